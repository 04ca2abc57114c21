"""torchrun, the real one of the engine's image, on three lab hosts with the real engine."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.asking import soon
from tests.e2e.conftest import COMPOSE
from tests.lab.system import LabError
from tools.chat import answer
from tools.engine_image import TAG
from tools.model import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.host import Host
    from tests.lab.lab import Lab
    from tests.launchers.conftest import Step

pytestmark = [pytest.mark.launchers, pytest.mark.lab]

MODEL = f"/srv/models/{NAME}"
IMAGE = "gen-stack-torchrun-test"
CONTAINER = "torchrun"
START_S = 300.0  # three engines share two cores
NOTICED_S = 13.0  # network.node_timeout and what the fault matrix allows beside it


@dataclass
class Agents:
    """A torchrun on each host, in a container as docs/launchers.md has it."""

    hosts: list[Host]
    folder: str

    def start(self, number: int, *words: str) -> None:
        """Run the exported script on a host, counted from 0."""
        mounts = ["-v", f"{self.folder}:/stack:ro", "-v", f"{MODEL}:{MODEL}:ro"]
        where = ["--network", "host", "--shm-size", "2gb", *mounts]
        script = ["--entrypoint", "/stack/torchrun.sh", IMAGE, *words]
        self.hosts[number].docker("run", "-d", "--name", CONTAINER, *where, *script)

    def kill(self, number: int) -> None:
        """Kill an agent, and with it, since it is its container's number 1, all that it has started."""
        self.hosts[number].docker("kill", CONTAINER)
        self.hosts[number].docker("rm", "-f", CONTAINER)

    def each(self, work: Callable[[int], object]) -> None:
        """Do something on all hosts at once."""
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            list(pool.map(work, range(len(self.hosts))))

    def stop(self, number: int) -> str:
        """Stop an agent as an operator does; returns its exit status."""
        self.hosts[number].docker("stop", "--time", "60", CONTAINER)
        return self.hosts[number].docker("inspect", "-f", "{{.State.ExitCode}}", CONTAINER).strip()

    def remove(self) -> None:
        """Take everything away."""
        self.each(lambda number: self.hosts[number].docker("rm", "-f", "-v", CONTAINER, check=False))

    def head(self) -> Host | None:
        """The host whose control port says that the group is ready."""
        return next((host for host in self.hosts if ready(host)), None)

    def wait_ready(self) -> Host:
        """Wait until the group serves; returns the head's host."""
        assert soon(lambda: self.head() is not None, START_S), self.story()
        head = self.head()
        assert head is not None
        return head

    def story(self) -> str:
        """The end of each agent's log."""
        return "\n".join(f"--- {host.name}\n{host.engine_log(CONTAINER, 60)}" for host in self.hosts)

    def logs(self, number: int) -> str:
        """All that an agent and its worker said."""
        return self.hosts[number].engine_log(CONTAINER)


def ready(host: Host) -> bool:
    """Whether a host's control port says that the group is ready."""
    try:
        return host.http_get(f"http://{host.address}:29600/readyz", 2)[0] == 200
    except (OSError, LabError):
        return False


@pytest.fixture(scope="module")
def placed(furnished: Lab, tmp_path_factory: pytest.TempPathFactory) -> Agents:
    """The exported folder on three hosts, and the image built from what it holds."""
    folder = tmp_path_factory.mktemp("torchrun")
    prefix = furnished.host(1).address.rpartition(".")[0]
    text = (COMPOSE / "cpu-tp3/spec.yaml").read_text().replace("10.77.0.", f"{prefix}.")
    (folder / "spec.yaml").write_text(f"{text}recovery: {{drain: 20s}}\n")
    command = [sys.executable, "-m", "gen_stack", "export", "torchrun", "spec.yaml", "-o", "out"]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    hosts = [furnished.host(number) for number in (1, 2, 3)]
    agents = Agents(hosts, hosts[0].put(folder / "out/cpu-tp3", "torchrun"))
    for host in hosts:
        host.put(folder / "out/cpu-tp3", "torchrun")
    build = ["build", "-q", "-t", IMAGE, "--build-arg", f"ENGINE_IMAGE={TAG}", f"{agents.folder}/image"]
    agents.each(lambda number: hosts[number].docker(*build))
    return agents


@pytest.fixture
def agents(placed: Agents) -> Iterator[Agents]:
    """Hosts on which nothing runs yet."""
    placed.remove()
    try:
        yield placed
    finally:
        placed.remove()


def in_mode(mode: str, agents: Agents, number: int) -> tuple[str, ...]:
    return (str(number),) if mode == "fixed ranks" else ("c10d", agents.hosts[number].address)


@pytest.mark.parametrize("mode", ["fixed ranks", "c10d"])
def test_torchrun_starts_a_group_that_outlives_an_agent(mode: str, agents: Agents, step: Step) -> None:
    with step("torchrun", f"{mode}: three agents, real answer", real=True):
        agents.each(lambda number: agents.start(number, *in_mode(mode, agents, number)))
        head = agents.wait_ready()
        assert "Paris" in answer(f"http://{head.address}:8000", MODEL)
    lost = next(number for number in (2, 1) if agents.hosts[number] is not head)
    with step("torchrun", f"{mode}: an agent killed, the epoch ends", real=True):
        began = time.monotonic()
        agents.kill(lost)
        assert soon(lambda: agents.head() is None, NOTICED_S, 0.1), agents.story()
        assert time.monotonic() - began < NOTICED_S
    with step("torchrun", f"{mode}: the agent started again, real answer", real=True):
        agents.start(lost, *in_mode(mode, agents, lost))
        head = agents.wait_ready()
        assert "Paris" in answer(f"http://{head.address}:8000", MODEL)
    with step("torchrun", f"{mode}: stopped, drained", real=True):
        first = agents.hosts.index(head)
        agents.stop(first)
        assert "stack-node[0/3]: stopped" in agents.logs(first), agents.story()
