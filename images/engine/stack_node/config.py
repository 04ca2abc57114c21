"""The container's environment as one frozen value.

The variables are the contract between the image and whatever starts it (docs/contracts.md). An empty variable counts as
unset, since `NODE_RANK: ${NODE_RANK:-}` in a Compose file makes one. Everything here is pure: an environment in, a
`NodeConfig` and the full list of problems out.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Rdma = Literal["auto", "required", "off"]
RDMA_CHOICES: tuple[Rdma, ...] = ("auto", "required", "off")

LogFormat = Literal["text", "json"]

DEFAULT_API_PORT = 8000
DEFAULT_CONTROL_PORT = 29600
DEFAULT_MASTER_PORT = 29500
MASTER_PORTS = 16  # one rendezvous port for each epoch, taken in turn from this many

VARIABLES = (
    "GEN_STACK_API_BIND",
    "GEN_STACK_API_KEY_FILE",
    "GEN_STACK_API_PORT",
    "GEN_STACK_CONTROL_PORT",
    "GEN_STACK_DIGEST",
    "GEN_STACK_DRAIN",
    "GEN_STACK_GROUP",
    "GEN_STACK_LAUNCHER",
    "GEN_STACK_LOG_FORMAT",
    "GEN_STACK_MASTER_PORT",
    "GEN_STACK_MAX_RESTARTS",
    "GEN_STACK_NODE_TIMEOUT",
    "GEN_STACK_RDMA",
    "GEN_STACK_STALL_TIMEOUT",
    "GEN_STACK_STATE_DIR",
    "GEN_STACK_TOKEN_FILE",
)

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[A-Za-z0-9:._-]{0,256}")


@dataclass(frozen=True)
class NodeConfig:
    """What the environment says about this node; times are in seconds."""

    nnodes: int | None  # None: no group, upstream's behaviour
    node_rank: int
    master_addr: str | None  # an address without brackets, or a host name
    master_port: int
    node_addr: str | None  # None: found by the route to master_addr
    control_port: int
    group: str
    digest: str
    token_file: str | None
    api_bind: str | None  # None: the head's address in a group, upstream's default without
    api_port: int | None  # None: upstream's default
    api_key_file: str | None
    node_timeout: float
    stall_timeout: float
    max_restarts: int
    drain: float | None  # None: upstream's default
    rdma: Rdma
    state_dir: str
    log_format: LogFormat  # of this node's own lines

    @property
    def in_group(self) -> bool:
        """Whether the group variables were given."""
        return self.nnodes is not None

    @property
    def spans_nodes(self) -> bool:
        """Whether the engine is distributed over more than one node."""
        return self.nnodes is not None and self.nnodes > 1

    @property
    def serves_api(self) -> bool:
        """Whether the API server runs here: rank 0, or no group at all."""
        return self.node_rank == 0

    @property
    def label(self) -> str:
        """How this node's own log lines begin."""
        return f"stack-node[{self.node_rank}/{self.nnodes}]" if self.in_group else "stack-node"


@dataclass(frozen=True)
class Network:
    """The group's addresses as this host sees them: numeric, without brackets."""

    master_addr: str
    node_addr: str
    interface: str


def parse_duration(text: str) -> float:
    """Seconds in a duration such as `500ms`, `10s`, `2m` or `1h30m`; raises ValueError for anything else."""
    if not _DURATION.fullmatch(text):
        raise ValueError(text)
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text))


def parse_address(text: str) -> str:
    """Bare form of a numeric address (`[fd00::1]` becomes `fd00::1`); raises ValueError for anything else."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    address = ipaddress.ip_address(bare)
    if isinstance(address, ipaddress.IPv4Address) and bare != text:
        raise ValueError(text)
    return str(address)


def is_loopback(address: str) -> bool:
    """Whether a numeric address is one of the host's own loopback addresses."""
    return ipaddress.ip_address(address).is_loopback


