"""The head's view of the group: events in, actions out, the time passed in. Nothing here waits, reads or writes.

forming → checking → starting → ready, and from anywhere an engine runs → ending → forming (or resting, or down). An
epoch is one common life of all engines; its number never comes again while this head lives. docs/protocol.md tells why
each rule is as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from stack_node import events as ev
from stack_node import messages as msg
from stack_node.budget import CALM_S, FRESH_RETRY_S, Budget
from stack_node.pulse import Pulse
from stack_node.roster import Mate, Roster

if TYPE_CHECKING:
    from stack_node.messages import Join, ToHead, ToNode
    from stack_node.roster import Settings

REACH_S = 10.0  # until pairs that cannot connect are named
REACH_AGAIN_S = 10.0
PORTS_AGAIN_S = 2.0
START_S = 30.0  # until every node has said that it started its engine
RENDEZVOUS_S = 600.0  # from the last of those until all ranks are connected; torch's own limit with NCCL
END_S = 45.0  # until every node has said that its engine is gone; gentle ends included
KILL_GRACE_S = 5.0
REMIND_S = 60.0
SETTLE_S = 2.0  # what is waited for has to stay the same so long before it is worth a line


class Phase(Enum):
    """What the group does."""

    FORMING = "forming"
    CHECKING = "checking"
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ENDING = "ending"
    RESTING = "resting"
    DOWN = "down"
    CLOSED = "closed"


@dataclass(frozen=True)
class Fault:
    """Why an epoch ended."""

    kind: str  # engine, lost, stall, start or rendezvous
    rank: int | None
    node: str
    reason: str
    log: list[str]
    epoch: int


class Group:
    """The state machine. `handle` is its only way in; `judge` only looks."""

    def __init__(
        self,
        settings: Settings,
        instance: str,
        now: float,
        failures: int = 0,
        retries: int = 0,
        last_fault: dict[str, Any] | None = None,
    ) -> None:
        """`failures`, `retries` and `last_fault` are what an earlier head has saved."""
        self.settings = settings
        self.instance = instance
        self.roster = Roster(settings)
        self.phase = Phase.FORMING
        self.epoch = 0
        self.budget = Budget(settings.max_restarts, failures, retries)
        self.last_fault = last_fault
        self.restarts: dict[str, int] = {}
        self.last_recovery_s: float | None = None
        self.last_detection_s: float | None = None
        self.pulse = Pulse(now, settings.stall_timeout)
        self.obstacle = ""  # what keeps a complete group from starting
        self.until = now  # resting and down: when to go on
        self._actions: list[ev.HeadAction] = []
        self._since = now  # of the phase
        self._waiting: tuple[str, float, float | None] = ("", now, None)  # for what, since when, when it was said
        self._not_before = now
        self._fault_at: float | None = None
        self._closing = False
        self._last_ack = now
        self._rendezvoused = False
        self._counted = False  # the last fault used the budget
        if self.budget.used_up:
            self.phase, self.until = Phase.DOWN, now + FRESH_RETRY_S
            self._say(
                f"the group had failed {failures} times when its head was last stopped; "
                f"one more attempt in {FRESH_RETRY_S:.0f} s"
            )

    @property
    def ready(self) -> bool:
        """Whether requests are welcome."""
        return self.phase is Phase.READY

    def judge(self, join: Join, now: float) -> str | None:
        """Why a node is not let in; None when it is."""
        return self.roster.refusal(join, now)

    def handle(self, event: ev.HeadEvent, now: float) -> list[ev.HeadAction]:
        """Take one event at a time `now` (seconds, monotonic) and return what is to be done, in order."""
        match event:
            case ev.Tick():
                self._drop_silent(now)
            case ev.StopAsked():
                self._stop_asked(now)
            case ev.Joined(link, join):
                self._joined(link, join, now)
            case ev.FromNode(link, message):
                mate = self.roster.by_link(link)
                if mate is not None:
                    mate.heard = now
                    self._heard(mate, message, now)
            case ev.LinkLost(link, why):
                mate = self.roster.by_link(link)
                if mate is not None:
                    self._lost(mate, why, now)
            case _:
                if event.epoch == self.epoch:
                    self._observed(event, now)
        self._advance(now)
        actions, self._actions = self._actions, []
        return actions

    # --- nodes come and go

    def _joined(self, link: int, join: Join, now: float) -> None:
        before = self.roster.mates.get(join.rank)
        if before is not None:
            self._do(ev.Drop(before.link, "this rank has joined anew"))
            self._lost(before, "its supervisor was started anew or lost the connection", now)
        mate = Mate(link, join, now)
        self.roster.mates[join.rank] = mate
        self._say(f"{mate.name} has joined")

    def _lost(self, mate: Mate, why: str, now: float) -> None:
        self.roster.remove(mate, now + self.settings.node_timeout + KILL_GRACE_S)
        if self.phase in (Phase.STARTING, Phase.READY, Phase.DRAINING) and mate.engaged:
            self.last_detection_s = now - mate.heard
            self._fault("lost", mate, f"{mate.name} is lost: {why}", [], now)
            return
        self._say(f"{mate.name} is gone: {why}")
        if self.phase is Phase.CHECKING:
            self._form(now)

    def _heard(self, mate: Mate, message: ToHead, now: float) -> None:
        match message:
            case msg.Ping(number):
                self._do(ev.Send(mate.link, msg.Pong(number)))
            case msg.Progress(done, total, text):
                mate.progress = (done, total, text)
            case msg.Prepared():
                mate.prepared, mate.blocked = True, ""
            case msg.Blocked(reason):
                if mate.blocked != reason:
                    self._say(f"{mate.name} cannot start: {reason}")
                mate.prepared, mate.blocked = False, reason
                if self.phase is Phase.ENDING:
                    mate.release()
                elif self.phase is Phase.CHECKING:
                    self._form(now)
            case msg.Leaving():
                self._leaving(mate, now)
            case _:
                if message.epoch == self.epoch:
                    self._heard_of_epoch(mate, message, now)

    def _heard_of_epoch(self, mate: Mate, message: ToHead, now: float) -> None:
        match message:
            case msg.Listening(_, port) if self.phase is Phase.CHECKING:
                mate.port = port
                if all(other.port is not None for other in self.roster.mates.values()):
                    self._try_pairs()
            case msg.Reached(_, failed) if self.phase is Phase.CHECKING:
                mate.failed_peers = failed
                if all(other.failed_peers is not None for other in self.roster.mates.values()):
                    self._pairs_tried(now)
            case msg.Started() if self.phase is Phase.STARTING:
                mate.started = True
                self._last_ack = now
                self.pulse.sign(now)
            case msg.Signs():
                self.pulse.sign(now)
            case msg.Failed(_, reason, log) if self.phase in (Phase.STARTING, Phase.READY, Phase.DRAINING):
                self._fault("engine", mate, f"{mate.name}: {reason}", log, now)
            case msg.Stopped():
                mate.release()
            case _:
                pass  # it crossed a message of ours that made it pointless

    # --- an epoch begins

    def _form(self, now: float) -> None:
        self._enter(Phase.FORMING, now)
        for mate in self.roster.mates.values():
            mate.release()

    def _check(self, now: float) -> None:
        self.epoch += 1
        self._enter(Phase.CHECKING, now)
        if self.settings.nnodes == 1:
            self._do(ev.PickPort(self.epoch))
            return
        self._tell_all(msg.Listen(self.epoch))

    def _try_pairs(self) -> None:
        for mate in self.roster.mates.values():
            others = (peer for peer in self.roster.in_order() if peer is not mate)
            peers: list[list[Any]] = [[peer.join.rank, peer.join.address, peer.port] for peer in others]
            self._do(ev.Send(mate.link, msg.Reach(self.epoch, peers)))

    def _pairs_tried(self, now: float) -> None:
        broken = [
            f"{mate.name} cannot connect to rank {rank} at {address}: {error}"
            for mate in self.roster.in_order()
            for rank, address, error in mate.failed_peers or []
        ]
        if broken:
            self._hindered("; ".join(broken) + "; all TCP ports have to be open between the nodes", REACH_AGAIN_S, now)
        else:
            self._do(ev.PickPort(self.epoch))

    def _hindered(self, obstacle: str, again_s: float, now: float) -> None:
        self._form(now)
        self.obstacle = obstacle
        self._not_before = now + again_s

    def _start(self, port: int, now: float) -> None:
        self.obstacle = ""
        self._rendezvoused = self.settings.nnodes == 1
        self._last_ack = now
        self.pulse = Pulse(now, self.settings.stall_timeout)
        self._enter(Phase.STARTING, now)
        self._say(f"epoch {self.epoch}: all {self.settings.nnodes} nodes start the engine")
        for mate in self.roster.mates.values():
            mate.engaged = True
        self._tell_all(msg.Start(self.epoch, port))
        self._do(ev.Watch(self.epoch, port))

    # --- an epoch lives

    def _observed(self, event: ev.HeadEvent, now: float) -> None:
        match event:
            case ev.PortPicked(_, port, problem) if self.phase is Phase.CHECKING:
                if problem:
                    self._hindered(problem, PORTS_AGAIN_S, now)
                else:
                    self._start(port, now)
            case ev.Rendezvoused():
                self._rendezvoused = True
                self.pulse.sign(now)
            case ev.ApiAnswered():
                self.pulse.api_answers(now)
                if self.phase is Phase.STARTING:
                    self._probe()
            case ev.Proved(_, note):
                self.pulse.probe_answered(now)
                if self.phase is Phase.STARTING:
                    self._become_ready(note, now)
            case ev.Disproved(_, reason) if self.phase in (Phase.STARTING, Phase.READY):
                self._fault("engine", self.roster.mates.get(0), f"the API failed a request of ours: {reason}", [], now)
            case ev.Gauges(_, progress, running):
                self.pulse.looked(progress, running, now)
            case _:
                pass

    def _probe(self) -> None:
        self.pulse.probe_sent()
        self._do(ev.Probe(self.epoch))

    def _become_ready(self, note: str, now: float) -> None:
        took = now - self._since
        self._enter(Phase.READY, now)
        self._waiting = ("", now, None)
        self._say(f"ready: epoch {self.epoch}, every rank has answered, {took:.1f} s after the start{note}")
        if self._fault_at is not None:
            self.last_recovery_s, self._fault_at = now - self._fault_at, None

    # --- an epoch ends

    def _fault(self, kind: str, mate: Mate | None, reason: str, log: list[str], now: float) -> None:
        draining, starting = self.phase is Phase.DRAINING, self.phase is Phase.STARTING
        fault = Fault(kind, mate.join.rank if mate else None, mate.join.node if mate else "", reason, log, self.epoch)
        self.last_fault = dict(vars(fault))
        self.restarts[kind] = self.restarts.get(kind, 0) + 1
        self._fault_at = now if self._fault_at is None else self._fault_at
        self._do(ev.KillOwnEngine())
        self._say(f"epoch {self.epoch} has failed: {reason}")
        for line in log:
            self._say(f"    {line}")
        self._counted = not draining and (kind != "lost" or starting)
        self.budget.failures += self._counted
        if draining:
            self._fault_at = None
        self._do(ev.Save(self.budget.failures, self.budget.retries, self.last_fault))
        self._end(reason, now)

    def _end(self, reason: str, now: float, *, gently: bool = False) -> None:
        self._enter(Phase.ENDING, now)
        self._do(ev.Unwatch())
        head = self.roster.mates.get(0)
        if gently and head is not None and head.engaged:
            # Head first: it is the one with requests, and headless ranks outlive it without harm.
            self._tell_to_stop(head, reason, gently=True)
            return
        for mate in self.roster.mates.values():
            self._tell_to_stop(mate, reason, gently=False)

    def _tell_to_stop(self, mate: Mate, reason: str, *, gently: bool) -> None:
        if mate.engaged and not mate.told_to_stop:
            mate.told_to_stop = True
            self._do(ev.Send(mate.link, msg.Stop(self.epoch, reason, gently)))

    def _ended(self, now: float) -> None:
        if self._closing:
            self._close(now)
        elif not self._counted:
            self._form(now)
        else:
            self._counted = False
            self._pause(now)

    def _pause(self, now: float) -> None:
        budget, pause = self.budget, self.budget.pause()
        self.until = now + pause
        self._enter(Phase.DOWN if budget.used_up else Phase.RESTING, now)
        if budget.used_up:
            self._say(
                f"the group stays down: it has failed {budget.failures} times and GEN_STACK_MAX_RESTARTS is "
                f"{budget.most}; mend the cause, which is above and in `stack-node status`; one more attempt in "
                f"{pause / 60:.0f} min"
            )
        elif pause:
            self._say(f"next attempt in {pause:.0f} s ({budget.failures} of {budget.most} used)")

    def _close(self, now: float) -> None:
        self._enter(Phase.CLOSED, now)
        self._do(ev.Exit())

    # --- stopping on purpose

    def _stop_asked(self, now: float) -> None:
        if self._closing:
            self._say("asked again: not waiting any longer")
            self._do(ev.KillOwnEngine())
            self._close(now)
            return
        self._closing = True
        if self.phase is Phase.READY:
            self._drain("asked to stop", now)
        elif self.phase is Phase.STARTING:
            self._end("the head was asked to stop", now)
        elif self.phase not in (Phase.DRAINING, Phase.ENDING):
            self._close(now)

    def _leaving(self, mate: Mate, now: float) -> None:
        mate.leaving = True
        if self.phase is Phase.READY:
            self._drain(f"{mate.name} was asked to stop", now)
        elif self.phase is Phase.STARTING:
            self._say(f"{mate.name} was asked to stop")
            self._end(f"{mate.name} was asked to stop", now)
        elif self.phase is Phase.CHECKING:
            self._form(now)

    def _drain(self, reason: str, now: float) -> None:
        self._enter(Phase.DRAINING, now)
        self.pulse.idle_looks = 0
        self._say(f"draining, for {self.settings.drain:.0f} s at most: {reason}")

    # --- time

    def _drop_silent(self, now: float) -> None:
        for mate in list(self.roster.mates.values()):
            if now - mate.heard > self.settings.node_timeout:
                self._do(ev.Drop(mate.link, "silent"))
                self._lost(mate, f"silent for {now - mate.heard:.1f} s", now)

    def _advance(self, now: float) -> None:
        match self.phase:
            case Phase.FORMING:
                self._advance_forming(now)
            case Phase.CHECKING:
                self._advance_checking(now)
            case Phase.STARTING:
                self._advance_starting(now)
            case Phase.READY:
                self._advance_ready(now)
            case Phase.DRAINING:
                self._advance_draining(now)
            case Phase.ENDING:
                self._advance_ending(now)
            case Phase.RESTING | Phase.DOWN:
                self._advance_resting(now)
            case Phase.CLOSED:
                pass

    def _advance_forming(self, now: float) -> None:
        waits = self.roster.waits_for()
        if not waits and now >= self._not_before:
            self._check(now)
            return
        if not waits and not self.obstacle:
            return
        what = f"waiting for {waits}" if waits else f"cannot start: {self.obstacle}"
        if what != self._waiting[0]:
            self._waiting = (what, now, None)
        _, since, said = self._waiting
        if now - since >= SETTLE_S and (said is None or now - said >= REMIND_S):
            self._waiting = (what, since, now)
            self._say(what)

    def _advance_checking(self, now: float) -> None:
        if now - self._since <= REACH_S:
            return
        silent = [
            mate.name
            for mate in self.roster.in_order()
            if mate.port is None or (mate.failed_peers is None and self._all_listen())
        ]
        self._hindered(f"no result of the connection test from {', '.join(silent) or 'the head'}", REACH_AGAIN_S, now)

    def _all_listen(self) -> bool:
        return all(mate.port is not None for mate in self.roster.mates.values())

    def _advance_starting(self, now: float) -> None:
        slow = [mate for mate in self.roster.in_order() if not mate.started]
        if slow and now - self._since > START_S:
            self._fault("start", slow[0], f"{slow[0].name} has not started its engine in {START_S:.0f} s", [], now)
        elif not slow and not self._rendezvoused and now - self._last_ack > RENDEZVOUS_S:
            self._fault(
                "rendezvous",
                None,
                f"the ranks have not met in {RENDEZVOUS_S:.0f} s: see each rank's log for the one that hangs",
                [],
                now,
            )
        elif reason := self.pulse.fault(now):
            self._fault("stall", None, reason, [], now)

    def _advance_ready(self, now: float) -> None:
        if reason := self.pulse.fault(now):
            self.last_detection_s = now - self.pulse.moved
            self._fault("stall", None, reason, [], now)
            return
        if self.pulse.wants_probe(now):
            self._probe()
        if self.budget.failures and now - self._since >= CALM_S:
            self.budget.restore()
            self._say(f"ready for {CALM_S / 60:.0f} min: earlier failures count no more")
            self._do(ev.Save(0, 0, self.last_fault))

    def _advance_draining(self, now: float) -> None:
        idle = self.pulse.idle_looks >= 2  # twice, since a look may be older than the last request
        if idle:
            self._say("drained")
        elif now - self._since > self.settings.drain:
            self._say(f"the drain is over with {self.pulse.running} requests running, which are cut off")
        else:
            return
        self._end("drained", now, gently=idle)

    def _advance_resting(self, now: float) -> None:
        if now < self.until:
            return
        if self.phase is Phase.DOWN:
            self.budget.retries += 1
        self._form(now)
        self._advance_forming(now)

    def _advance_ending(self, now: float) -> None:
        engaged = [mate for mate in self.roster.in_order() if mate.engaged]
        if not engaged:
            self._ended(now)
        elif all(not mate.told_to_stop for mate in engaged):
            for mate in engaged:
                self._tell_to_stop(mate, "the head has stopped", gently=False)
        elif now - self._since > END_S:
            for mate in engaged:
                self._do(ev.Drop(mate.link, "no word that its engine is gone"))
                self._lost(mate, f"it has not ended its engine in {END_S:.0f} s", now)

    # --- small

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self._since = phase, now

    def _tell_all(self, message: ToNode) -> None:
        for mate in self.roster.in_order():
            self._do(ev.Send(mate.link, message))

    def _say(self, sentence: str) -> None:
        self._do(ev.Say(sentence))

    def _do(self, action: ev.HeadAction) -> None:
        self._actions.append(action)
