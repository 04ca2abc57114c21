"""Fetches a model from the hub: a program of its own, run by weights.py as a child process.

It says what it does as JSON lines on its standard output: {"note": sentence}, {"done": bytes, "total": bytes},
{"error": sentence, "retry": whether it goes on by itself}, and at last {"path": folder, "replace": whether the engine
has to be given that folder in the model's place, "text": sentence}, or an error without a retry. It ends when its
standard input is closed. Secrets are in none of it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack_node import huberrors, modelfiles
from stack_node.hubcache import MAIN, Repository, SeveralSnapshotsError, is_commit
from stack_node.huberrors import FetchError
from stack_node.pace import size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROGRESS_S = 1.0
_INFO_S = 15.0  # for the hub to list a model's files
_BACKOFF_S = (2.0, 5.0, 10.0, 30.0, 60.0)

# Files at a time. Several, since one connection seldom fills a line; few, since newer versions of the hub's library
# begin a file anew after a restart.
_AT_ONCE = 4
_GLOB = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})  # a file's name as a pattern that fits it alone

_output = threading.Lock()


@dataclass(frozen=True)
class Wanted:
    """A model and what of it is needed."""

    model: str
    revision: str | None
    cache: Path
    load_format: str
    ignored: tuple[str, ...]
    texts_only: bool = False  # tokenizer and configuration

    @property
    def repository(self) -> Repository:
        """Its folder in the cache."""
        return Repository(self.cache, self.model)

    @property
    def name(self) -> str:
        """For sentences."""
        return self.model if self.revision is None else f"{self.model} at revision {self.revision}"


@dataclass(frozen=True)
class File:
    """A file that the hub lists."""

    name: str
    size: int | None  # bytes; None where a mirror of the hub does not tell
    etag: str | None

    def fits(self, have: int | None) -> bool:
        """Whether a file of so many bytes can be this one; None: there is none."""
        return have is not None and self.size in (None, have)


@dataclass(frozen=True)
class Listing:
    """What the hub says about a model."""

    commit: str
    files: dict[str, File]


def emit(**message: Any) -> None:
    """Write a message; a reader that has gone is not this program's trouble, its end is seen elsewhere."""
    with _output:
        try:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
        except OSError:
            os._exit(1)


def main(argv: Sequence[str]) -> int:
    """Fetch; returns 0 when the model is here."""
    wanted = _arguments(argv)
    repositories = [one.repository for one in wanted]
    threading.Thread(target=_end_with_parent, args=(repositories,), daemon=True).start()
    try:
        # The tokenizer first: the last message is the model's.
        for one in reversed(wanted):
            last = _persist(one)
        emit(**last)
    except FetchError as error:
        emit(error=error.sentence, retry=False)
        return 1
    return 0


def _arguments(argv: Sequence[str]) -> list[Wanted]:
    parser = argparse.ArgumentParser("fetch")
    parser.add_argument("model")
    for name in ("--revision", "--cache", "--tokenizer", "--tokenizer-revision"):
        parser.add_argument(name)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--ignore", action="append", default=[])
    given = parser.parse_args(argv)
    from huggingface_hub import constants

    hub_cache = Path(constants.HF_HUB_CACHE)
    cache = Path(given.cache) if given.cache else hub_cache
    wanted = [Wanted(given.model, given.revision, cache, given.load_format, tuple(given.ignore))]
    if given.tokenizer:
        wanted.append(Wanted(given.tokenizer, given.tokenizer_revision, hub_cache, "auto", (), texts_only=True))
    return wanted


def _end_with_parent(repositories: list[Repository]) -> None:
    while os.read(0, 4096):
        pass
    # No thread begins another file while those that are there are removed.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for repository in repositories:
        repository.drop_own()
    os._exit(0)


def _persist(wanted: Wanted) -> dict[str, Any]:
    """The last message. Goes on for as long as trying again may help; raises FetchError when it cannot."""
    attempt = 0
    before = -1
    while True:
        try:
            return _get(wanted)
        except Exception as error:
            problem = huberrors.explain(error, wanted.name, wanted.cache)
            if not problem.retry:
                raise problem from error
        have = sum(wanted.repository.partial().values()) + _stored(wanted)
        attempt = 0 if have > before >= 0 else attempt + 1  # what moves may be tried again soon
        before = have
        pause = _BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)]
        emit(error=f"{problem.sentence}; trying again in {pause:.0f} s", retry=True)
        time.sleep(pause)


