"""What all processes of the fake engine share: settings from the command line, titles, the log."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

COMMAND = Path(__file__).resolve().parent.parent / "vllm"
_SETTINGS, _PYTHON, _LINK = "FAKE_SETTINGS", "FAKE_PYTHON", "FAKE_LINK"


@dataclass(frozen=True)
class Settings:
    """The flags that the fake engine understands."""

    model: str
    served: list[str]
    nnodes: int
    rank: int
    master_addr: str
    master_port: int
    headless: bool
    host: str
    port: int
    max_num_seqs: int
    shutdown_timeout: float
    kind: str  # TP or PP, for titles
    certfile: str | None
    keyfile: str | None

    @property
    def own_address(self) -> str:
        """Where this node's workers listen."""
        return os.environ.get("VLLM_HOST_IP") or "127.0.0.1"

    @property
    def worker_title(self) -> str:
        """Title of this node's worker process."""
        return f"VLLM::Worker_{self.kind}{self.rank}" if self.nnodes > 1 else "VLLM::Worker"


def log(who: str, text: str, level: str = "INFO") -> None:
    """Write a line as vLLM does."""
    stamp = time.strftime("%m-%d %H:%M:%S")
    line = f"({who} pid={os.getpid()}) {level} {stamp} [fake.py:1] {text}\n"
    os.write(1, line.encode())


def spawn(title: str, role: str, settings: Settings, link: socket.socket) -> subprocess.Popen[bytes]:
    """Start another process of the engine under `title`, with one end of a connection."""
    python = os.environ.get(_PYTHON) or sys.executable
    env = {**os.environ, _SETTINGS: json.dumps(asdict(settings)), _PYTHON: python, _LINK: str(link.fileno())}
    argv = [title, "-SE", str(COMMAND), f"fake-{role}"]
    child = subprocess.Popen(argv, executable=python, env=env, pass_fds=[link.fileno()], stdin=subprocess.DEVNULL)
    link.close()
    return child


def inherited() -> tuple[Settings, socket.socket]:
    """What `spawn` handed to this process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    return Settings(**json.loads(os.environ[_SETTINGS])), socket.socket(fileno=int(os.environ[_LINK]))
