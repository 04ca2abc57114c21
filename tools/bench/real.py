"""The real engine on two lab hosts: start, recovery, throughput and sockets beside hand-started `vllm serve`.

Both ways in turn, on the same hosts, with the same image, flags and warm caches. The lab is the tests' own;
GEN_STACK_LAB and GEN_STACK_LAB_NUMBER choose another.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from tests.e2e.conftest import Deployment
from tests.lab import images
from tests.lab.fixtures import Hosts, Stacks, lab_session
from tools.bench.figures import Figure, all_below, spread
from tools.bench.real_soak import faults
from tools.bench.real_stacks import API, MODEL, Way, by_hand, complete, spec
from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image
from tools.model import ensure_model
from tools.process import ToolError, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.lab import Lab
    from tools.bench.figures import Options

ADDED_S = 2.0
RECOVERY = 1.15
REQUESTS, TOKENS, AT_ONCE, BATCHES = 16, 32, 4, 3
# Student's t for 95 %, two-sided, by degrees of freedom; more than ten are taken as ten.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass
class Results:
    """What was measured so far; seconds, and tokens a second."""

    hand_start: list[float] = field(default_factory=list)
    our_start: list[float] = field(default_factory=list)
    recovery: list[float] = field(default_factory=list)
    hand_rate: list[float] = field(default_factory=list)
    our_rate: list[float] = field(default_factory=list)
    listeners: str = ""


def section(options: Options) -> list[Figure]:
    """So many pairs, then the faults."""
    results = Results()
    with hosts() as (lab, folder):
        ours = deploy(lab, folder)
        hand = deploy_by_hand(ours, folder) if options.pairs else ours
        for number in range(1, options.pairs + 1):
            _pair(number, ours, hand, results)
        soak = faults(ours, options.real_faults, Random(options.seed)) if options.real_faults else []  # noqa: S311
    return [*_figures(results), *soak]


@contextlib.contextmanager
def hosts() -> Iterator[tuple[Lab, Path]]:
    """Two lab hosts with the engine image and the model, and a folder for what is generated."""
    with lab_session(Hosts(2)) as lab, tempfile.TemporaryDirectory(prefix="gen-stack-bench-") as name:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            if images.image_id(lab.root / "images/docker", TAG) is None:
                docker = stack.enter_context(docker_here())
                ensure_engine_image()
                lab.load_image(TAG, source=[docker.client])
            else:
                lab.share_image(TAG)
            model = ensure_model(folder)
        for number in lab.numbers():
            lab.host(number).place(model, MODEL)
        yield lab, folder


def deploy(lab: Lab, folder: Path) -> Way:
    """What gen-stack makes of the spec, placed on the hosts and built there."""
    (folder / "spec.yaml").write_text(spec(lab), encoding="utf-8")
    deployment = Deployment(lab, Stacks(), folder)
    return Way("gen-stack", deployment.place(deployment.generate(folder / "spec.yaml")).nodes)


def deploy_by_hand(ours: Way, folder: Path) -> Way:
    """The same by hand. Both ways have run once when this returns, so that every cache is warm."""
    say(f"gen-stack, first start: {ours.start():.1f} s")
    logs = [node.logs() for node in ours.nodes]
    ours.stop()
    stacks = Stacks()
    hand = Way("by hand", [])
    for number, (node, log) in enumerate(zip(ours.nodes, logs, strict=True), 1):
        made = by_hand(folder / f"generated/lab{number}", log, folder / f"hand/lab{number}")
        hand.nodes.append(stacks.put(node.host, made, f"hand{number}"))
    say(f"by hand, first start: {hand.start():.1f} s")
    hand.stop()
    return hand


def _pair(number: int, ours: Way, hand: Way, results: Results) -> None:
    for way in (hand, ours) if number % 2 else (ours, hand):
        mine = way is ours
        took = way.start()
        (results.our_start if mine else results.hand_start).append(took)
        rate = statistics.median(_rate(way) for _ in range(BATCHES))
        (results.our_rate if mine else results.hand_rate).append(rate)
        say(f"{number}: {way.name}: first good completion {took:.2f} s, {rate:.1f} tokens/s")
        if mine:
            results.listeners = _listeners(way)
            results.recovery.append(_recovery(way))
            say(f"{number}: {way.name}: good again {results.recovery[-1]:.2f} s after a worker's process was killed")
        way.stop()


def _rate(way: Way) -> float:
    begin = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        counts = list(pool.map(lambda _: complete(way.url, TOKENS, 120), range(REQUESTS)))
    return sum(counts) / (time.monotonic() - begin)


def _recovery(way: Way) -> float:
    worker = way.nodes[1].host
    found = worker.sh(["pgrep", "-f", "^VLLM::Worker"], user=None).stdout.split()
    if not found:
        raise ToolError(f"{worker.name} has no VLLM::Worker")
    begin = time.monotonic()
    worker.sh(["kill", "-KILL", *found], user=None)
    while way.completes():
        time.sleep(0.02)
    return way.good(begin)


def _listeners(way: Way) -> str:
    """Who listens on the API's port of the head's host, in the words of its own command line."""
    host = way.nodes[0].host
    line = host.sh(["ss", "-Hltnp", f"sport = :{API}"], user=None).stdout
    names = []
    for pid in dict.fromkeys(re.findall(r"pid=(\d+)", line)):
        words = host.sh(["ps", "-o", "args=", "-p", pid], user=None).stdout.split()
        names.append(" ".join(Path(word).name for word in words[:3]))
    return "; ".join(names) or line


def _figures(results: Results) -> list[Figure]:
    if not results.hand_start:
        return []
    hand = statistics.median(results.hand_start)
    added = [our - by for our, by in zip(results.our_start, results.hand_start, strict=True)]
    ratios = [seconds / hand for seconds in results.recovery]
    rates = [our / by for our, by in zip(results.our_rate, results.hand_rate, strict=True)]
    more = statistics.median(results.our_start) - hand
    supervised = "stack-node" in results.listeners
    return [
        Figure("start until the first good completion, by hand", spread(results.hand_start)),
        Figure("start until the first good completion, gen-stack", spread(results.our_start)),
        Figure("added, pair by pair", spread(added)),
        Figure("added, of the medians", f"{more:.2f} s", f"at most {ADDED_S:g} s", more <= ADDED_S),
        Figure("from a worker process's death until the next good completion", spread(results.recovery)),
        all_below("the same, divided by the start by hand", ratios, RECOVERY, ""),
        Figure(
            f"{REQUESTS} requests of {TOKENS} tokens, {AT_ONCE} at once, by hand",
            spread(results.hand_rate, "tokens/s", 1),
        ),
        Figure("the same, gen-stack", spread(results.our_rate, "tokens/s", 1)),
        Figure("the ratio, gen-stack to by hand, pair by pair", interval(rates), "1 lies within"),
        Figure(f"who listens on port {API}", results.listeners, "the engine", not supervised),
    ]


def interval(values: list[float]) -> str:
    """Mean and its 95 % interval."""
    if len(values) < 2:
        return f"{values[0]:.3f} (one pair: no interval)"
    half = T95[min(len(values) - 2, len(T95) - 1)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f} (95 %, {len(values)} pairs)"
