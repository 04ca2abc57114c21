"""The spec, version 1: what a user writes, as strict models. The JSON Schema in the repository comes from them.

A field says what it means and what it may be; rules that need more than one field stand in `rules.py`.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from gen_stack.problems import shown
from gen_stack.release import ENGINE_VERSION

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

SIZE_UNITS = {"MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s?(MiB|GiB|TiB|MB|GB|TB)")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|s|m|h)")
MAX_DURATION_S = 7 * 24 * 3600.0
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")


def size_bytes(text: str) -> int:
    """Turn a size such as `80GiB` into bytes. Raises `ValueError` with the rule."""
    match = _SIZE.fullmatch(text)
    if not match or float(match[1]) <= 0:
        raise ValueError(f"{shown(text)} is no size; write a number and a unit, such as 80GiB")
    return int(float(match[1]) * SIZE_UNITS[match[2]])


def seconds(text: str) -> float:
    """Turn a duration such as `10s` into seconds. Raises `ValueError` with the rule."""
    match = _DURATION.fullmatch(text)
    if not match:
        raise ValueError(f"{shown(text)} is no duration; write a number and a unit, such as 10s, 5m or 1h")
    found = float(match[1]) * DURATION_UNITS[match[2]]
    if found > MAX_DURATION_S:
        raise ValueError(f"{shown(text)} is more than a week; write 168h or less")
    return found


def _matching(pattern: str, rule: str) -> Any:
    def check(text: str | None) -> str | None:
        if text is not None and not re.fullmatch(pattern, text):
            raise ValueError(f"{shown(text)} is not allowed here; {rule}")
        return text

    return AfterValidator(check)


def _with_unit(unit: str) -> Any:
    def check(value: object) -> object:
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"{shown(value)} has no unit; write it with one, such as {value}{unit}")
        return value

    return BeforeValidator(check)


def _checked_size(text: str) -> str:
    size_bytes(text)
    return text


def _checked_duration(text: str) -> str:
    seconds(text)
    return text


def _positive_duration(text: str) -> str:
    if seconds(text) < 1:
        raise ValueError(f"{shown(text)} is too short; write 1s or more")
    return text


def _numeric_address(text: str, rule: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is no numeric address; {rule}") from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        raise ValueError(f"{shown(text)} is an IPv4 address in IPv6 form; write {address.ipv4_mapped}")
    return address


def _checked_address(text: str) -> str:
    rule = "write the numeric IPv4 or IPv6 address that the other nodes reach, such as 10.0.0.11"
    address = _numeric_address(text, rule)
    if isinstance(address, ipaddress.IPv6Address) and (address.is_link_local or address.scope_id):
        raise ValueError(f"{shown(text)} is a link-local address, which needs a zone; write a global or fd00::/8 one")
    if address.is_unspecified or address.is_multicast or text == "255.255.255.255":
        raise ValueError(f"{shown(text)} is not the address of one host; write the one that the other nodes reach")
    return str(address)


def _checked_bind(text: str) -> str:
    rule = "write a numeric address of the head, 0.0.0.0 to widen, or 127.0.0.1 to narrow"
    address = _numeric_address(text, rule)
    if address.is_multicast or text == "255.255.255.255" or "%" in text:
        raise ValueError(f"{shown(text)} is not the address of one host; {rule}")
    return str(address)


def _checked_plain(text: str) -> str:
    if "\n" in text or _CONTROL.search(text):
        raise ValueError(f"{shown(text)} has a line break or a control character in it; write one line of plain text")
    return text


def _checked_path(text: str) -> str:
    if not text.startswith("/"):
        raise ValueError(f"{shown(text)} is not absolute; write the whole path on the node, such as /srv/models/m")
    if ".." in text.split("/") or ":" in text:
        raise ValueError(f"{shown(text)} has '..' or ':' in it, which a mount cannot take; write the plain path")
    return _checked_plain(text).rstrip("/") or "/"


def _checked_model(text: str) -> str:
    if text.startswith("/"):
        return _checked_path(text)
    if not _HUB_ID.fullmatch(text):
        rule = "write a hub id such as Qwen/Qwen2.5-72B-Instruct, or an absolute path that exists on every node"
        if text.startswith(("./", "../", "~")):
            rule = "a path is the same on every node, so write the whole of it, such as /srv/models/m"
        elif "://" in text:
            rule = "write the hub's name for it alone, such as Qwen/Qwen2.5-72B-Instruct"
        raise ValueError(f"{shown(text)} is no model; {rule}")
    return text


def _device_ids(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | list):
        raise ValueError(f"{shown(value)} is neither a count, such as 8, nor a list of device ids such as ['0', '1']")
    if isinstance(value, int):
        if not 0 <= value <= 1024:
            raise ValueError(f"{value} is no count of GPUs; write a number from 0 to 1024")
        return value
    ids = [str(one) if isinstance(one, int) and not isinstance(one, bool) else one for one in value]
    for one in ids:
        if not isinstance(one, str) or not re.fullmatch(r"[0-9]+|(GPU|MIG)-[A-Za-z0-9/-]+", one):
            raise ValueError(f"{shown(one)} is no device id; write an index such as '0', or a GPU-… or MIG-… id")
    if not ids or len(set(ids)) < len(ids):
        raise ValueError(f"{shown(ids)} must name each device once, and at least one; or write a count such as 8")
    return ids


def _environment(value: object) -> object:
    """Turn numbers into the text they are in an environment; `rules.py` judges names and texts."""
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is no mapping; write variables as NAME: value")
    return {
        name: str(one) if isinstance(one, int | float) and not isinstance(one, bool) else one
        for name, one in value.items()
    }


def _no_boolean(value: object) -> object:
    if isinstance(value, bool):  # which Python takes for the number 1
        raise ValueError(f"{shown(value)} is no version; write 1")
    return value


def _one_or_more(value: object) -> object:
    return [value] if isinstance(value, str) else value


PlainText = Annotated[str, Field(min_length=1), AfterValidator(_checked_plain)]
StackName = Annotated[
    str,
    Field(max_length=63),
    _matching(r"[a-z0-9][a-z0-9._-]*", "use small letters, digits, '.', '_' and '-', a letter or digit first"),
    WithJsonSchema({"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]*$", "maxLength": 63}),
]
NodeName = Annotated[
    str,
    Field(max_length=63),
    _matching(r"[a-z0-9][a-z0-9-]*", "use small letters, digits and '-', a letter or digit first"),
    WithJsonSchema({"type": "string", "pattern": "^[a-z0-9][a-z0-9-]*$", "maxLength": 63}),
]
Address = Annotated[str, AfterValidator(_checked_address)]
BindAddress = Annotated[str, AfterValidator(_checked_bind)]
HostPath = Annotated[str, AfterValidator(_checked_path)]
ModelId = Annotated[str, AfterValidator(_checked_model)]
Size = Annotated[
    str,
    _with_unit("GiB"),
    AfterValidator(_checked_size),
    WithJsonSchema({"type": "string", "pattern": f"^{_SIZE.pattern}$"}),
]
Duration = Annotated[
    str,
    _with_unit("s"),
    AfterValidator(_checked_duration),
    WithJsonSchema({"type": "string", "pattern": f"^{_DURATION.pattern}$"}),
]
PositiveDuration = Annotated[
    str,
    _with_unit("s"),
    AfterValidator(_positive_duration),
    WithJsonSchema({"type": "string", "pattern": f"^{_DURATION.pattern}$"}),
]
Interface = Annotated[
    str, _matching(r"[^\s/:=^,\x00-\x1f\x7f]{1,15}", "write the name of one interface, such as ens1f0")
]
Port = Annotated[int, Field(ge=1, le=65535)]
Gpus = Annotated[
    int | list[str],
    BeforeValidator(_device_ids),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 1024},
                {"type": "array", "items": {"type": ["string", "integer"]}, "minItems": 1, "uniqueItems": True},
            ]
        }
    ),
]
Environment = Annotated[
    dict[str, str],
    BeforeValidator(_environment),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}}),
]


@dataclasses.dataclass(frozen=True)
class _AlsoInSchema:
    """Adds a form that a validator before takes, by its JSON type, to the JSON Schema of a field."""

    kind: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), {"type": self.kind}]}


def _none_is_empty(value: object) -> object:
    return {} if value is None else value


_Any = TypeVar("_Any")
Section = Annotated[_Any, BeforeValidator(_none_is_empty), _AlsoInSchema("null")]
"""A mapping of which nothing is left when all lines below its key are comments."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(_Part):
    """What is served, and where its weights come from."""

    id: Annotated[ModelId, Field(description="A hub id, or an absolute path that exists on every node.")]
    revision: Annotated[PlainText | None, Field(description="Commit, tag or branch of the hub's repository.")] = None
    served_name: Annotated[
        list[PlainText],
        BeforeValidator(_one_or_more),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
        Field(description="Names that requests use; the first one stands in answers. Default: the id."),
    ] = []
    config: Annotated[
        PlainText | None, Field(description="The model's config.json to plan from; and its index beside it.")
    ] = None
    cache: Annotated[
        HostPath | None, Field(description="Host directory for weights. Default: the volume gen-stack-huggingface.")
    ] = None
    offline: Annotated[bool, Field(description="Fetch nothing; the engine fails where something is missing.")] = False
    token_file: Annotated[PlainText | None, Field(description="File with the hub's token, for gated models.")] = None

    @property
    def is_local(self) -> bool:
        """Whether the id is a path on the nodes rather than a name on the hub."""
        return self.id.startswith("/")


