"""Figures: what was measured, how it is written, and the sections of docs/measurements.md that hold them."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Figure:
    """One row of a table."""

    what: str
    figure: str
    bound: str = ""
    kept: bool | None = None  # None: there is no bound, or it is not judged here

    def row(self) -> str:
        """The row in Markdown."""
        mark = "" if self.kept is None else (", kept" if self.kept else ", **missed**")
        return f"| {self.what} | {self.figure} | {self.bound}{mark} |"


@dataclass(frozen=True)
class Options:
    """What can be asked of the sections; the defaults are what the documentation states."""

    seconds: float = 60.0  # of idling
    runs: int = 10
    members: int = 255
    faults: int = 200
    seed: int = 1
    pairs: int = 5
    real_faults: int = 10


def below(what: str, value: float, limit: float, unit: str, digits: int = 1) -> Figure:
    """A single value that has to stay below a limit."""
    return Figure(what, f"{value:.{digits}f} {unit}", f"under {limit:g} {unit}", value < limit)


def all_below(what: str, values: Sequence[float], limit: float, unit: str = "s", digits: int = 2) -> Figure:
    """Values that all have to stay below a limit."""
    return Figure(what, spread(values, unit, digits), f"under {limit:g} {unit}".strip(), max(values) < limit)


def spread(values: Sequence[float], unit: str = "s", digits: int = 2) -> str:
    """Median, number and extremes."""
    median = f"{statistics.median(values):.{digits}f} {unit}".strip()
    return f"{median} (median of {len(values)}; {min(values):.{digits}f} to {max(values):.{digits}f})"


def table(figures: Sequence[Figure]) -> str:
    """A section's table in Markdown."""
    return "\n".join(["| what | figure | bound |", "|---|---|---|", *(figure.row() for figure in figures)])


def replaced(page: str, name: str, text: str) -> str:
    """The page with the section between its two marks replaced, or added at the end."""
    begin, end = f"<!-- make bench: {name} -->", f"<!-- end of {name} -->"
    section = f"{begin}\n{text}\n{end}"
    if begin in page:
        return re.sub(rf"{re.escape(begin)}.*?{re.escape(end)}", lambda _: section, page, count=1, flags=re.DOTALL)
    return f"{page.rstrip()}\n\n{section}\n"
