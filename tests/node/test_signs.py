"""When an engine counts as doing something."""

from __future__ import annotations

from stack_node import signs


def test_growth_of_counters() -> None:
    assert signs.growth({(1, 1): 5, (2, 1): 50}, {(1, 1): 7, (3, 1): 4}) == 6
    assert signs.growth({(1, 1): 5}, {(1, 2): 3}) == 3