def _stored(wanted: Wanted) -> int:
    return sum(path.stat().st_size for path in wanted.repository.folder.glob("blobs/*") if path.is_file())


def _get(wanted: Wanted) -> dict[str, Any]:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _local(wanted, "the hub is not asked (offline)", engine_is_offline=True)
    try:
        listing = _list(wanted)
    except Exception as error:
        problem = huberrors.explain(error, wanted.name, wanted.cache)
        if problem.about_revision:
            raise problem from error
        try:
            return _local(wanted, problem.sentence, engine_is_offline=False)
        except FetchError:
            raise problem from error
    return _download(wanted, listing)


# --- without the hub


def _local(wanted: Wanted, why: str, engine_is_offline: bool) -> dict[str, Any]:
    """Use what is in the cache. Raises FetchError when that is not the whole model."""
    repository = wanted.repository
    known = repository.known_commit(wanted.revision)
    commit = known
    if commit is None and not is_commit(wanted.revision or MAIN):
        try:
            commit = repository.only_commit()
        except SeveralSnapshotsError as error:
            raise FetchError(
                f"{repository.folder} has several snapshots of {wanted.model} ({', '.join(error.args[0])}) and no "
                "refs that tell which is meant; give one with `--revision=<commit>`, or copy refs/ too"
            ) from None
    if commit is None:
        raise FetchError(
            f"{wanted.name} is not in {wanted.cache}, and {why}; copy its folder {repository.folder.name} there, or "
            "let this node reach the hub (model.offline: false)"
        )
    path = repository.snapshot(commit)
    problems = _incomplete(path, wanted)
    if problems:
        raise FetchError(f"the copy of {wanted.name} in the cache is not whole: {'; '.join(problems)}")
    if wanted.texts_only and known is None:
        raise FetchError(f"the tokenizer's snapshot has no refs; use `--tokenizer={path}`, or copy refs/ too")
    # Without the hub the engine finds only what refs/ tell, and in the hub's own cache; when it is not told that it is
    # offline, it would ask the hub for every file and wait for each answer.
    replace = known is None or not engine_is_offline or _elsewhere(wanted)
    return {"path": str(path), "replace": replace, "text": f"weights: {wanted.name} is whole in {path}; {why}"}


def _incomplete(path: Path, wanted: Wanted) -> list[str]:
    names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    if wanted.texts_only:
        return [] if names else [f"{path} is empty"]
    if not {"config.json", "params.json"} & set(names):
        return [f"{path} has no config.json"]
    problems = modelfiles.check_directory(path, wanted.load_format)
    if not problems:
        try:
            modelfiles.wanted(names, wanted.load_format, wanted.ignored, None)
        except LookupError:
            return [f"{path} has no weights that --load-format={wanted.load_format} reads"]
    return problems


def _elsewhere(wanted: Wanted) -> bool:
    """Whether the files are where the engine looks for weights alone (--download-dir)."""
    from huggingface_hub import constants

    return wanted.cache != Path(constants.HF_HUB_CACHE)


# --- from the hub


def _list(wanted: Wanted) -> Listing:
    from huggingface_hub import HfApi

    info = HfApi().model_info(wanted.model, revision=wanted.revision, files_metadata=True, timeout=_INFO_S)
    files = {}
    for sibling in info.siblings or ():
        large = sibling.lfs
        etag = large.sha256 if large else sibling.blob_id
        files[sibling.rfilename] = File(sibling.rfilename, large.size if large else sibling.size, etag)
    return Listing(str(info.sha), files)


def _download(wanted: Wanted, listing: Listing) -> dict[str, Any]:
    repository = wanted.repository
    files = [listing.files[name] for name in sorted(_choose(wanted, listing))]
    for file in files:
        have = repository.size(listing.commit, file.name, None)
        if have is not None and not file.fits(have):
            emit(note=f"weights: {file.name} has {have} bytes and should have {file.size}: it is fetched again")
            repository.forget(listing.commit, file.name)
    repository.drop_orphans()
    path = repository.snapshot(listing.commit)
    missing = [file for file in files if repository.size(listing.commit, file.name, file.etag) is None]
    unlinked = any(not (path / file.name).exists() for file in files)
    if missing or unlinked or repository.known_commit(wanted.revision) != listing.commit:
        _make_room(wanted, files, missing)
        _transfer(wanted, listing, files)
    wrong = [file for file in files if not file.fits(repository.size(listing.commit, file.name, None))]
    if wrong:
        raise OSError(f"{modelfiles.listed([file.name for file in wrong])}: not as large as the hub says")
    problems = [] if wanted.texts_only else modelfiles.check_directory(path, wanted.load_format)
    if problems:
        raise FetchError(f"the files are as the hub has them, and broken: {'; '.join(problems)}")
    total = total_size(files)
    verb = "fetched" if missing else "there"
    return {
        "path": str(path),
        # refs/ cannot be written where the cache may only be read
        "replace": _elsewhere(wanted) or repository.known_commit(wanted.revision) != listing.commit,
        "text": f"weights: {wanted.name} is {verb}: {size(total)} in {path}",
    }


