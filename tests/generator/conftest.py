from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.generator.helpers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _processes_find_gen_stack() -> Iterator[None]:
    """Let `python -m gen_stack` find what these tests import, installed or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "generator"), prepend=os.pathsep)
        yield
