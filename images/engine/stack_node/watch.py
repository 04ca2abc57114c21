"""Says at once when a process ends, also one that is not this process's child.

A pidfd (Linux 5.3) becomes readable in that moment. Where there is none, because of an old kernel or a container's
system call filter, the process is looked at every half second.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stack_node import processes

if TYPE_CHECKING:
    from collections.abc import Collection

    from stack_node.processes import Process

LOOK_S = 0.5


@dataclass(frozen=True)
class Watched:
    """A process whose end is waited for."""

    pid: int
    started: int  # as in processes.Process
    name: str  # for people
    fd: int | None


class Watch:
    """A set of processes, any thread may add to it; one thread waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: dict[int, Watched] = {}
        self._poll = select.epoll()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, select.EPOLLIN)

    def pids(self) -> set[int]:
        """Numbers of the processes that are watched."""
        with self._lock:
            return set(self._watched)

    def add(self, process: Process, name: str) -> Watched | None:
        """Watch a process, also one that has just ended; None when it is watched already, or was reaped."""
        with self._lock:
            if process.pid in self._watched:
                return None
            with contextlib.ExitStack() as undo:
                fd = _pidfd(process.pid)
                if fd is not None:
                    undo.callback(os.close, fd)
                    self._poll.register(fd, select.EPOLLIN)
                now = processes.read(process.pid)
                if now is None or now.started != process.started:  # its number is free, or somebody else's
                    return None
                undo.pop_all()
            if fd is None:
                self.wake()  # the wait that goes on may have none to look at
            self._watched[process.pid] = Watched(process.pid, process.started, name, fd)
            return self._watched[process.pid]

    def rename(self, pid: int, name: str) -> None:
        """Call a process what it calls itself by now."""
        with self._lock:
            known = self._watched.get(pid)
            if known is not None and known.name != name:
                self._watched[pid] = Watched(known.pid, known.started, name, known.fd)

    def clear(self) -> None:
        """Watch nothing any more."""
        with self._lock:
            for pid in list(self._watched):
                self._forget(pid)

    def wake(self) -> None:
        """Let `wait` return."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"w")

    def wait(self, seconds: float | None) -> list[Watched]:
        """Processes that ended, in that order, at once or as soon as there is one; each is told once.

        The list is empty when the time is over or somebody called `wake`.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            with self._lock:
                look = any(known.fd is None for known in self._watched.values())
            step = min(LOOK_S, left) if look and left >= 0 else LOOK_S if look else left
            ready = [fd for fd, _ in self._poll.poll(step)]  # the kernel keeps them in the order of their ends
            ended = self._take(ready)
            if ended or self._woken(ready) or (deadline is not None and time.monotonic() >= deadline):
                return ended

    def _take(self, ready: Collection[int]) -> list[Watched]:
        with self._lock:
            by_fd = {known.fd: known for known in self._watched.values()}
            ended = [by_fd[fd] for fd in ready if fd in by_fd]
            ended += [known for known in self._watched.values() if known.fd is None and not _lives(known)]
            for known in ended:
                self._forget(known.pid)
        return ended

    def _woken(self, ready: Collection[int]) -> bool:
        if self._wake_read not in ready:
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        return True

    def _forget(self, pid: int) -> None:
        fd = self._watched.pop(pid).fd
        if fd is not None:
            self._poll.unregister(fd)
            os.close(fd)


def _pidfd(pid: int) -> int | None:
    open_pidfd = getattr(os, "pidfd_open", None)  # absent where Python was built for old kernels
    if open_pidfd is None:
        return None
    try:
        fd: int = open_pidfd(pid)
    except OSError:
        return None
    return fd


def _lives(known: Watched) -> bool:
    process = processes.read(known.pid)
    return process is not None and process.started == known.started and process.alive
