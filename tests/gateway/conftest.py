"""The lab for `make gateway`: four hosts with the real engine's image and the real model, and the stacks on them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.asking import soon
from tests.gateway.shop import Shop, place
from tests.lab import images
from tests.lab.fixtures import Hosts, lab_session
from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image
from tools.model import NAME, ensure_model

if TYPE_CHECKING:
    from collections.abc import Iterator

START_S = 400.0


@pytest.fixture(scope="session")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """The stacks on four hosts of their own, not started; everything is gone afterwards."""
    with lab_session(Hosts(4)) as lab:
        with docker_here() as docker:
            model = ensure_model(tmp_path_factory.mktemp("models"))
            if images.image_id(lab.root / "images/docker", TAG) is None:
                ensure_engine_image()
                lab.load_image(TAG, source=[docker.client])
        lab.share_image(TAG)
        for number in lab.numbers():
            lab.host(number).place(model, f"/srv/models/{NAME}")
        shop = place(lab, tmp_path_factory.mktemp("shop"))
        try:
            yield shop
        finally:
            for node in shop.nodes:
                node.compose("down", "-v", "--timeout", "3", check=False)


@pytest.fixture
def shop(placed: Shop) -> Shop:
    """All of it, both groups ready."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda node: node.up(), placed.nodes))
    assert soon(lambda: all(placed.ready(group) for group in (0, 1)), START_S, 0.5), placed.story()
    return placed
