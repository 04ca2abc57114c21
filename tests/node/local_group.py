"""A whole group on this machine: real `stack-node` processes on loopback addresses, with the fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.asking import http
from tests.node.conftest import SCRIPT, Node, as_a_prepared_host, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

FAKE = Path(__file__).resolve().parents[1] / "fake"
TOKEN = "a-token-of-this-group"


def free_ports(count: int) -> tuple[int, socket.socket]:
    """The first of so many neighbouring ports that nothing uses; no other test has them while the socket is open."""
    for first in range(21000, 31000, count):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0gen-stack-test-ports-{first}")
            with contextlib.ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("0.0.0.0", port))
        except OSError:
            claim.close()
        else:
            return first, claim
    raise AssertionError("no free ports")


@dataclass
class LocalNode:
    """One rank and what it has said."""

    node: Node
    rank: int
    variables: dict[str, str]
    args: list[str]
    prefix: list[str] = field(default_factory=list)  # of the supervisor's command
    process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        """Its stdout: the engine's."""
        return self._text("out")

    @property
    def errors(self) -> str:
        """Its stderr: the supervisor's and the engine's."""
        return self._text("err")

    @property
    def log(self) -> str:
        return self.output + self.errors

    def _text(self, name: str) -> str:
        path = self.node.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def says(self, text: str) -> bool:
        return text in self.errors

    def start(self) -> None:
        folder = self.node.folder
        with (folder / "out").open("ab") as output, (folder / "err").open("ab") as errors:
            self.process = subprocess.Popen(
                [*self.prefix, *as_a_prepared_host(), str(SCRIPT), *self.args],
                env=self.node.environment(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def ask_to_stop(self) -> None:
        assert self.process is not None
        self.process.terminate()

    def status(self) -> int:
        """Its exit status, when it has ended."""
        assert self.process is not None
        return self.process.wait(60)

    def stop(self) -> int:
        self.ask_to_stop()
        return self.status()

    def health(self) -> tuple[int, str]:
        """What Docker's health check says: its exit status and its sentence."""
        done = self.node.run("health")
        return done.returncode, done.stdout

    def switch(self, name: str, text: str = "") -> None:
        """Ask something of this node's fake engine (tests/fake/fakevllm/switches.py)."""
        (self.node.folder / name).write_text(text)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process of this node."""
        for pid in self.node.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_supervisor(self) -> None:
        """SIGKILL for it alone; its engine has to follow by itself."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def kill_engine_process(self, title: str) -> None:
        """SIGKILL for one process of the engine, as soon as the supervisor has found it."""
        pid, *_ = self.titled(title)
        wait_until(lambda: self._watches(pid), f"the supervisor watches {title}")
        os.kill(pid, signal.SIGKILL)

    def _watches(self, pid: int) -> bool:
        """Whether the supervisor holds a pidfd of it."""
        assert self.process is not None
        for entry in (Path("/proc") / str(self.process.pid) / "fdinfo").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if f"\nPid:\t{pid}\n" in entry.read_text():
                    return True
        return False

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
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
    """Three nodes, or so; `engine` is the `vllm` that they find."""

    folder: Path
    nnodes: int = 3
    variables: dict[str, str] = field(default_factory=dict)
    args: list[str] | None = None
    engine: Path = FAKE / "vllm"
    nodes: list[LocalNode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.port, self._claim = free_ports(20)
        token = self.folder / "token"
        token.write_text(f"{TOKEN}\n")
        for rank in range(self.nnodes):
            home = self.folder / str(rank)
            (home / "bin").mkdir(parents=True)
            (home / "bin" / "vllm").symlink_to(self.engine)
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
                "FAKE_DIR": str(home),
                "VLLM_TARGET_DEVICE": "cpu",
                "PYTHONDONTWRITEBYTECODE": "1",
                **self.variables,
            }
            args = ["/", f"--pipeline-parallel-size={self.nnodes}", "--load-format=dummy"]
            self.nodes.append(LocalNode(Node(home), rank, variables, args if self.args is None else self.args))

    @property
    def control(self) -> str:
        return f"http://127.0.0.11:{self.port}"

    @property
    def api(self) -> str:
        return f"http://127.0.0.11:{self.port + 1}"

    def control_answers(self) -> bool:
        return http(f"{self.control}/livez")[0] == 200

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

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        self._claim.close()

    def start(self) -> None:
        for node in reversed(self.nodes):
            node.start()


@contextlib.contextmanager
def cleaned_up(group: LocalGroup) -> Iterator[LocalGroup]:
    """A group that nothing has been started of; nothing of it outlives the block."""
    try:
        yield group
    except BaseException:
        sys.stderr.write(group.logs())
        raise
    finally:
        group.close()


@contextlib.contextmanager
def local_group(folder: Path, nnodes: int = 3, **variables: str) -> Iterator[LocalGroup]:
    """A group that is starting; nothing of it outlives the block."""
    with cleaned_up(LocalGroup(folder, nnodes, variables)) as group:
        group.start()
        yield group