def url_host(address: str) -> str:
    """An address as it stands in a URL: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


class _Reader:
    """Reads variables one by one and keeps every problem."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[str] = []

    def text(self, name: str) -> str | None:
        return self.environ.get(name, "").strip() or None

    def problem(self, name: str, rule: str, fix: str) -> None:
        value = self.text(name)
        seen = f"{name} is not set" if value is None else f"{name}={value!r}"
        self.problems.append(f"{seen}: {rule}; {fix}")

    def integer(self, name: str, default: int, low: int, high: int | None, fix: str) -> int:
        value = self.text(name)
        if value is None:
            return default
        if re.fullmatch(r"[0-9]{1,9}", value) and low <= int(value) and (high is None or int(value) <= high):
            return int(value)
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        self.problem(name, f"must be a whole number {bounds}", fix)
        return default

    def port(self, name: str, default: int) -> int:
        return self.integer(name, default, 1, 65535, f"the default is {default}")

    def duration(self, name: str, default: str, zero: bool = False) -> float:
        value = self.text(name)
        try:
            seconds = parse_duration(value or default)
        except ValueError:
            seconds = -1.0
        if seconds > 0 or (zero and seconds == 0):
            return seconds
        self.problem(name, "must be a duration with a unit (ms, s, m, h)", f"for example {name}={default}")
        return parse_duration(default)

    def address(self, name: str, fix: str, *, names: bool = False, any_address: bool = False) -> str | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            bare = parse_address(value)
        except ValueError:
            # An all-numeric name is a mistyped address, not a host.
            if names and _HOST_NAME.fullmatch(value) and not re.fullmatch(r"[0-9.]+", value):
                return value
            self.problem(name, "is no address" if names else "must be a numeric IPv4 or IPv6 address", fix)
            return None
        address = ipaddress.ip_address(bare)
        if address.is_multicast or (address.is_unspecified and not any_address):
            self.problem(name, "is not the address of one host", fix)
        elif address.version == 6 and address.is_link_local:
            self.problem(
                name, "is link-local and means nothing without an interface", "use a routable or fd00::/8 address"
            )
        else:
            return bare
        return None

    def path(self, name: str) -> str | None:
        value = self.text(name)
        if value is not None and not value.startswith("/"):
            self.problem(name, "must be an absolute path", f"for example {name}=/run/secrets/name")
        return value

    def matching(self, name: str, pattern: re.Pattern[str], default: str, rule: str, fix: str) -> str:
        value = self.text(name)
        if value is None or pattern.fullmatch(value):
            return value or default
        self.problem(name, rule, fix)
        return default


def read(environ: Mapping[str, str]) -> tuple[NodeConfig, list[str]]:
    """The contract's variables, and a sentence for everything that is wrong with them; use it only without any.

    Without `NNODES` only `GEN_STACK_LOG_FORMAT`, the endpoint's variables and `GEN_STACK_DRAIN` count; the latter two
    only when they are set.
    """
    reader = _Reader(environ)
    nnodes = None
    if reader.text("NNODES") is not None:
        nnodes = reader.integer("NNODES", 0, 1, None, "set it to the number of nodes in the group") or None
    # Plain also when NNODES is no number: without the group's size its other variables cannot be judged.
    config = _read_plain(reader) if nnodes is None else _read_group(reader, nnodes)
    if reader.text("GEN_STACK_API_KEY_FILE") and reader.text("VLLM_API_KEY"):
        reader.problems.append(
            "GEN_STACK_API_KEY_FILE and VLLM_API_KEY are both set: the key has one source; unset VLLM_API_KEY"
        )
    return config, reader.problems


def _read_plain(reader: _Reader) -> NodeConfig:
    has_port = reader.text("GEN_STACK_API_PORT") is not None
    return NodeConfig(
        nnodes=None,
        node_rank=0,
        master_addr=None,
        master_port=DEFAULT_MASTER_PORT,
        node_addr=None,
        control_port=DEFAULT_CONTROL_PORT,
        group="default",
        digest="",
        token_file=None,
        api_bind=_api_bind(reader),
        api_port=reader.port("GEN_STACK_API_PORT", DEFAULT_API_PORT) if has_port else None,
        api_key_file=reader.path("GEN_STACK_API_KEY_FILE"),
        node_timeout=10.0,
        stall_timeout=300.0,
        max_restarts=5,
        drain=reader.duration("GEN_STACK_DRAIN", "60s", zero=True) if reader.text("GEN_STACK_DRAIN") else None,
        rdma="auto",
        state_dir="/var/lib/gen-stack",
        log_format=_log_format(reader),
    )


def _read_group(reader: _Reader, nnodes: int) -> NodeConfig:
    config = NodeConfig(
        nnodes=nnodes,
        node_rank=_node_rank(reader, nnodes),
        master_addr=_master_addr(reader, nnodes),
        master_port=reader.integer(
            "MASTER_PORT", DEFAULT_MASTER_PORT, 1, 65536 - MASTER_PORTS, f"it is the first of {MASTER_PORTS} ports"
        ),
        node_addr=reader.address("NODE_ADDR", "give this node's own address on the group's network, or leave it out"),
        control_port=reader.port("GEN_STACK_CONTROL_PORT", DEFAULT_CONTROL_PORT),
        group=reader.matching(
            "GEN_STACK_GROUP",
            _NAME,
            "default",
            "must be a name of letters, digits, '.', '_' and '-'",
            "for example GEN_STACK_GROUP=qwen-72b",
        ),
        digest=reader.matching(
            "GEN_STACK_DIGEST", _DIGEST, "", "must be a digest", "use the one that gen-stack wrote, or leave it out"
        ),
        token_file=reader.path("GEN_STACK_TOKEN_FILE"),
        api_bind=_api_bind(reader),
        api_port=reader.port("GEN_STACK_API_PORT", DEFAULT_API_PORT),
        api_key_file=reader.path("GEN_STACK_API_KEY_FILE"),
        node_timeout=reader.duration("GEN_STACK_NODE_TIMEOUT", "10s"),
        stall_timeout=reader.duration("GEN_STACK_STALL_TIMEOUT", "300s"),
        max_restarts=reader.integer("GEN_STACK_MAX_RESTARTS", 5, 0, None, "the default is 5"),
        drain=reader.duration("GEN_STACK_DRAIN", "60s", zero=True),
        rdma=_rdma(reader),
        state_dir=reader.path("GEN_STACK_STATE_DIR") or "/var/lib/gen-stack",
        log_format=_log_format(reader),
    )
    _check_families(reader, config)
    _check_ports(reader, config)
    _check_engine_variables(reader, config)
    return config


