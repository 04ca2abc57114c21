"""Becomes the engine: the last step between the supervisor's fork and vLLM, run by file name in a fresh interpreter.

It leaves a guard behind. Should the supervisor be killed so hard that it cannot clean up (SIGKILL, out of memory),
while the container or job lives on, the guard sees its pipe close and kills the engine's whole session. The kernel's
own parent-death signal would reach the engine's first process alone, and the orphaned workers would keep the GPUs.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

LIFE_FD = 3  # read end of a pipe whose other end only the supervisor holds


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def guard(session: int) -> None:
    """Wait for the supervisor's end, then kill what is left of its engine."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # the log pump waits for the last writer of these
        os.dup2(null, fd)
    while os.read(LIFE_FD, 1):
        pass
    deadline = time.monotonic() + 10.0
    while (left := members(session)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main(argv: list[str]) -> None:
    """Fork the guard, then turn into `argv`; the caller already made this process a session of its own."""
    session = os.getpid()
    first = os.fork()
    if first == 0:
        # Twice, so that the guard is no child of the engine, whose own wait() calls it would confuse.
        if os.fork() == 0:
            guard(session)
        os._exit(0)
    os.waitpid(first, 0)
    os.close(LIFE_FD)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would pass that on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"stack-node: cannot run {argv[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main(sys.argv[1:])