def _choose(wanted: Wanted, listing: Listing) -> set[str]:
    names = listing.files.keys()
    if wanted.texts_only:
        return modelfiles.texts(names)
    indexed = None
    if modelfiles.INDEX in names and modelfiles.pattern(names, wanted.load_format) == "*.safetensors":
        indexed = _read_index(wanted, listing)
        lacking = sorted(indexed - names)
        if lacking:
            raise FetchError(f"{wanted.name} on the hub lacks files that its index lists: {modelfiles.listed(lacking)}")
    try:
        return modelfiles.wanted(names, wanted.load_format, wanted.ignored, indexed)
    except LookupError:
        raise FetchError(
            f"{wanted.name} has no weights that --load-format={wanted.load_format} reads; a model of GGUF files is "
            "named with a file or a quantization (`owner/name:Q4_K_M`)"
        ) from None


def _read_index(wanted: Wanted, listing: Listing) -> set[str]:
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(wanted.model, modelfiles.INDEX, revision=listing.commit, cache_dir=str(wanted.cache))
    try:
        return modelfiles.read_index(Path(path))
    except ValueError as error:
        wanted.repository.forget(listing.commit, modelfiles.INDEX)
        raise OSError(f"{modelfiles.INDEX} of {wanted.name} is no index of weights: {error}") from error


def _make_room(wanted: Wanted, files: list[File], missing: list[File]) -> None:
    """Say what will be fetched. Raises FetchError when the disk has no room for it."""
    resumable = wanted.repository.resumable()
    need = sum(max(0, (file.size or 0) - resumable.get(file.etag or "", 0)) for file in missing)
    wanted.cache.mkdir(parents=True, exist_ok=True)
    free = free_bytes(wanted.cache)
    total = total_size(files)
    if need > free:
        raise FetchError(
            f"the disk is too small for {wanted.name}: {size(need)} of {size(total)} are missing, and {wanted.cache} "
            f"has room for {size(free)}; free {size(need - free)} there, or put the cache on a larger disk "
            "(model.cache)"
        )
    if need:
        emit(
            note=f"weights: fetching {wanted.name}: {size(need)} of {size(total)} are missing; {wanted.cache} has room "
            f"for {size(free)}"
        )


def total_size(files: list[File]) -> int:
    """Bytes of all files, as far as the hub tells."""
    return sum(file.size or 0 for file in files)


def free_bytes(path: Path) -> int:
    """Room for this user on the disk of a folder."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _transfer(wanted: Wanted, listing: Listing, files: list[File]) -> None:
    from huggingface_hub import snapshot_download

    with _Progress(_counter(wanted.repository, listing.commit, files), total_size(files)):
        got = snapshot_download(
            wanted.model,
            revision=wanted.revision,  # not the commit: refs/ get written, by which the engine finds it
            cache_dir=str(wanted.cache),
            allow_patterns=[file.name.translate(_GLOB) for file in files],
            max_workers=_AT_ONCE,
        )
    if Path(got).name != listing.commit:
        raise OSError(f"{wanted.name} has just changed on the hub")


def _counter(repository: Repository, commit: str, files: list[File]) -> Callable[[], int]:
    """Counts the bytes that are on the disk, whoever fetches them: several nodes may share a cache."""
    complete: set[str] = set()

    def count() -> int:
        partial = repository.partial()
        done = 0
        for file in files:
            if file.name not in complete and repository.size(commit, file.name, file.etag) is not None:
                complete.add(file.name)
            whole = file.size or 0
            done += whole if file.name in complete else min(whole, partial.get(file.etag or "", 0))
        return done

    return count


class _Progress:
    """Tells how far it is, at once and once a second, for as long as the block runs."""

    def __init__(self, count: Callable[[], int], total: int) -> None:
        self._count = count
        self._total = total
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _tell(self) -> None:
        while True:
            emit(done=self._count(), total=self._total)
            if self._over.wait(PROGRESS_S):
                break


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
