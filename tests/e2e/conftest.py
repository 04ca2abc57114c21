"""The real engine and the real model on lab hosts: what the end-to-end tests share."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image
from tools.model import NAME, ensure_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.fixtures import Stack, Stacks
    from tests.lab.lab import Lab
    from tools.docker_here import Docker

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE = REPOSITORY / "compose"


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """The machine's own Docker engine, with the engine image in it; one that is started for this is stopped again."""
    with docker_here() as here:
        ensure_engine_image()
        yield here


@pytest.fixture(scope="session")
def model(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the real model."""
    return ensure_model(tmp_path_factory.mktemp("models"))


@dataclass
class Group:
    """A stack on lab hosts: one started folder a node, in the order of ranks."""

    nodes: list[Stack]

    @property
    def head(self) -> Stack:
        """The node of rank 0."""
        return self.nodes[0]

    def logs(self) -> list[str]:
        """Return what each rank said."""
        return [node.logs() for node in self.nodes]


@dataclass
class Deployment:
    """Brings generated folders to lab hosts, as a user does: generate, copy, build, up."""

    lab: Lab
    stacks: Stacks
    folder: Path

    def generate(self, spec: Path) -> Path:
        """Run gen-stack on a spec and return the folder that it wrote."""
        out = self.folder / "generated"
        done = subprocess.run(
            [sys.executable, "-m", "gen_stack", str(spec), "-o", str(out)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return out

    def place(self, out: Path) -> Group:
        """Copy each node's folder to the host that has its number (`lab1` is host 1) and build its image there."""
        folders = sorted(path for path in out.iterdir() if (path / "compose.yaml").exists())
        numbers = [int(re.sub(r"\D", "", folder.name)) for folder in folders]
        group = Group([self.stacks.put(self.lab.host(n), folder) for n, folder in zip(numbers, folders, strict=True)])
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda node: node.compose("build"), group.nodes))
        return group

    def start(self, group: Group) -> None:
        """Bring the workers up from the last to the first, then the head, and wait until it is healthy."""
        for node in reversed(group.nodes[1:]):
            node.up()
        group.head.up("--wait", "--wait-timeout", "400")

    def deploy(self, name: str) -> Group:
        """Do all of it for a reference stack of the repository."""
        group = self.place(self.generate(COMPOSE / name / "spec.yaml"))
        self.start(group)
        return group


@pytest.fixture
def deployment(lab: Lab, docker: Docker, model: Path, stacks: Stacks, tmp_path: Path) -> Deployment:
    """Lab hosts that have the engine image and the model, as hosts of a user would."""
    lab.load_image(TAG, source=[docker.client])
    for number in lab.numbers():
        host = lab.host(number)
        if not host.path(f"/srv/models/{NAME}").exists():
            host.place(model, f"/srv/models/{NAME}")
    return Deployment(lab, stacks, tmp_path)
