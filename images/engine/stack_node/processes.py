"""The process table, read from /proc: who is below whom, what it is called, what it did.

Only `title` and `mapped_files` look into a process's memory. The kernel makes their reader wait for a process that
hangs in a driver with its memory map locked (it is why `ps` hangs on such hosts), so whatever has to kill in time
reads the table alone.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Collection, Mapping

TICKS_PER_S: int = os.sysconf("SC_CLK_TCK")
_STAT_BYTES = 4096
_CHUNK = 64 << 10


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    state: str
    threads: int
    cpu: int  # clock ticks it computed, with the children it waited for
    started: int  # clock ticks since boot: tells it from a later process with its number
    status: int  # of waitpid(2), once it has ended and if this user may know

    @property
    def alive(self) -> bool:
        """Whether anything of it still runs; a zombie does when a thread of it hangs in the kernel."""
        return self.state not in "ZX" or self.threads > 1


def read(pid: int) -> Process | None:
    """The process with this number, zombies too; None when there is none, or it is hidden from this user.

    Raises OSError when that cannot be told: without a file descriptor to spare nobody has ended.
    """
    try:
        text = _read(f"/proc/{pid}/stat", _STAT_BYTES)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = text.rpartition(b")")[2].split()
    cpu = sum(int(field) for field in fields[11:15])
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[17]), cpu, int(fields[19]), int(fields[49]))


def table() -> dict[int, Process]:
    """Every process that can be seen."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - half the time of Path.iterdir(), in what runs for ever
        if name.isdecimal():
            process = read(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def below(root: int, processes: Mapping[int, Process], spare: Collection[int] = ()) -> list[Process]:
    """Everything below `root`, parents first, zombies too; without the trees that begin at a process in `spare`."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found = []
    todo = [root]
    while todo:
        for process in children.get(todo.pop(), []):
            if process.pid not in spare:
                found.append(process)
                todo.append(process.pid)
    return found


def living_below(root: int, spare: Collection[int] = ()) -> list[Process]:
    """Processes below `root` of which something still runs."""
    # Twice, because the table is no snapshot: whose parent ends while it is read seems to be nobody's child.
    for _ in range(2):
        found = [process for process in below(root, table(), spare) if process.alive]
        if found:
            return found
    return []


def descendants(root: int) -> list[int]:
    """Numbers of the processes below `root` of which something still runs."""
    return [process.pid for process in living_below(root)]


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def title(pid: int) -> str:
    """Command line, or what the process calls itself instead; empty when it is gone."""
    try:
        return _read(f"/proc/{pid}/cmdline", _STAT_BYTES).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def mapped_files(pid: int, folder: str) -> set[str]:
    """Paths below a folder that a process has mapped, deleted ones left out; empty when it is gone or closed to us."""
    prefix = f"{folder}/".encode()
    found = set()
    with contextlib.suppress(OSError):
        for line in _read(f"/proc/{pid}/maps").split(b"\n"):
            path = line[line.find(b"/") :] if b"/" in line else b""
            if path.startswith(prefix) and not path.endswith(b" (deleted)"):
                found.add(os.fsdecode(path))
    return found


def bytes_read(pid: int) -> int:
    """Bytes that a process read, from wherever, with the children it waited for; 0 when it is gone or closed to us."""
    with contextlib.suppress(OSError):
        lines = _read(f"/proc/{pid}/io", _STAT_BYTES).decode().splitlines()
        values = dict(line.split(": ") for line in lines)
        # Files that are mapped count as read_bytes alone, what comes from the page cache as rchar alone.
        return int(values["rchar"]) + int(values["read_bytes"])
    return 0


def _read(path: str, limit: int | None = None) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if limit is not None:
            return os.read(fd, limit)
        return b"".join(iter(lambda: os.read(fd, _CHUNK), b""))
    finally:
        os.close(fd)
