"""How often a group may fail, and how long it waits before the next attempt. Pure; times in seconds.

Thrashing restarts take hosts down, so attempts come further and further apart, and above the budget rarely.
"""

from __future__ import annotations

from dataclasses import dataclass

REST_MAX_S = 60.0
RETRY_S, RETRY_MAX_S = 300.0, 3600.0
FRESH_RETRY_S = 60.0  # somebody started the head anew although the budget is used up: once more, but not at once
CALM_S = 600.0  # ready that long: the budget is whole again


@dataclass
class Budget:
    """Failures that count, and the rare attempts since they were too many; both outlive the head's process."""

    most: int
    failures: int = 0
    retries: int = 0

    @property
    def used_up(self) -> bool:
        """Whether the group has failed more often than it may."""
        return self.failures > self.most

    def pause(self) -> float:
        """How long to wait before the next attempt."""
        if self.used_up:
            return doubled(RETRY_S, self.retries, RETRY_MAX_S)
        return rest(self.failures)

    def restore(self) -> None:
        """The group has been ready for long."""
        self.failures = self.retries = 0


def rest(failures: int) -> float:
    """The wait after so many failures within the budget: 0, 2, 4, 8 … 60."""
    return 0.0 if failures <= 1 else doubled(1.0, failures - 1, REST_MAX_S)


def doubled(first: float, times: int, most: float) -> float:
    """A wait that doubles so many times, up to the longest; the count itself may grow for months."""
    return min(first * 2.0 ** min(times, 32), most)
