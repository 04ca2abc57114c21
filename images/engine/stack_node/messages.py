"""What the head and the nodes say to each other on the control channel (docs/protocol.md).

A message is a JSON object with its kind under `kind`. An epoch is a number here: a connection belongs to one head
instance, so the pair (head instance, number) needs no repeating.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, get_args, get_type_hints

PROTOCOL = 1


@dataclass(frozen=True)
class Join:
    """Who a node is; the first thing it says, and what its proof of the token covers."""

    protocol: int
    group: str
    nnodes: int
    rank: int
    digest: str
    version: str  # of stack-node
    engine_version: str
    devices: int  # visible to the engine; -1 where that cannot be told
    address: str  # on the group's network
    node: str  # host name, for people
    instance: str  # random, one for each start of a supervisor


@dataclass(frozen=True)
class Ping:
    """A node lives; numbered, so that the answer tells which one was heard."""

    number: int


@dataclass(frozen=True)
class Progress:
    """How far the weights are, in bytes; `total` is 0 while unknown."""

    done: int
    total: int
    text: str


@dataclass(frozen=True)
class Prepared:
    """The weights are here and no engine is: this node can start."""


@dataclass(frozen=True)
class Blocked:
    """This node cannot start, and why: an engine that cannot be killed, weights that cannot be had."""

    reason: str


@dataclass(frozen=True)
class Listening:
    """The port on which this node waits for its peers."""

    epoch: int
    port: int


@dataclass(frozen=True)
class Reached:
    """Every peer was tried; each failure is [rank, address, error]."""

    epoch: int
    failed: list[list[Any]]


@dataclass(frozen=True)
class Started:
    """The engine was started."""

    epoch: int


@dataclass(frozen=True)
class Signs:
    """The engine does something: it reads, computes or logs."""

    epoch: int


@dataclass(frozen=True)
class Failed:
    """A process of the engine's tree ended unasked; `log` is its last meaningful lines."""

    epoch: int
    reason: str
    log: list[str]


@dataclass(frozen=True)
class Stopped:
    """Nothing of the epoch's engine is left here."""

    epoch: int


@dataclass(frozen=True)
class Leaving:
    """This node was asked to stop and wants the group drained first."""


@dataclass(frozen=True)
class Pong:
    """The head heard that ping."""

    number: int


@dataclass(frozen=True)
class Listen:
    """Wait for peers on a port of your own."""

    epoch: int


@dataclass(frozen=True)
class Reach:
    """Connect to every peer, each [rank, address, port]."""

    epoch: int
    peers: list[list[Any]]


@dataclass(frozen=True)
class Start:
    """Start the engine."""

    epoch: int
    master_port: int


@dataclass(frozen=True)
class Stop:
    """End the engine: at once, or with SIGTERM and some time where `gently`."""

    epoch: int
    reason: str
    gently: bool


ToHead = Ping | Progress | Prepared | Blocked | Listening | Reached | Started | Signs | Failed | Stopped | Leaving
ToNode = Pong | Listen | Reach | Start | Stop
Message = ToHead | ToNode

_KINDS: dict[str, type[Any]] = {kind.__name__.lower(): kind for union in (ToHead, ToNode) for kind in get_args(union)}
_CHECKS = {int: "a whole number", str: "text", bool: "true or false", list: "a list"}


def encode(message: Message) -> dict[str, Any]:
    """The message as a JSON object."""
    return {"kind": type(message).__name__.lower(), **asdict(message)}


def decode(data: object) -> Message:
    """The message in a JSON object; raises ValueError for anything else, unknown fields included."""
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str) or data["kind"] not in _KINDS:
        raise ValueError("no message of this protocol")
    kind = _KINDS[data["kind"]]
    message: Message = build(kind, {name: value for name, value in data.items() if name != "kind"})
    return message


def decode_join(data: object) -> Join:
    """The `Join` in a JSON object; raises ValueError for anything else."""
    if not isinstance(data, dict):
        raise ValueError("no join")
    join: Join = build(Join, data)
    return join


def build(kind: type[Any], data: dict[str, Any]) -> Any:
    """A dataclass from a JSON object whose fields have exactly the right names and types; raises ValueError."""
    names = {field.name for field in fields(kind)}
    if set(data) != names:
        raise ValueError(f"{kind.__name__.lower()}: fields {sorted(set(data) ^ names)}")
    hints = get_type_hints(kind)
    for name, value in data.items():
        wanted = getattr(hints[name], "__origin__", hints[name])
        if type(value) is not wanted:
            raise ValueError(f"{kind.__name__.lower()}.{name} is not {_CHECKS[wanted]}")
    return kind(**data)
