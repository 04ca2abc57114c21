"""Measure how long the generator takes as a whole process: `make bench`. Prints medians with their spread."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUNS = 20
COMMAND = str(Path(sys.executable).with_name("gen-stack"))
SPEC = Path(__file__).resolve().parent.parent / "compose/qwen-72b/spec.yaml"


def measure(argv: list[str], runs: int = RUNS) -> list[float]:
    """Run a command so many times and return its wall-clock seconds, the first run (cold caches) left out."""
    seconds = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main() -> None:
    """Measure the help and a two-node spec, the latter into a new folder each time and into one that is up to date."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = ["sh", "-c", f'out=$(mktemp -d -p {folder}); exec "$0" "$1" -o "$out/new"', COMMAND, str(SPEC)]
        cases = {
            "help (aim: under 0.3 s)": [COMMAND, "--help"],
            "two nodes, new folder (aim: under 0.5 s)": fresh,
            "two nodes, nothing to change": [COMMAND, str(SPEC), "-o", f"{folder}/same"],
        }
        for what, argv in cases.items():
            found = measure(argv)
            spread = f"{min(found):.3f} to {max(found):.3f} s"
            print(f"{what}: median {statistics.median(found):.3f} s of {RUNS} ({spread}): {' '.join(argv)}")


if __name__ == "__main__":
    main()
