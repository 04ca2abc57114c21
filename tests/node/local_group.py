"""A whole group on this machine: real `stack-node` processes on loopback addresses, with the fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.node.conftest import SCRIPT, Node, as_a_prepared_host, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

FAKE = Path(__file__).resolve().parents[1] / "fake"
TOKEN = "a-token-of-this-group"


def http(url: str, body: dict[str, Any] | None = None, token: str = "") -> tuple[int, str]:
    """Status and text; 0 when nobody answers."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def free_ports(count: int) -> int:
    """The first of so many neighbouring ports that nothing uses."""
    for first in range(21000, 31000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                sock = stack.enter_context(socket.socket())
                sock.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports")


@dataclass
class LocalNode:
    """One rank and what it has said."""

    node: Node
    rank: int
    variables: dict[str, str]
    args: list[str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        path = self.node.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        with (self.node.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*as_a_prepared_host(), str(SCRIPT), *self.args],
                env=self.node.environment(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    def kill(self) -> None:
        for pid in self.node.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)

    def titled(self, title: str) -> list[int]:
        """The processes of this node whose command line begins so."""
        found = []
        for pid in self.node.living():
            with contextlib.suppress(OSError):
                if (Path("/proc") / str(pid) / "cmdline").read_bytes().startswith(title.encode()):
                    found.append(pid)
        return found


@dataclass
class LocalGroup:
    """Three nodes, or so."""

    folder: Path
    nnodes: int = 3
    variables: dict[str, str] = field(default_factory=dict)
    nodes: list[LocalNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port = free_ports(20)
        token = self.folder / "token"
        token.write_text(f"{TOKEN}\n")
        for rank in range(self.nnodes):
            home = self.folder / str(rank)
            (home / "bin").mkdir(parents=True)
            (home / "bin" / "vllm").symlink_to(FAKE / "vllm")
            variables = {
                "NNODES": str(self.nnodes),
                "NODE_RANK": str(rank),
                "NODE_ADDR": f"127.0.0.{11 + rank}",
                "MASTER_ADDR": "127.0.0.11",
                "MASTER_PORT": str(self.port + 4),
                "GEN_STACK_CONTROL_PORT": str(self.port),
                "GEN_STACK_API_PORT": str(self.port + 1),
                "GEN_STACK_TOKEN_FILE": str(token),
                "GEN_STACK_STATE_DIR": str(home),
                "GEN_STACK_NODE_TIMEOUT": "3s",
                "GEN_STACK_RDMA": "off",
                "VLLM_TARGET_DEVICE": "cpu",
                "PYTHONDONTWRITEBYTECODE": "1",
                **self.variables,
            }
            args = ["/", f"--pipeline-parallel-size={self.nnodes}", "--load-format=dummy"]
            self.nodes.append(LocalNode(Node(home), rank, variables, args))

    @property
    def control(self) -> str:
        return f"http://127.0.0.11:{self.port}"

    @property
    def api(self) -> str:
        return f"http://127.0.0.11:{self.port + 1}"

    def ready(self) -> bool:
        return http(f"{self.control}/readyz")[0] == 200

    def status(self) -> dict[str, Any]:
        code, text = http(f"{self.control}/status", token=TOKEN)
        assert code == 200, text
        status: dict[str, Any] = json.loads(text)
        return status

    def answer(self) -> str:
        body = {"model": "/", "prompt": "Hi", "max_tokens": 3}
        code, text = http(f"{self.api}/v1/completions", body)
        assert code == 200, text
        return str(json.loads(text)["choices"][0]["text"])

    def wait_ready(self) -> None:
        wait_until(self.ready, "ready")

    def logs(self) -> str:
        return "\n".join(f"--- {node.rank}\n{node.log}" for node in self.nodes)


@contextlib.contextmanager
def local_group(folder: Path, nnodes: int = 3, **variables: str) -> Iterator[LocalGroup]:
    """A group that is starting; nothing of it outlives the block."""
    group = LocalGroup(folder, nnodes, variables)
    try:
        for node in reversed(group.nodes):
            node.start()
        yield group
    except BaseException:
        sys.stderr.write(group.logs())
        raise
    finally:
        for node in group.nodes:
            node.kill()
