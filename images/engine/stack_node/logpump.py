"""Carries the engine's output to ours without ever making anyone wait.

A reader that is slow or stuck (a full disk under Docker's log, a stopped terminal) must stop neither the engine, which
would block in write(2), nor the supervisor. So each stream has a bounded buffer: when it is full the oldest output
goes, and how many lines went is said where they are missing.
"""

from __future__ import annotations

import datetime
import json
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from stack_node.config import NodeConfig

BUFFER_BYTES = 4 << 20
_CHUNK = 64 << 10


class Takes(Protocol):
    """Takes output without making anyone wait."""

    def put(self, data: bytes) -> None:
        """Append output."""


def line_of(config: NodeConfig, clock: Callable[[], float] = time.time) -> Callable[[str], bytes]:
    """How this node writes a line of its own, as its configuration wants it; `clock` gives seconds since 1970.

    Text has no time of day: Docker and journald keep one with each line.
    """
    if config.log_format == "text":
        return labelled(config.label)
    who = {"node": config.node_rank, "nnodes": config.nnodes or 1, "group": config.group}

    def line(sentence: str) -> bytes:
        now = datetime.datetime.fromtimestamp(clock(), datetime.timezone.utc)
        at = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return json.dumps({"time": at, **who, "message": sentence}).encode() + b"\n"

    return line


def labelled(label: str) -> Callable[[str], bytes]:
    """Lines of text with a label in front."""
    return lambda sentence: f"{label}: {sentence}\n".encode(errors="backslashreplace")


class Sink:
    """One output stream with a bounded buffer and a thread that writes it."""

    def __init__(self, fd: int, line: Callable[[str], bytes], limit: int = BUFFER_BYTES) -> None:
        """`line` writes this process's own lines among the output (`line_of`); `limit` is in bytes."""
        self.line = line
        self._fd = fd
        self._limit = limit
        self._chunks: deque[tuple[bytes, bool]] = deque()  # output, and whether it has to begin a line
        self._held = 0  # bytes in _chunks
        self._lost = 0  # lines dropped since the last one that was told
        self._broken = False  # the buffer begins in the middle of a line
        self._writing = False
        self._line_start = True  # what was written last ended a line
        self._change = threading.Condition()
        threading.Thread(target=self._write_all, daemon=True, name=f"write-{fd}").start()

    def put(self, data: bytes, own_line: bool = False) -> None:
        """Append output, as it is or on a line of its own; never waits."""
        with self._change:
            self._chunks.append((data, own_line))
            self._held += len(data)
            while self._held > self._limit:
                self._drop()
            self._change.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait until everything is written, at most so long; False when something was left."""
        deadline = time.monotonic() + seconds
        with self._change:
            while self._chunks or self._writing:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._change.wait(left)
        return True

    def _drop(self) -> None:
        dropped, _ = self._chunks.popleft()
        self._held -= len(dropped)
        self._lost += dropped.count(b"\n")
        self._broken = not dropped.endswith(b"\n")

    def _next(self) -> bytes:
        """Take the next piece to write, with word of a gap before it; called with the lock held."""
        chunk, own_line = self._chunks.popleft()
        self._held -= len(chunk)
        if self._broken and not own_line:  # the rest of a line whose beginning is gone
            _, newline, chunk = chunk.partition(b"\n")
            self._broken = not newline
            self._lost += len(newline)
        if self._lost and chunk:
            lines = "1 line" if self._lost == 1 else f"{self._lost} lines"
            told = self.line(f"{lines} of output dropped here, because nobody read them in time")
            chunk, own_line = told + chunk, True
            self._lost = 0
        if own_line and not self._line_start:
            chunk = b"\n" + chunk
        if chunk:
            self._line_start = chunk.endswith(b"\n")
        return chunk

    def _write_all(self) -> None:
        while True:
            with self._change:
                while not self._chunks:
                    self._change.wait()
                chunk = self._next()
                self._writing = True
            self._write(chunk)
            with self._change:
                self._writing = False
                self._change.notify_all()

    def _write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        try:
            while view:
                view = view[self._write_some(view) :]
        except OSError:
            return  # the reader is gone for good; the engine goes on without a log

    def _write_some(self, view: memoryview) -> int:
        try:
            return os.write(self._fd, view)
        except BlockingIOError:  # whoever gave us the descriptor made it so
            select.select([], [self._fd], [])
            return 0


class Voice:
    """This process's own lines: on stderr, through the same buffer as the engine's."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def __call__(self, sentence: str) -> None:
        """Say one line."""
        self._sink.put(self._sink.line(sentence), own_line=True)


def copy(source_fd: int, sink: Takes) -> threading.Thread:
    """Start a thread that moves everything from a pipe to a sink until the pipe's last writer has closed it."""
    thread = threading.Thread(target=_copy, args=(source_fd, sink), daemon=True, name=f"read-{source_fd}")
    thread.start()
    return thread


def _copy(source_fd: int, sink: Takes) -> None:
    while True:
        data = os.read(source_fd, _CHUNK)
        if not data:
            break
        sink.put(data)
    os.close(source_fd)
