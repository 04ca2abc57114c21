"""From a spec to an answer that several hosts computed: generated folders, unmodified, with the real engine."""

from __future__ import annotations

import re
import urllib.error
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import COMPOSE
from tests.lab.fixtures import Hosts
from tests.lab.host import Software
from tools.chat import answer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Deployment, Group
    from tests.lab.host import Host

pytestmark = pytest.mark.lab

MODEL = "/srv/models/SmolLM2-135M-Instruct"
NEW, OLD = Hosts(3, Software("26.1")), Hosts(3, Software("20.10"))


def listening(host: Host) -> set[int]:
    """List the TCP ports that anything on a host listens on."""
    lines = host.sh(["ss", "-Hltn"], user=None).stdout.splitlines()
    return {int(line.split()[3].rpartition(":")[2]) for line in lines}


def api_servers(host: Host) -> list[str]:
    """List the engines on a host that run an API server: in vLLM, those that are not headless."""
    lines = host.sh(["ps", "-eo", "args"], user=None).stdout.splitlines()
    return [line for line in lines if re.search(r"bin/vllm serve", line) and "--headless" not in line]


def assert_only_the_head_serves(group: Group) -> None:
    assert 8000 in listening(group.head.host)
    assert len(api_servers(group.head.host)) == 1
    assert "Application startup complete" in group.head.logs()
    for worker in group.nodes[1:]:
        assert 8000 not in listening(worker.host)
        assert api_servers(worker.host) == []
        assert "Application startup complete" not in worker.logs()


def assert_every_rank_loaded_its_part(group: Group, kind: str) -> None:
    """Read from each engine's own log that it has loaded weights as the rank of its node; `kind` is TP or PP."""
    for rank, log in enumerate(group.logs()):
        place = f"rank {rank} in world size {len(group.nodes)} is assigned as DP rank 0"
        [line] = [line for line in log.splitlines() if place in line]
        assert re.search(rf"(?<!E){kind} rank {rank},", line), line
        assert log.count("Loading weights took") == 1, log


def assert_down_leaves_nothing(group: Group) -> None:
    for node in group.nodes:
        node.compose("down", "-v")
        assert node.host.containers() == []
        assert node.host.sh(["docker", "volume", "ls", "-q"]).stdout == ""
        assert 8000 not in listening(node.host)
        assert "vllm" not in node.host.sh(["ps", "-eo", "args"], user=None).stdout.lower()


@pytest.mark.parametrize(
    ("lab", "stack", "head", "kind", "user"),
    [
        pytest.param(OLD, "cpu-tp3", "10.77.0.11", "TP", "0", id="tensor-parallel-3-on-engine-20.10"),
        pytest.param(NEW, "cpu-pp2", "10.77.0.11", "PP", "0", id="pipeline-parallel-2-on-engine-26.1"),
        pytest.param(NEW, "cpu-pp2-ipv6", "[fd00:77::11]", "PP", "1000", id="ipv6-as-ordinary-user-on-engine-26.1"),
    ],
    indirect=["lab"],
)
def test_hosts_answer_with_a_part_of_the_model_each(
    deployment: Deployment, stack: str, head: str, kind: str, user: str
) -> None:
    group = deployment.deploy(stack)
    assert "Paris" in answer(f"http://{head}:8000", MODEL)
    assert_every_rank_loaded_its_part(group, kind)
    assert_only_the_head_serves(group)
    assert {node.compose("exec", "engine", "id", "-u").stdout.strip() for node in group.nodes} == {user}
    assert_down_leaves_nothing(group)


@pytest.mark.parametrize("lab", [NEW], indirect=True, ids=["engine-26.1"])
def test_the_api_key_is_asked_for_and_shown_nowhere(deployment: Deployment, tmp_path: Path) -> None:
    key, url = "sk-end-to-end-0123456789", "http://[fd00:77::11]:8000"
    (tmp_path / "api_key").write_text(f"{key}\n")
    spec = tmp_path / "spec.yaml"
    spec.write_text((COMPOSE / "cpu-pp2-ipv6/spec.yaml").read_text() + "api: {key_file: ./api_key}\n")
    group = deployment.place(deployment.generate(spec))
    deployment.start(group)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        answer(url, MODEL)
    assert "Paris" in answer(url, MODEL, key=key)
    for node in group.nodes:
        [container] = node.containers()
        assert key not in node.logs()
        assert key not in node.host.docker("inspect", container)
        assert key not in node.host.sh(["ps", "-eo", "args"], user=None).stdout
    assert_down_leaves_nothing(group)
