"""Hypothesis strategies for specs: any that is right, any that was right before somebody's hand slipped, any text."""

from __future__ import annotations

import copy
import dataclasses
import ipaddress
from typing import TYPE_CHECKING, Any

import yaml
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

SECRETS = {"hub": "hf-hub-token", "key": "sk-api-key", "group": "gt-group-token"}

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
LINE = TEXT.filter(lambda text: "\n" not in text and "\r" not in text)
PLAIN = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
NAME = st.from_regex(r"[a-z0-9][a-z0-9-]{0,9}", fullmatch=True).filter(lambda name: name != "secrets")
TRICKY = st.sampled_from(
    [
        "$HOME",
        "${X:-y}",
        "$$",
        "1e5",
        "0o17",
        "0b1",
        "yes",
        "null",
        "~",
        "",
        "'",
        '"',
        "\\",
        "a: b",
        "#",
        "\u2028",
        "😀",
    ]
)
NUMBER = st.integers(1 - 2**63, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT | TRICKY,
    lambda some: st.lists(some, max_size=3) | st.dictionaries(TEXT, some, max_size=3),
    max_leaves=5,
)
WHOLE = st.integers(1 - 2**63, 2**63 - 1)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "max-model-len": WHOLE | st.sampled_from(["auto", "8k", "8K", "1.5m"]),
        "max_num_seqs": WHOLE,
        "seed": WHOLE,
        "gpu-memory-utilization": NUMBER,
        "enable-prefix-caching": st.booleans(),
        "hf-overrides": st.dictionaries(TEXT, JSON, max_size=3),
        "chat-template": TEXT | TRICKY | NUMBER,
        "cudagraph-capture-sizes": st.lists(st.integers(-999, 999), min_size=1, max_size=3),
        "limit-mm-per-prompt.image": st.integers(0, 9),
    },
)
"""Arguments that the engine takes, each with any value that its type allows."""
VARIABLES = st.dictionaries(
    st.sampled_from(["NCCL_DEBUG", "A", "B", "no_proxy", "_x", "Y", "NULL"]), LINE | TRICKY | NUMBER, max_size=4
)


@dataclasses.dataclass(frozen=True)
class Made:
    """A spec that is right, as data, and what is known about it."""

    data: dict[str, Any]
    world_size: int
    nodes_in_group: int

    @property
    def text(self) -> str:
        """The spec as YAML."""
        return dump(self.data)


def dump(data: object) -> str:
    """Write YAML of which every text is a text in every dialect."""
    return str(yaml.safe_dump(data, default_style='"', sort_keys=False, width=10**6))


@st.composite
def specs(draw: Callable[..., Any]) -> Made:
    """Draw any spec that is right, of at most eight nodes."""
    nodes_in_group, replicas = draw(st.sampled_from([(n, r) for n in range(1, 9) for r in range(1, 9) if n * r <= 8]))
    device = draw(st.sampled_from(["cuda", "rocm", "cpu"]))
    per_node = 1 if device == "cpu" else draw(st.sampled_from([1, 2, 4, 8]))
    world_size = nodes_in_group * per_node
    one_host = ["127.0.0.1"] if device == "cpu" and replicas == 1 else []
    first = draw(st.sampled_from(["10.0.0.1", "fd00::1", *one_host]))
    local = draw(st.booleans())
    user = draw(st.sampled_from([None, *(["1000:1000"] if device != "rocm" else [])]))
    names = draw(st.lists(NAME, min_size=nodes_in_group * replicas, max_size=nodes_in_group * replicas, unique=True))
    nodes = [
        {
            "name": name,
            "address": str(ipaddress.ip_address(first) + index),
            **({} if device == "cpu" else {"gpus": draw(gpus(per_node, uuids=device == "cuda"))}),
            **draw(optional({"env": VARIABLES, "interface": st.just("ens1f0"), "cache": st.just("/data/hf cache")})),
            **(draw(optional({"model": st.just("/other/$m")})) if local else {}),
        }
        for index, name in enumerate(names)
    ]
    served_name = PLAIN.filter(lambda name: not name.startswith("-"))
    model: dict[str, Any] = {"id": "/models/it's $m" if local else "org/model"}
    model |= draw(optional({"served_name": st.lists(served_name, max_size=3), "offline": st.booleans()}))
    if not local:
        model |= draw(optional({"token_file": st.just("hub"), "revision": PLAIN}))
        model |= {"cache": "/srv/hf"} if user else {}
    return Made(
        {
            "name": draw(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,9}", fullmatch=True)),
            "model": model,
            "nodes": nodes,
            "parallelism": draw(parallelism(world_size)),
            "engine": {"device": device, "user": user, "args": draw(ARGUMENTS), "env": draw(VARIABLES)},
            "api": draw(optional({"key_file": st.just("key"), "port": st.integers(1, 29499)})),
            "network": draw(optional({"token_file": st.just("group"), "rdma": st.sampled_from(["auto", "off"])})),
            "replicas": replicas,
        },
        world_size,
        nodes_in_group,
    )


def optional(keys: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw a mapping with any of the keys."""
    return st.fixed_dictionaries({}, optional=keys)


def gpus(count: int, *, uuids: bool) -> st.SearchStrategy[int | list[int] | list[str]]:
    """Draw a count, or as many device ids."""
    ids = st.permutations(range(count))
    form = "GPU-{}" if uuids else "{}"
    return st.just(count) | ids | ids.map(lambda some: [form.format(one) for one in some])


@st.composite
def parallelism(draw: Callable[..., Any], world_size: int) -> dict[str, Any]:
    """Draw sizes whose product is the world size; some of them are left open."""
    tensor = draw(st.sampled_from(divisors(world_size)))
    data = draw(st.sampled_from(divisors(world_size // tensor)))
    sizes = {"tensor": tensor, "pipeline": world_size // tensor // data, "data": data}
    for key in draw(st.sampled_from([(), ("tensor",), ("pipeline",), ("tensor", "pipeline")])):
        del sizes[key]
    return {**sizes, "expert": draw(st.booleans())}


def divisors(number: int) -> list[int]:
    """List the divisors of a number."""
    return [one for one in range(1, number + 1) if number % one == 0]


@st.composite
def slips(draw: Callable[..., Any]) -> str:
    """Draw the text of a spec that was right before a key was deleted, given twice, retyped or renamed."""
    data = copy.deepcopy(draw(specs()).data)
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(places(data) or [(data, "name")]))
        slip = draw(st.sampled_from(["delete", "retype", "rename"]))
        if slip == "delete":
            container.pop(key, None) if isinstance(container, dict) else container.pop(key)
        elif slip == "retype":
            container[key] = draw(JSON)
        elif isinstance(container, dict):
            container[draw(TEXT)] = container.pop(key, None)
    text = dump(data)
    if draw(st.booleans()):
        lines = text.splitlines(keepends=True)
        line = draw(st.integers(0, len(lines) - 1))
        lines.insert(line, lines[line])
        text = "".join(lines)
    return text


def places(data: Any) -> list[tuple[Any, Any]]:
    """List all places of a document, as container and key."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else []
    return [place for key in keys for place in ((data, key), *places(data[key]))]
