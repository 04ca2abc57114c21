"""What the launchers' tests have seen, kept in build/launchers.json; `python -m tests.launchers.table` prints it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

KEPT = Path(__file__).resolve().parents[2] / "build/launchers.json"


@dataclass
class Result:
    """One step with one target."""

    target: str
    step: str
    real: bool  # no stand-in took part
    passed: bool = False
    seconds: float = 0.0


def save(results: Sequence[Result]) -> None:
    """Keep results, after those of earlier runs."""
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps([asdict(one) for one in [*kept(), *results]], indent=1))


def kept() -> list[Result]:
    """Read what was kept."""
    return [Result(**one) for one in json.loads(KEPT.read_text())] if KEPT.exists() else []


def table(results: Sequence[Result]) -> str:
    """Write the table in Markdown, and the last line."""
    lines = ["| target | step | real or stand-in | | seconds |", "|---|---|---|---|---|"]
    for one in results:
        cells = [one.target, one.step, "real" if one.real else "stand-in", "ok" if one.passed else "FAILED"]
        lines.append(f"| {' | '.join(cells)} | {one.seconds:.1f} |")
    failed = sum(not one.passed for one in results)
    return "\n".join([*lines, "", f"{len(results) - failed} passed, {failed} failed"])


if __name__ == "__main__":
    sys.stdout.write(f"\n{table(kept())}\n")
