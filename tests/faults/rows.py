"""The rows of faults.yaml, as parameters of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

DATA = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())
_WORDS = {*DATA["defaults"], "id", "fault", "rank", "do", "expect"}
assert all(set(row) <= _WORDS for row in DATA["rows"]), "a comma in a text without quotes"
ROWS: list[dict[str, Any]] = [{**DATA["defaults"], **row} for row in DATA["rows"]]


def chosen(expect: str, layer: str | None = None) -> list[Any]:
    """The rows with that expectation, as parameters; those of layer `real` only when asked for."""
    layers = [layer] if layer else ["fake", "pure"]
    return [_parameter(row) for row in ROWS if row["expect"] == expect and row["layer"] in layers]


def one(name: str) -> pytest.MarkDecorator:
    """For a test of one row's own: `@one("older-plan")`."""
    [row] = [row for row in ROWS if row["id"] == name and row["expect"] == "test"]
    return pytest.mark.parametrize("row", [_parameter(row)])


def several(*names: str) -> pytest.MarkDecorator:
    """For a test that rows have together."""
    return pytest.mark.parametrize("row", [_parameter(row) for name in names for row in ROWS if row["id"] == name])


def _parameter(row: dict[str, Any]) -> Any:
    return pytest.param(row, id=row["id"], marks=[pytest.mark.smoke] if row["smoke"] else [])
