"""Runs one engine and leaves nothing of it behind, as PID 1 or as anybody's child.

The signals that matter are blocked in every thread and taken one by one: no handler runs between
two lines, and PID 1, for which the kernel drops signals without a handler, gets them all. As a child subreaper this
process inherits whatever the engine's tree orphans, also from sessions of their own, so the tree under it is all there
is to end.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stack_node import launch, processes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_WAITED = STOP_SIGNALS | {signal.SIGCHLD}

# The rest of a tree, when its first process has ended: SIGTERM, so many seconds, SIGKILL, so many seconds. A stop takes
# EngineCommand.stop_s plus these at most; Docker's stop_grace_period has to be longer.
TERM_S = 3.0
KILL_S = 5.0
_POLL_S = 0.05

_PR_SET_CHILD_SUBREAPER = 36


class StopRequestedError(Exception):
    """A stop signal came before there was an engine to stop."""


@dataclass(frozen=True)
class Outcome:
    """How an engine ended."""

    asked: bool  # a stop signal had come before
    status: int  # negative: the signal that ended it


def take_signals() -> None:
    """Block the signals that this module waits for; call before any thread starts."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent's SIG_IGN would come through exec and hide exit codes
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)


def pause(seconds: float) -> None:
    """Sleep; raises StopRequestedError as soon as a stop signal comes."""
    if _next_signal(STOP_SIGNALS, seconds) is not None:
        raise StopRequestedError


def _next_signal(signals: frozenset[signal.Signals], seconds: float) -> signal.Signals | None:
    """Take one of these blocked signals; None when there is none for so long.

    Only a sigtimedwait that does not wait is safe: when a freeze (SIGCONT, docker unpause) outlasts the wait, Python's
    returns a signal that nobody sent, with whatever number its uninitialised memory holds.
    """
    deadline = time.monotonic() + seconds
    while (received := signal.sigtimedwait(signals, 0)) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, _POLL_S))
    return signal.Signals(received.si_signo)


def become_subreaper() -> None:
    """Make orphans of the tree below children of this process (prctl(2)); PID 1 has them anyway."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def spawn(argv: Sequence[str], env: dict[str, str], stdout_fd: int, stderr_fd: int) -> tuple[int, int]:
    """Start an engine in a session of its own, through `launch`.

    Returns its process id and a file descriptor that has to stay open as long as the engine may live.
    """
    read_end, write_end = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    # Copies above the targets, since a source whose number is also a target would be overwritten.
    sources = [
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, launch.LIFE_FD + 1) for fd in (null, stdout_fd, stderr_fd, read_end)
    ]
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", launch.__file__, *argv],
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(sources)],
            setsid=True,
            setsigmask=[],
        )
    finally:
        for fd in (null, read_end, *sources):
            os.close(fd)
    return pid, write_end


class Supervisor:
    """Watches one engine until it and everything below it has ended."""

    def __init__(self, pid: int, stop_s: float, say: Callable[[str], None]) -> None:
        """`stop_s`: seconds the engine has to end after SIGTERM."""
        self._pid = pid
        self._stop_s = stop_s
        self._say = say
        self._status: int | None = None  # of waitpid, once the engine ended
        self._asked = False
        self._deadline: float | None = None

    def run(self) -> Outcome:
        """Wait for the engine's end, pass on a stop, end the rest of the tree."""
        while self._status is None and not self._overdue():
            self._wait(1.0)
        self._end_tree()
        status = -signal.SIGKILL if self._status is None else os.waitstatus_to_exitcode(self._status)
        return Outcome(self._asked, status)

    def _overdue(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _wait(self, seconds: float) -> None:
        if self._deadline is not None:
            seconds = max(0.0, min(seconds, self._deadline - time.monotonic()))
        received = _next_signal(_WAITED, seconds)
        if received in STOP_SIGNALS:
            self._stop(received.name)
        self._reap()

    def _stop(self, name: str) -> None:
        if self._asked:
            self._say(f"{name} again: not waiting any longer")
            self._deadline = time.monotonic()
            return
        self._asked = True
        self._deadline = time.monotonic() + self._stop_s
        self._say(f"{name}: stopping the engine, which has {self._stop_s:.0f} s to end by itself")
        if self._status is None:
            processes.send(self._pid, signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status = status

    def _end_tree(self) -> None:
        if self._status is None:
            self._say("the engine did not end in time and is killed")
            self._signal_tree(signal.SIGKILL, KILL_S)
        elif not self._signal_tree(signal.SIGTERM, TERM_S):
            self._signal_tree(signal.SIGKILL, KILL_S)
        left = processes.descendants(os.getpid())
        if left:
            self._say(f"processes {', '.join(map(str, left))} cannot be killed; the host may need a reboot")

    def _signal_tree(self, number: signal.Signals, seconds: float) -> bool:
        """Signal every process below, also those that appear meanwhile, until none is left; False when some are."""
        deadline = time.monotonic() + seconds
        signalled: set[int] = set()
        while True:
            self._reap()
            left = processes.descendants(os.getpid())
            if not left:
                return True
            for pid in left:
                if pid not in signalled:
                    processes.send(pid, number)
                    signalled.add(pid)
            if time.monotonic() >= deadline:
                return False
            signal.sigtimedwait({signal.SIGCHLD}, _POLL_S)
