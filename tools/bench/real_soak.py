"""A few random faults in a row on the real engine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.bench.figures import Figure, spread
from tools.process import ToolError, say

if TYPE_CHECKING:
    from random import Random

    from tests.lab.fixtures import Stack
    from tools.bench.real_stacks import Way

FREEZE_S = 15.0  # more than node_timeout
FILES = 2
LOOKS = 3
# The supervisor's open files, the files in shared memory, and the names of all processes of a container.
COUNT = "ls /proc/1/fd | wc -l; ls /dev/shm | wc -l; cat /proc/[0-9]*/comm"


@dataclass(frozen=True)
class Held:
    """What a container holds."""

    files: int  # open, of the supervisor
    shared: int  # files in /dev/shm
    processes: Counter[str]  # by name

    def more_than(self, first: Held) -> list[str]:
        """What is more than it was, in words."""
        found = [f"{count} more {name}" for name, count in (self.processes - first.processes).items()]
        if self.files > first.files + FILES:
            found.append(f"{self.files} open files, {first.files} at first")
        if self.shared > first.shared:
            found.append(f"{self.shared} files in /dev/shm, {first.shared} at first")
        return found


def faults(way: Way, count: int, random: Random) -> list[Figure]:
    """So many of them; the group is taken down at the end."""
    way.start()
    time.sleep(5)
    first = [_held(node) for node in way.nodes]
    again = []
    failed = 0
    for number in range(1, count + 1):
        rank = random.randrange(len(way.nodes))
        kind = random.choice(tuple(FAULTS))
        begin = time.monotonic()
        FAULTS[kind](way.nodes[rank], random)
        try:
            while way.completes():
                time.sleep(0.1)
            again.append(way.good(begin))
            said = f"good again after {again[-1]:.1f} s"
        except ToolError as error:
            failed += 1
            said = str(error)
        say(f"{number}: rank {rank}: {kind}: {said}")
        if failed:
            break
    time.sleep(5)
    leaked = [
        f"rank {rank}: {words}"
        for rank, (node, before) in enumerate(zip(way.nodes, first, strict=True))
        for words in _held(node).more_than(before)
    ]
    way.stop()
    return [
        Figure("random faults in a row", f"{len(again)} passed, {failed} failed", "all pass", not failed),
        Figure("from the fault until the next good completion", spread(again) if again else "never"),
        Figure(
            "more than at first: processes, open files of the supervisor, files in /dev/shm",
            "; ".join(leaked) or "nothing",
            f"nothing; {FILES} files more are no leak",
            not leaked,
        ),
    ]


def _held(node: Stack) -> Held:
    """The least of some looks, since a health check may run in one of them."""
    looks = []
    for _ in range(LOOKS):
        files, shared, *names = node.compose("exec", "-T", "engine", "sh", "-c", COUNT).stdout.split("\n")
        looks.append(Held(int(files), int(shared), Counter(filter(None, names))))
        time.sleep(1.0)
    return min(looks, key=lambda look: look.processes.total())


def _pids(node: Stack, pattern: str) -> list[str]:
    found = node.host.sh(["pgrep", "-f", pattern], user=None, check=False).stdout.split()
    if not found:
        raise ToolError(f"{node.host.name} runs no {pattern}")
    return found


def _kill_one(node: Stack, random: Random) -> None:
    node.host.sh(["kill", "-KILL", random.choice(_pids(node, "^VLLM::"))], user=None)


def _kill_supervisor(node: Stack, random: Random) -> None:  # noqa: ARG001
    pid = node.host.sh(["docker", "inspect", "-f", "{{.State.Pid}}", node.containers()[0]]).stdout.strip()
    node.host.sh(["kill", "-KILL", pid], user=None)


def _freeze(node: Stack, random: Random) -> None:  # noqa: ARG001
    container = node.containers()[0]
    node.host.docker("pause", container)
    time.sleep(FREEZE_S)
    node.host.docker("unpause", container)


FAULTS = {
    "an engine process is killed": _kill_one,
    "the supervisor is killed": _kill_supervisor,
    "the node is frozen": _freeze,
}