class Gpu(_Part):
    """The kind of GPU, for the memory check."""

    type: Annotated[PlainText | None, Field(description="A name from the table of GPUs, such as H100-80GB.")] = None
    memory: Annotated[Size | None, Field(description="Memory of one GPU, such as 79.2GiB; before type.")] = None


class Node(_Part):
    """One host. The order of the nodes is their rank."""

    name: Annotated[NodeName, Field(description="Unique; also the name of the node's folder.")]
    address: Annotated[Address, Field(description="Numeric IPv4 or IPv6 address that the other nodes reach.")]
    gpus: Annotated[Gpus, Field(description="A count, or a list of device ids. 0 on the CPU engine.")] = 0
    gpu: Annotated[Gpu | None, Field(description="Overrides the spec's gpu section for this node.")] = None
    interface: Annotated[
        Interface | None, Field(description="Network interface. Default: found at start from the address.")
    ] = None
    cache: Annotated[HostPath | None, Field(description="Overrides model.cache for this node.")] = None
    model: Annotated[HostPath | None, Field(description="This node's host path of a local model.")] = None
    env: Annotated[Section[Environment], Field(description="Environment of the engine on this node only.")] = {}
    ssh: Annotated[PlainText | None, Field(description="Where to log in; for later commands that reach the host.")] = (
        None
    )


