"""A whole group in one process and in no time: the real state machines, a network and engines made of events.

Messages take a little, links can be cut in either direction, a node can freeze, die or come back, an engine can die,
hang or refuse to start. Time is a number, so an hour passes in milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from stack_node import events as ev
from stack_node import messages as msg
from stack_node.group import Group, Phase
from stack_node.member import Engine, Member
from stack_node.roster import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_S = 0.25
DELAY_S = 0.01
KILL_S = 0.05
LOAD_S = 5.0

SETTINGS = Settings("g", 3, "d", "1", "0.32.0", node_timeout=10, stall_timeout=60, max_restarts=5, drain=20)


@dataclass
class SimEngine:
    """One node's engine; it is alive from `StartEngine` until it was killed."""

    head_instance: str
    epoch: int
    starts: float


@dataclass
class SimNode:
    """A host: its supervisor (None while it is dead) and what surrounds it."""

    rank: int
    member: Member | None = None
    engine: SimEngine | None = None
    link: int | None = None  # None: not connected
    head_instance: str = ""
    frozen: bool = False
    cut_in: bool = False  # nothing from the head arrives
    cut_out: bool = False  # nothing arrives at the head
    fails_to_start: int = 0
    hangs: bool = False  # its engine answers nothing
    unkillable: bool = False  # its engine survives SIGKILL
    weights_problem: str = ""
    life: int = 0  # counts supervisors
    stuck_out: list[Callable[[], None]] = field(default_factory=list)  # waits in a socket that is cut
    stuck_in: list[Callable[[], None]] = field(default_factory=list)
    frozen_events: list[Callable[[], None]] = field(default_factory=list)


