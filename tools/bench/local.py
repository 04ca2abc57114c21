"""A group on this machine's loopback to measure: what tests/node/local_group.py has, and what only a bench needs."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.asking import http
from tests.node.local_group import LocalGroup, LocalNode, cleaned_up
from tools.bench.usage import command
from tools.process import ToolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PATIENCE_S = 90.0
_LOOK_S = 0.01
_FAILURES = 2  # more would make the head rest between epochs, which is not what is measured here


@contextlib.contextmanager
def ready_group(prefix: Sequence[str] = (), **variables: str) -> Iterator[LocalGroup]:
    """Three nodes that are ready, each started through `prefix`; nothing of them is left afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="gen-stack-bench-") as folder,
        cleaned_up(LocalGroup(Path(folder), variables=variables)) as group,
    ):
        for node in group.nodes:
            node.prefix.extend(prefix)
        group.start()
        wait(group.ready, "the group is ready")
        yield group


def wait(happened: Callable[[], bool], what: str, seconds: float = PATIENCE_S) -> float:
    """Wait until something is so; returns the seconds that took. Raises ToolError when it is not in time."""
    begin = time.monotonic()
    while not happened():
        if time.monotonic() - begin > seconds:
            raise ToolError(f"not within {seconds:.0f} s: {what}")
        time.sleep(_LOOK_S)
    return time.monotonic() - begin


def says_ready(group: LocalGroup) -> int:
    """Status of `/readyz`; 0 when nobody answers."""
    return http(f"{group.control}/readyz")[0]


def supervisor(node: LocalNode) -> int:
    """The process id of a node's supervisor."""
    if node.process is None:
        raise ToolError(f"rank {node.rank} was not started")
    return node.process.pid


def engine_processes(node: LocalNode) -> list[int]:
    """The processes of a node's engine, without the supervisor and the guard."""
    return [pid for pid in node.node.living() if pid != supervisor(node) and not is_guard(pid)]


def guards(node: LocalNode) -> list[int]:
    """The processes that end an engine whose supervisor was killed."""
    return [pid for pid in node.node.living() if is_guard(pid)]


def is_guard(pid: int) -> bool:
    """Whether a process is the launcher's guard."""
    return "stack_node/launch.py" in command(pid)


def forget_failures(group: LocalGroup) -> None:
    """Give the group its whole budget back when much of it is used: its head starts anew, with an empty state."""
    if group.status()["failures"] <= _FAILURES:
        return
    head = group.nodes[0]
    head.stop()
    (head.node.folder / "default.json").unlink(missing_ok=True)
    head.start()
    wait(group.ready, "ready after its head was started anew")
