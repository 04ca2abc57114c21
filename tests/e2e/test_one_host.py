"""On one plain Docker engine: the demo, and a single node alone."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import COMPOSE, REPOSITORY
from tools.chat import answer
from tools.demo import MODELS
from tools.model import NAME, ensure_model

if TYPE_CHECKING:
    from pathlib import Path

    from tools.docker_here import Docker

pytestmark = pytest.mark.lab


def containers(docker: Docker, stack: str) -> str:
    return docker.run("ps", "-aq", "--filter", f"label=gen-stack.stack={stack}").strip()


def test_make_demo_prints_the_answer_of_three_containers_and_leaves_nothing(docker: Docker) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.demo"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("answer: ")]
    assert "Paris" in line
    for rank in range(3):
        assert f"demo-{rank}: rank {rank} in world size 3 is assigned" in done.stdout
    assert containers(docker, "demo") == ""


def test_a_single_node_answers_with_upstreams_image_and_nothing_of_a_group(docker: Docker, tmp_path: Path) -> None:
    ensure_model(MODELS)
    spec = COMPOSE / "cpu-single/spec.yaml"
    subprocess.run([sys.executable, "-m", "gen_stack", str(spec), "-o", str(tmp_path / "out")], check=True)
    node = tmp_path / "out/only"
    try:
        docker.compose(node, "up", "-d", "--wait", "--wait-timeout", "300")
        assert "Paris" in answer("http://127.0.0.1:18001", f"{MODELS / NAME}")
        environment = docker.compose(node, "exec", "-T", "engine", "env")
        assert not {"NNODES", "NODE_RANK", "MASTER_ADDR"} & {line.partition("=")[0] for line in environment.split()}
    finally:
        docker.compose(node, "down", "-v", "--timeout", "20")
    assert containers(docker, "cpu-single") == ""
