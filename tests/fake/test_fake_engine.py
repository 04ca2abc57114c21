"""What is the fake engine's own: its command line and its switches. What it shares with vLLM is in test_conformance."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.asking import http, soon
from tests.fake.conftest import COMMAND, FakeGroup, tree
from tests.fake.fakevllm import cli

pytestmark = pytest.mark.slow


def test_flags_are_read_in_every_spelling_and_unknown_ones_ignored() -> None:
    words = "M --nnodes 3 -r=2 --master_port=1 --headless --max-model-len 512 --served-model-name a b --enforce-eager"
    found = cli.parse(words.split())
    assert (found.model, found.nnodes, found.rank, found.master_port) == ("M", 3, 2, 1)
    assert found.headless
    assert found.served == ["a", "b"]
    assert cli.parse(["--enforce-eager", "M", "-pp", "2"]).kind == "PP"


def test_version_is_the_pinned_one() -> None:
    assert subprocess.run([COMMAND, "--version"], capture_output=True, text=True, check=True).stdout == "0.32.0\n"


def test_a_start_fails_as_often_as_asked(fake: FakeGroup) -> None:
    (fake.switches(0) / "fail-start").write_text("1")
    fake.start(0)
    assert fake.status(0) == 1
    assert "ValueError: the switch fail-start is set" in fake.log(0)
    fake.start_all()


def test_a_rank_that_dies_while_loading_ends_its_node_with_1(fake: FakeGroup) -> None:
    (fake.switches(1) / "die-loading").write_text("always")
    fake.start(0)
    fake.start(1)
    assert fake.status(1) == 1
    assert "the switch die-loading is set" in fake.log(1)
    assert fake.status(0) == 1  # gloo says so at the next collective


def test_the_first_process_ends_with_any_code_at_any_time(fake: FakeGroup) -> None:
    fake.start_all()
    (fake.switches(0) / "exit").write_text("7")
    assert fake.status(0) == 7
    assert not (fake.switches(0) / "exit").exists()


def test_a_stalled_rank_holds_every_request_until_it_is_released(fake: FakeGroup) -> None:
    fake.start_all()
    stall = fake.switches(1) / "stall"
    stall.touch()
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(fake.ask()[0]))
    asking.start()
    asking.join(1)
    assert asking.is_alive()
    assert fake.metric("vllm:num_requests_running") == 0  # no step has ended, so nothing has moved
    stall.unlink()
    asking.join(5)
    assert answers == [200]


def test_the_api_can_be_muted(fake: FakeGroup) -> None:
    fake.start_all()
    mute = fake.switches(0) / "mute"
    mute.touch()
    assert http(f"{fake.url}/metrics", timeout=0.5)[0] == 0
    mute.unlink()
    assert http(f"{fake.url}/metrics")[0] == 200


def test_more_requests_than_slots_wait(fake: FakeGroup) -> None:
    fake.start_all("--max-num-seqs=1")
    asking = [threading.Thread(target=fake.ask, args=(40,)) for _ in range(3)]
    for one in asking:
        one.start()
    assert soon(lambda: fake.metric("vllm:num_requests_waiting") == 2)
    assert fake.metric("vllm:num_requests_running") == 1
    for one in asking:
        one.join()
    assert fake.metric("vllm:num_requests_waiting") == 0


def test_a_client_that_leaves_frees_its_slot(fake: FakeGroup) -> None:
    fake.start_all("--max-num-seqs=1")
    assert fake.ask(tokens=100_000, timeout=0.5)[0] == 0
    assert soon(lambda: fake.ask(timeout=2)[0] == 200)


def test_streaming_brings_a_token_at_a_time(fake: FakeGroup) -> None:
    fake.start_all()
    text = fake.ask(stream=True)[1]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["text"] for event in events] == [" fake1", " fake2", " fake3"]
    assert text.rstrip().endswith("data: [DONE]")


def test_a_worker_leaves_an_orphan_behind_when_asked(fake: FakeGroup) -> None:
    (fake.switches(0) / "orphan").touch()
    fake.nnodes = 1
    fake.start_all()
    known = {fake.find(0, ""), *tree(fake.find(0, ""))}
    assert len(set(fake.members()) - known) == 1


def test_an_idle_engine_takes_no_time(fake: FakeGroup) -> None:
    fake.start_all()
    head = fake.find(0, "")

    def ticks() -> int:
        fields = Path(f"/proc/{head}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(1)
    assert (ticks() - before) / os.sysconf("SC_CLK_TCK") < 0.05
