"""How much memory GPUs really have: a table of measured totals, since a card of "80 GB" shows 79.2 GiB or less."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import TYPE_CHECKING

from gen_stack.problems import Problem, listed, shown, suggestion
from gen_stack.rules import groups_of
from gen_stack.spec import size_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gen_stack.problems import KeyPath
    from gen_stack.spec import Gpu, Spec


@functools.lru_cache(maxsize=1)
def totals() -> dict[str, int]:
    """Load the table: bytes by type."""
    text = (importlib.resources.files("gen_stack") / "data" / "gpus.json").read_text("utf-8")
    return {one["type"]: int(one["total"] * 2**30) for one in json.loads(text)["gpus"]}


def known_type(name: str) -> str | None:
    """Find a type in the table, however it is written: `h100-80gb` and `H100_80GB` are `H100-80GB`."""
    return _names().get(_plain(name))


@functools.lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    return {_plain(one): one for one in totals()}


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def memory_of(gpu: Gpu) -> int | None:
    """Give the bytes of one GPU; a size that the spec says goes before its type."""
    if gpu.memory is not None:
        return size_bytes(gpu.memory)
    name = known_type(gpu.type) if gpu.type else None
    return totals()[name] if name else None


def smallest(spec: Spec, group: Sequence[int] | None = None) -> tuple[int, int] | None:
    """Find the smallest GPU of a group (default: of all nodes), as its bytes and its node; None if one is not known."""
    indexes = group if group is not None else range(len(spec.nodes))
    found = [(memory_of(spec.nodes[index].gpu or spec.gpu), index) for index in indexes]
    if spec.engine.device == "cpu" or not found or any(size is None for size, _ in found):
        return None
    return min((size, index) for size, index in found if size is not None)


def gpu_key(spec: Spec, index: int) -> KeyPath:
    """Name the key that says how much memory a node's GPUs have."""
    gpu = spec.nodes[index].gpu
    where: KeyPath = ("nodes", index, "gpu") if gpu else ("gpu",)
    return (*where, "memory" if (gpu or spec.gpu).memory is not None else "type")


def problems_of_gpus(spec: Spec) -> Iterator[Problem]:
    """Refuse types that the table does not have."""
    places: list[tuple[KeyPath, Gpu]] = [(("gpu",), spec.gpu)]
    places += [(("nodes", index, "gpu"), node.gpu) for index, node in enumerate(spec.nodes) if node.gpu]
    for path, gpu in places:
        if gpu.type is not None and known_type(gpu.type) is None and gpu.memory is None:
            close = suggestion(gpu.type, totals()) or f"; known are {listed(totals())}"
            words = f"{shown(gpu.type)} is not in the table of GPUs{close}; or say gpu.memory, such as 80GiB"
            yield Problem((*path, "type"), words)


def one_group(spec: Spec) -> list[int]:
    """Give the nodes of the group whose smallest GPU is the smallest of all: what fits there, fits everywhere."""
    groups = groups_of(spec)
    least = smallest(spec)
    return next((group for group in groups if least and least[1] in group), groups[0])
