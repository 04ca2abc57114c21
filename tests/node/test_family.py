"""How an end is told."""

from __future__ import annotations

from stack_node import family


def test_a_signal_without_a_name() -> None:
    assert family.sentence("v", 2, 45) == "v (process 2) was killed by signal 45"
