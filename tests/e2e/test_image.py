"""The layer on a real engine: its size, and the bake file with a real buildx."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import COMPOSE, REPOSITORY
from tests.lab.fixtures import Hosts
from tests.lab.host import Software
from tools.engine_image import TAG

if TYPE_CHECKING:
    from tests.e2e.conftest import Deployment

pytestmark = pytest.mark.lab


@pytest.mark.parametrize(
    "lab", [Hosts(3, Software("26.1", "2.26.1", buildx=True))], indirect=True, ids=["engine-26.1-buildx"]
)
def test_the_layer_adds_less_than_a_megabyte(deployment: Deployment) -> None:
    host = deployment.lab.host(1)
    stack = deployment.stacks.put(host, deployment.generate(COMPOSE / "cpu-pp2/spec.yaml") / "lab1")
    stack.compose("build")
    [image] = set(stack.compose("config", "--images").stdout.split())
    sizes = [int(json.loads(host.sh(["docker", "image", "inspect", name]).stdout)[0]["Size"]) for name in (image, TAG)]
    assert 0 < sizes[0] - sizes[1] < 1_000_000


@pytest.mark.parametrize(
    "lab", [Hosts(3, Software("26.1", "2.26.1", buildx=True))], indirect=True, ids=["engine-26.1-buildx"]
)
def test_bake_builds_the_cpu_variant_and_plans_the_others(deployment: Deployment) -> None:
    host = deployment.lab.host(1)
    folder = host.put(REPOSITORY / "images/engine", "engine")
    plan = json.loads(host.sh(["docker", "buildx", "bake", "--print"], cwd=folder).stdout)["target"]
    assert {name: (target["args"]["ENGINE_IMAGE"], target["platforms"]) for name, target in plan.items()} == {
        "cuda": ("vllm/vllm-openai:v0.32.0", ["linux/amd64", "linux/arm64"]),
        "rocm": ("vllm/vllm-openai-rocm:v0.32.0", ["linux/amd64"]),
        "cpu": ("vllm/vllm-openai-cpu:v0.32.0", ["linux/amd64", "linux/arm64"]),
    }
    [tag] = plan["cpu"]["tags"]
    host.sh(["docker", "buildx", "bake", "cpu", "--set", "cpu.platform=linux/amd64", "--load"], cwd=folder)
    assert "0.32.0" in host.docker("run", "--rm", tag, "python3", "-c", "import vllm; print(vllm.__version__)")
