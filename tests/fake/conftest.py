"""Groups of engines, fake ones as plain processes and real ones in containers, behind one small interface."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.asking import http, soon
from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image
from tools.model import NAME, ensure_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.lab import Lab

COMMAND = Path(__file__).parent / "vllm"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def tree(pid: int) -> dict[int, str]:
    """Living descendants of a process, with their command lines."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):  # processes end meanwhile
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            found |= {int(child): words, **tree(int(child))}
    return found


def _open_files(pid: int) -> set[str]:
    try:
        return {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:  # gone meanwhile
        return set()


class FakeGroup:
    """Ranks of the fake engine on this machine."""

    ready_s = 15.0

    def __init__(self, folder: Path, nnodes: int = 2):
        self.folder = folder
        self.nnodes = nnodes
        self.master_port, self.port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def switches(self, rank: int) -> Path:
        """The folder of a rank's run-time switches."""
        path = self.folder / f"switches-{rank}"
        path.mkdir(exist_ok=True)
        return path

    def start(self, rank: int, *flags: str, **env: str) -> None:
        """Start one rank."""
        group = [f"--nnodes={self.nnodes}", f"--node-rank={rank}", "--master-addr=127.0.0.1"]
        group += [f"--master-port={self.master_port}", f"--tensor-parallel-size={self.nnodes}"]
        group += ["--headless"] if rank else ["--host=127.0.0.1", f"--port={self.port}"]
        quick = {"FAKE_LOAD_S": "0.1", "FAKE_NOTICE_S": "0.5", "FAKE_LEAVE_S": "0.3", "FAKE_STEP_S": "0.01"}
        with (self.folder / f"{rank}.log").open("wb") as log:
            self.processes[rank] = subprocess.Popen(
                [COMMAND, "serve", "/srv/model", *group, *flags],
                env={**os.environ, **quick, "FAKE_DIR": str(self.switches(rank)), "VLLM_HOST_IP": "127.0.0.1", **env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def start_all(self, *flags: str, **env: str) -> None:
        """Start all ranks, the head last, and wait for the API."""
        for rank in reversed(range(self.nnodes)):
            self.start(rank, *(flags if rank == 0 else ()), **env)
        assert soon(lambda: http(f"{self.url}/health")[0] == 200), self.log(0)

    def log(self, rank: int) -> str:
        return (self.folder / f"{rank}.log").read_text()

    def find(self, rank: int, title: str) -> int:
        """The process of a rank whose command line begins with `title`; the first one for an empty title."""
        first = self.processes[rank].pid
        return next(pid for pid, words in tree(first).items() if words.startswith(title)) if title else first

    def alive(self, rank: int, title: str) -> bool:
        """Whether a rank has that process."""
        if self.processes[rank].poll() is not None:
            return False
        return not title or any(words.startswith(title) for words in tree(self.processes[rank].pid).values())

    def connections(self, rank: int) -> int:
        """Established connections that a rank's processes opened to the master port."""
        mine = {target for pid in tree(self.processes[rank].pid) for target in _open_files(pid)}
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        there = f":{self.master_port:04X}"
        return sum(row[3] == "01" and row[2].endswith(there) and f"socket:[{row[9]}]" in mine for row in rows)

    def signal(self, rank: int, title: str, number: signal.Signals) -> None:
        os.kill(self.find(rank, title), number)

    def status(self, rank: int, seconds: float = 15) -> int | None:
        """The exit status of a rank's first process, negative for a signal; None when it does not end in time."""
        try:
            return self.processes[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def ask(self, tokens: int = 3, timeout: float = 10, **more: Any) -> tuple[int, str]:
        body = {"model": "/srv/model", "prompt": "one two three", "max_tokens": tokens, **more}
        return http(f"{self.url}/v1/completions", body, timeout=timeout)

    def metric(self, name: str) -> float:
        """A metric's value, all its rows together."""
        text = http(f"{self.url}/metrics")[1]
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def members(self) -> list[int]:
        """Every living process of the group, also one that has lost its parent."""
        return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if self._is_ours(entry)]

    def _is_ours(self, entry: Path) -> bool:
        try:
            return f"FAKE_DIR={self.folder}/".encode() in (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile
            return False

    def end(self) -> None:
        """Kill every process of the group."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeGroup]:
    """A group of two fake ranks; nothing of it is left afterwards."""
    group = FakeGroup(tmp_path)
    try:
        yield group
    finally:
        group.end()


@pytest.fixture(scope="session")
def real_lab(lab: Lab) -> Lab:
    """Lab hosts with the real engine's image and the real model."""
    with docker_here() as docker, tempfile.TemporaryDirectory() as folder:
        ensure_engine_image()
        lab.load_image(TAG, source=[docker.client])
        model = ensure_model(Path(folder))
        for number in lab.numbers():
            if not lab.host(number).path(f"/srv/models/{NAME}").exists():
                lab.host(number).place(model, f"/srv/models/{NAME}")
    return lab
