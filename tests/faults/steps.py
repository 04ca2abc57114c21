"""What the rows have in common: the load, the phase, a fault that the group heals from."""

from __future__ import annotations

import re
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.asking import soon
from tests.faults.actions import ACTIONS
from tests.faults.harness import Watch

if TYPE_CHECKING:
    from tests.faults.harness import Group
    from tests.faults.table import Result

START_S = 90.0


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


def begin(group: Group, phase: str, load: list[Load]) -> None:
    """Bring the group into a row's phase."""
    group.up()
    assert soon(group.ready, START_S), group.story()
    assert group.ask() == "length"
    if phase in ("busy", "full"):
        load.append(Load(group, 40 if phase == "full" else 2, tokens=20))
        assert soon(lambda: load[0].good > 0, 10)


def heals(row: dict[str, Any], group: Group, record: Result) -> None:
    """A ready group has the row's fault: noticed in time, ready again in time, in a new epoch, with the right words."""
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
        assert soon(lambda: group.ready() and group.ask() == "length", row["again"]), group.story()
        record.again = time.monotonic() - over_at
    finally:
        watch.stop()
    after = group.status()
    lines = group.said(0, "15m").splitlines()
    matching = [line for line in lines if re.search(row["said"], line)]
    fault = after["last_fault"] if after["last_fault"] != before["last_fault"] else None  # a head remembers older ones
    fault = fault or {}
    record.said = fault.get("reason") or (matching[-1] if row["said"] and matching else "")
    assert (after["instance"], after["epoch"]) != (before["instance"], before["epoch"])
    assert row["kind"] in (None, fault.get("kind")), fault
    assert row["blamed"] in (None, fault.get("rank")), fault
    assert matching or not row["said"], "\n".join(lines)
