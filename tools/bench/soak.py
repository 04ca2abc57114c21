"""Random faults in a row: after each the group is ready again, and after all of them nothing has leaked.

The same seed gives the same faults on the same ranks; the moments differ by what the machine does.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from tests.asking import http
from tools.bench.figures import Figure, spread
from tools.bench.leaks import leaked, look
from tools.bench.local import forget_failures, ready_group, wait
from tools.bench.soak_faults import FAULTS, NODE_TIMEOUT_S, STALL_S, SWITCHES
from tools.bench.usage import MIB
from tools.process import ToolError, say

if TYPE_CHECKING:
    from tests.node.local_group import LocalGroup
    from tools.bench.figures import Options
    from tools.bench.leaks import Look
    from tools.bench.soak_faults import Fault

BOUND_S = 60.0
BUSY = 0.5  # so many of the faults come while a request runs
LONG = 200  # tokens of that request: some seconds
SETTLE_S = 3.0


def section(options: Options) -> list[Figure]:
    """So many faults, and what was there before and after."""
    variables = {
        "GEN_STACK_NODE_TIMEOUT": f"{NODE_TIMEOUT_S:g}s",
        "GEN_STACK_STALL_TIMEOUT": f"{STALL_S:g}s",
        "GEN_STACK_MAX_RESTARTS": "100",
        "GEN_STACK_DRAIN": "5s",
    }
    random = Random(options.seed)  # noqa: S311 (nothing is kept secret with it)
    begin = time.monotonic()
    with ready_group(**variables) as group:
        group.answer()
        time.sleep(SETTLE_S)
        first = look(group)
        soak = Soak(group, first)
        for number in range(1, options.faults + 1):
            fault = random.choices(FAULTS, [fault.weight for fault in FAULTS])[0]
            soak.step(number, fault, random.randrange(len(group.nodes)), Random(random.random()))  # noqa: S311
        last = look(group)
        ends = [node.stop() for node in group.nodes]
        left = [pid for node in group.nodes for pid in node.node.living()]
    minutes = (time.monotonic() - begin) / 60
    say(f"{options.faults - soak.failed} passed, {soak.failed} failed ({minutes:.0f} min, seed {options.seed})")
    return _figures(soak, first, last, clean=ends == [0] * len(ends) and not left)


class Soak:
    """The faults so far."""

    def __init__(self, group: LocalGroup, first: Look) -> None:
        self.group = group
        self.first = first
        self.failed = 0
        self.again: list[float] = []
        self.kinds: Counter[str] = Counter()

    def step(self, number: int, fault: Fault, rank: int, random: Random) -> None:
        """One fault, and the way back; a group that does not find it is started anew."""
        self.kinds[fault.name] += 1
        say(f"{number}: rank {rank}: {fault.name}")
        try:
            problems = self._happen(fault, rank, random)
        except (AssertionError, ToolError, subprocess.TimeoutExpired) as error:
            problems = [str(error)]
            say(self.group.logs())
            self._rescue()
        self.failed += bool(problems)
        say(f"    {'; '.join(problems) or 'ok'}")

    def _happen(self, fault: Fault, rank: int, random: Random) -> list[str]:
        forget_failures(self.group)
        before = self._epoch()
        if busy := random.random() < BUSY:
            threading.Thread(target=_occupy, args=(self.group,), daemon=True).start()
            time.sleep(random.random())
        begin = time.monotonic()
        done = fault.act(self.group, self.group.nodes[rank], random)
        acted = time.monotonic()
        if fault.notices:
            wait(lambda: self._epoch() not in (before, None), "a new epoch", BOUND_S)
        wait(self.group.ready, "ready again", BOUND_S)
        self.again.append(time.monotonic() - acted)
        load = "with a request running; " if busy else ""
        say(f"    {load}{done}; {acted - begin:.1f} s; ready again {self.again[-1]:.1f} s after that")
        self.group.answer()
        unneeded = [] if fault.notices or self._epoch() == before else ["a fault was seen where there was none"]
        return unneeded + leaked(self.group, self.first)

    def _rescue(self) -> None:
        for node in self.group.nodes:
            node.kill()
            for switch in SWITCHES:
                (node.node.folder / switch).unlink(missing_ok=True)
            node.start()
        wait(self.group.ready, "ready after every node was killed and started")

    def _epoch(self) -> tuple[str, int] | None:
        """Which epoch it is, of which head, when there is one that answers."""
        try:
            status = self.group.status()
        except AssertionError:
            return None
        return status["instance"], status["epoch"]


def _occupy(group: LocalGroup) -> None:
    """Ask for a long completion; what becomes of it is the fault's affair."""
    http(f"{group.api}/v1/completions", {"model": "/", "prompt": "Hi", "max_tokens": LONG})


def _figures(soak: Soak, first: Look, last: Look, *, clean: bool) -> list[Figure]:
    total = sum(soak.kinds.values())
    kinds = ", ".join(f"{count} x {name}" for name, count in sorted(soak.kinds.items()))
    ranks = sorted(first.files)

    def each(what: dict[int, int]) -> str:
        return "/".join(str(what[rank]) for rank in ranks)

    memory = {rank: f"{first.memory[rank] / MIB:.1f} → {last.memory[rank] / MIB:.1f}" for rank in ranks}
    return [
        Figure("faults in a row", f"{total - soak.failed} passed, {soak.failed} failed", "all pass", not soak.failed),
        Figure("of these", kinds),
        Figure(
            "from the end of the fault until ready again",
            spread(soak.again),
            f"under {BOUND_S:g} s",
            max(soak.again) < BOUND_S,
        ),
        Figure("open files of the supervisors", f"{each(first.files)} → {each(last.files)}", "no more than 2 more"),
        Figure("threads of the supervisors", f"{each(first.threads)} → {each(last.threads)}"),
        Figure("resident memory of the supervisors", f"{', '.join(memory.values())} MiB"),
        Figure("processes", f"{each(first.processes)} → {each(last.processes)}", "as many as at first"),
        Figure("sockets at the group's ports", f"{first.sockets} → {last.sockets}", "no more than 2 more"),
        Figure("files in /dev/shm", f"{len(first.shared)} → {len(last.shared)}", "no more"),
        Figure("every node stopped with 0 and left nothing behind", "yes" if clean else "no", "yes", clean),
    ]
