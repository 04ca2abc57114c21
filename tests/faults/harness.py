"""A group of three lab hosts with the fake engine: what can be done to it, and what is seen of it."""

from __future__ import annotations

import json
import shutil
import signal
import struct
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.asking import soon
from tests.lab.system import LabError, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.lab.fixtures import Stack
    from tests.lab.host import Host
    from tests.lab.lab import Lab

HERE = Path(__file__).parent
FAKE = HERE.parent / "fake"
MODEL = "/srv/models/small"
CONTROL, API, MASTER = 29600, 8000, 29500
DOCKERD = "...dockerd --config-file"


def write_model(folder: Path) -> Path:
    """The smallest model that the checks of weights take: one tensor of four bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder


@dataclass
class Watch:
    """Looks at `/readyz` twenty times a second, from the head's own host, so that a cut cable does not blind it."""

    group: Group
    began: float = field(default_factory=time.monotonic)
    changes: list[tuple[float, bool]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> Watch:
        """Begin; the first entry is how it is now."""
        self._look()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def lost_after(self, since: float, seconds: float) -> float | None:
        """Seconds from `since` until the group was not ready; None when it stayed ready for `seconds`."""
        soon(lambda: self._first(False, since) is not None, seconds, 0.02)
        found = self._first(False, since)
        return None if found is None else found - since

    def _first(self, ready: bool, since: float) -> float | None:
        return next((at for at, was in list(self.changes) if at >= since and was is ready), None)

    def _run(self) -> None:
        while not self._over.wait(0.05):
            self._look()

    def _look(self) -> None:
        ready = self.group.ready()
        if not self.changes or self.changes[-1][1] is not ready:
            self.changes.append((time.monotonic(), ready))


@dataclass
class Group:
    """The stack, in the order of ranks. Ranks count from 0, the lab's hosts from 1."""

    lab: Lab
    nodes: list[Stack]
    token: str
    model: str = MODEL

    # -- life -----------------------------------------------------------------------------------------------------

    def host(self, rank: int) -> Host:
        """The host of a rank."""
        return self.nodes[rank].host

    def up(self) -> None:
        """Start every node, with an empty state."""
        self._each(lambda node: node.up())

    def repair(self) -> None:
        """Undo everything that a fault may have left."""
        for rank, node in enumerate(self.nodes):
            node.host.heal()
            if node.host.init_pid() is None:
                node.host.boot()
            self.freeze(rank, DOCKERD, thaw=True)
            if not node.host.answers():
                node.host.start_engine()
            node.host.sh(["iptables", "-F", "INPUT"], user=None, check=False)
            for switch in node.host.path("/srv/fake").iterdir():
                shutil.rmtree(switch) if switch.is_dir() else switch.unlink()
            for container in node.host.sh(["docker", "ps", "-q", "--filter", "status=paused"]).stdout.split():
                node.host.docker("unpause", container)
            self.freeze(rank, "VLLM::", thaw=True)

    def down(self) -> None:
        """Take every node away with its volumes."""
        self.repair()
        self._each(lambda node: node.compose("down", "-v", "--timeout", "3", check=False))

    def _each(self, work: Callable[[Stack], object]) -> None:
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(work, self.nodes))

    # -- what is seen ---------------------------------------------------------------------------------------------

    def get(self, path: str, port: int = CONTROL, token: str = "") -> tuple[int, str]:
        """GET from the head, asked from its own host; status 0 when nobody answers."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        host = self.host(0)
        try:
            return host.http_get(f"http://{host.address}:{port}{path}", 2, headers)
        except (OSError, LabError):
            return 0, ""

    def ready(self) -> bool:
        """What `/readyz` says."""
        return self.get("/readyz")[0] == 200

    def status(self) -> dict[str, Any]:
        """What `/status` says; empty when nobody answers."""
        code, text = self.get("/status", token=self.token)
        return json.loads(text) if code == 200 else {}

    def ask(self, tokens: int = 3, timeout: float = 10) -> str | None:
        """A completion's finish reason, asked over the network; None when none came."""
        body = json.dumps({"model": self.model, "prompt": "one two", "max_tokens": tokens, "ignore_eos": True}).encode()
        url = f"http://{self.host(0).address}:{API}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=timeout) as response:
                return str(json.load(response)["choices"][0]["finish_reason"])
        except (OSError, ValueError, urllib.error.HTTPError):
            return None

    def story(self, lines: int = 40) -> str:
        """The end of every rank's log."""
        return "\n".join(f"--- rank {rank}\n{node.logs(lines)}" for rank, node in enumerate(self.nodes))

    def said(self, rank: int, since: str) -> str:
        """What the supervisor of a rank said since a time (of `docker logs --since`)."""
        text = self.host(rank).docker("logs", "--since", since, self.container(rank), check=False)
        return "\n".join(line for line in text.splitlines() if "stack-node" in line)

    def processes(self, rank: int) -> dict[int, str]:
        """Processes on a rank's host, by their numbers there."""
        lines = self.host(rank).sh(["ps", "-eo", "pid=,args="], user=None).stdout.splitlines()
        return {int(line.split()[0]): line.split(maxsplit=1)[1] for line in lines}

    def pids(self, rank: int, title: str) -> list[int]:
        """Processes of a rank's host by the beginning of their command line, or a part of it: `...vllm serve`."""
        part = title.removeprefix("...")
        return [
            pid
            for pid, words in self.processes(rank).items()
            if (part in words if title.startswith("...") else words.startswith(title))
        ]

    def container(self, rank: int) -> str:
        """The name of a rank's container."""
        return self.nodes[rank].containers()[0]

    # -- faults ---------------------------------------------------------------------------------------------------

    def kill(self, rank: int, title: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to processes of a rank."""
        pids = self.pids(rank, title)
        assert pids, f"no {title} on rank {rank}: {self.processes(rank)}"
        # Some may end with the first of them.
        self.host(rank).sh(["kill", f"-{number.value}", *map(str, pids)], user=None, check=False)

    def freeze(self, rank: int, title: str, *, thaw: bool = False) -> None:
        """Stop processes without ending them, or let them go on."""
        number = signal.SIGCONT if thaw else signal.SIGSTOP
        pids = self.pids(rank, title)
        if pids:
            self.host(rank).sh(["kill", f"-{number.value}", *map(str, pids)], user=None)

    def switch(self, rank: int, name: str, text: object = "") -> None:
        """Set a switch of the fake engine (tests/fake/fakevllm/switches.py)."""
        (self.host(rank).path("/srv/fake") / name).write_text(str(text))

    def clear(self, rank: int, *names: str) -> None:
        """Take switches back."""
        for name in names:
            (self.host(rank).path("/srv/fake") / name).unlink(missing_ok=True)

    def block(self, rank: int, *rule: str) -> None:
        """Drop packets that come in at a rank's host: `block(1, "-s", "10.77.0.13")`."""
        self.host(rank).sh(["iptables", "-I", "INPUT", *rule, "-j", "DROP"], user=None)

    def unblock(self, rank: int) -> None:
        """Let packets in again."""
        self.host(rank).sh(["iptables", "-F", "INPUT"], user=None)

    def take_port(self, rank: int, port: int) -> int:
        """Listen on a port of a rank's host; returns the process to end."""
        script = f"import socket,time;s=socket.create_server(('0.0.0.0',{port}));time.sleep(3600)"
        command = self.host(rank).command(["python3", "-c", script], user=None)
        run(["sh", "-c", 'exec "$@" >/dev/null 2>&1 &', "sh", *command])
        assert soon(lambda: bool(self.pids(rank, f"...,{port}))")), 5)
        return self.pids(rank, f"...,{port}))")[0]
