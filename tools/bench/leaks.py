"""What a group on this machine holds, so that two looks can be compared: processes, files, sockets, shared memory."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench import usage
from tools.bench.local import supervisor

if TYPE_CHECKING:
    from tests.node.local_group import LocalGroup, LocalNode

FILES = 2  # so many more open files of a supervisor may be a connection that is just being made
SETTLE_S = 8.0
PORTS = 20  # that a local group keeps to itself
_TIME_WAIT = "06"  # the kernel's, for a minute, whatever anybody does
_CLOSE_WAIT = "08"  # the peer has closed, this side has forgotten to


@dataclass(frozen=True)
class Look:
    """What there is at one moment, of a group that is ready."""

    processes: dict[int, int]  # by rank
    zombies: int
    files: dict[int, int]  # of the supervisors, by rank
    threads: dict[int, int]  # of the supervisors, by rank
    memory: dict[int, int]  # resident bytes of the supervisors, by rank
    sockets: int  # TCP, at the group's ports, without those in TIME_WAIT
    half_closed: int
    shared: frozenset[str]  # names in /dev/shm

    def compared(self, first: Look) -> list[str]:
        """What is more than it was, in words; empty when nothing has leaked."""
        found = []
        for rank, files in self.files.items():
            if files > first.files[rank] + FILES:
                found.append(f"rank {rank}: {files} open files, {first.files[rank]} at first")
            if self.processes[rank] != first.processes[rank]:
                found.append(f"rank {rank}: {self.processes[rank]} processes, {first.processes[rank]} at first")
        if self.zombies:
            found.append(f"{self.zombies} zombies")
        if self.sockets > first.sockets + FILES:
            found.append(f"{self.sockets} sockets at the group's ports, {first.sockets} at first")
        if self.half_closed:
            found.append(f"{self.half_closed} sockets that were never closed here")
        if new := self.shared - first.shared:
            found.append(f"in /dev/shm: {', '.join(sorted(new))}")
        return found


def look(group: LocalGroup) -> Look:
    """Look once."""
    living = {node.rank: node.node.living() for node in group.nodes}
    states = Counter(state for _, _, state in usage.tcp(range(group.port, group.port + PORTS)))
    pids = {node.rank: supervisor(node) for node in group.nodes}
    return Look(
        processes={rank: len(found) for rank, found in living.items()},
        zombies=sum(_zombies(node) for node in group.nodes),
        files={rank: len(usage.descriptors(pid)) for rank, pid in pids.items()},
        threads={rank: len(list((Path("/proc") / str(pid) / "task").iterdir())) for rank, pid in pids.items()},
        memory={rank: usage.resident(pid) for rank, pid in pids.items()},
        sockets=sum(states.values()) - states[_TIME_WAIT],
        half_closed=states[_CLOSE_WAIT],
        shared=frozenset(path.name for path in Path("/dev/shm").iterdir()),  # noqa: S108
    )


def leaked(group: LocalGroup, first: Look) -> list[str]:
    """What is still more than it was, after some seconds in which it may go away."""
    end = time.monotonic() + SETTLE_S
    while (found := look(group).compared(first)) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def _zombies(node: LocalNode) -> int:
    children = Path(f"/proc/{supervisor(node)}/task/{supervisor(node)}/children").read_text().split()
    return sum(usage.state(int(pid)) == "Z" for pid in children)
