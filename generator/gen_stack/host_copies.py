"""Where this host may hold a model: the folder that its id names, or the hub's cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gen_stack.spec import Spec

CONFIG = "config.json"


def host_folders(spec: Spec, environment: Mapping[str, str]) -> Iterator[Path]:
    """List the folders that may hold the model's files, the nearest first; a local model's need not exist."""
    if spec.model.is_local:
        yield Path(spec.model.id)
        return
    for cache in _caches(spec, environment):
        if snapshot := _snapshot(cache, spec.model.id, spec.model.revision or "main"):
            yield snapshot


def _caches(spec: Spec, environment: Mapping[str, str]) -> list[Path]:
    """List where huggingface-hub keeps its files, as its own variables say."""
    home = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME') or Path.home()}/.cache"
    hub = environment.get("HF_HUB_CACHE") or f"{environment.get('HF_HOME') or f'{home}/huggingface'}/hub"
    return [*([Path(spec.model.cache) / "hub"] if spec.model.cache else []), Path(hub)]


def _snapshot(cache: Path, model: str, revision: str) -> Path | None:
    """Find a revision in the cache: a commit, or the commit that a branch or tag had when it was fetched."""
    folder = cache / f"models--{model.replace('/', '--')}"
    named = folder / "refs" / revision
    if ".." in revision.split("/"):
        return None
    try:
        commit = named.read_text("utf-8").strip() if named.is_file() else revision
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None
