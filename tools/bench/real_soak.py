"""A few random faults in a row on the real engine."""

from __future__ import annotations

import time
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
# Everything of a container, counted from inside: processes, the supervisor's open files, shared memory.
COUNT = "ls -d /proc/[0-9]* | wc -l; ls /proc/1/fd | wc -l; ls /dev/shm | wc -l"


def faults(way: Way, count: int, random: Random) -> list[Figure]:
    """So many of them; the group is taken down at the end."""
    way.start()
    time.sleep(5)
    first = [_counts(node) for node in way.nodes]
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
    last = [_counts(node) for node in way.nodes]
    way.stop()
    kept = all(
        new[0] <= old[0] and new[1] <= old[1] + FILES and new[2] <= old[2] for old, new in zip(first, last, strict=True)
    )
    return [
        Figure("random faults in a row", f"{len(again)} passed, {failed} failed", "all pass", not failed),
        Figure("from the fault until the next good completion", spread(again) if again else "never"),
        Figure(
            "processes, open files of the supervisor, files in /dev/shm, by rank",
            f"{first} → {last}",
            f"no more, no more than {FILES} more, no more",
            kept,
        ),
    ]


def _counts(node: Stack) -> tuple[int, ...]:
    """The least of some looks, since a health check may run in one of them."""
    looks = []
    for _ in range(LOOKS):
        found = node.compose("exec", "-T", "engine", "sh", "-c", COUNT).stdout.split()
        looks.append(tuple(map(int, found)))
        time.sleep(1.0)
    return min(looks)


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
