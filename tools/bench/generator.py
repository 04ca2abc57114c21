"""How long the generator takes as a whole process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench.figures import Figure, all_below, spread

if TYPE_CHECKING:
    from tools.bench.figures import Options

RUNS = 20
COMMAND = str(Path(sys.executable).with_name("gen-stack"))
SPEC = Path(__file__).resolve().parents[2] / "compose/qwen-72b/spec.yaml"


def measure(argv: list[str], runs: int = RUNS) -> list[float]:
    """Run a command so many times and return its wall-clock seconds, the first run (cold caches) left out."""
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def many_nodes(count: int) -> str:
    """Write a spec of so many nodes, in groups of two, with everything that a plan can judge."""
    head = f"name: big\nmodel: Qwen/Qwen2.5-72B-Instruct\ngpu: {{type: H100-80GB}}\nreplicas: {count // 2}\nnodes:\n"
    return head + "".join(
        f"  - {{name: n{index}, address: 10.0.{index // 250}.{index % 250 + 1}, gpus: 8}}\n" for index in range(count)
    )


def section(_: Options) -> list[Figure]:
    """The help, a two-node spec into a new folder and into one that is up to date, and the plan of many nodes."""
    with tempfile.TemporaryDirectory() as folder:
        for count in (500, 1000):
            Path(folder, f"{count}.yaml").write_text(many_nodes(count), "utf-8")
        fresh = ["sh", "-c", f'out=$(mktemp -d -p {folder}); exec "$0" "$1" -o "$out/new"', COMMAND, str(SPEC)]
        return [
            all_below("help", measure([COMMAND, "--help"]), 0.3, digits=3),
            all_below("two nodes, new folder", measure(fresh), 0.5, digits=3),
            Figure(
                "two nodes, nothing to change",
                spread(measure([COMMAND, str(SPEC), "-o", f"{folder}/same"]), digits=3),
            ),
            all_below("plan, two nodes", measure([COMMAND, "plan", str(SPEC)]), 0.5, digits=3),
            Figure("plan, 500 nodes", spread(measure([COMMAND, "plan", f"{folder}/500.yaml"]), digits=3)),
            all_below("plan, 1000 nodes", measure([COMMAND, "plan", f"{folder}/1000.yaml"]), 1.0, digits=3),
        ]
