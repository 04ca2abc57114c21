"""The lab's hands on the machine: commands, cgroups, mounts. All state is read from the system, none is remembered."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools.process import ToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_CGROUPS = Path("/sys/fs/cgroup")


class LabError(ToolError):
    """The lab could not do what was asked; the text says what it tried and what came back."""


def run(
    argv: Sequence[str | Path],
    *,
    check: bool = True,
    stdin: str | None = None,
    timeout: float | None = 300,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; on time-out its whole process group is killed, since `nsenter` leaves children."""
    command = [str(item) for item in argv]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout=timeout)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise LabError(f"`{' '.join(command)}` was not done after {timeout:g} s") from None
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check and done.returncode != 0:
        raise LabError(f"`{' '.join(command)}` ended with {done.returncode}:\n{(err + out).strip()[-4000:]}")
    return done


def wait_until(happened: Callable[[], bool], what: str, timeout: float, log: Path | None = None) -> None:
    """Poll until `happened()`; when it does not, say what was waited for and what the log's last lines are."""
    end = time.monotonic() + timeout
    while not happened():
        if time.monotonic() > end:
            said = tail(log, 20) if log else ""
            raise LabError(f"{what}: not within {timeout:g} s" + (f"; the end of {log}:\n{said}" if log else ""))
        time.sleep(0.02)


def tail(path: Path, lines: int) -> str:
    """Return the last lines of a file, nothing where there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


# -- cgroups: every process of a host, containers included, lies under one; so what is alive is never guessed --------


def cgroup_v2() -> bool:
    """Tell whether the machine has one cgroup tree (version 2) rather than one for each controller."""
    return (_CGROUPS / "cgroup.controllers").exists()


def marker() -> Path:
    """Return the cgroup tree in which the lab's processes are found."""
    if cgroup_v2():
        return _CGROUPS
    for name in ("pids", "devices", "systemd"):
        if (_CGROUPS / name / "cgroup.procs").exists():
            return _CGROUPS / name
    raise LabError("no cgroups are mounted at /sys/fs/cgroup; Docker engines need them")


def make_cgroup(name: str) -> Path:
    """Make a cgroup (in the marker tree) and return its `cgroup.procs`."""
    group = marker() / name
    group.mkdir(parents=True, exist_ok=True)
    return group / "cgroup.procs"


def processes(name: str) -> list[int]:
    """Return the ids of all processes in a cgroup and below it."""
    found: list[int] = []
    for listing in _walk(marker() / name):
        with contextlib.suppress(OSError):
            found += [int(line) for line in (listing / "cgroup.procs").read_text().split()]
    return found


def pid_inside(pid: int) -> int | None:
    """Return a process's id in its own PID namespace."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return None


def kill_cgroup(name: str, timeout: float = 20) -> None:
    """Kill whatever is in a cgroup and below, wait until it is gone, and remove the cgroup from every tree."""

    def gone() -> bool:
        # A paused container (version 1) does not die before it is thawed.
        for group in _walk(_CGROUPS / "freezer" / name):
            with contextlib.suppress(OSError):
                (group / "freezer.state").write_text("THAWED")
        alive = processes(name)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not alive

    wait_until(gone, f"processes of {name} to die", timeout)
    trees = [_CGROUPS] if cgroup_v2() else [path for path in _CGROUPS.iterdir() if path.is_dir()]
    for tree in trees:
        wait_until(lambda tree=tree: _remove(tree / name), f"cgroup {tree / name} to be removable", timeout)  # type: ignore[misc]


def _remove(group: Path) -> bool:
    try:
        for folder in reversed(list(_walk(group))):
            folder.rmdir()
    except FileNotFoundError:  # somebody else's work; the next look decides
        return not group.exists()
    except OSError:  # busy: a zombie that is not reaped yet
        return False
    return True


def _walk(group: Path) -> Iterator[Path]:
    """Yield a cgroup and all below it, parents first."""
    if not group.is_dir():
        return
    yield group
    with contextlib.suppress(FileNotFoundError):
        for child in sorted(group.iterdir()):
            if child.is_dir():
                yield from _walk(child)


def cgroup_children(name: str) -> list[str]:
    """Return the names of the cgroups directly below one, in any tree."""
    trees = [_CGROUPS] if cgroup_v2() else [path for path in _CGROUPS.iterdir() if path.is_dir()]
    return sorted({child.name for tree in trees for child in (tree / name).glob("*") if child.is_dir()})


# -- mounts ---------------------------------------------------------------------------------------------------------


def mounts_below(folder: Path) -> list[str]:
    """Return the mount points at or below a folder, the deepest first."""
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        where = line.split()[1].replace("\\040", " ")
        if where == str(folder) or where.startswith(f"{folder}/"):
            found.append(where)
    return found[::-1]


def unmount_below(folder: Path) -> None:
    """Unmount whatever a crashed run left mounted below a folder (a whole lab leaves nothing there)."""
    for where in mounts_below(folder):
        run(["umount", "--lazy", where], check=False)
