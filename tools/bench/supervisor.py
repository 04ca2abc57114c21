"""What the supervisors of a ready, idle group take: memory, and CPU over a minute. All time-outs are the defaults.

Each node sees only its own processes, as in a container: the supervisor's look for new ones costs what there is to see.
It is measured in the group's first minutes, when it looks most often.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench.figures import Figure, below
from tools.bench.local import guards, ready_group, supervisor
from tools.bench.usage import cpu_shares, resident

if TYPE_CHECKING:
    from tests.node.local_group import LocalNode
    from tools.bench.figures import Options

SETTLE_S = 5.0
CONTAINED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
RSS_MB, CPU_PERCENT = 50.0, 0.5


def section(options: Options) -> list[Figure]:
    """Resident memory and share of a core, rank by rank."""
    with ready_group(CONTAINED, GEN_STACK_NODE_TIMEOUT="10s") as group:
        time.sleep(SETTLE_S)
        pids = {node.rank: _supervisor(node) for node in group.nodes}
        shares = cpu_shares(pids.values(), options.seconds)
        figures = []
        for rank, pid in pids.items():
            who = f"rank {rank} ({'head' if rank == 0 else 'worker'})"
            figures += [
                below(f"{who}: resident memory", resident(pid) / 1e6, RSS_MB, "MB"),
                below(f"{who}: CPU over {options.seconds:.0f} s", shares[pid], CPU_PERCENT, "% of a core", 2),
            ]
        guard = max(resident(pid) for node in group.nodes for pid in guards(node))
        return [
            *figures,
            Figure("guard of an engine, beside each supervisor: resident memory", f"{guard / 1e6:.1f} MB"),
        ]


def _supervisor(node: LocalNode) -> int:
    """The process id, as this machine sees it, of what is process 1 of the node's own process namespace."""
    [child] = Path(f"/proc/{supervisor(node)}/task/{supervisor(node)}/children").read_text().split()
    return int(child)
