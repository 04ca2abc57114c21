"""How long a group waits before the next attempt."""

from __future__ import annotations

import pytest

from stack_node.budget import Budget, rest


def test_attempts_come_at_once_and_then_further_and_further_apart() -> None:
    assert [rest(failures) for failures in range(1, 9)] == [0, 2, 4, 8, 16, 32, 60, 60]


def test_above_the_budget_attempts_are_rare_and_get_rarer_up_to_an_hour() -> None:
    assert [Budget(5, 6, retries).pause() for retries in range(6)] == [300, 600, 1200, 2400, 3600, 3600]


@pytest.mark.parametrize("count", [2000, 10**6])
def test_a_group_that_fails_for_months_still_waits_its_hour(count: int) -> None:
    assert Budget(5, count, count).pause() == 3600
    assert Budget(10**9, count).pause() == 60


def test_the_budget_itself_may_be_used() -> None:
    assert not Budget(3, 3).used_up
    assert Budget(3, 4).used_up


def test_a_restored_budget_is_whole() -> None:
    budget = Budget(3, 9, 4)
    budget.restore()
    assert budget == Budget(3)
