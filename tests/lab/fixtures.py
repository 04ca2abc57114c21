"""The lab for pytest. In a conftest: `from tests.lab.fixtures import lab, pytest_runtest_makereport, stacks`.

@pytest.mark.lab
@pytest.mark.parametrize("lab", [Hosts(2, Software("20.10"))], indirect=True)   # without: three hosts, newest
def test_something(lab, stacks):
    head = stacks.put(lab.host(1), generated / "gpu-a")
    head.up("--wait")
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.lab.host import Host, Software
from tests.lab.lab import Lab
from tests.lab.system import LabError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Generator, Iterator
    from pathlib import Path

LOG_LINES = 60


@dataclass(frozen=True)
class Hosts:
    """What a test wants of the lab; tests that want the same share one lab."""

    count: int = 3
    software: Software = field(default_factory=Software)


@contextmanager
def lab_session(wanted: Hosts, lab: Lab | None = None) -> Iterator[Lab]:
    """Yield a lab with these hosts, and only these, and remove it again, whatever happens."""
    lab = lab or Lab(software=wanted.software)
    with lab.held(wait=900):
        try:
            lab.up(wanted.count)
            yield lab
        finally:
            lab.down()


@pytest.fixture(scope="session")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """Hosts for the tests that ask for the same `Hosts` (parametrize with `indirect=True`), removed at the end."""
    with lab_session(getattr(request, "param", None) or Hosts()) as made:
        yield made


@dataclass(frozen=True)
class Stack:
    """A folder with a Compose file on one host."""

    host: Host
    folder: str

    def compose(self, *args: str, check: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGS` in the folder."""
        return self.host.compose(self.folder, *args, check=check, timeout=timeout)

    def up(self, *args: str, check: bool = True, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Run `docker compose up -d ARGS`."""
        return self.compose("up", "-d", *args, check=check, timeout=timeout)

    def logs(self, lines: int | None = None) -> str:
        """Return what the containers said."""
        tail = [] if lines is None else ["--tail", str(lines)]
        done = self.compose("logs", "--no-color", "--timestamps", *tail, check=False, timeout=30)
        return done.stdout + done.stderr

    def containers(self) -> list[str]:
        """Return the names of the stack's containers, stopped ones too."""
        return self.compose("ps", "-a", "--format", "{{.Name}}").stdout.split()


class Stacks:
    """The stacks of one test: brought onto hosts by it, removed after it."""

    def __init__(self) -> None:
        self.placed: list[Stack] = []

    def put(self, host: Host, folder: Path, name: str | None = None) -> Stack:
        """Copy a generated folder to a host, as its ordinary user would, and return it as a stack."""
        stack = Stack(host, host.put(folder, name or folder.name))
        self.placed.append(stack)
        return stack

    def remove(self) -> None:
        """Bring every stack down with its volumes, and whatever container is left on those hosts."""
        if not self.placed:
            return
        with ThreadPoolExecutor(len(self.placed)) as pool:
            downs = [pool.submit(self._down, stack) for stack in self.placed]
        for host in {stack.host.name: stack.host for stack in self.placed}.values():
            if host.healthy() and (left := host.containers()):
                host.docker("rm", "-f", "-v", *left)
        self.placed.clear()
        for down in downs:
            down.result()

    @staticmethod
    def _down(stack: Stack) -> None:
        if stack.host.healthy() and stack.host.path(stack.folder).is_dir():
            stack.compose("down", "-v", "--remove-orphans", "--timeout", "5", check=False, timeout=120)


@pytest.fixture
def stacks() -> Iterator[Stacks]:
    """Stacks that this test puts on hosts; on failure the end of each rank's log is part of the report."""
    made = Stacks()
    try:
        yield made
    finally:
        made.remove()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the end of each stack's log to the report of a test that failed."""
    report = yield
    made = getattr(item, "funcargs", {}).get("stacks")
    if report.failed and isinstance(made, Stacks):
        for stack in made.placed:
            try:
                said = stack.logs(LOG_LINES)
            except LabError as error:
                said = str(error)
            report.sections.append((f"{stack.host.name}: last {LOG_LINES} lines of {stack.folder}", said))
    return report
