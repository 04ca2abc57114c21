"""Signs of life of an engine that is loading: it computes, reads or logs."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from stack_node import processes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from stack_node.logtail import Tail

# Enough to be a sign: this share of one core (a process that only waits uses less), so many bytes, any output.
CPU_SHARE = 1 / 30
READ_BYTES = 1 << 20

_Key = tuple[int, int]  # process id and start


class Signs:
    """What the tree below this process did since somebody last asked."""

    def __init__(self, tail: Tail) -> None:
        """Counts from now on; `tail` takes the engine's output."""
        self._tail = tail
        self._lock = threading.Lock()
        self._asked = time.monotonic()
        self._cpu: dict[_Key, int] = {}
        self._read: dict[_Key, int] = {}
        self._taken = 0

    def since_last_call(self, spare: Collection[int]) -> bool:
        """Whether there was a sign; the trees that begin at processes in `spare` do not count."""
        tree = processes.below(os.getpid(), processes.table(), spare)
        cpu = {(process.pid, process.started): process.cpu for process in tree}
        read = {(process.pid, process.started): processes.bytes_read(process.pid) for process in tree}
        taken = self._tail.taken
        with self._lock:
            now = time.monotonic()
            computed = growth(self._cpu, cpu) / processes.TICKS_PER_S
            found = (
                taken > self._taken
                or growth(self._read, read) >= READ_BYTES
                or (computed > 0 and computed >= CPU_SHARE * (now - self._asked))
            )
            self._asked, self._cpu, self._read, self._taken = now, cpu, read, taken
        return found


def growth(before: Mapping[_Key, int], after: Mapping[_Key, int]) -> int:
    """How much counters grew; new ones began at 0, and those that have gone do not count against the others."""
    return sum(max(0, value - before.get(key, 0)) for key, value in after.items())
