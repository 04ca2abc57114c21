"""A node's view of itself: events in, actions out, the time passed in. Nothing here waits, reads or writes.

A node gets its weights, joins when no engine of its own is left, does what the head says, and kills its engine by
itself when the head has not answered for `node_timeout`: who cannot be heard has been given up by the others.
"""

from __future__ import annotations

from enum import Enum

from stack_node import events as ev
from stack_node import messages as msg

PING_S = 1.0
CONNECT_AGAIN_S = 1.0
REFUSED_AGAIN_S = 5.0
FETCH_AGAIN_S = 60.0
REMIND_S = 60.0
LEAVE_S = 15.0  # on top of the drain, until a node that was asked to stop no longer waits for the head
PROGRESS_S = 2.0
LONGEST = 2000  # characters of a reason that the head is told; a message has a limit (channel.MAX_FRAME)


class Engine(Enum):
    """This node's part of the engine."""

    NONE = "none"
    RUNNING = "running"
    ENDING = "ending"
    STUCK = "stuck"


class Member:
    """The state machine. `handle` is its only way in."""

    def __init__(self, node_timeout: float, drain: float, now: float) -> None:
        """Times in seconds."""
        self.engine = Engine.NONE
        self.epoch = 0
        self.connected = False
        self.prepared = False
        self._stuck = ""  # why an engine that ended is still there
        self._weightless = ""  # why the weights cannot be had
        self.refusal = ""
        self.away = "not tried yet"  # why there is no connection
        self._node_timeout = node_timeout
        self._drain = drain
        self._ping_s = min(PING_S, node_timeout / 5)
        self._connecting = False
        self._connect_at = now
        self._fetch_at: float | None = now
        self._pings: dict[int, float] = {}  # unanswered: when each was sent
        self._number = 0
        self._ping_at = now
        self._lease = now  # when the last ping that the head acknowledged was sent
        self._progress_at = now
        self._leave_by: float | None = None
        self._said = ("", now)
        self._actions: list[ev.NodeAction] = []

    @property
    def obstacle(self) -> str:
        """Why this node cannot start; empty when it can."""
        return self._stuck or self._weightless

    @property
    def health(self) -> tuple[bool, str]:
        """Whether this node does what it should, and a sentence about it."""
        if self.refusal:
            return False, f"refused by the head: {self.refusal}"
        if self.obstacle:
            return False, self.obstacle
        if not self.connected:
            return False, f"not connected to the head: {self.away}"
        if self.engine is Engine.NONE:
            return True, "waits for the group" if self.prepared else "fetches the weights"
        return True, f"epoch {self.epoch}: the engine is {self.engine.value}"

    @property
    def stopping(self) -> bool:
        """Whether this node was asked to stop."""
        return self._leave_by is not None

    def handle(self, event: ev.NodeEvent, now: float) -> list[ev.NodeAction]:
        """Take one event at a time `now` (seconds, monotonic) and return what is to be done, in order."""
        match event:
            case ev.Tick():
                pass
            case ev.StopAsked():
                self._stop_asked(now)
            case ev.Connected() | ev.Refused() | ev.Disconnected():
                self._link_changed(event, now)
            case ev.FromHead(message):
                self._told(message)
            case ev.WeightsProgress() | ev.WeightsReady() | ev.WeightsFailed():
                self._weights(event, now)
            case ev.EngineGone(epoch, left):
                self._engine_gone(epoch, left)
            case _:
                if event.epoch == self.epoch:
                    self._observed(event)
        self._advance(now)
        actions, self._actions = self._actions, []
        return actions

    # --- the connection

    def _link_changed(self, event: ev.Connected | ev.Refused | ev.Disconnected, now: float) -> None:
        self._connecting = False
        match event:
            case ev.Connected():
                self.connected = True
                self.refusal = ""
                self._pings.clear()
                self._lease = self._ping_at = now
                self._say("connected to the head")
                self._tell_state()
            case ev.Refused(reason):
                self._connect_at = now + REFUSED_AGAIN_S
                self.refusal = reason
                self._remind(f"the head has refused this node: {reason}; trying again", now)
            case ev.Disconnected(why):
                was, self.connected = self.connected, False
                self._connect_at = now + CONNECT_AGAIN_S
                self.away, self.refusal = why, ""
                self._do(ev.CloseListener())
                if was:
                    self._said = ("", now)
                    self._say(f"the connection to the head is lost: {why}")
                else:
                    self._remind(f"waiting for the head: {why}", now)
                if self.engine is Engine.RUNNING:
                    self._say("the engine is killed, since the head has given it up")
                    self._end_engine(gently=False)

    def _tell_state(self) -> None:
        if self.obstacle:
            self._tell(msg.Blocked(self.obstacle))
        elif self.prepared:
            self._tell(msg.Prepared())

    # --- what the head says

    def _told(self, message: msg.ToNode) -> None:
        match message:
            case msg.Pong(number):
                sent = self._pings.get(number)
                if sent is not None:
                    self._lease = sent
                    self._pings = {n: at for n, at in self._pings.items() if n > number}
            case msg.Listen(epoch):
                self.epoch = epoch
                self._do(ev.OpenListener(epoch))
            case msg.Reach(epoch, peers):
                self._do(ev.TryPeers(epoch, peers))
            case msg.Start(epoch, master_port) if self.engine is Engine.NONE:
                self.epoch = epoch
                self.engine = Engine.RUNNING
                self._do(ev.CloseListener())
                self._say(f"epoch {epoch}: the engine starts")
                self._do(ev.StartEngine(epoch, master_port))
                self._tell(msg.Started(epoch))
            case msg.Stop(epoch, reason, gently):
                if self.engine is Engine.RUNNING:
                    self._say(f"epoch {epoch} ends: {reason}")
                    self._end_engine(gently=gently)
                elif self.engine is Engine.NONE:
                    self._tell(msg.Stopped(epoch))
            case _:
                pass

    # --- this node's own things

    def _weights(self, event: ev.WeightsProgress | ev.WeightsReady | ev.WeightsFailed, now: float) -> None:
        match event:
            case ev.WeightsProgress(done, total, text):
                if self.connected and now - self._progress_at >= PROGRESS_S:
                    self._progress_at = now
                    self._tell(msg.Progress(done, total, text))
            case ev.WeightsReady():
                self.prepared, self._weightless = True, ""
                self._tell_state()
            case ev.WeightsFailed(reason, again):
                self._weightless = reason[:LONGEST]
                if not again:
                    self._fetch_at = now + FETCH_AGAIN_S
                self._remind(f"the weights cannot be had: {reason}", now)
                self._tell_state()

    def _engine_gone(self, epoch: int, left: list[int]) -> None:
        if left:
            self.engine = Engine.STUCK
            self._stuck = (
                f"processes {', '.join(map(str, left))} of the last engine cannot be killed; this host needs a reboot"
            )
            self._say(self._stuck)
            self._tell_state()
            return
        was, self.engine = self.engine, Engine.NONE
        if was is Engine.STUCK:
            self._stuck = ""
            self._say("the last engine is gone after all")
            self._tell_state()
        self._tell(msg.Stopped(epoch))
        if self.stopping:
            self._do(ev.Exit())

    def _observed(self, event: ev.NodeEvent) -> None:
        match event:
            case ev.ListenerOpen(epoch, port):
                self._tell(msg.Listening(epoch, port))
            case ev.PeersTried(epoch, failed):
                self._tell(msg.Reached(epoch, failed))
            case ev.EngineSigns(epoch):
                self._tell(msg.Signs(epoch))
            case ev.EngineEnded(epoch, reason, log) if self.engine is Engine.RUNNING:
                self._say(f"epoch {epoch}: {reason}")
                self._tell(msg.Failed(epoch, reason, log))
                self._end_engine(gently=False)
            case _:
                pass

    def _end_engine(self, *, gently: bool) -> None:
        self.engine = Engine.ENDING
        self._do(ev.EndEngine(gently))

    # --- stopping and time

    def _stop_asked(self, now: float) -> None:
        again = self.stopping
        self._leave_by = now + self._drain + LEAVE_S
        if self.engine is not Engine.RUNNING:
            if self.engine is not Engine.ENDING or again:
                self._do(ev.Exit())
        elif again:
            self._say("asked again: not waiting any longer")
            self._end_engine(gently=False)
        else:
            self._say("asked to stop: the group is drained first")
            self._tell(msg.Leaving())

    def _advance(self, now: float) -> None:
        if self._leave_by is not None and now > self._leave_by and self.engine is Engine.RUNNING:
            self._say("the head has not drained the group in time")
            self._end_engine(gently=False)
        if self._fetch_at is not None and now >= self._fetch_at:
            self._fetch_at = None
            self._do(ev.FetchWeights())
        if self.connected:
            self._advance_lease(now)
        elif self._may_connect(now):
            self._connecting = True
            self._do(ev.Connect())

    def _may_connect(self, now: float) -> bool:
        free = self.engine in (Engine.NONE, Engine.STUCK)
        return free and not self._connecting and not self.stopping and now >= self._connect_at

    def _advance_lease(self, now: float) -> None:
        if now - self._lease > self._node_timeout:
            self._do(ev.Disconnect(f"the head has not answered for {now - self._lease:.1f} s"))
            if self.engine is Engine.RUNNING:
                self._say(f"the head has not answered for {now - self._lease:.1f} s: the engine is killed")
                self._end_engine(gently=False)
        elif now >= self._ping_at:
            self._ping_at = now + self._ping_s
            self._number += 1
            self._pings[self._number] = now
            self._tell(msg.Ping(self._number))

    # --- small

    def _remind(self, sentence: str, now: float) -> None:
        told, when = self._said
        if sentence != told or now - when >= REMIND_S:
            self._said = (sentence, now)
            self._say(sentence)

    def _tell(self, message: msg.ToHead) -> None:
        if self.connected:
            self._do(ev.Tell(message))

    def _say(self, sentence: str) -> None:
        self._do(ev.Say(sentence))

    def _do(self, action: ev.NodeAction) -> None:
        self._actions.append(action)
