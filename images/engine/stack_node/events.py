"""What the two state machines are told and what they want done.

`group.Group` is the head's view, `member.Member` a node's view of itself. Both take one event and the time and return
actions; neither looks at anything by itself. `control` carries the actions out and brings their results back as events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stack_node.messages import Join, ToHead, ToNode


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class StopAsked:
    """A stop signal came to this node."""


# --- to the head's view


@dataclass(frozen=True)
class Joined:
    """A node that `judge` let in is connected through a link."""

    link: int
    join: Join


@dataclass(frozen=True)
class FromNode:
    """A node said something."""

    link: int
    message: ToHead


@dataclass(frozen=True)
class LinkLost:
    """A node's connection ended."""

    link: int
    why: str


@dataclass(frozen=True)
class PortPicked:
    """The rendezvous port of an epoch, or why the head's ports cannot be used."""

    epoch: int
    port: int
    problem: str


@dataclass(frozen=True)
class Rendezvoused:
    """All ranks are connected to the engine's store."""

    epoch: int


@dataclass(frozen=True)
class ApiAnswered:
    """The API's own health check answers: the engine has started."""

    epoch: int


@dataclass(frozen=True)
class Proved:
    """One real request went through all ranks; `note` says when it was refused instead."""

    epoch: int
    note: str


@dataclass(frozen=True)
class Disproved:
    """The engine answered a request of ours with an error of its own."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Gauges:
    """The engine's counters; `progress` is None when they cannot be had."""

    epoch: int
    progress: float | None
    running: int  # requests that run or wait


# --- what the head's view wants


@dataclass(frozen=True)
class Send:
    """Say this to a node."""

    link: int
    message: ToNode


@dataclass(frozen=True)
class Drop:
    """End a node's connection."""

    link: int
    why: str


@dataclass(frozen=True)
class PickPort:
    """Find a free rendezvous port and see that the API's is free."""

    epoch: int


@dataclass(frozen=True)
class KillOwnEngine:
    """Kill the engine of this very node at once: its API must not be open a second longer."""


@dataclass(frozen=True)
class Watch:
    """Look at the API and the rendezvous of an epoch from now on."""

    epoch: int
    master_port: int


@dataclass(frozen=True)
class Unwatch:
    """Look at the API no more."""


@dataclass(frozen=True)
class Probe:
    """Send a request of our own."""

    epoch: int


@dataclass(frozen=True)
class Save:
    """Keep what must outlive this process."""

    failures: int
    retries: int
    last_fault: dict[str, Any] | None


@dataclass(frozen=True)
class Say:
    """Write a line to the log."""

    sentence: str


@dataclass(frozen=True)
class Exit:
    """All is done; the process may end with 0."""


HeadEvent = (
    Tick
    | StopAsked
    | Joined
    | FromNode
    | LinkLost
    | PortPicked
    | Rendezvoused
    | ApiAnswered
    | Proved
    | Disproved
    | Gauges
)
HeadAction = Send | Drop | PickPort | KillOwnEngine | Watch | Unwatch | Probe | Save | Say | Exit


# --- to a node's view of itself


@dataclass(frozen=True)
class Connected:
    """The head let this node in."""

    head_instance: str


@dataclass(frozen=True)
class Refused:
    """The head did not let this node in."""

    reason: str


@dataclass(frozen=True)
class Disconnected:
    """The connection, or the attempt to make one, ended."""

    why: str


@dataclass(frozen=True)
class FromHead:
    """The head said something."""

    message: ToNode


@dataclass(frozen=True)
class WeightsProgress:
    """How far the weights are, in bytes."""

    done: int
    total: int
    text: str


@dataclass(frozen=True)
class WeightsReady:
    """The weights are here."""


@dataclass(frozen=True)
class WeightsFailed:
    """The weights cannot be had; where `again`, another attempt follows by itself."""

    reason: str
    again: bool


@dataclass(frozen=True)
class EngineEnded:
    """A process of the engine's tree ended unasked."""

    epoch: int
    reason: str
    log: list[str]


@dataclass(frozen=True)
class EngineGone:
    """The engine was ended; `left` are processes that cannot be killed."""

    epoch: int
    left: list[int]


@dataclass(frozen=True)
class EngineSigns:
    """The engine did something since the last time."""

    epoch: int


@dataclass(frozen=True)
class ListenerOpen:
    """Peers can reach this node on that port."""

    epoch: int
    port: int


@dataclass(frozen=True)
class PeersTried:
    """Every peer was tried; each failure is [rank, address, error]."""

    epoch: int
    failed: list[list[Any]]


# --- what a node's view wants


@dataclass(frozen=True)
class Connect:
    """Try once to join."""


@dataclass(frozen=True)
class Disconnect:
    """Leave the connection."""

    why: str


@dataclass(frozen=True)
class Tell:
    """Say this to the head."""

    message: ToHead


@dataclass(frozen=True)
class OpenListener:
    """Wait for peers."""

    epoch: int


@dataclass(frozen=True)
class TryPeers:
    """Connect to every peer, each [rank, address, port]."""

    epoch: int
    peers: list[list[Any]]


@dataclass(frozen=True)
class CloseListener:
    """Wait for peers no more."""


@dataclass(frozen=True)
class StartEngine:
    """Start this node's part of the engine."""

    epoch: int
    master_port: int


@dataclass(frozen=True)
class EndEngine:
    """End it: at once, or `gently`."""

    gently: bool


@dataclass(frozen=True)
class FetchWeights:
    """Get the weights, from the beginning or from where it stopped."""


NodeEvent = (
    Tick
    | StopAsked
    | Connected
    | Refused
    | Disconnected
    | FromHead
    | WeightsProgress
    | WeightsReady
    | WeightsFailed
    | EngineEnded
    | EngineGone
    | EngineSigns
    | ListenerOpen
    | PeersTried
)
NodeAction = (
    Connect
    | Disconnect
    | Tell
    | OpenListener
    | TryPeers
    | CloseListener
    | StartEngine
    | EndEngine
    | FetchWeights
    | Say
    | Exit
)
