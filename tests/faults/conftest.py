"""The groups for the rows of the matrix, and what is kept of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.faults.harness import FAKE, HERE, Group, write_model
from tests.faults.table import Result, save
from tests.lab import images
from tests.lab.fixtures import Stack
from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image
from tools.model import NAME, ensure_model

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from tests.lab.lab import Lab

RESULTS: list[Result] = []


@pytest.fixture(scope="session")
def fault_lab(lab: Lab) -> Lab:
    """Three hosts with the engine's image."""
    if images.image_id(lab.root / "images/docker", TAG) is not None:
        lab.share_image(TAG)  # an image that an earlier run left is good enough: what is tested is on top of it
    else:
        with docker_here() as docker:
            ensure_engine_image()
            lab.load_image(TAG, source=[docker.client])
    return lab


def place(lab: Lab, folder: Path, spec: str, *, fake: bool) -> Group:
    """Bring the generated folders of a spec to the hosts and build their images; nothing is started."""
    text = (HERE / spec).read_text().replace("10.77.0.", lab.host(1).address.rpartition(".")[0] + ".")
    (folder / "spec.yaml").write_text(text)
    out = folder / "generated"
    command = [sys.executable, "-m", "gen_stack", str(folder / "spec.yaml"), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    nodes = []
    for number in range(1, len(list(out.glob("lab*"))) + 1):
        host = lab.host(number)
        host.mkdir("/srv/fake")
        if fake:
            shutil.copy(HERE / "compose.override.yaml", out / f"lab{number}" / "compose.override.yaml")
        nodes.append(Stack(host, host.put(out / f"lab{number}", f"{folder.name}-lab{number}")))
    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(lambda node: node.compose("build"), nodes))
    return Group(lab, nodes, (out / "lab1/secrets/group_token").read_text().strip())


@pytest.fixture(scope="session")
def placed(fault_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Group:
    """The group of the fake engine, on its hosts, not started."""
    folder = tmp_path_factory.mktemp("faults")
    model = write_model(folder / "small")
    engine = shutil.copytree(FAKE, folder / "fake", ignore=shutil.ignore_patterns("__pycache__", "*.md"))
    for number in fault_lab.numbers():
        fault_lab.host(number).place(model, "/srv/models/small")
        fault_lab.host(number).place(engine, "/srv/fake-engine")
    return place(fault_lab, folder, "spec.yaml", fake=True)


@pytest.fixture
def group(placed: Group) -> Iterator[Group]:
    """The group with an empty state, not started; everything is repaired and taken away afterwards."""
    placed.down()
    try:
        yield placed
    finally:
        placed.down()


@pytest.fixture(scope="session")
def real_placed(fault_lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """The group of the real engine and the real model; one row finds it as the row before has left it."""
    with docker_here():
        model = ensure_model(tmp_path_factory.mktemp("models"))
    for number in fault_lab.numbers():
        if not fault_lab.host(number).path(f"/srv/models/{NAME}").exists():
            fault_lab.host(number).place(model, f"/srv/models/{NAME}")
    group = place(fault_lab, tmp_path_factory.mktemp("real"), "real.yaml", fake=False)
    group.model = f"/srv/models/{NAME}"
    try:
        yield group
    finally:
        group.down()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Iterator[Result]:
    """The row's line of the table."""
    result = Result(request.node.callspec.id, load=os.getloadavg()[0])
    RESULTS.append(result)
    yield result
    result.passed = getattr(request.node, "outcome_of_call", None) == "passed"


def pytest_sessionfinish() -> None:
    """Keep what was seen (see table.py)."""
    if RESULTS:
        save(RESULTS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the fixture of the table know how its test ended."""
    report = yield
    if report.when == "call":
        item.outcome_of_call = report.outcome  # type: ignore[attr-defined]
    return report
