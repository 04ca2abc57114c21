"""Removes the shared memory that a killed engine leaves in /dev/shm, and nothing that anybody still uses.

/dev/shm may be the host's, shared with containers whose processes cannot be seen here. So the kernel is asked, not
/proc: it gives a write lease (fcntl(2)) only for a file that nobody else has open or mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
from pathlib import Path

from stack_node import processes

FOLDER = Path("/dev/shm")  # noqa: S108
# Names by Python's shared memory and semaphores, NCCL, torch and Intel's OpenMP.
PREFIXES = ("psm_", "sem.", "nccl-", "torch_", "__KMP_")

_F_SETSIG = 10  # the fcntl module has no name for it


class Segments:
    """What one engine may have left in /dev/shm; begins with what was there before it."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._before = set(_files(folder).items())
        self._mapped: set[tuple[Path, int]] = set()

    def note(self, pid: int) -> None:
        """Remember what a process of the engine has mapped."""
        files = _files(self._folder)
        for name in processes.mapped_files(pid, str(self._folder)):
            path = Path(name)
            if path in files:
                self._mapped.add((path, files[path]))

    def remove(self) -> list[Path]:
        """Remove the engine's files that nobody has open or mapped; returns them."""
        removed = []
        for path, inode in _files(self._folder).items():
            ours = (path, inode) in self._mapped or path.name.startswith(PREFIXES)
            if ours and (path, inode) not in self._before and _remove_unused(path, inode):
                removed.append(path)
        return removed


def _files(folder: Path) -> dict[Path, int]:
    """This user's plain files in a folder, with their inodes."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it went meanwhile
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    found[Path(entry.path)] = status.st_ino
    return found


def _remove_unused(path: Path, inode: int) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Whoever opens the file in this moment has the lease's holder told, with SIGIO, which would end this process.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        if os.fstat(fd).st_ino != inode:
            return False
        path.unlink()
    except OSError:  # it is in use, or has gone
        return False
    finally:
        os.close(fd)
    return True
