"""Runs one engine after the other under a supervisor that outlives them, and says at once when one breaks.

One thread waits for ends, kills, and calls back; all it reads is the process table, which never makes a reader wait.
What has to look into processes is the lookout's. The supervisor is a child subreaper, so everything an engine leaves
behind is below it and goes with the rest.
"""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stack_node import logpump, logtail, processes, supervise
from stack_node.family import Family, sentence
from stack_node.lookout import Lookout
from stack_node.sharedmemory import Segments
from stack_node.signs import Signs
from stack_node.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    from stack_node.argv import EngineCommand
    from stack_node.logpump import Takes
    from stack_node.processes import Process
    from stack_node.watch import Watched

KILL_S = supervise.KILL_S  # what lives so long after SIGKILL is told

_GATHER_S = 0.1  # from a process's end to the callback: its last lines are still on their way
_AGAIN_S = 0.05  # between looks at what is being killed
_AGAIN_SLOWLY_S = 1.0


class Phase(enum.Enum):
    """What is wanted of the engine."""

    IDLE = enum.auto()  # nothing is there
    RUNNING = enum.auto()
    STOPPING = enum.auto()  # SIGTERM was sent
    KILLING = enum.auto()


class Engine:
    """The engine's process tree. Every method may be called from any thread."""

    def __init__(
        self,
        say: Callable[[str], None],
        ended: Callable[[int, str, list[str]], None],
        gone: Callable[[int, list[int]], None],
        output: Takes,
        errors: Takes,
    ) -> None:
        """The callbacks come from a thread of the engine's and must not wait.

        `ended(epoch, reason, log_lines)`: a long-lived process ended unasked; once per epoch, at the first.
        `gone(epoch, left)`: the answer to `kill` and `terminate`. `left` are processes that SIGKILL did not end in
        KILL_S; when they have gone in the end, it is called again with none.
        """
        supervise.become_subreaper()
        self._say = say
        self._ended = ended
        self._gone = gone
        self._sinks = (output, errors)
        self._lock = threading.RLock()
        self._family = Family()
        self._watch = Watch()
        self._phase = Phase.IDLE
        self._epoch = 0
        self._first: Watched | None = None  # while it lives
        self._life_fd: int | None = None
        self._started = 0.0
        self._fault: str | None = None
        self._fault_told = False
        self._report_at = 0.0
        self._deadline = 0.0  # of the phase
        self._left_told = False
        self._calls: deque[Callable[[], None]] = deque()
        self._tail = logtail.Tail()
        self._signs = Signs(self._tail)
        self._segments = Segments()
        self._lookout = Lookout(self)
        threading.Thread(target=self._watch_for_ever, daemon=True, name="engine").start()

    @property
    def pid(self) -> int | None:
        """Process id of the engine's first process, while that lives."""
        first = self._first
        return None if first is None else first.pid

    @property
    def spare(self) -> set[int]:
        """Children of this process that are neither killed nor reaped, with everything below them."""
        return self._family.spare

    def sparing(self) -> AbstractContextManager[set[int]]:
        """Start a child that is no part of the engine inside this block, and add its process id to the set."""
        return self._family.sparing()

    def start(self, epoch: int, command: EngineCommand) -> None:
        """Start an engine. One that cannot be started is told with `ended`.

        Raises RuntimeError while something of the engine before is there: `gone` with an empty list has to come first.
        """
        with self._lock:
            if self._phase is not Phase.IDLE:
                raise RuntimeError(f"the engine of epoch {self._epoch} is still there")
            self._phase = Phase.RUNNING
            self._epoch = epoch
            self._started = time.monotonic()
            self._fault = None
            self._fault_told = False
            self._tail = logtail.Tail()
            self._signs = Signs(self._tail)
            self._segments = Segments()
            try:
                self._spawn(command)
            except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
                self._fail(f"{command.argv[0]} cannot be started: {error}")
        self._lookout.begin()
        self._watch.wake()

    def kill(self) -> None:
        """Kill everything below this process, except for `spare`; `gone` tells the rest."""
        with self._lock:
            self._begin_kill()
        self._watch.wake()

    def terminate(self, seconds: float) -> None:
        """Ask the first process to end, with SIGTERM; kill what is left when it has, or after so many seconds."""
        with self._lock:
            if self._phase is Phase.KILLING:
                return
            if self._first is None:
                self._begin_kill()
            else:
                self._phase = Phase.STOPPING
                self._deadline = time.monotonic() + seconds
                self._family.send(self._first, signal.SIGTERM)
        self._watch.wake()

    def signs(self) -> bool:
        """Whether the engine computed, read or logged since the last call, or since its start."""
        return self._signs.since_last_call(self.spare)

    # What the lookout asks and tells.

    def seen(self, table: Mapping[int, Process]) -> tuple[Collection[int], Collection[int]] | None:
        """Reap what has ended; returns what is watched and what is spared, or None while no engine runs."""
        self._family.reap(table)
        with self._lock:
            return (self._watch.pids(), set(self.spare)) if self._phase is Phase.RUNNING else None

    def found(self, process: Process, name: str) -> None:
        """Watch a process of the engine."""
        with self._lock:
            # One of an epoch before, in a table that was read before its end, is not there any more.
            if self._phase is Phase.RUNNING and (self._first is None or process.pid != self._first.pid):
                self._watch.add(process, name)
                self._watch.rename(process.pid, name)

    def age(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started

    def note_maps(self, pid: int) -> None:
        """Remember what shared memory a process of the engine has mapped."""
        self._segments.note(pid)

    # The rest runs with the lock held, except for the thread's own loop.

    def _spawn(self, command: EngineCommand) -> None:
        write_ends: list[int] = []
        try:
            for sink in self._sinks:
                read_end, write_end = os.pipe()
                write_ends.append(write_end)
                logpump.copy(read_end, self._tail.beside(sink))
            with self._family.sparing():  # nobody else may take its exit status before it is watched
                pid, self._life_fd = supervise.spawn(command.argv, command.env, *write_ends)
                process = processes.read(pid)
                if process is not None:
                    self._first = self._watch.add(process, Path(command.argv[0]).name)
        finally:
            for fd in write_ends:
                os.close(fd)

    def _begin_kill(self) -> None:
        if self._phase is not Phase.KILLING or self._left_told:
            self._phase = Phase.KILLING
            self._deadline = time.monotonic() + KILL_S
            self._left_told = False

    def _fail(self, reason: str) -> None:
        self._fault = reason
        self._report_at = time.monotonic() + _GATHER_S

    def _watch_for_ever(self) -> None:
        while True:
            try:
                with self._lock:
                    patience = self._patience()
                dead = self._watch.wait(patience)
                with self._lock:
                    self._note(dead)
                    self._advance()
            except OSError as error:  # out of file descriptors, say; not for good, perhaps
                self._say(f"error: the engine's processes cannot be watched: {error}")
                time.sleep(_AGAIN_SLOWLY_S)
            while self._calls:
                self._call(self._calls.popleft())

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # this thread has to live on, whatever the other side did
            self._say(f"error: {type(error).__name__} in what the engine called back: {error}")

    def _patience(self) -> float | None:
        """Seconds until there is something to do even if nothing ends."""
        if self._phase is Phase.KILLING:
            return _AGAIN_SLOWLY_S if self._left_told else _AGAIN_S
        times = [self._deadline] if self._phase is Phase.STOPPING else []
        if self._fault is not None and not self._fault_told:
            times.append(self._report_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _note(self, dead: list[Watched]) -> None:
        """Take in the ends of watched processes, the earliest first."""
        for process in dead:
            status = self._family.status(process)
            if self._first is not None and process.pid == self._first.pid:
                self._first = None
            if self._phase is Phase.RUNNING and self._fault is None:
                self._fail(sentence(process.name, process.pid, status))

    def _advance(self) -> None:
        now = time.monotonic()
        due = now >= self._report_at or self._phase is not Phase.RUNNING
        if self._fault is not None and not self._fault_told and due:
            self._fault_told = True
            lines = logtail.root_cause(self._tail.lines())
            self._calls.append(partial(self._ended, self._epoch, self._fault, lines))
        if self._phase is Phase.STOPPING and (self._first is None or now >= self._deadline):
            self._begin_kill()
        if self._phase is Phase.KILLING:
            self._kill_all(now)

    def _kill_all(self, now: float) -> None:
        left = self._family.kill(self.pid)
        if not left:
            self._finish()
            self._calls.append(partial(self._gone, self._epoch, []))
        elif now >= self._deadline and not self._left_told:
            self._left_told = True
            self._calls.append(partial(self._gone, self._epoch, left))

    def _finish(self) -> None:
        self._phase = Phase.IDLE
        self._first = None
        self._watch.clear()
        self._segments.remove()
        if self._life_fd is not None:
            os.close(self._life_fd)
            self._life_fd = None
