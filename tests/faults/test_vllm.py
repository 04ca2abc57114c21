"""The rows of layer `real`: vLLM and a real model on two hosts, in one group that lives from row to row."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.asking import soon
from tests.faults.rows import chosen, one
from tests.faults.steps import Load, heals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.harness import Group
    from tests.faults.table import Result

REAL_START_S = 300.0

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture
def real(real_placed: Group) -> Group:
    """The group, ready."""
    real_placed.repair()
    real_placed.up()
    assert soon(lambda: real_placed.ready() and real_placed.ask(timeout=30) == "length", REAL_START_S, 0.5), (
        real_placed.story()
    )
    return real_placed


@pytest.fixture
def busy(row: dict[str, Any], real: Group) -> Iterator[None]:
    """Requests that run, for rows that want them."""
    load = Load(real, 2, tokens=40) if row["phase"] == "busy" else None
    if load is not None:
        assert soon(lambda: load.good > 0, 30)
    yield
    if load is not None:
        load.stop()


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("row", chosen("recovers", "real"))
def test_the_group_heals(row: dict[str, Any], real: Group, record: Result) -> None:
    heals(row, real, record)


@one("real-drain")
def test_running_requests_are_finished_before_a_stop(row: dict[str, Any], real: Group, record: Result) -> None:
    answers: list[str | None] = []
    asking = [
        threading.Thread(target=lambda: answers.append(real.ask(tokens=300, timeout=90)), daemon=True) for _ in range(2)
    ]
    for one_of_them in asking:
        one_of_them.start()
    time.sleep(2)
    assert not answers, "the requests have to be longer"
    began = time.monotonic()
    stopping = threading.Thread(target=lambda: real.nodes[0].compose("stop"))
    stopping.start()
    assert soon(lambda: not real.ready(), 3, 0.05)
    record.detected = time.monotonic() - began
    for one_of_them in asking:
        one_of_them.join()
    stopping.join()
    assert answers == ["length", "length"], real.story()
    assert "drained" in real.said(0, "2m")
    began = time.monotonic()
    real.nodes[0].up()
    assert soon(lambda: real.ready() and real.ask(timeout=30) == "length", row["again"]), real.story()
    record.again = time.monotonic() - began
