"""How a download goes, in words: bytes, rate, time that is left. Pure: times are passed in."""

from __future__ import annotations

from collections import deque

SAY_EVERY_S = 10.0
SAY_EVERY = 0.05  # of the whole
SAY_LATEST_S = 300.0
_WINDOW_S = 30.0  # over which the rate is taken

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit, name in _UNITS:
        if count >= unit * 0.9995:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """A rough time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Pace:
    """One download; times in seconds, by a clock that never jumps."""

    def __init__(self, now: float) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self._said_at = now
        self._said_done: int | None = None  # bytes at the last line; None before the first report

    def text(self, now: float, done: int, total: int) -> str:
        """The state in words, after a report of it."""
        self._points.append((now, done))
        while now - self._points[0][0] > _WINDOW_S:
            self._points.popleft()
        if self._said_done is None:
            self._said_done = done
        words = f"{size(done)} of {size(total)}"
        if total:
            words += f" ({100 * done // total} %)"
        rate = self._rate()
        if rate > 0 and done < total:
            words += f", {size(rate)}/s, {duration((total - done) / rate)} left"
        return words

    def due(self, now: float, done: int, total: int) -> bool:
        """Whether the log should get a line now; counts it as said."""
        since = now - self._said_at
        moved = done - (self._said_done or 0)
        if since < SAY_LATEST_S and (since < SAY_EVERY_S or moved < SAY_EVERY * total):
            return False
        self._said_at, self._said_done = now, done
        return True

    def _rate(self) -> float:
        (first, begun), (last, done) = self._points[0], self._points[-1]
        return (done - begun) / (last - first) if last > first else 0.0
