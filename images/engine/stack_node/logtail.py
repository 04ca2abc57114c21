"""Keeps the end of an engine's log, and finds in it what went wrong."""

from __future__ import annotations

import re
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stack_node.logpump import Takes

LINES = 200
BYTES = 64 << 10
ROOT_CAUSE_LINES = 12
_LINE_BYTES = 2048  # a longer line is cut

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
# (EngineCore pid=12) ERROR 12-01 02:57:12 [core.py:1149] text
_WHO = re.compile(r"\([^()]*\bpid=\d+\) ?")
_LEVEL = re.compile(r"(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d\S* \[[^]]*\] ?")
_BAD_LEVELS = frozenset({"ERROR", "CRITICAL", "FATAL"})
_POINTERS = re.compile(r"[\s^~]*")  # that Python 3.11 draws under a traceback's lines
# What ends a traceback, and the last words of programs that are not Python.
_LAST_WORDS = re.compile(
    r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)(: .*)?$|Fatal Python error|terminate called|(ERROR|FATAL)\b"
)
# vLLM's own consequences of an error that another process has told before (v1/engine/core.py, multiproc_executor.py).
_CONSEQUENCES = re.compile(
    r"Engine core initialization failed|EngineCore failed to start|EngineCore encountered (a fatal error|an issue)"
    r"|WorkerProc initialization failed|Executor failed|EngineDeadError|output_handler failed"
    r"|See (root cause|stack trace)"
)
_DIED = re.compile(r"died unexpectedly")  # with the exit code; a cause only when the process itself said nothing


class Tail:
    """The last lines of several streams, in the order in which they ended; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._held = 0
        self._open: dict[int, bytes] = {}  # by stream: the line that has not ended yet
        self._taken = 0

    @property
    def taken(self) -> int:
        """Bytes that came so far."""
        return self._taken

    def beside(self, sink: Takes) -> Takes:
        """A stream that passes everything on to a sink, untouched, and keeps its last lines here."""
        return _Beside(self, sink)

    def feed(self, stream: int, data: bytes) -> None:
        """Take output of a stream."""
        with self._lock:
            self._taken += len(data)
            *ended, rest = data.split(b"\n")
            for line in ended:
                self._keep(_shorten(self._open.pop(stream, b"") + line).rstrip(b"\r"))
            self._open[stream] = _shorten(self._open.get(stream, b"") + rest)

    def _keep(self, line: bytes) -> None:
        self._lines.append(line)
        self._held += len(line)
        while len(self._lines) > LINES or self._held > BYTES:
            self._held -= len(self._lines.popleft())

    def lines(self) -> list[str]:
        """What is kept, without colours and other control characters; lines without an end come last."""
        with self._lock:
            kept = [*self._lines, *(rest for rest in self._open.values() if rest)]
        return [_ESCAPES.sub("", line.decode(errors="replace")).rstrip() for line in kept]


class _Beside:
    def __init__(self, tail: Tail, sink: Takes) -> None:
        self._tail = tail
        self._sink = sink

    def put(self, data: bytes) -> None:
        self._sink.put(data)
        self._tail.feed(id(self), data)


def _shorten(line: bytes) -> bytes:
    """What a terminal would show of a line that a progress bar writes again and again, and not too much of it."""
    text, end = (line[:-1], b"\r") if line.endswith(b"\r") else (line, b"")
    return text.rpartition(b"\r")[2][:_LINE_BYTES] + end


def root_cause(lines: Sequence[str]) -> list[str]:
    """At most `ROOT_CAUSE_LINES` lines of a log that say best why an engine failed.

    They end with the last error that is not a mere consequence of an earlier one. Before it come lines of the same
    process, when its name is in front of them. Without an error in the log they are its last lines.
    """
    kept = [line for line in lines if not _POINTERS.fullmatch(_text(line))]
    errors = [index for index, line in enumerate(kept) if _is_error(line)]
    if not errors:
        return kept[-ROOT_CAUSE_LINES:]
    others = [index for index in errors if not _CONSEQUENCES.search(kept[index])]
    causes = [index for index in others if not _DIED.search(kept[index])]
    last = (causes or others or errors)[-1]
    who = _who(kept[last])
    return [line for line in kept[: last + 1] if who is None or _who(line) == who][-ROOT_CAUSE_LINES:]


def _who(line: str) -> str | None:
    match = _WHO.match(line)
    return match and match[0].strip()


def _text(line: str) -> str:
    """A line without what vLLM's logger puts in front."""
    who = _WHO.match(line)
    rest = line[who.end() :] if who else line
    level = _LEVEL.match(rest)
    return rest[level.end() :] if level else rest


def _is_error(line: str) -> bool:
    """Whether a line is an error's own sentence, and not one of the lines of its traceback."""
    who = _WHO.match(line)
    rest = line[who.end() :] if who else line
    level = _LEVEL.match(rest)
    if level is None:
        return _LAST_WORDS.match(rest) is not None
    text = rest[level.end() :]
    in_traceback = not text.strip() or text.startswith((" ", "Traceback (most recent call last)"))
    return level["level"] in _BAD_LEVELS and not in_traceback
