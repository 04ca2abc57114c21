"""The fake engine behaves as the real one does, wherever the supervisor looks: one suite for both.

`-m slow` is the fake one, in half a minute; the real one (marks lab and faults) needs a minute a test.
"""

from __future__ import annotations

import json
import threading
from signal import SIGKILL, SIGSTOP, SIGTERM
from typing import TYPE_CHECKING

import pytest

from tests.asking import http, soon
from tests.fake.conftest import FakeGroup
from tests.fake.real import RealGroup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REAL = pytest.param("real", marks=[pytest.mark.lab, pytest.mark.faults, pytest.mark.timeout(900)])


@pytest.fixture(params=[pytest.param("fake", marks=pytest.mark.slow), REAL])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeGroup | RealGroup]:
    """A group, not started."""
    made = FakeGroup(tmp_path) if request.param == "fake" else RealGroup(request.getfixturevalue("real_lab"))
    made.end()  # what a run that was killed has left
    try:
        yield made
    finally:
        made.end()


def finish_reason(answer: tuple[int, str]) -> str:
    assert answer[0] == 200, answer
    return str(json.loads(answer[1])["choices"][0]["finish_reason"])


def test_nobody_answers_before_every_rank_is_there_and_counters_move_by_steps(group: FakeGroup) -> None:
    group.start(0)
    assert not soon(lambda: http(f"{group.url}/health")[0] != 0, 1.5)
    for rank in range(1, group.nnodes):
        group.start(rank)
    assert soon(lambda: http(f"{group.url}/health")[0] == 200, group.ready_s), group.log(0)
    assert group.metric("vllm:generation_tokens_total") == 0
    assert finish_reason(group.ask(tokens=3)) == "length"
    assert group.metric("vllm:generation_tokens_total") == 3
    assert group.metric("vllm:prompt_tokens_total") > 0
    assert group.metric("vllm:iteration_tokens_total_count") >= 3
    assert group.metric("vllm:request_success_total") == 1
    assert group.metric("vllm:num_requests_running") == group.metric("vllm:num_requests_waiting") == 0
    assert [group.connections(rank) for rank in range(group.nnodes)] == [1] * group.nnodes


def test_a_remote_worker_that_dies_is_noticed_by_the_next_request_only(group: FakeGroup) -> None:
    group.start_all()
    group.signal(1, "VLLM::Worker", SIGKILL)
    assert group.status(1) == 0, "a headless parent ends with 0 when its worker dies"
    assert not soon(lambda: http(f"{group.url}/health")[0] != 200, 2), "/health sees no remote rank"
    assert group.ask()[0] in (500, 0)
    assert group.status(0) == 0


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker"])
def test_the_head_ends_with_0_when_its_own_engine_dies(group: FakeGroup, title: str) -> None:
    group.start_all()
    group.signal(0, title, SIGKILL)
    assert group.status(0) == 0
    assert http(f"{group.url}/health")[0] == 0


def test_a_headless_node_never_notices_the_heads_death(group: FakeGroup) -> None:
    group.start_all()
    for title in ("", "VLLM::EngineCore", "VLLM::Worker"):
        if group.alive(0, title):
            group.signal(0, title, SIGKILL)
    assert group.status(1, 3) is None


def test_a_frozen_worker_hangs_a_request_and_health_stays_200(group: FakeGroup) -> None:
    group.start_all()
    before = group.metric("vllm:generation_tokens_total")
    group.signal(1, "VLLM::Worker", SIGSTOP)
    assert group.ask(timeout=3)[0] == 0
    assert http(f"{group.url}/health")[0] == 200
    assert group.metric("vllm:generation_tokens_total") == before
    assert group.metric("vllm:num_requests_running") == 0, "gauges come from finished steps, so they are at rest"


def test_sigterm_drains_and_serves_no_newcomer(group: FakeGroup) -> None:
    group.start_all("--shutdown-timeout=60")
    answers: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: answers.append(group.ask(tokens=200, timeout=90)))
    asking.start()
    assert soon(lambda: group.metric("vllm:num_requests_running") == 1)
    group.signal(0, "", SIGTERM)
    assert soon(lambda: group.ask()[0] == 500, 5), "a text, which would have to be tokenised"
    assert http(f"{group.url}/health")[0] == 200
    asking.join()
    assert finish_reason(answers[0]) == "length"
    assert group.status(0) == 0


def test_sigterm_without_a_drain_cuts_requests_off(group: FakeGroup) -> None:
    group.start_all()
    answers: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: answers.append(group.ask(tokens=400, timeout=90)))
    asking.start()
    assert soon(lambda: group.metric("vllm:num_requests_running") == 1)
    group.signal(0, "", SIGTERM)
    asking.join()
    assert answers[0][0] != 200 or finish_reason(answers[0]) == "abort"
    assert group.status(0) == 0


def test_sigterm_to_a_headless_node_ends_it_with_0_after_a_while(group: FakeGroup) -> None:
    group.start_all()
    group.signal(1, "", SIGTERM)
    assert group.status(1) == 0


def test_sigterm_while_starting_ends_the_head_with_130(group: FakeGroup) -> None:
    group.start(0)
    assert soon(lambda: group.alive(0, "VLLM::Worker"), 60)
    group.signal(0, "", SIGTERM)
    assert group.status(0) == 130


def test_a_headless_node_that_cannot_meet_the_others_ends_with_1(group: FakeGroup) -> None:
    group.nnodes = 3
    group.start(0)
    group.start(1)
    assert soon(lambda: group.connections(1) == 1, 60)
    for title in ("VLLM::Worker", "VLLM::EngineCore", ""):
        if group.alive(0, title):
            group.signal(0, title, SIGKILL)
    assert group.status(1) == 1
