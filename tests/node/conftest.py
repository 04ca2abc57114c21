"""Runs the real `stack-node` script with a `vllm` that prints what it was given."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stack_node
from stack_node import checks, host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SCRIPT = Path(stack_node.__file__).parent / "stack-node"
PATIENCE_S = 60.0

# Prints argv and environment as JSON on the first line, then does what the test wants it to.
SHIM = """\
#!{python} -IS
import json, os, sys
print(json.dumps({{"argv": sys.argv[1:], "env": dict(os.environ)}}), flush=True)
exec(os.environ.get("SHIM", ""))
"""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll until a condition holds; a test waits for nothing in any other way."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s"
        time.sleep(0.02)


def as_a_prepared_host() -> list[str]:
    """Prefix of a command that gets what the start checks want of a well-configured container."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < checks.NOFILE_MIN:
        pytest.skip(f"the hard limit of open files is {hard}; {checks.NOFILE_MIN} are needed")
    return with_shm("1g") if host.shm_bytes()[0] < checks.SHM_MIN else []


def with_shm(size: str) -> list[str]:
    """Prefix that gives a command a /dev/shm of its own; needs root."""
    script = f'mount -t tmpfs -o size={size} tmpfs {host.SHM} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


@dataclass
class Node:
    """A place to run stack-node in: its PATH, temporary folder and a mark on everything it starts."""

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {"PATH": path, "TMPDIR": str(self.folder), "TEST_MARK": self.mark, **variables}

    def run(self, *args: str, prefix: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, str(SCRIPT), *args],
            env=self.environment(variables),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    @contextlib.contextmanager
    def start(self, *args: str, prefix: Sequence[str] = (), **variables: str) -> Iterator[subprocess.Popen[str]]:
        """A running stack-node; nothing of it outlives the block."""
        with subprocess.Popen(
            [*prefix, str(SCRIPT), *args],
            env=self.environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                for pid in self.living():
                    os.kill(pid, 9)

    def living(self) -> list[int]:
        """Every process that came from this node, whatever session it is in."""
        wanted = f"TEST_MARK={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def install_engine(self, version: str) -> str:
        """Make the interpreter believe in an installed vLLM; returns the PYTHONPATH for that."""
        info = self.folder / "site" / f"vllm-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        return str(info.parent)


def engine(output: str) -> dict[str, Any]:
    """What the engine was started with, from the first line of its output."""
    seen: dict[str, Any] = json.loads(output.splitlines()[0])
    return seen


def write_shim(path: Path) -> Path:
    """A `vllm` that prints what it was given."""
    path.write_text(SHIM.format(python=sys.executable))
    path.chmod(0o755)
    return path


@pytest.fixture
def node(tmp_path: Path) -> Node:
    (tmp_path / "bin").mkdir()
    write_shim(tmp_path / "bin" / "vllm")
    return Node(tmp_path)
