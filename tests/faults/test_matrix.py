"""Every row of faults.yaml that needs no steps of its own: a fault, what becomes of the group, what is said."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.actions import ACTIONS
from tests.faults.harness import Watch, soon
from tests.faults.rows import chosen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Result
    from tests.faults.harness import Group

START_S = 90.0

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.timeout(420)]


class Load:
    """Clients that ask all the time, each again as soon as it has an answer."""

    def __init__(self, group: Group, clients: int, tokens: int):
        self.group, self.tokens = group, tokens
        self.over = threading.Event()
        self.good = 0
        self.threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End; requests that hang are left to their time-out."""
        self.over.set()

    def _ask(self) -> None:
        while not self.over.is_set():
            if self.group.ask(self.tokens, timeout=15) == "length":
                self.good += 1
            else:
                self.over.wait(0.3)


@pytest.fixture
def load(group: Group) -> Iterator[list[Load]]:
    """The running load, for phases with requests."""
    running: list[Load] = []
    yield running
    for one in running:
        one.stop()


def begin(group: Group, phase: str, load: list[Load]) -> None:
    """Bring the group into a row's phase."""
    group.up()
    assert soon(group.ready, START_S), group.story()
    assert group.ask() == "length"
    if phase in ("busy", "full"):
        load.append(Load(group, 40 if phase == "full" else 2, tokens=20))
        assert soon(lambda: load[0].good > 0, 10)


def last_words(group: Group) -> str:
    fault = group.status().get("last_fault") or {}
    return f"{fault.get('kind')}: rank {fault.get('rank')}: {fault.get('reason')}" if fault else ""


@pytest.mark.parametrize("row", chosen("recovers"))
def test_the_group_heals(row: dict[str, Any], group: Group, record: Result, load: list[Load]) -> None:
    begin(group, row["phase"], load)
    before = group.status()
    watch = Watch(group).start()
    try:
        word, argument = row["do"]
        fault_at = time.monotonic()
        undo = ACTIONS[word](group, row["rank"], argument)
        done_at = time.monotonic()
        record.detected = watch.lost_after(fault_at, row["detected"] + (done_at - fault_at))
        over_at = done_at
        if undo is not None:
            time.sleep(max(0.0, fault_at + row["for"] - time.monotonic()))
            undo()
            over_at = time.monotonic()
        assert record.detected is not None, f"not noticed within {row['detected']} s\n{group.story()}"
        assert soon(group.ready, row["again"]), group.story()
        assert soon(lambda: group.ask() == "length", 10), group.story()
        record.again = time.monotonic() - over_at
    finally:
        watch.stop()
    after = group.status()
    record.said = last_words(group)
    assert (after["instance"], after["epoch"]) != (before["instance"], before["epoch"])
    fault = after["last_fault"] or {}
    assert row["kind"] in (None, fault.get("kind")), fault
    assert row["blamed"] in (None, fault.get("rank")), fault
    assert re.search(row["said"], group.said(0, "10m"))


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
    record.said = last_words(group)


@pytest.mark.parametrize("row", chosen("down"))
def test_the_group_gives_up_and_comes_back(row: dict[str, Any], group: Group, record: Result) -> None:
    word, argument = row["do"]
    undo = ACTIONS[word](group, row["rank"], argument)
    group.up()
    assert soon(lambda: group.status().get("phase") == "down", 200), group.story()
    status = group.status()
    record.said = status["sentence"]
    assert status["failures"] > status["max_restarts"]
    assert "the switch fail-start is set" in "\n".join(status["last_fault"]["log"])
    assert not group.ready()
    quiet = group.said(0, "0m")
    time.sleep(5)
    assert group.said(0, "5s") in ("", quiet)
    assert undo is not None
    undo()
    began = time.monotonic()
    group.nodes[0].compose("restart")
    assert soon(group.ready, 60 + START_S), group.story()
    record.again = time.monotonic() - began
