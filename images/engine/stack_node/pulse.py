"""Whether an epoch's engine is alive, from what is seen of it. Pure.

The engine's counters come from its steps, and a first request that hangs leaves them all at rest, like an idle engine
does. So rest alone proves nothing: after a while of it a request of ours is sent, and only that one unanswered *and*
no counter moved for the whole stall time-out is a stall.
"""

from __future__ import annotations

QUIET_S = 30.0  # counters at rest that long: a probe


class Pulse:
    """The signs of life of one epoch; times in seconds, monotonic."""

    def __init__(self, now: float, stall_timeout: float) -> None:
        self.running = 0  # requests that run or wait, as last seen
        self.answered = False  # the API has answered its own health check: the engine has started
        self.probing = False  # a request of ours is on its way
        self.moved = now  # when a counter last moved
        self.idle_looks = 0  # how often in a row no request was running
        self._stall = stall_timeout
        self._progress: float | None = None
        self._looked = now  # when the counters were last had
        self._sign = now

    def sign(self, now: float) -> None:
        """Some rank has read, computed or logged something."""
        self._sign = now

    def api_answers(self, now: float) -> None:
        """The engine has started; from now on its counters tell."""
        self.answered = True
        self.moved = self._looked = now

    def probe_sent(self) -> None:
        """A request of ours is on its way."""
        self.probing = True

    def probe_answered(self, now: float) -> None:
        """The engine has answered it."""
        self.probing = False
        self.moved = now

    def looked(self, progress: float | None, running: int, now: float) -> None:
        """The counters, or None when they could not be had."""
        if progress is None:
            return
        self._looked = now
        self.running = running
        self.idle_looks = self.idle_looks + 1 if running == 0 else 0
        if progress != self._progress:
            self._progress, self.moved = progress, now

    def wants_probe(self, now: float) -> bool:
        """Whether it is time to ask the engine something."""
        return not self.probing and now - self.moved >= min(QUIET_S, self._stall / 2)

    def fault(self, now: float) -> str | None:
        """Why the engine has to be taken for dead; None while it lives."""
        if not self.answered:
            if now - self._sign > self._stall:
                return f"no sign of life from any rank for {now - self._sign:.0f} s: nothing read, computed or logged"
            return None
        if now - self._looked > self._stall:
            return f"the API has not given its metrics for {now - self._looked:.0f} s"
        if self.probing and now - self.moved > self._stall:
            return f"stalled: no counter moved for {now - self.moved:.0f} s and a request of ours is unanswered"
        return None
