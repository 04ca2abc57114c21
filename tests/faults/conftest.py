"""The group for the rows of the matrix, and the table at the end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.faults.harness import FAKE, HERE, Group, write_model
from tests.lab import images
from tests.lab.fixtures import Hosts, Stack, lab_session
from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from tests.lab.lab import Lab


@dataclass
class Result:
    """One row of the table."""

    id: str
    passed: bool
    detected: float | None = None
    again: float | None = None
    said: str = ""


RESULTS: list[Result] = []


@pytest.fixture(scope="session")
def fault_lab() -> Iterator[Lab]:
    """Three hosts with the engine's image."""
    with lab_session(Hosts(3)) as lab:
        if images.image_id(lab.root / "images/docker", TAG) is not None:
            lab.share_image(TAG)  # only its Python is needed: any build will do
        else:
            with docker_here() as docker:
                ensure_engine_image()
                lab.load_image(TAG, source=[docker.client])
        yield lab


@pytest.fixture(scope="session")
def placed(fault_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Group:
    """The generated folders on the hosts, images built; nothing started."""
    folder = tmp_path_factory.mktemp("faults")
    out = folder / "generated"
    subprocess.run([sys.executable, "-m", "gen_stack", HERE / "spec.yaml", "-o", out], check=True, capture_output=True)
    model = write_model(folder / "small")
    engine = shutil.copytree(FAKE, folder / "fake", ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    nodes = []
    for number in (1, 2, 3):
        host = fault_lab.host(number)
        host.place(model, "/srv/models/small")
        host.place(engine, "/srv/fake-engine")
        host.mkdir("/srv/fake")
        shutil.copy(HERE / "compose.override.yaml", out / f"lab{number}" / "compose.override.yaml")
        nodes.append(Stack(host, host.put(out / f"lab{number}", f"lab{number}")))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda node: node.compose("build"), nodes))
    return Group(fault_lab, nodes, (out / "lab1/secrets/group_token").read_text().strip())


@pytest.fixture
def group(placed: Group) -> Iterator[Group]:
    """The group with an empty state, not started; everything is repaired and taken away afterwards."""
    placed.down()
    try:
        yield placed
    finally:
        placed.down()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Iterator[Result]:
    """The row's line of the table."""
    result = Result(request.node.callspec.id, passed=False)
    RESULTS.append(result)
    yield result
    call = getattr(request.node, "outcome_of_call", None)
    result.passed = call == "passed"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table: what was seen of every row."""
    if not RESULTS:
        return

    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f} s"

    write = terminalreporter.write_line
    write("")
    write("| id | | detected after | ready again after | said |")
    write("|---|---|---|---|---|")
    for row in RESULTS:
        mark = "ok" if row.passed else "FAILED"
        write(f"| {row.id} | {mark} | {seconds(row.detected)} | {seconds(row.again)} | {row.said} |")
    failed = sum(not row.passed for row in RESULTS)
    write(f"\n{len(RESULTS) - failed} passed, {failed} failed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the fixture of the table know how its test ended."""
    report = yield
    if report.when == "call":
        item.outcome_of_call = report.outcome  # type: ignore[attr-defined]
    return report
