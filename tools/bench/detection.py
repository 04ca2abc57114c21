"""How long a fault goes unnoticed: from the fault until `/readyz` no longer says that the group is ready."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from tools.bench.figures import Figure, all_below, spread
from tools.bench.local import engine_processes, forget_failures, ready_group, says_ready, wait
from tools.bench.usage import command

if TYPE_CHECKING:
    from tests.node.local_group import LocalGroup, LocalNode
    from tools.bench.figures import Options

NODE_TIMEOUT_S = 3.0
DEATH_S = 1.0
# Rank and the beginning of its command line: every kind of process that an engine has.
VICTIMS = ((0, "VLLM::Worker"), (1, "VLLM::Worker"), (0, "VLLM::EngineCore"), (2, "VLLM::Worker"), (1, ""), (0, ""))


def section(options: Options) -> list[Figure]:
    """A process that dies, and a node that is frozen with all its processes."""
    with ready_group(GEN_STACK_NODE_TIMEOUT=f"{NODE_TIMEOUT_S:g}s", GEN_STACK_MAX_RESTARTS="100") as group:
        again: list[float] = []
        deaths = [_death(group, *VICTIMS[run % len(VICTIMS)], again) for run in range(options.runs)]
        silent = [_silence(group, group.nodes[1 + run % 2], again) for run in range(max(1, options.runs // 2))]
    return [
        all_below("an engine process is killed (each kind in turn)", deaths, DEATH_S, digits=3),
        all_below(f"a node is frozen, node_timeout {NODE_TIMEOUT_S:g} s", silent, NODE_TIMEOUT_S + 1),
        Figure("from the fault, or the thaw, until ready again; the fake engine starts in a second", spread(again)),
    ]


def _death(group: LocalGroup, rank: int, title: str, again: list[float]) -> float:
    forget_failures(group)
    pid = _process(group.nodes[rank], title)
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait(lambda: says_ready(group) != 200, "the death is noticed")
    noticed = time.monotonic() - begin
    wait(group.ready, "ready again")
    again.append(time.monotonic() - begin)
    time.sleep(1.0)
    return noticed


def _process(node: LocalNode, title: str) -> int:
    """A process of a node's engine; without a title its first one, which Python runs under its own name."""
    for pid in engine_processes(node):
        words = command(pid)
        if words.startswith(title) if title else "vllm serve" in words and not words.startswith("VLLM::"):
            return pid
    raise LookupError(f"rank {node.rank} has no {title or 'vllm serve'}")


def _silence(group: LocalGroup, node: LocalNode, again: list[float]) -> float:
    begin = time.monotonic()
    node.signal(signal.SIGSTOP)
    try:
        wait(lambda: says_ready(group) != 200, "the silence is noticed")
        noticed = time.monotonic() - begin
    finally:
        thawed = time.monotonic()
        node.signal(signal.SIGCONT)
    wait(group.ready, "ready again")
    again.append(time.monotonic() - thawed)
    time.sleep(1.0)
    return noticed
