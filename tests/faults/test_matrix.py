"""Every row of faults.yaml that needs no steps of its own: a fault, what becomes of the group, what is said."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.asking import soon
from tests.faults.actions import ACTIONS
from tests.faults.harness import Watch
from tests.faults.rows import chosen
from tests.faults.steps import START_S, Load, begin, heals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.harness import Group
    from tests.faults.table import Result

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture
def load(group: Group) -> Iterator[list[Load]]:
    """The running load, for phases with requests."""
    running: list[Load] = []
    yield running
    for one in running:
        one.stop()


@pytest.mark.parametrize("row", chosen("recovers"))
def test_the_group_heals(row: dict[str, Any], group: Group, record: Result, load: list[Load]) -> None:
    begin(group, row["phase"], load)
    heals(row, group, record)


@pytest.mark.parametrize("row", chosen("nothing"))
def test_nothing_happens(row: dict[str, Any], group: Group, record: Result, load: list[Load]) -> None:
    begin(group, row["phase"], load)
    before = group.status()
    watch = Watch(group).start()
    try:
        word, argument = row["do"]
        undo = ACTIONS[word](group, row["rank"], argument)
        time.sleep(row["for"])
        if undo is not None:
            undo()
        time.sleep(8)  # twice node_timeout: what is late would show
    finally:
        watch.stop()
    assert [ready for _, ready in watch.changes] == [True], group.story()
    after = group.status()
    assert (after["instance"], after["epoch"]) == (before["instance"], before["epoch"])
    assert soon(lambda: group.ask(timeout=30) == "length", 40)


@pytest.mark.parametrize("row", chosen("down"))
def test_the_group_gives_up_and_comes_back(row: dict[str, Any], group: Group, record: Result) -> None:
    word, argument = row["do"]
    undo = ACTIONS[word](group, row["rank"], argument)
    group.up()
    assert soon(lambda: group.status().get("phase") == "down", 200), group.story()
    status = group.status()
    record.said = status["sentence"]
    assert status["failures"] > status["max_restarts"]
    assert "the switch" in "\n".join(status["last_fault"]["log"])
    assert not group.ready()
    time.sleep(6)
    assert group.said(0, "5s") == ""
    assert undo is not None
    undo()
    began = time.monotonic()
    group.nodes[0].compose("restart")
    assert soon(group.ready, 60 + START_S), group.story()
    record.again = time.monotonic() - began


@pytest.mark.parametrize("row", chosen("pure"))
def test_what_no_host_can_show_is_shown_without_one(row: dict[str, Any], record: Result) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *row["do"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    record.said = ", ".join(f"`{name}`" for name in row["do"])