class Simulation:
    """The group and its world."""

    def __init__(self, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.now = 0.0
        self.said: list[str] = []
        self.nodes = [SimNode(rank) for rank in range(settings.nnodes)]
        self.group: Group | None = None
        self.saved: tuple[int, int, dict[str, Any] | None] = (0, 0, None)
        self.requests = 0  # running at the head
        self.answers = True  # the API answers requests, not only its own health check
        self.exited: list[int] = []
        self.unreachable: set[tuple[int, int]] = set()  # pairs of ranks: the first cannot connect to the second
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._links = itertools.count(1)
        self._progress = 0.0
        self._watch: int | None = None
        self._probe: int | None = None
        self._answered = False
        for node in self.nodes:
            self.boot(node.rank)

    # --- time

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, what = heapq.heappop(self._queue)
            what()
            self.check()
        self.now = end

    def run_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Let time pass until something is so; False when it was not within `seconds`."""
        end = self.now + seconds
        while not condition() and self.now < end:
            self.run(TICK_S)
        return condition()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), what))

    # --- invariants

    def check(self) -> None:
        """What must hold at every moment."""
        engines = [node.engine for node in self.nodes if node.engine and not node.frozen]
        if self.group is not None and self.group.ready:
            assert self.group.epoch > 0
            assert not self.group.roster.missing()
        kinds = {(engine.head_instance, engine.epoch): engine for engine in engines}
        if len(kinds) > 1:
            newest = max(engine.starts for engine in kinds.values())
            bound = 2 * self.settings.node_timeout + 5
            assert self.now - newest <= bound, f"engines of several epochs at {self.now}: {sorted(kinds)}"

    @property
    def ready(self) -> bool:
        """Whether `/readyz` of the head answers 200."""
        head = self.nodes[0]
        return self.group is not None and not head.frozen and self.group.ready

    # --- faults

    def boot(self, rank: int) -> None:
        """Start a supervisor on a host, after whatever was there has died."""
        node = self.nodes[rank]
        if node.member is not None:
            self.die(rank)
        node.life += 1
        s = self.settings
        node.member = Member(s.node_timeout, s.drain, self.now)
        if rank == 0:
            failures, retries, fault = self.saved
            self.group = Group(s, f"h{node.life}", self.now, failures, retries, fault)
            self._watch = self._probe = None
        self._ticks(node, node.life)

    def die(self, rank: int) -> None:
        """The supervisor is gone with everything below it: a container or a host that was killed."""
        node = self.nodes[rank]
        node.member = node.engine = None
        node.frozen = False
        node.frozen_events.clear()
        self._unlink(node, "the connection was closed", silent=node.cut_out)
        if rank == 0:
            self.group = None
            for other in self.nodes[1:]:
                self._unlink(other, "the connection was closed", silent=other.cut_in)

    def freeze(self, rank: int) -> None:
        """Stop a host in its tracks."""
        self.nodes[rank].frozen = True

    def thaw(self, rank: int) -> None:
        """Let it go on."""
        node = self.nodes[rank]
        node.frozen = False
        waiting, node.frozen_events = node.frozen_events, []
        for what in waiting:
            self.later(0, what)

    def cut(self, rank: int, *, incoming: bool = True, outgoing: bool = True) -> None:
        """Cut a host off."""
        self.nodes[rank].cut_in |= incoming
        self.nodes[rank].cut_out |= outgoing

    def heal(self, rank: int) -> None:
        """Repair the cable: what waited in sockets arrives."""
        node = self.nodes[rank]
        node.cut_in = node.cut_out = False
        waiting = [*node.stuck_out, *node.stuck_in]
        node.stuck_out, node.stuck_in = [], []
        for what in waiting:
            self.later(DELAY_S, what)

    def kill_engine(self, rank: int) -> None:
        """A process of the engine dies."""
        node = self.nodes[rank]
        if node.engine is not None and node.member is not None:
            self._to_node(node, ev.EngineEnded(node.engine.epoch, "killed by SIGKILL", ["last line"]))

    def stop(self, rank: int) -> None:
        """SIGTERM to a supervisor."""
        node = self.nodes[rank]
        if rank == 0:
            self._to_head(ev.StopAsked())
        else:
            self._to_node(node, ev.StopAsked())

    def clear(self) -> None:
        """End all faults and start what is dead."""
        for node in self.nodes:
            node.fails_to_start, node.hangs = 0, False
            self.heal(node.rank)
            self.thaw(node.rank)
            if node.member is None:
                self.boot(node.rank)

    # --- machinery

    def _ticks(self, node: SimNode, life: int) -> None:
        if node.life != life or node.member is None:
            return
        if not node.frozen:
            if node.rank == 0:
                self._to_head(ev.Tick())
                self._look()
            if node.member is not None:
                self._to_node(node, ev.Tick())
        self.later(TICK_S, lambda: self._ticks(node, life))

    def _to_node(self, node: SimNode, event: ev.NodeEvent) -> None:
        if node.frozen:
            life = node.life
            node.frozen_events.append(lambda: self._to_node(node, event) if node.life == life else None)
        elif node.member is not None:
            for action in node.member.handle(event, self.now):
                self._do_node(node, action)

    def _to_head(self, event: ev.HeadEvent) -> None:
        head = self.nodes[0]
        if head.frozen:
            life = head.life
            head.frozen_events.append(lambda: self._to_head(event) if head.life == life else None)
        elif self.group is not None:
            for action in self.group.handle(event, self.now):
                self._do_head(action)

    def _do_node(self, node: SimNode, action: ev.NodeAction) -> None:
        member = node.member
        match action:
            case ev.Connect():
                self.later(DELAY_S, lambda: self._connect(node))
            case ev.Disconnect(why):
                self._unlink(node, why)
            case ev.Tell(message):
                if (link := node.link) is not None:
                    self._carry(node, out=True, what=lambda: self._to_head(ev.FromNode(link, message)))
            case ev.OpenListener(epoch):
                self.later(DELAY_S, lambda: self._to_node(node, ev.ListenerOpen(epoch, 1000 + node.rank)))
            case ev.TryPeers(epoch, peers):
                failed = [[rank, address, "cut"] for rank, address, _ in peers if self._cut_off(node, rank)]
                self.later(DELAY_S, lambda: self._to_node(node, ev.PeersTried(epoch, failed)))
            case ev.StartEngine(epoch, _):
                assert node.engine is None, "an engine was started beside a living one"
                node.engine = SimEngine(node.head_instance, epoch, self.now)
                if node.fails_to_start:
                    node.fails_to_start -= 1
                    self.later(1.0, lambda: self._to_node(node, ev.EngineEnded(epoch, "exit code 1", ["boom"])))
            case ev.EndEngine(_):
                self.later(KILL_S, lambda: self._engine_dies(node, member))
            case ev.FetchWeights():
                problem = node.weights_problem
                found = ev.WeightsFailed(problem, again=False) if problem else ev.WeightsReady()
                self.later(DELAY_S, lambda: self._to_node(node, found))
            case ev.Say(sentence):
                self.said.append(f"{node.rank}: {sentence}")
            case ev.Exit():
                self.exited.append(node.rank)
                self.die(node.rank)
            case _:
                pass

    def _cut_off(self, node: SimNode, rank: int) -> bool:
        peer = self.nodes[rank]
        if (node.rank, rank) in self.unreachable:
            return True
        return node.cut_in or node.cut_out or peer.cut_in or peer.cut_out or peer.member is None

    def _engine_dies(self, node: SimNode, member: Member | None) -> None:
        if node.member is not member or node.engine is None:
            return
        if node.frozen:
            node.frozen_events.append(lambda: self._engine_dies(node, member))
            return
        if node.unkillable:
            self._to_node(node, ev.EngineGone(node.engine.epoch, [7]))
            self.later(1.0, lambda: self._engine_dies(node, member))
            return
        epoch, node.engine = node.engine.epoch, None
        self._to_node(node, ev.EngineGone(epoch, []))

    def _carry(self, node: SimNode, *, out: bool, what: Callable[[], None]) -> None:
        if node.cut_out if out else node.cut_in:
            (node.stuck_out if out else node.stuck_in).append(what)
        else:
            self.later(DELAY_S, what)

    def _connect(self, node: SimNode) -> None:
        if node.member is None:
            return
        if self.group is None or self.nodes[0].frozen or node.cut_in or node.cut_out:
            self.later(5.0, lambda: self._to_node(node, ev.Disconnected("no answer")))
            return
        s = self.settings
        address, instance = f"10.0.0.{node.rank}", f"{node.rank}-{node.life}"
        join = msg.Join(
            msg.PROTOCOL, s.group, s.nnodes, node.rank, s.digest, s.version, s.engine_version, 1, address, "n", instance
        )
        refusal = self.group.judge(join, self.now)
        if refusal is not None:
            self._to_node(node, ev.Refused(refusal))
            return
        node.link = next(self._links)
        node.head_instance = self.group.instance
        self._to_head(ev.Joined(node.link, join))
        self._to_node(node, ev.Connected(self.group.instance))

    def _unlink(self, node: SimNode, why: str, *, silent: bool = False) -> None:
        if node.link is None:
            return
        link, node.link = node.link, None
        node.stuck_in, node.stuck_out = [], []
        self._to_node(node, ev.Disconnected(why))
        if not silent and not node.cut_out:
            self.later(DELAY_S, lambda: self._to_head(ev.LinkLost(link, why)))

    def _do_head(self, action: ev.HeadAction) -> None:
        match action:
            case ev.Send(link, message):
                for node in self.nodes:
                    if node.link == link:
                        self._carry(node, out=False, what=partial(self._deliver, node, link, message))
            case ev.Drop(link, why):
                for node in self.nodes:
                    if node.link == link and not node.cut_in:
                        self._unlink(node, why, silent=True)
            case ev.PickPort(epoch):
                self.later(0, lambda: self._to_head(ev.PortPicked(epoch, 29500, "")))
            case ev.KillOwnEngine():
                head = self.nodes[0]
                member = head.member
                self.later(KILL_S, lambda: self._engine_dies(head, member))
            case ev.Watch(epoch, _):
                self._watch, self._answered = epoch, False
            case ev.Unwatch():
                self._watch = self._probe = None
            case ev.Probe(epoch):
                self._probe = epoch
            case ev.Save(failures, retries, fault):
                self.saved = (failures, retries, fault)
            case ev.Say(sentence):
                self.said.append(f"head: {sentence}")
            case ev.Exit():
                self.exited.append(0)
                self.die(0)

    def _deliver(self, node: SimNode, link: int, message: msg.ToNode) -> None:
        if node.link == link:
            self._to_node(node, ev.FromHead(message))

    @property
    def whole(self) -> bool:
        """Whether an engine of the watched epoch runs on every node and has loaded."""
        engines = [node.engine for node in self.nodes]
        return all(engine is not None and self.now - engine.starts > LOAD_S for engine in engines) and not any(
            node.frozen or node.hangs or node.cut_in or node.cut_out for node in self.nodes
        )

    def _look(self) -> None:
        epoch = self._watch
        if epoch is None or self.nodes[0].engine is None:
            return
        if not self._answered:
            if self.whole:
                self._answered = True
                self._to_head(ev.Rendezvoused(epoch))
                self._to_head(ev.ApiAnswered(epoch))
            return
        if self._probe == epoch and self.whole and self.answers:
            self._probe = None
            self._progress += 1
            self._to_head(ev.Proved(epoch, ""))
        if self.requests and self.whole:
            self._progress += 1
        self._to_head(ev.Gauges(epoch, self._progress, self.requests))


def up(settings: Settings = SETTINGS) -> Simulation:
    """A group that is ready."""
    simulation = Simulation(settings)
    assert simulation.run_until(lambda: simulation.ready, 60), simulation.said
    return simulation


__all__ = ["SETTINGS", "Engine", "Phase", "SimNode", "Simulation", "up"]
