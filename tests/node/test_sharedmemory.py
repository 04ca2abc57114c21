"""What may be removed from /dev/shm."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from stack_node.sharedmemory import Segments


def test_only_segments_that_nobody_uses_are_removed() -> None:
    folder = Path("/dev/shm")
    mark = f"{os.getpid()}-test"
    old = folder / f"psm_old{mark}"
    old.touch()
    segments = Segments()
    names = ["psm_left", "torch_left", "nccl-mapped", "psm_open", "plain", "noted"]
    left, torch, mapped, opened, plain, noted = (folder / f"{name}{mark}" for name in names)
    try:
        for path in (left, torch, mapped, opened, plain, noted):
            path.write_bytes(bytes(4096))
        with mapped.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 4096)
        with noted.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            segments.note(os.getpid())
        with opened.open("rb"), memory:
            removed = segments.remove()
        assert sorted(path for path in removed if mark in path.name) == sorted([left, torch, noted])
        assert all(path.exists() for path in (old, mapped, opened, plain))
        assert mapped in segments.remove()
    finally:
        for path in folder.glob(f"*{mark}"):
            path.unlink()
