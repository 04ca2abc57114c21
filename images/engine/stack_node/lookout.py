"""Looks for new processes of the engine whose end is the engine's end.

It has a thread of its own, because names and memory maps are read from inside a process: one that hangs in a driver
may hold this up, and must hold up nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from typing import TYPE_CHECKING, Protocol

from stack_node import processes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from stack_node.processes import Process

# How often: at first, and after that. Where /proc is large, more rarely: a look may cost this share of a core.
YOUNG_S = 600.0
LOOK_FIRST_S, LOOK_YOUNG_S, LOOK_S = 0.1, 1.0, 5.0
_SHARE_YOUNG = 0.01
_SHARE = 0.0025
_MAPS_S = 30.0

_TITLE = re.compile(r"\S+::\w\S*")  # VLLM::Worker_TP1; what is in front can be changed, by VLLM_PROCESS_NAME_PREFIX
_SPAWNED = ("multiprocessing.spawn", "spawn_main", "multiprocessing.forkserver")
_TITLE_LENGTH = 60


def interval(age: float, cost: float) -> float:
    """Seconds until the next look at a tree of that age, when the last look cost so many seconds of a processor.

    The younger a tree, the faster it changes; the death of one that was not seen yet is left to its
    parent to notice.
    """
    if age < YOUNG_S:
        return max(min(max(age / 10, LOOK_FIRST_S), LOOK_YOUNG_S), cost / _SHARE_YOUNG)
    return max(LOOK_S, cost / _SHARE)


class Tree(Protocol):
    """What is looked after; the methods may come from the lookout's thread at any time."""

    def seen(self, table: Mapping[int, Process]) -> tuple[Collection[int], Collection[int]] | None:
        """Take a process table; returns what is watched and what is spared, or None while there is no engine."""

    def found(self, process: Process, name: str) -> None:
        """Watch a process, under this name."""

    def age(self) -> float:
        """Seconds since the engine was started."""

    def note_maps(self, pid: int) -> None:
        """Remember what a process has mapped."""


class Lookout:
    """A thread that looks every now and then, for ever."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._soon = threading.Event()
        self._maps_at = 0.0
        threading.Thread(target=self._look_for_ever, daemon=True, name="lookout").start()

    def begin(self) -> None:
        """Look at once: an engine has been started."""
        self._soon.set()

    def _look_for_ever(self) -> None:
        while True:
            begin = time.thread_time()
            with contextlib.suppress(OSError):  # out of file descriptors, say; the next time, perhaps
                self._look()
            cost = time.thread_time() - begin
            self._soon.wait(interval(self._tree.age(), cost))
            self._soon.clear()

    def _look(self) -> None:
        table = processes.table()
        seen = self._tree.seen(table)
        if seen is None:
            return
        watched, spare = seen
        with_maps = time.monotonic() >= self._maps_at
        tree = processes.below(os.getpid(), table, spare)
        titles = {process.pid: processes.title(process.pid) for process in tree}
        counted = {os.getpid(), *watched}
        for process in tree:
            name = long_lived(titles[process.pid], titles.get(process.parent, ""), process.parent in counted)
            if name is not None:
                counted.add(process.pid)
                self._tree.found(process, name)
            if with_maps:
                self._tree.note_maps(process.pid)
                self._maps_at = time.monotonic() + _MAPS_S


def long_lived(title: str, parent_title: str, parent_counts: bool) -> str | None:
    """What to call a process whose end is the engine's end; None for one that may end.

    `parent_counts`: the parent is such a process itself, or the supervisor. Without that a process spawned by Python
    is some helper's own (vLLM's test of peer access between GPUs is one).
    """
    if title == parent_title:
        return None  # a fork that has its parent's name still: about to exec, or a helper
    if match := _TITLE.match(title):
        return match[0][:_TITLE_LENGTH]
    if parent_counts and any(mark in title for mark in _SPAWNED):
        return "a multiprocessing child"
    return None
