"""Who is in the group: the nodes by rank, whom the head lets in, and what each of them has said. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stack_node.messages import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stack_node.messages import Join


@dataclass(frozen=True)
class Settings:
    """What a group is and how long its head waits; times in seconds."""

    group: str
    nnodes: int
    digest: str
    version: str
    engine_version: str
    node_timeout: float
    stall_timeout: float
    max_restarts: int
    drain: float


@dataclass
class Mate:
    """A connected node, as its messages show it."""

    link: int
    join: Join
    heard: float  # when it last said anything
    prepared: bool = False
    blocked: str = ""
    leaving: bool = False
    progress: tuple[int, int, str] = (0, 0, "")
    port: int | None = None  # where it waits for its peers
    failed_peers: list[list[Any]] | None = None  # None: not tried yet
    engaged: bool = False  # it was told to start: it may have an engine
    started: bool = False
    told_to_stop: bool = False

    def release(self) -> None:
        """Nothing of an epoch is left on it."""
        self.engaged = self.started = self.told_to_stop = False
        self.port = self.failed_peers = None

    @property
    def name(self) -> str:
        """The node in a sentence."""
        return f"rank {self.join.rank} ({self.join.node}, {self.join.address})"


@dataclass
class Roster:
    """The nodes that are connected, and the ranks that a lost node may still hold."""

    settings: Settings
    mates: dict[int, Mate] = field(default_factory=dict)  # by rank
    _held: dict[int, tuple[str, float]] = field(default_factory=dict)  # rank: (address, until)

    def refusal(self, join: Join, now: float) -> str | None:
        """Why a node is not let in, with both sides named; None when it is."""
        own = self.settings
        pairs = (
            ("protocol", PROTOCOL, join.protocol),
            ("group", own.group, join.group),
            ("group size", own.nnodes, join.nnodes),
            ("plan", own.digest or "none", join.digest or "none"),
            ("stack-node version", own.version, join.version),
            ("engine version", own.engine_version, join.engine_version),
        )
        who = f"rank {join.rank} ({join.node}, {join.address})"
        for what, ours, theirs in pairs:
            if ours != theirs:
                return f"{who} has {what} {theirs}, the head has {ours}; bring both to the same"
        if not 0 <= join.rank < own.nnodes:
            return f"{who} is outside of 0 to {own.nnodes - 1}, the ranks of this group"
        holder = self.mates.get(join.rank)
        if holder is not None and holder.join.address != join.address:
            return f"{who} wants a rank that {holder.join.node} at {holder.join.address} holds; give each its own"
        address, until = self._held.get(join.rank, (join.address, now))
        if address != join.address and now < until:
            return f"{who} has to wait {until - now:.0f} s: {address} had this rank and may still run its engine"
        return None

    def in_order(self) -> list[Mate]:
        """The connected nodes, by rank."""
        return [mate for _, mate in sorted(self.mates.items())]

    def by_link(self, link: int) -> Mate | None:
        """The node behind a connection; None for one that was replaced or lost."""
        return next((mate for mate in self.mates.values() if mate.link == link), None)

    def remove(self, mate: Mate, held_until: float) -> None:
        """Forget a node; its rank stays its address's until then."""
        del self.mates[mate.join.rank]
        self._held[mate.join.rank] = (mate.join.address, held_until)

    def missing(self) -> list[int]:
        """Ranks that nobody holds."""
        return [rank for rank in range(self.settings.nnodes) if rank not in self.mates]

    def waits_for(self) -> str:
        """What keeps the group from starting, in words; empty when nothing does."""
        parts = []
        if missing := self.missing():
            parts.append(f"{'rank' if len(missing) == 1 else 'ranks'} {ranks(missing)} to join")
        for mate in self.in_order():
            if mate.leaving:
                parts.append(f"{mate.name} to come back, which is stopping")
            elif mate.blocked:
                parts.append(f"{mate.name}: {mate.blocked}")
            elif not mate.prepared:
                parts.append(f"the weights of {mate.name}")
        return "; ".join(parts)


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in short: `1, 3-5`."""
    parts: list[str] = []
    run: list[int] = []
    for number in [*sorted(numbers), None]:
        if run and (number is None or number != run[-1] + 1):
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if number is not None:
            run.append(number)
    return ", ".join(parts)
