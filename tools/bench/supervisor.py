"""What the supervisors of a ready, idle group take: memory, and CPU over a minute. All time-outs are the defaults."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tools.bench.figures import Figure, below
from tools.bench.local import guards, ready_group, supervisor
from tools.bench.usage import MIB, cpu_shares, resident

if TYPE_CHECKING:
    from tools.bench.figures import Options

SETTLE_S = 5.0
RSS_MB, CPU_PERCENT = 50.0, 0.5


def section(options: Options) -> list[Figure]:
    """Resident memory and share of a core, rank by rank."""
    with ready_group(GEN_STACK_NODE_TIMEOUT="10s") as group:
        time.sleep(SETTLE_S)
        pids = {node.rank: supervisor(node) for node in group.nodes}
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
            Figure("guard of an engine, beside each supervisor: resident memory", f"{guard / MIB:.1f} MiB"),
        ]
