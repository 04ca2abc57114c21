"""A clock that jumps changes nothing, since nothing that decides looks at it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "images/engine/stack_node"
# The age of a file that a killed download left: there is only the wall clock, and what is locked is kept anyway.
ALLOWED = {("hubcache.py", "time")}
WALL = {"time", "time_ns", "now", "utcnow", "today"}  # of time and datetime


def wall_clock_calls(source: Path) -> set[tuple[str, str]]:
    """Calls of functions that read the wall clock to decide something; formatting a moment for people is none."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WALL:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in ("time", "datetime", "date"):
                found.add((source.name, node.func.attr))
    return found


def test_everything_that_decides_reads_the_monotonic_clock() -> None:
    found = set().union(*(wall_clock_calls(path) for path in sorted(PACKAGE.glob("*.py"))))
    assert found == ALLOWED
