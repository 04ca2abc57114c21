"""The same group on two lab hosts in two ways: as gen-stack deploys it, and by hand with upstream's `vllm serve`."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from tools.model import NAME
from tools.process import ToolError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.fixtures import Stack
    from tests.lab.lab import Lab

API = 8000
MODEL = f"/srv/models/{NAME}"
START_S = 400.0
SPEC = """\
name: bench
model: {model}
nodes:
  - {{name: lab1, address: {first}}}
  - {{name: lab2, address: {second}}}
recovery: {{max_restarts: 100}}
engine:
  device: cpu
  args:
    max-model-len: 512
    max-num-seqs: 4
    compilation-config: {{mode: DYNAMO_TRACE_ONCE, backend: eager}}
  env: {{OMP_NUM_THREADS: 1, VLLM_CPU_OMP_THREADS_BIND: nobind, VLLM_CPU_KVCACHE_SPACE: 1}}
"""


@dataclass
class Way:
    """One of the two ways: a folder on each host."""

    name: str
    nodes: list[Stack]

    @property
    def url(self) -> str:
        """Where the API is, as the machine reaches it."""
        return f"http://{self.nodes[0].host.address}:{API}"

    def start(self) -> float:
        """Start both nodes at once; returns the seconds until the first good completion."""
        begin = time.monotonic()
        each(self.nodes, lambda node: node.up())
        return self.good(begin)

    def good(self, begin: float) -> float:
        """Wait for a good completion; returns the seconds since `begin`."""
        while not self.completes():
            if time.monotonic() - begin > START_S:
                raise ToolError(f"{self.name}: no good completion within {START_S:.0f} s\n{self.logs()}")
            time.sleep(0.05)
        return time.monotonic() - begin

    def completes(self) -> bool:
        """Whether a short completion comes."""
        try:
            return complete(self.url, 1, 10) == 1
        except (OSError, ValueError, KeyError):
            return False

    def stop(self) -> None:
        """Take both nodes down. Their caches stay, what was remembered of failures does not."""
        each(self.nodes, _down)

    def logs(self) -> str:
        """The end of each rank's log."""
        return "\n".join(node.logs(25) for node in self.nodes)


def each(nodes: list[Stack], work: Any) -> None:
    """Do something on every host at once."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(work, nodes))


def _down(node: Stack) -> None:
    node.compose("down", "--timeout", "30")
    volumes = node.host.sh(["docker", "volume", "ls", "-q"]).stdout.split()
    for volume in volumes:
        if volume.endswith("_state"):
            node.host.docker("volume", "rm", volume)


def complete(url: str, tokens: int, timeout: float) -> int:
    """Ask for so many tokens; returns how many came. Raises OSError, ValueError or KeyError when it goes wrong."""
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": tokens, "temperature": 0}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as response:
        return int(json.load(response)["usage"]["completion_tokens"])


def spec(lab: Lab) -> str:
    """The group: pipeline parallel 2, with the backend that starts soonest."""
    return SPEC.format(model=MODEL, first=lab.host(1).address, second=lab.host(2).address)


def by_hand(folder: Path, log: str, target: Path) -> Path:
    """A generated folder without the entrypoint: what somebody writes who starts `vllm serve` on each host.

    The flags and variables that the entrypoint adds are taken from its own log, so that both engines get the same.
    """
    added = re.search(r"added to the engine's flags: (.*)", log)
    place = re.search(r"(?:head|worker) of group \S+: (\S+) on ([^,\s]+),", log)
    if added is None or place is None:
        raise ToolError(f"{folder.name}: the log does not tell which flags were added:\n{log}")
    document = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
    document["name"] += "-by-hand"
    service = document["services"]["engine"]
    service.update(entrypoint=["vllm", "serve"], command=[*service["command"], *added[1].split()], restart="no")
    service["healthcheck"] = {"disable": True}
    ours = re.compile(r"GEN_STACK_|NNODES$|NODE_|MASTER_")
    kept = {name: value for name, value in service["environment"].items() if not ours.match(name)}
    names = {"GLOO_SOCKET_IFNAME": place[2], "NCCL_SOCKET_IFNAME": f"={place[2]}", "NCCL_IB_DISABLE": "1"}
    service["environment"] = {**kept, "VLLM_HOST_IP": place[1], **names}
    for name in ("secrets", "labels"):
        service.pop(name, None)
    document.pop("secrets", None)
    target.mkdir(parents=True)
    (target / "compose.yaml").write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return target