class Parallelism(_Part):
    """How the model is split. What is left out is chosen, with the reason printed."""

    tensor: Annotated[Annotated[int, Field(ge=1)] | None, Field(description="Tensor parallel size.")] = None
    pipeline: Annotated[Annotated[int, Field(ge=1)] | None, Field(description="Pipeline parallel size.")] = None
    data: Annotated[int, Field(ge=1, description="Data parallel size.")] = 1
    expert: Annotated[bool | None, Field(description="Expert parallel: whole experts on each rank.")] = None


class Engine(_Part):
    """The engine and its image."""

    device: Annotated[Literal["cuda", "rocm", "cpu"], Field(description="What the engine runs on.")] = "cuda"
    version: Annotated[
        str,
        _matching(r"[0-9]+\.[0-9]+\.[0-9]+([a-z0-9.]+)?", f"write vLLM's version, such as {ENGINE_VERSION}"),
        Field(description="vLLM's version; another one than the default is not tested."),
    ] = ENGINE_VERSION
    image: Annotated[
        str,
        _matching(
            r"[a-z0-9][a-zA-Z0-9._/:@-]*", "write `build`, or a reference such as ghcr.io/gen-stack/vllm:0.32.0-0.1.0"
        ),
        Field(description="`build`: a thin layer on upstream's image, built where it runs; or a reference to pull."),
    ] = "build"
    user: Annotated[
        str | None,
        _matching(r"[0-9]+:[0-9]+", "write a numeric user and group, such as 1000:1000"),
        Field(description="Run as this user and group instead of root, such as 1000:1000."),
    ] = None
    args: Annotated[
        Section[dict[str, Any]], Field(description="vLLM's own flags by name, without dashes in front.")
    ] = {}
    env: Annotated[Section[Environment], Field(description="Environment of the engine on every node.")] = {}


