"""Bring an image into a host by sharing the files of its layers with the seed, instead of unpacking them again.

The seed is a data root in which an image was loaded once. Docker's overlay2 store never changes a layer's files in
place (a container writes into a layer of its own), so hosts can have hard links to them: copying an image costs
directory entries only, and the page cache holds a file once for all hosts.

This knows the store's layout, which has been the same from Engine 1.10 to 28 (graph drivers; not the containerd store):

    image/overlay2/repositories.json            names -> image ids
    image/overlay2/imagedb/content/sha256/ID    an image's configuration, with the digests of its layers
    image/overlay2/layerdb/sha256/CHAIN/        a layer; cache-id names its folder in overlay2/
    overlay2/CACHE/{diff,link,lower,...}        its files; overlay2/l/LINK -> ../CACHE/diff
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

from tests.lab.system import LabError, run

_STORE = Path("image/overlay2")


def full_name(tag: str) -> str:
    """Return a tag as Docker's store writes it: with `:latest` where there is no tag."""
    return tag if ":" in tag.rsplit("/", 1)[-1] else f"{tag}:latest"


def image_id(data_root: Path, tag: str) -> str | None:
    """Return the id (`sha256:...`) of the image with that name, None where there is none."""
    name = full_name(tag)
    known = _repositories(data_root).get(name.rsplit(":", 1)[0], {}).get(name)
    return str(known) if known else None


def archive_id(archive: Path, tag: str) -> str:
    """Return the id of the image with that name in an archive of `docker save`."""
    with tarfile.open(archive) as tar:
        listing = tar.extractfile("manifest.json")
        entries: list[dict[str, Any]] = json.load(listing) if listing else []
    for entry in entries:
        if full_name(tag) in (entry.get("RepoTags") or []):
            return f"sha256:{Path(entry['Config']).name.removesuffix('.json')}"
    raise LabError(f"{archive} has no image {tag}")


def graft(seed: Path, target: Path, tag: str) -> None:
    """Give the data root `target`, whose engine is stopped, the image that `seed` has under that name."""
    identity = image_id(seed, tag)
    if identity is None:
        raise LabError(f"the seed {seed} has no image {tag}")
    for chain in _chains(seed, identity):
        _graft_layer(seed, target, chain)
    content = Path("imagedb/content/sha256") / identity.removeprefix("sha256:")
    metadata = Path("imagedb/metadata/sha256") / identity.removeprefix("sha256:")
    for part in (metadata, content):
        if (seed / _STORE / part).exists():
            _copy(seed / _STORE / part, target / _STORE / part)
    _name(target, full_name(tag), identity)


def _repositories(data_root: Path) -> dict[str, dict[str, str]]:
    try:
        read: dict[str, Any] = json.loads((data_root / _STORE / "repositories.json").read_text())
    except FileNotFoundError:
        return {}
    return read.get("Repositories") or {}


def _name(data_root: Path, name: str, identity: str) -> None:
    known = _repositories(data_root)
    known.setdefault(name.rsplit(":", 1)[0], {})[name] = identity
    path = data_root / _STORE / "repositories.json"
    path.write_text(json.dumps({"Repositories": known}))
    path.chmod(0o600)


def _chains(seed: Path, identity: str) -> list[str]:
    """Return the chain ids (hex) of an image's layers, the lowest first."""
    content = seed / _STORE / "imagedb/content/sha256" / identity.removeprefix("sha256:")
    chain = ""
    found = []
    for digest in json.loads(content.read_text())["rootfs"].get("diff_ids", []):
        chain = f"sha256:{hashlib.sha256(f'{chain} {digest}'.encode()).hexdigest()}" if chain else digest
        found.append(chain.removeprefix("sha256:"))
    return found


def _graft_layer(seed: Path, target: Path, chain: str) -> None:
    record = _STORE / "layerdb/sha256" / chain
    if (target / record).exists():
        return
    cache = (seed / record / "cache-id").read_text()
    layer = target / "overlay2" / cache
    if not layer.exists():  # files first, the record that makes them count last
        _copy(seed / "overlay2" / cache, layer, "--link")
        link = target / "overlay2/l" / (layer / "link").read_text()
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(f"../{cache}/diff")
        # `lower` and `link` are rewritten in place in no known version; they are tiny, so they are copied all the same.
        for name in ("link", "lower"):
            _unshare(layer / name)
    _copy(seed / record, target / record)


def _unshare(path: Path) -> None:
    if path.exists():
        text = path.read_bytes()
        path.unlink()
        path.write_bytes(text)


def _copy(source: Path, target: Path, *how: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    run(["cp", "-a", *how, "-T", source, target])
