"""The GPU form of the files on lab hosts that have no GPU, behind a stub of the device hook.

What is proved is the file: both generations of Docker and Compose take it, build the layer, and start the container
with the reservation in it. No GPU is proved: the layer is on the CPU engine here, and the entrypoint's own check says
that this cannot run eight ranks.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import COMPOSE
from tests.lab.fixtures import Hosts
from tests.lab.host import Software
from tools.engine_image import TAG

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import Deployment

pytestmark = pytest.mark.lab

NEW, OLD = Hosts(3, Software("26.1")), Hosts(3, Software("20.10"))
HCA = Path("/dev/infiniband")


@pytest.fixture
def hca_folder() -> Iterator[None]:
    """Take away the empty folder that `rdma: auto` leaves in /dev, which the hosts share with this machine."""
    there = HCA.exists()
    yield
    if HCA.exists() and not there:
        HCA.rmdir()


@pytest.mark.parametrize("lab", [OLD, NEW], indirect=True, ids=["engine-20.10", "engine-26.1"])
@pytest.mark.usefixtures("hca_folder")
def test_file_form_only_a_gpu_stack_is_accepted_and_started_with_a_hook_stub_and_no_gpu(
    deployment: Deployment, tmp_path: Path
) -> None:
    spec = tmp_path / "spec.yaml"
    text = (COMPOSE / "qwen-72b/spec.yaml").read_text()
    for here, there in (("gpu-a", "lab1"), ("gpu-b", "lab2"), ("10.0.0.11", "10.77.0.11"), ("10.0.0.12", "10.77.0.12")):
        text = text.replace(here, there)
    spec.write_text(text)
    folder = deployment.generate(spec) / "lab1"
    host = deployment.lab.host(1)
    stack = deployment.stacks.put(host, folder)
    assert stack.compose("config", "-q").stderr == ""
    stack.compose("build", "--build-arg", f"ENGINE_IMAGE={TAG}")
    stack.up()
    [name] = stack.containers()
    container = json.loads(host.sh(["docker", "inspect", name]).stdout)[0]
    [request] = container["HostConfig"]["DeviceRequests"]
    assert (request["Driver"], request["Count"], request["Capabilities"]) == ("nvidia", 8, [["gpu"]])
    assert container["HostConfig"]["NetworkMode"] == "host"
    assert container["HostConfig"]["CapDrop"] == ["ALL"]
    deadline = time.monotonic() + 60
    while "the CPU engine runs exactly one process a node" not in (said := stack.logs()):
        assert time.monotonic() < deadline, said
        time.sleep(0.5)


@pytest.mark.parametrize("lab", [OLD, NEW], indirect=True, ids=["engine-20.10", "engine-26.1"])
def test_every_reference_stack_is_read_without_a_warning(deployment: Deployment, tmp_path: Path) -> None:
    host = deployment.lab.host(1)
    for spec in sorted(COMPOSE.glob("*/spec.yaml")):
        out = deployment.generate(spec)
        for node in sorted(out.iterdir()):
            if (node / "compose.yaml").exists():
                read = host.compose(host.put(node, f"read/{spec.parent.name}-{node.name}"), "config", "-q")
                assert (read.stdout, read.stderr) == ("", ""), node
        shutil.rmtree(out)
