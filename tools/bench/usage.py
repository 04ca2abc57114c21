"""What processes use, from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MIB = 2**20
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def resident(pid: int) -> int:
    """Resident memory in bytes, shared pages included."""
    return int((Path("/proc") / str(pid) / "statm").read_text().split()[1]) * _PAGE


def cpu_seconds(pid: int) -> float:
    """CPU time of a process since its start, all threads, without children."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def cpu_shares(pids: Iterable[int], seconds: float) -> dict[int, float]:
    """Share of a core in percent that each process takes over so many seconds, from now on."""
    before, begin = {pid: cpu_seconds(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - begin
    return {pid: 100 * (cpu_seconds(pid) - then) / took for pid, then in before.items()}


def descriptors(pid: int) -> list[str]:
    """What the open files of a process are; none of a process that has ended."""
    found = []
    with contextlib.suppress(OSError):
        for entry in (Path("/proc") / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(str(entry.readlink()))
    return found


def command(pid: int) -> str:
    """The words of a process; empty when it has ended."""
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def state(pid: int) -> str:
    """One letter, as ps(1) has it; `X` when there is no such process."""
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def tcp(ports: range) -> Iterator[tuple[int, int, str]]:
    """TCP sockets with one of these ports at this side: local port, peer's port, state as /proc has it."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), (Path("/proc/net") / name).open() as lines:
            next(lines, None)
            for line in lines:
                fields = line.split()
                local, peer = (int(field.rpartition(":")[2], 16) for field in fields[1:3])
                if local in ports:
                    yield local, peer, fields[3]
