"""What the head keeps over restarts: how often the group has failed, and why it did last.

A state that cannot be read or written must not keep a group from serving, so every function here answers with a
sentence where others would raise.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class State:
    """The budget and the last fault."""

    failures: int = 0  # that count against the budget
    last_fault: dict[str, Any] | None = None  # as /status shows it
    retries: int = 0  # since the budget was used up


def path(state_dir: str, group: str) -> Path:
    """Where a group's state is; a group's name (config.py) is always fit for a file."""
    return Path(state_dir) / f"{group}.json"


def load(path: Path) -> tuple[State, str | None]:
    """The saved state, and a sentence when there is one that cannot be used.

    A missing file is a first start. A damaged one is kept aside as `*.damaged`, and counts as none.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return State(), None
    except OSError as error:
        return State(), f"the saved state {path} cannot be read ({error.strerror}); failures are counted from 0"
    state = _parse(text)
    if state is not None:
        return state, None
    aside = path.with_name(f"{path.name}.damaged")
    try:
        path.replace(aside)
    except OSError as error:
        return State(), f"the saved state {path} is damaged and cannot be moved ({error.strerror}); it is ignored"
    return State(), f"the saved state {path} was damaged; it is kept as {aside.name}, and failures are counted from 0"


def _parse(text: bytes) -> State | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or set(data) != {"failures", "last_fault", "retries"}:
        return None
    for name in ("failures", "retries"):
        if type(data[name]) is not int or data[name] < 0:
            return None
    fault = data["last_fault"]
    return State(**data) if fault is None or isinstance(fault, dict) else None


def save(path: Path, state: State) -> str | None:
    """Replace the saved state in one step that outlasts a power cut; a sentence when that fails.

    Waits for the disk.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(state), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        temporary = None
        _sync_folder(path.parent)
    except OSError as error:
        return f"the state cannot be saved in {path} ({error.strerror}); a restart of the head will forget its failures"
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
    return None


def _sync_folder(folder: Path) -> None:
    """Make a rename last."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
