"""The output folder: what differs there, and writing it, all or nothing, never over what a person wrote.

The folder keeps a record, `.gen-stack.json`, of the digests of what gen-stack wrote. A file that is neither what the
record says nor what is to be written was changed or made by a person, and is left alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gen_stack.problems import GenStackError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from gen_stack.output import OutputFile

RECORD = ".gen-stack.json"
_SCHEMA = "gen-stack/record/1"


@dataclasses.dataclass(frozen=True)
class Difference:
    """A file on disk that is not as it would be written.

    `foreign` is one that a person made or changed; `obsolete` one of a node's that gen-stack wrote and needs no more;
    `left over` one of a node that is no longer in the spec, and perhaps still runs.
    """

    path: str
    kind: Literal["missing", "changed", "mode", "foreign", "obsolete", "left over"]


def differences(folder: Path, files: Mapping[str, OutputFile]) -> list[Difference]:
    """Compare the folder with what it is to hold, in the order of paths. Raises `OSError` as reading does."""
    record = _read_record(folder)
    found = []
    for path, file in sorted(files.items()):
        content = _read(folder / path)
        if content is None:
            found.append(Difference(path, "missing"))
        elif content != file.text.encode():
            found.append(Difference(path, "changed" if _digest(content) in record.get(path, ()) else "foreign"))
        elif not _mode_is_right(folder / path, file):
            found.append(Difference(path, "mode"))
    nodes = {path.split("/")[0] for path in files}
    for path in sorted(record.keys() - files.keys()):
        content = _read(folder / path)
        if content is not None:
            unchanged = _digest(content) in record[path]
            found.append(Difference(path, "obsolete" if unchanged and path.split("/")[0] in nodes else "left over"))
    return found


def unified_diff(folder: Path, files: Mapping[str, OutputFile]) -> Iterator[str]:
    """Write what would change as a unified diff, with no secret in it."""
    for one in differences(folder, files):
        file = files.get(one.path)
        if file is None or file.secret or one.kind == "mode":
            yield f"# {one.path}: {one.kind}{' (a secret, not shown)' if file and file.secret else ''}\n"
            continue
        before = (_read(folder / one.path) or b"").decode("utf-8", "replace").splitlines(keepends=True)
        name = str(folder / one.path)
        old = os.devnull if one.kind == "missing" else name
        yield from difflib.unified_diff(before, file.text.splitlines(keepends=True), old, name)


def write(folder: Path, files: Mapping[str, OutputFile]) -> list[Difference]:
    """Make the folder hold the files, and list what was changed.

    Every file is written beside its place first; only when all are there do they take their places. Raises
    `GenStackError`, with nothing changed, when a file there is a person's, and `OSError` when the disk refuses.
    """
    found = differences(folder, files)
    foreign = [str(folder / one.path) for one in found if one.kind == "foreign"]
    if foreign:
        raise GenStackError("\n".join(f"{path}: {_FOREIGN}" for path in foreign))
    record = _read_record(folder)
    new = {path: [_digest(file.text.encode())] for path, file in files.items()}
    kept = {one.path: record[one.path] for one in found if one.kind == "left over"}
    if {**kept, **new} != record or len(kept) < len(found):
        both = {path: sorted({*new.get(path, ()), *record.get(path, ())}) for path in {**record, **new}}
        with _staged(folder, {one.path: files[one.path] for one in found if one.path in files}) as place:
            _write_record(folder, both)
            place()
        for one in found:
            if one.kind == "obsolete":
                _remove(folder, one.path)
        _write_record(folder, {**kept, **new})
    return found


_FOREIGN = (
    "this file is not as gen-stack wrote it, so somebody's work may be in it; nothing was written. "
    "Put the change into the spec (--diff shows it), move the file away, and run again"
)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs out of the folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _staged(folder: Path, files: Mapping[str, OutputFile]) -> Iterator[Callable[[], None]]:
    """Write files under temporary names beside their places, and hand over the step that puts them there."""
    staged: list[tuple[Path, Path]] = []

    def place() -> None:
        while staged:
            temporary, final = staged[-1]
            temporary.replace(final)
            staged.pop()

    try:
        for path, file in files.items():
            final = folder / path
            _make_folder(final.parent, 0o700 if file.secret else 0o755)
            staged.append((_temporary(final, file.text, file.mode), final))
        yield place
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def _make_folder(folder: Path, mode: int) -> None:
    """Make a folder with this mode whatever the umask: an image is built from it, and any user may enter that."""
    if not folder.exists():
        _make_folder(folder.parent, 0o755)
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
    elif mode == 0o700:
        folder.chmod(mode)


def _temporary(final: Path, text: str, mode: int) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{final.name}.", dir=final.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text.encode())
            if mode == 0o600:  # all else can be made again
                stream.flush()
                os.fsync(stream.fileno())
        Path(name).chmod(mode)
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)


def _mode_is_right(path: Path, file: OutputFile) -> bool:
    mode = stat.S_IMODE(path.stat().st_mode)
    if file.secret:
        return mode & 0o177 == 0 and stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    return bool(mode & 0o100) == bool(file.mode & 0o100)


def _remove(folder: Path, path: str) -> None:
    """Remove a file, and the folders that are empty without it."""
    (folder / path).unlink()
    with contextlib.suppress(OSError):  # another file is in it
        for above in list((folder / path).parents)[: path.count("/")]:
            above.rmdir()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_record(folder: Path) -> dict[str, list[str]]:
    content = _read(folder / RECORD)
    if content is None:
        return {}
    try:
        record = json.loads(content)
        if record["schema"] == _SCHEMA:
            return {str(path): [str(one) for one in digests] for path, digests in record["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise GenStackError(f"{folder / RECORD}: this is not gen-stack's record of what it wrote here; move it away")


def _write_record(folder: Path, record: Mapping[str, list[str]]) -> None:
    text = json.dumps({"schema": _SCHEMA, "files": dict(sorted(record.items()))}, indent=1) + "\n"
    temporary = _temporary(folder / RECORD, text, 0o600)
    try:
        temporary.replace(folder / RECORD)
    except BaseException:
        temporary.unlink()
        raise
