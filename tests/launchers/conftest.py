"""What the launchers' tests share: their steps' table, and lab hosts with the engine's image and the model."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import pytest

from tests.lab import images
from tests.lab.fixtures import lab, pytest_runtest_makereport, stacks  # noqa: F401 - fixtures
from tests.launchers.table import Result, save
from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image
from tools.model import NAME, ensure_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.lab.lab import Lab

RESULTS: list[Result] = []


class Step(Protocol):
    """Opens a step: `with step("slurm", "scancel drains", real=True):`; what it raises fails it."""

    def __call__(self, target: str, words: str, *, real: bool) -> AbstractContextManager[Result]:
        """Begin a step, which ends with the block."""


@pytest.fixture
def step() -> Step:
    """Record steps for the table; `real` says that no stand-in took part."""

    @contextmanager
    def record(target: str, words: str, *, real: bool) -> Iterator[Result]:
        result = Result(target, words, real)
        RESULTS.append(result)
        began = time.monotonic()
        try:
            yield result
            result.passed = True
        finally:
            result.seconds = time.monotonic() - began

    return record


def pytest_sessionfinish() -> None:
    """Keep what was seen (see table.py)."""
    if RESULTS:
        save(RESULTS)


@pytest.fixture(scope="session")
def furnished(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Lab:  # noqa: F811 - pytest's way
    """Three hosts with the engine's image and the real model."""
    with docker_here() as docker:
        if images.image_id(lab.root / "images/docker", TAG) is not None:
            lab.share_image(TAG)  # one that an earlier run left is good enough: what is tested is on top of it
        else:
            ensure_engine_image()
            lab.load_image(TAG, source=[docker.client])
        model = ensure_model(tmp_path_factory.mktemp("models"))
    for number in lab.numbers():
        if not lab.host(number).path(f"/srv/models/{NAME}").exists():
            lab.host(number).place(model, f"/srv/models/{NAME}")
    return lab
