"""One model's folder in the hub's cache, as every version of huggingface_hub lays it out.

models--<owner>--<name>/refs/<branch or tag>          the commit it was at, when last asked
models--<owner>--<name>/snapshots/<commit>/<file>     links to
models--<owner>--<name>/blobs/<etag>                  and, while it is fetched, <etag>[.<8 hex digits>].incomplete
.locks/models--<owner>--<name>/<etag>.lock            held by whoever fetches it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PARTIAL = re.compile(r"(?P<etag>.+?)(?P<own>\.[0-9a-f]{8})?\.incomplete")
_QUIET_S = 120.0  # whoever writes a file writes more often, or has given up: the hub's time-out is 10 s
_MOST_FILES = 4096  # that a process which fetches has open; a few dozen in truth
MAIN = "main"


class SeveralSnapshotsError(Exception):
    """Nothing tells which of the snapshots is meant; the argument is the list of commits."""


def is_commit(revision: str) -> bool:
    """Whether a revision is a full commit, which needs no looking up."""
    return _COMMIT.fullmatch(revision) is not None


class Repository:
    """A model's folder below a cache; neither has to be there."""

    def __init__(self, cache: Path, model: str) -> None:
        self.folder = cache / f"models--{model.replace('/', '--')}"
        self._locks = cache / ".locks" / self.folder.name
        self._blobs = self.folder / "blobs"

    def known_commit(self, revision: str | None) -> str | None:
        """The commit that the engine will take a revision for when it cannot ask the hub; None where it will fail."""
        commit: str | None = revision or MAIN
        if not is_commit(revision or MAIN):
            try:
                commit = (self.folder / "refs" / (revision or MAIN)).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                return None
        return commit if commit and self.snapshot(commit).is_dir() else None

    def only_commit(self) -> str | None:
        """The commit of the only snapshot, for a cache that was copied without `refs`; None without any.

        Raises SeveralSnapshotsError.
        """
        with contextlib.suppress(OSError):
            commits = sorted(entry.name for entry in (self.folder / "snapshots").iterdir() if any(entry.iterdir()))
            if len(commits) > 1:
                raise SeveralSnapshotsError(commits)
            return commits[0] if commits else None
        return None

    def snapshot(self, commit: str) -> Path:
        """Folder of a commit's files."""
        return self.folder / "snapshots" / commit

    def size(self, commit: str, name: str, etag: str | None) -> int | None:
        """Bytes of a file that has been fetched, also one that another commit's snapshot already has; None: not yet."""
        candidates = [self.snapshot(commit) / name, *([self._blobs / etag] if etag else [])]
        for path in candidates:
            with contextlib.suppress(OSError):
                return path.stat().st_size
        return None

    def forget(self, commit: str, name: str) -> None:
        """Remove a broken file of a snapshot, so that it is fetched again. Raises OSError."""
        path = self.snapshot(commit) / name
        if path.is_symlink():  # one step only: newer versions of the hub's library share blobs between models by links
            (path.parent / path.readlink()).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def partial(self) -> dict[str, int]:
        """Bytes on the disk of files that are being fetched, by etag."""
        found: dict[str, int] = {}
        for entry, etag, _ in self._partials():
            with contextlib.suppress(OSError):
                status = entry.stat()
                # A file that is written in several places at once has holes.
                found[etag] = max(found.get(etag, 0), min(status.st_size, status.st_blocks * 512))
        return found

    def resumable(self) -> dict[str, int]:
        """Of these, the bytes that are not fetched again: older versions of the hub's library go on where they were."""
        own = {etag for _, etag, own in self._partials() if own}
        return {etag: count for etag, count in self.partial().items() if etag not in own}

    def drop_orphans(self) -> None:
        """Remove what a process that was killed left and that nothing will ever use again.

        Newer versions of the hub's library give each attempt a file of its own.
        """
        for entry, etag, own in self._partials():
            with contextlib.suppress(OSError):
                quiet = time.time() - entry.stat().st_mtime > _QUIET_S
                if own and quiet and self._unlocked(etag):
                    os.unlink(entry)  # noqa: PTH108 - an os.DirEntry

    def drop_own(self) -> None:
        """Remove what this process itself is fetching, before it ends; what can be resumed stays.

        Works in a process that may open no more files.
        """
        blobs = os.path.realpath(self._blobs)
        for fd in range(_MOST_FILES):
            with contextlib.suppress(OSError):
                path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
                match = _PARTIAL.fullmatch(os.path.basename(path))  # noqa: PTH119
                if os.path.dirname(path) == blobs and match and match["own"]:  # noqa: PTH120
                    os.unlink(path)  # noqa: PTH108

    def _partials(self) -> Iterator[tuple[os.DirEntry[str], str, bool]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._blobs) as entries:
            for entry in entries:
                match = _PARTIAL.fullmatch(entry.name)
                if match:
                    yield entry, match["etag"], match["own"] is not None

    def _unlocked(self, etag: str) -> bool:
        """Whether no process of this host, in whichever container, fetches a file."""
        try:
            fd = os.open(self._locks / f"{etag}.lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True
