"""Which files of a model vLLM reads, and whether those in a folder are whole.

Source: vLLM 0.32.0, model_executor/model_loader/default_loader.py (`_prepare_weights`), weight_utils.py
(`download_weights_from_hf`) and transformers_utils/repo_utils.py (`_WEIGHT_FILE_PATTERNS`).
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

INDEX = "model.safetensors.index.json"
MISTRAL_INDEX = "consolidated.safetensors.index.json"
MISTRAL = "consolidated*.safetensors"

# vLLM fetches every file but these for the tokenizer and the processor.
_HEAVY_ENDINGS = """safetensors bin pt pth ckpt gguf h5 msgpack onnx onnx_data png jpg jpeg gif webp mp3 mp4 wav flac
    parquet arrow ipynb zip tar*"""
_HEAVY = tuple(f"*.{ending}" for ending in _HEAVY_ENDINGS.split())

_SAFETENSORS = ("*.safetensors",)
_ANY = ("*.safetensors", "*.bin", "*.pt")
_PATTERNS: dict[str, tuple[str, ...]] = {
    "auto": _ANY,
    "hf": _ANY,
    "safetensors": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "instanttensor": _SAFETENSORS,
    "runai_streamer": _SAFETENSORS,
    "runai_streamer_sharded": _SAFETENSORS,
    "sharded_state": _SAFETENSORS,
    "mistral": (MISTRAL,),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
}

_SHARD = re.compile(r"(.+-)(\d+)-of-(\d+)\.safetensors")
_POINTER = b"version https://git-lfs"  # first line of what Git leaves of a large file that it did not fetch
_MOST_HEADER = 100_000_000  # bytes; safetensors' own limit
_NAMED = 3  # files that a sentence names


def pattern(names: Iterable[str], load_format: str) -> str | None:
    """The pattern of the weights' files that vLLM takes from these; None when it finds none, or needs none."""
    names = list(names)
    if load_format == "auto" and any(fnmatchcase(PurePosixPath(name).name, MISTRAL) for name in names):
        return MISTRAL
    top = [name for name in names if "/" not in name]
    for candidate in _PATTERNS.get(load_format, ()):
        if any(fnmatchcase(name, candidate) for name in top):
            return candidate
    return None


def wanted(
    names: Collection[str], load_format: str, ignored: Sequence[str], indexed: Collection[str] | None
) -> set[str]:
    """Files of a hub's list that vLLM reads: all light ones and the weights.

    `indexed` are the files that `INDEX` lists, where the model has one. Raises LookupError when there are no weights.
    """
    light = texts(names)
    if load_format not in _PATTERNS:  # such weights come in another way
        return light
    weights = pattern(names, load_format)
    if weights is None:
        raise LookupError(load_format)
    if weights == "*.safetensors" and indexed:
        return light | set(indexed)
    heavy = {name for name in names if fnmatchcase(name, weights)}
    return light | {name for name in heavy if not any(fnmatchcase(name, pattern) for pattern in ignored)}


def texts(names: Iterable[str]) -> set[str]:
    """Files of a hub's list that are no weights: configuration, tokenizer, chat template, code."""
    return {name for name in names if not any(fnmatchcase(name, heavy) for heavy in _HEAVY)}


def read_index(path: Path) -> set[str]:
    """Files that an index lists. Raises OSError, and ValueError for what is no index."""
    try:
        weight_map: Mapping[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(PurePosixPath(name)) for name in weight_map.values()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("it has no weight_map") from error


def check_directory(path: Path, load_format: str = "auto") -> list[str]:
    """Sentences on what is missing or broken in a model's folder.

    Only safetensors tell their size, so a folder without any is left alone, and so is a load format that reads others.
    Reads the files' headers, of which a large model has hundreds: not for a thread that must not wait.
    """
    try:
        names = {entry.name for entry in path.iterdir()}
        return _check_names(path, names, load_format)
    except OSError as error:
        return [f"{error.filename or path} cannot be read: {error.strerror}; check the disk and the modes of the files"]


def _check_names(path: Path, names: set[str], load_format: str) -> list[str]:
    if not any(fnmatchcase(name, "*.safetensors*") for name in names):
        return []
    found = []
    if not names & {"config.json", "params.json"}:
        found.append(f"{path} has no config.json; copy the whole model")
    weights = pattern(names, load_format) or _PATTERNS.get(load_format, ("",))[0]
    if not weights.endswith(".safetensors"):
        return found
    index = MISTRAL_INDEX if weights == MISTRAL else INDEX
    if index in names:
        try:
            expected = read_index(path / index)
        except ValueError as error:
            return [*found, _broken_index(path / index, error)]
    else:
        expected = _numbered({name for name in names if fnmatchcase(name, weights)})
    missing = sorted(name for name in expected if not (path / name).exists())
    if missing:
        found.append(
            f"{len(missing)} of {len(expected)} files with weights are missing in {path}: {listed(missing)}; "
            "copy the whole model"
        )
    broken = (broken_file(path / name) for name in sorted(expected - set(missing)))
    return [*found, *(sentence for sentence in broken if sentence is not None)]


def _broken_index(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        pointer = file.read(len(_POINTER)) == _POINTER
    why = "it is a pointer of Git LFS" if pointer else str(error)
    return f"{path} is no index of weights ({why}); copy it again"


def _numbered(names: set[str]) -> set[str]:
    """The names, and those that are missing in a row of numbered ones (`…-00001-of-00004.safetensors`)."""
    complete = set(names)
    for name in names:
        match = _SHARD.fullmatch(name)
        if match:
            start, digits, count = match[1], len(match[2]), match[3]
            complete |= {f"{start}{number:0{digits}}-of-{count}.safetensors" for number in range(1, int(count) + 1)}
    return complete


def broken_file(path: Path) -> str | None:
    """What is wrong with a safetensors file; None when it is whole. Raises OSError."""
    have = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(8)
        if begin == _POINTER[:8]:
            return f"{path} is only a pointer of Git LFS; run `git lfs pull` in that folder, or copy the model again"
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > _MOST_HEADER:
            return f"{path} ({have} bytes) is no safetensors file; copy it again"
        header = file.read(length)
    try:
        tensors = json.loads(header) if len(header) == length else None
        ends = [tensor["data_offsets"][1] for name, tensor in (tensors or {}).items() if name != "__metadata__"]
        want = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"{path} ({have} bytes) has a broken header; copy it again"
    if tensors is None or have != want:
        least = "at least " if tensors is None else ""
        return f"{path} has {have} bytes where its header wants {least}{want}; copy it again"
    return None


def listed(names: Sequence[str]) -> str:
    """The first names, and how many there are more."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
