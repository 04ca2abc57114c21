"""The processes below this one: reaped with their exit status kept, killed together, some of them spared."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import TYPE_CHECKING

from stack_node import processes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stack_node.processes import Process
    from stack_node.watch import Watched

_STATUSES = 256  # exit statuses that are kept; each is asked for at once


class Family:
    """Everything below this process, which has to be a child subreaper."""

    def __init__(self) -> None:
        self.spare: set[int] = set()
        self._lock = threading.RLock()
        self._statuses: dict[tuple[int, int], int] = {}

    @contextlib.contextmanager
    def sparing(self) -> Iterator[set[int]]:
        """Start a child that is to live on inside this block, and add its process id to the set.

        It and everything below it are neither killed nor reaped here until its id is taken out of `spare`.
        """
        with self._lock:
            yield self.spare

    def reap(self, table: Mapping[int, Process]) -> None:
        """Take away the zombies among the children that are in a process table."""
        own = os.getpid()
        with self._lock:
            for process in table.values():
                if process.parent == own and process.state == "Z" and process.pid not in self.spare:
                    self._reap(process.pid, process.started)

    def status(self, ended: Watched) -> int | None:
        """How a watched process ended, as of waitpid(2); None where it cannot be known."""
        key = (ended.pid, ended.started)
        with self._lock:
            if key not in self._statuses:
                self._reap(*key)
            if key in self._statuses:
                return self._statuses[key]
        now = processes.read(ended.pid)
        if now is None or now.started != ended.started or now.alive:
            return None
        # Somebody else's child that was not taken away yet. 0 may also mean that the kernel keeps it to itself.
        return now.status or None

    def send(self, process: Watched, number: signal.Signals) -> None:
        """Signal a child, unless it has been reaped."""
        with self._lock:
            now = processes.read(process.pid)
            if now is not None and now.started == process.started:
                processes.send(process.pid, number)

    def kill(self, first: int | None) -> list[int]:
        """SIGKILL everything, `first` first; returns what had still been there, so none when all have gone."""
        with self._lock:
            left = [process.pid for process in processes.living_below(os.getpid(), self.spare)]
            for pid in sorted(left, key=lambda pid: pid != first):
                processes.send(pid, signal.SIGKILL)
            self.reap(processes.table())
        return left

    def _reap(self, pid: int, started: int) -> None:
        with contextlib.suppress(ChildProcessError):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self._statuses[pid, started] = status
                while len(self._statuses) > _STATUSES:
                    del self._statuses[next(iter(self._statuses))]


def sentence(name: str, pid: int, status: int | None) -> str:
    """How a process ended that nobody asked to; `status` as of waitpid(2), None where it is not known."""
    who = f"{name} (process {pid})"
    if status is None:
        return f"{who} has ended"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return f"{who} ended with 0 without being asked"
    if code > 0:
        return f"{who} ended with exit code {code}"
    try:
        killer = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        killer = f"signal {-code}"
    return f"{who} was killed by {killer}{'; out of memory, perhaps' if -code == signal.SIGKILL else ''}"
