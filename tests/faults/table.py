"""What runs of the fault matrix have seen, kept in build/faults.json.

`python -m tests.faults.table` prints it, with `--page` it writes it into docs/faults.md.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from tests.faults.rows import ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).resolve().parents[2]
KEPT = REPOSITORY / "build/faults.json"
PAGE = REPOSITORY / "docs/faults.md"
BEGIN, END = "<!-- table: python -m tests.faults.table --page -->", "<!-- end -->"


@dataclass
class Result:
    """One row of the table; times in seconds."""

    id: str
    passed: bool = False
    detected: float | None = None
    again: float | None = None
    said: str = ""
    load: float = 0.0  # the machine's load average when it began
    day: str = field(default_factory=lambda: datetime.now(timezone.utc).date().isoformat())


def save(results: Sequence[Result]) -> None:
    """Keep results; those of other rows stay as they were."""
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps({**_kept(), **{one.id: asdict(one) for one in results}}, indent=1))


def table(results: Sequence[Result]) -> str:
    """The table in Markdown, in the order of faults.yaml."""
    head = "| id | fault | phase | layer | | detected after | ready again after | said |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    rows = {row["id"]: row for row in ROWS}
    for one in sorted(results, key=lambda one: list(rows).index(one.id)):
        row, mark = rows[one.id], "ok" if one.passed else "FAILED"
        cells = [one.id, row["fault"], row["phase"], row["layer"], mark]
        cells += [_seconds(one.detected), _seconds(one.again), _cell(one.said)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def closing(results: Sequence[Result]) -> str:
    """The last line."""
    failed = sum(not one.passed for one in results)
    return f"{len(results) - failed} passed, {failed} failed"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _cell(text: str) -> str:
    text = re.sub(r"^stack-node\[\d+/\d+\]: ", "", text)
    return text.replace("|", "\\|") if len(text) <= 160 else text[:159].replace("|", "\\|") + "…"


def _kept() -> dict[str, dict[str, object]]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def main() -> None:
    """Print the kept results, or write them into the page."""
    results = [Result(**one) for name, one in _kept().items() if name in {row["id"] for row in ROWS}]  # type: ignore[arg-type]
    missing = [row["id"] for row in ROWS if row["id"] not in {one.id for one in results}]
    notes = f"Not run: {', '.join(missing)}.\n\n" if missing else ""
    seen = f"{table(results)}\n\n{notes}{closing(results)}"
    if "--page" not in sys.argv[1:]:
        print(f"\n{seen}")
        return
    loads = sorted(one.load for one in results)
    when = f"Run on {' and '.join(sorted({one.day for one in results}))}"
    conditions = f"{when}; load average {loads[0]:.1f} to {loads[-1]:.1f} when the rows began, on two cores."
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{conditions}\n\n{seen}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
