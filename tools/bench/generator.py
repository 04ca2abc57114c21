"""How long the generator takes as a whole process."""

from __future__ import annotations

import os
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
SIZES = {2: RUNS, 10: RUNS, 100: RUNS, 1000: 5}
"""Nodes of a spec, and how often each is measured."""
COMMAND = str(Path(sys.executable).with_name("gen-stack"))
SPEC = Path(__file__).resolve().parents[2] / "compose/qwen-72b/spec.yaml"


def measure(argv: list[str], runs: int = RUNS) -> list[float]:
    """Run a command so many times and return its wall-clock seconds, the first run (cold caches) left out.

    Compiled modules are kept, as they are wherever pip installed the package.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env=environment)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def many_nodes(count: int) -> str:
    """Write a spec of so many nodes, in groups of two, with everything that a plan can judge."""
    head = f"name: big\nmodel: Qwen/Qwen2.5-72B-Instruct\ngpu: {{type: H100-80GB}}\nreplicas: {count // 2}\nnodes:\n"
    return head + "".join(
        f"  - {{name: n{index}, address: 10.0.{index // 250}.{index % 250 + 1}, gpus: 8}}\n" for index in range(count)
    )


def section(_: Options) -> list[Figure]:
    """The help, a two-node spec into a folder that is up to date, and plan and new folder of more and more nodes."""
    with tempfile.TemporaryDirectory() as folder:
        figures = [
            all_below("help", measure([COMMAND, "--help"]), 0.3, digits=3),
            Figure(
                "two nodes, nothing to change",
                spread(measure([COMMAND, str(SPEC), "-o", f"{folder}/same"]), digits=3),
            ),
        ]
        for count, runs in SIZES.items():
            limit = round(0.5 + 0.5 * (count - 2) / 998, 3)  # half a second for two nodes, one for a thousand
            spec = Path(folder, f"{count}.yaml")
            spec.write_text(many_nodes(count), "utf-8")
            fresh = ["sh", "-c", f'out=$(mktemp -d -p {folder}); exec "$0" "$1" -o "$out/new"', COMMAND, str(spec)]
            for what, argv in (("plan", [COMMAND, "plan", str(spec)]), ("new folder", fresh)):
                figures.append(all_below(f"{what}, {count} nodes", measure(argv, runs), limit, digits=3))
        return figures
