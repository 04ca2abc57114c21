"""One folder for everything that is downloaded or made: whole or absent, and made by one process at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tools.process import ToolError, say

if TYPE_CHECKING:
    from collections.abc import Iterator


def cache_dir() -> Path:
    """Return the cache folder, which exists afterwards."""
    chosen = os.environ.get("GEN_STACK_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(chosen) if chosen else Path(base) / "gen-stack"
    path = path.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"cannot make the cache folder {path}: {error.strerror}; set GEN_STACK_CACHE") from None
    return path


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name`; the kernel drops it when the process ends, so none is ever left behind."""
    with (cache_dir() / f"{name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is making {name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch(name: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield an empty folder that is gone afterwards. Call it with a lock held that covers `name`.

    It lies in the cache and not in /tmp, which is often small or memory, unless another parent is given.
    What an earlier, killed run left behind is removed first.
    """
    parent = cache_dir() if parent is None else parent
    prefix = f".partial-{name}-"
    for left_over in parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    room = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Yield a path to make `target` at, file or folder; it takes that name only when the block ends well."""
    # Beside the target: a rename is atomic only within one file system.
    with scratch(target.name, target.parent) as room:
        made = room / target.name
        yield made
        if target.is_dir():
            shutil.rmtree(target)
        made.replace(target)
