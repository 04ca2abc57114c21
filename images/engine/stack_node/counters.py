"""The engine's counters, from the text of its /metrics.

A line parser of our own: the text is up to megabytes long, is read every few seconds, and three numbers are wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# What moves when the engine makes a step, and only then: vLLM 0.32 takes all of it from its engine's answers
# (v1/metrics/loggers.py, record). The share of the cache in use is among them for the chunks of a long prompt, which
# move nothing else before the first token. What the API server counts by itself (http_*, rejections) proves nothing.
PROGRESS = frozenset(
    {
        b"vllm:generation_tokens_total",
        b"vllm:iteration_tokens_total_count",
        b"vllm:kv_cache_usage_perc",
        b"vllm:num_preemptions_total",
        b"vllm:prompt_tokens_total",
        b"vllm:request_success_total",
    }
)
RUNNING = b"vllm:num_requests_running"
WAITING = b"vllm:num_requests_waiting"

_LONGEST = 64 * 1024  # bytes of a line; no metric has so long a one


@dataclass(frozen=True)
class Counters:
    """Sums over all engines behind one API.

    `progress` changes with every step of an engine; only whether it differs from the last look means something, since
    it may fall. All are 0 when the engine was started without its statistics (--disable-log-stats).
    """

    progress: float
    running: int
    waiting: int


class Parser:
    """Takes the text in pieces, as it arrives."""

    def __init__(self) -> None:
        self._rest = b""
        self._recognised = False
        self._progress = 0.0
        self._running = 0.0
        self._waiting = 0.0

    def feed(self, piece: bytes) -> None:
        """Take the next piece; raises ValueError for something that is no such text."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._line(line)
        if len(self._rest) > _LONGEST:
            raise ValueError("a line without an end")

    def result(self) -> Counters | None:
        """What was found, after the last piece; None when there was not one comment or metric of the engine's."""
        self._line(self._rest)
        self._rest = b""
        if not self._recognised:
            return None
        return Counters(self._progress, int(self._running), int(self._waiting))

    def _line(self, line: bytes) -> None:
        if line.startswith((b"# HELP ", b"# TYPE ")):
            self._recognised = True
        if not line.startswith(b"vllm:"):
            return
        name, brace, rest = line.partition(b"{")
        if brace:
            rest = rest.rpartition(b"}")[2]  # behind the labels, whose values may have spaces and braces
        else:
            name, _, rest = line.partition(b" ")
        if name in PROGRESS or name in (RUNNING, WAITING):
            self._sample(name, rest)

    def _sample(self, name: bytes, rest: bytes) -> None:
        try:
            value = float(rest.split(maxsplit=1)[0])
        except (ValueError, IndexError):
            return
        if not math.isfinite(value):
            return
        self._recognised = True
        if name == RUNNING:
            self._running += value
        elif name == WAITING:
            self._waiting += value
        else:
            self._progress += value
