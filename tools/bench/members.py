"""A real head with hundreds of members that another process simulates: CPU, memory, and how soon it misses one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tests.node.local_group import LocalGroup, cleaned_up
from tools.bench.figures import Figure, all_below
from tools.bench.local import says_ready, supervisor, wait
from tools.bench.usage import cpu_shares, resident

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.bench.figures import Options

STUB = Path(__file__).with_name("stub_engine.py")
NODE_TIMEOUT_S = 10.0  # the default
DEATH_S = 1.0
SETTLE_S = 5.0


def section(options: Options) -> list[Figure]:
    """The head at rest, then members that die or fall silent."""
    nnodes = options.members + 1
    with tempfile.TemporaryDirectory(prefix="gen-stack-bench-") as folder:
        group = LocalGroup(
            Path(folder),
            nnodes,
            {"GEN_STACK_NODE_TIMEOUT": f"{NODE_TIMEOUT_S:g}s"},
            ["stub", f"--pipeline-parallel-size={nnodes}", "--load-format=dummy"],
            STUB,
        )
        del group.nodes[1:]
        with cleaned_up(group), simulated(group, nnodes) as members:
            begin = time.monotonic()
            group.start()
            wait(group.ready, "ready")
            ready = time.monotonic() - begin
            time.sleep(SETTLE_S)
            head = supervisor(group.nodes[0])
            share = cpu_shares([head], options.seconds / 2)[head]
            memory = resident(head) / 1e6
            deaths = [_death(group, members, 1 + run * 17 % options.members) for run in range(options.runs)]
            silent = [_silence(group, members, 1 + run * 31 % options.members) for run in range(options.runs // 2)]
    return [
        Figure(f"start of the head until ready with {options.members} members", f"{ready:.1f} s"),
        Figure(f"CPU of the head, ready and idle, over {options.seconds / 2:.0f} s", f"{share:.1f} % of a core"),
        Figure("resident memory of the head", f"{memory:.1f} MB"),
        all_below("a member dies (its connection closes)", deaths, DEATH_S, digits=3),
        all_below(f"a member falls silent, node_timeout {NODE_TIMEOUT_S:g} s", silent, NODE_TIMEOUT_S + 1),
    ]


class Members:
    """The other process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._input: IO[str] = process.stdin  # type: ignore[assignment]
        self._output: IO[str] = process.stdout  # type: ignore[assignment]

    def tell(self, name: str, rank: int) -> float:
        """Have something done to a member; returns when that was."""
        self._input.write(f"{name} {rank}\n")
        self._input.flush()
        return float(self._output.readline())


@contextlib.contextmanager
def simulated(group: LocalGroup, nnodes: int) -> Iterator[Members]:
    """All members but the head; they end with the block."""
    words = ["127.0.0.11", str(group.port), str(nnodes), group.nodes[0].variables["GEN_STACK_TOKEN_FILE"]]
    command = [sys.executable, "-m", "tools.bench.simulated", *words]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Members(process)
        finally:
            process.kill()


def _death(group: LocalGroup, members: Members, rank: int) -> float:
    begin = members.tell("die", rank)
    wait(lambda: says_ready(group) != 200, "the death is noticed")
    noticed = time.monotonic() - begin
    wait(group.ready, "ready again")
    time.sleep(1.0)
    return noticed


def _silence(group: LocalGroup, members: Members, rank: int) -> float:
    begin = members.tell("freeze", rank)
    wait(lambda: says_ready(group) != 200, "the silence is noticed")
    noticed = time.monotonic() - begin
    members.tell("thaw", rank)
    wait(group.ready, "ready again")
    time.sleep(1.0)
    return noticed