def _api_bind(reader: _Reader) -> str | None:
    return reader.address(
        "GEN_STACK_API_BIND",
        "use an address of the head, 0.0.0.0 or :: for all, 127.0.0.1 for this host only",
        any_address=True,
    )


def _node_rank(reader: _Reader, nnodes: int) -> int:
    if nnodes > 1 and reader.text("NODE_RANK") is None:
        reader.problem(
            "NODE_RANK",
            f"every node of a group needs its own rank (NNODES={nnodes})",
            f"set 0 on the head and 1 to {nnodes - 1} on the others",
        )
    return reader.integer("NODE_RANK", 0, 0, nnodes - 1, f"ranks count from 0 on the head (NNODES={nnodes})")


def _master_addr(reader: _Reader, nnodes: int) -> str | None:
    fix = "give the head's address, the same on every node"
    if nnodes > 1 and reader.text("MASTER_ADDR") is None:
        reader.problem("MASTER_ADDR", f"a group has to find its head (NNODES={nnodes})", fix)
    return reader.address("MASTER_ADDR", fix, names=True)


def _rdma(reader: _Reader) -> Rdma:
    value = reader.text("GEN_STACK_RDMA") or "auto"
    for choice in RDMA_CHOICES:
        if value == choice:
            return choice
    reader.problem("GEN_STACK_RDMA", "must be auto, required or off", "the default is auto")
    return "auto"


def _log_format(reader: _Reader) -> LogFormat:
    value = reader.text("GEN_STACK_LOG_FORMAT") or "text"
    if value not in ("text", "json"):
        reader.problem("GEN_STACK_LOG_FORMAT", "must be text or json", "the default is text")
    return "json" if value == "json" else "text"


def _check_families(reader: _Reader, config: NodeConfig) -> None:
    if config.node_addr is None or config.master_addr is None or not _is_numeric(config.master_addr):
        return
    if (":" in config.node_addr) != (":" in config.master_addr):
        reader.problems.append(
            f"NODE_ADDR={config.node_addr} and MASTER_ADDR={config.master_addr} are of two address families; "
            "use IPv4 for all nodes or IPv6 for all"
        )


def _is_numeric(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _check_ports(reader: _Reader, config: NodeConfig) -> None:
    last = config.master_port + MASTER_PORTS - 1
    ports = {"GEN_STACK_CONTROL_PORT": config.control_port, "GEN_STACK_API_PORT": config.api_port}
    for name, port in ports.items():
        if config.spans_nodes and port is not None and config.master_port <= port <= last:
            reader.problems.append(
                f"{name}={port} is one of the {MASTER_PORTS} ports from MASTER_PORT on "
                f"({config.master_port}-{last}); use a port outside"
            )
    if config.control_port == config.api_port:
        reader.problems.append(
            f"GEN_STACK_CONTROL_PORT and GEN_STACK_API_PORT are both {config.api_port}; use two different ports"
        )


def _check_engine_variables(reader: _Reader, config: NodeConfig) -> None:
    """Refuse engine variables that contradict ours: one of the two was meant, and guessing which breaks a group late.

    The interface names (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) are no contradiction: see `argv.engine_environment`.
    """
    host_ip = reader.text("VLLM_HOST_IP")
    if config.spans_nodes and host_ip is not None and host_ip != config.node_addr:
        reader.problem("VLLM_HOST_IP", "in a group it is made from NODE_ADDR", "set NODE_ADDR instead")
    disabled = reader.text("NCCL_IB_DISABLE")
    if config.rdma == "required" and disabled not in (None, "0"):
        reader.problem("NCCL_IB_DISABLE", "contradicts GEN_STACK_RDMA=required", "unset one of the two")
    if config.rdma == "off" and disabled == "0":
        reader.problem("NCCL_IB_DISABLE", "contradicts GEN_STACK_RDMA=off", "unset one of the two")


def warnings(environ: Mapping[str, str]) -> list[str]:
    """Sentences about variables that have no effect as they stand: a slip, most often.

    They are no errors, since other software sets such names too: Kubernetes a GEN_STACK_PORT for a service of ours, and
    several launchers MASTER_ADDR for a single process.
    """
    found = []
    for name in sorted(environ):
        if name.startswith("GEN_STACK_") and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, 1)
            found.append(f"{name} is not a variable of this image" + (f"; did you mean {close[0]}?" if close else ""))
    if not environ.get("NNODES"):
        stray = [name for name in ("NODE_RANK", "MASTER_ADDR", "NODE_ADDR") if environ.get(name)]
        if stray:
            found.append(f"{', '.join(stray)} without NNODES: this node serves alone; set NNODES to form a group")
    return found