class Api(_Part):
    """The endpoint, on the head."""

    port: Annotated[Port, Field(description="The endpoint's port.")] = 8000
    bind: Annotated[BindAddress | None, Field(description="Default: the head's address.")] = None
    key_file: Annotated[PlainText | None, Field(description="File with the API key.")] = None


class Network(_Part):
    """Ports and transport between the nodes."""

    rdma: Annotated[
        Literal["auto", "required", "off"],
        Field(description="auto uses HCAs where the host has them; required fails without; off."),
    ] = "auto"
    control_port: Annotated[Port, Field(description="The group's own channel, on the head.")] = 29600
    master_port: Annotated[Port, Field(description="First of 16: one is taken for each epoch.")] = 29500
    token_file: Annotated[PlainText | None, Field(description="Default: a group token is made once.")] = None


class Recovery(_Part):
    """When the group counts something as failed, and how often it tries again."""

    node_timeout: Annotated[PositiveDuration, Field(description="Silence after which a node is lost.")] = "10s"
    stall_timeout: Annotated[
        PositiveDuration, Field(description="Standstill with a request open after which the engine counts as failed.")
    ] = "300s"
    max_restarts: Annotated[int, Field(ge=0, le=10**6, description="Failures after which the group stays down.")] = 5
    drain: Annotated[Duration, Field(description="How long running requests may finish when it is stopped.")] = "60s"


class Tls(_Part):
    """Certificate and key of the gateway."""

    cert_file: Annotated[PlainText, Field(description="File with the certificate chain.")]
    key_file: Annotated[PlainText, Field(description="File with its private key.")]


class Gateway(_Part):
    """One address in front of the groups."""

    nodes: Annotated[list[NodeName], Field(min_length=1, description="The nodes it runs on.")]
    port: Annotated[Port, Field(description="The gateway's port.")] = 8080
    metrics_port: Annotated[Port, Field(description="Its metrics, on the loopback address of its host.")] = 8404
    bind: Annotated[BindAddress, Field(description="Where it listens.")] = "0.0.0.0"  # noqa: S104 - it is to be reached
    keys_file: Annotated[
        PlainText | None, Field(description="File with API keys, one a line. Default: api.key_file.")
    ] = None
    tls: Annotated[Tls | None, Field(description="Serve HTTPS.")] = None
    max_body: Annotated[Size, Field(description="Largest request that is taken.")] = "2MiB"
    sticky_header: Annotated[
        str | None,
        _matching(r"[A-Za-z0-9-]+", "write the name of a header, such as X-Session"),
        Field(description="Requests with the same value of this header go to the same group."),
    ] = None


class Spec(_Part):
    """A gen-stack spec, version 1."""

    version: Annotated[Literal[1], BeforeValidator(_no_boolean), Field(description="The version of this format.")] = 1
    name: Annotated[StackName, Field(description="The stack's name.")]
    model: Annotated[
        Model,
        _AlsoInSchema("string"),
        Field(description="A hub id or an absolute path, or a mapping."),
    ]
    nodes: Annotated[list[Node], Field(min_length=1, max_length=1024, description="The hosts; the first is the head.")]
    gpu: Section[Gpu] = Gpu()
    parallelism: Section[Parallelism] = Parallelism()
    engine: Section[Engine] = Engine()
    api: Section[Api] = Api()
    network: Section[Network] = Network()
    recovery: Section[Recovery] = Recovery()
    replicas: Annotated[int, Field(ge=1, description="Split the nodes into this many equal groups.")] = 1
    groups: Annotated[list[list[NodeName]] | None, Field(description="Or name the groups.")] = None
    gateway: Annotated[Gateway | None, Field(description="One address in front of the groups.")] = None

    @model_validator(mode="before")
    @classmethod
    def _short_form_of_model(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("model"), str):
            return {**data, "model": {"id": data["model"]}}
        return data
