"""Faults of whole nodes, and stops, on this machine's loopback: what takes too long for `make check`."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.node.conftest import wait_until
from tests.node.local_group import LocalGroup, cleaned_up, local_group

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.lab

TOKENS = 25


@dataclass
class Streaming:
    """A request that runs meanwhile, and what came back."""

    group: LocalGroup
    events: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self.events, "the first token")

    def _run(self) -> None:
        body = {"model": "/", "prompt": "Hi", "max_tokens": TOKENS, "stream": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.group.api}/v1/completions", json.dumps(body).encode(), headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=30) as response:
            self.events += [line.decode().strip() for line in response if line.strip()]

    def is_complete(self) -> bool:
        self._thread.join(30)
        *tokens, last = self.events
        finished = json.loads(tokens[-1].removeprefix("data: "))["choices"][0]["finish_reason"]
        return (len(tokens), finished, last) == (TOKENS, "length", "data: [DONE]")


def ready_in_epoch(group: LocalGroup, epoch: int) -> bool:
    return group.ready() and group.status()["epoch"] == epoch


def test_a_worker_whose_supervisor_is_killed_leaves_no_engine_and_comes_back(tmp_path: Path) -> None:
    with local_group(tmp_path) as group:
        group.wait_ready()
        worker = group.nodes[1]
        worker.kill_supervisor()
        wait_until(lambda: not worker.node.living(), "the guard ends the engine")
        wait_until(lambda: not group.ready(), "detection")
        worker.start()
        wait_until(lambda: ready_in_epoch(group, 2), "ready again")
        status = group.status()
        assert (status["last_fault"]["kind"], status["last_fault"]["rank"]) == ("lost", 1)
        assert status["failures"] == 0
        assert group.answer()


def test_a_head_whose_supervisor_is_killed_comes_back_to_the_same_workers(tmp_path: Path) -> None:
    with local_group(tmp_path) as group:
        group.wait_ready()
        before = group.status()["instance"]
        head, *workers = group.nodes
        head.kill_supervisor()
        wait_until(lambda: not head.node.living(), "the guard ends the engine")
        for worker in workers:
            wait_until(lambda: not worker.titled("VLLM::"), "the workers end theirs")  # noqa: B023
            assert worker.says("the connection to the head is lost")
            assert worker.says("the engine is killed")
        head.start()
        group.wait_ready()
        assert group.status()["instance"] != before
        assert group.status()["failures"] == 0
        assert group.answer()


def test_a_node_that_stands_still_is_given_up_and_ends_its_engine_when_it_goes_on(tmp_path: Path) -> None:
    with local_group(tmp_path, GEN_STACK_NODE_TIMEOUT="2s") as group:
        group.wait_ready()
        frozen = group.nodes[2]
        old = frozen.titled("VLLM::Worker")
        frozen.signal(signal.SIGSTOP)
        begin = time.monotonic()
        wait_until(lambda: not group.ready(), "detection")
        assert 1.0 < time.monotonic() - begin < 4.0
        assert "silent for" in group.status()["last_fault"]["reason"]
        wait_until(lambda: group.status()["members"][1]["state"] == "waiting", "the others wait for it")
        frozen.signal(signal.SIGCONT)
        wait_until(lambda: ready_in_epoch(group, 2), "ready again")
        assert frozen.titled("VLLM::Worker") != old
        assert group.status()["failures"] == 0
        assert group.answer()
        assert frozen.stop() == 0  # a freeze upsets Python's sigtimedwait, so stop signals are taken without it


@pytest.mark.parametrize("rank", [0, 2])
def test_a_stop_lets_running_requests_finish(tmp_path: Path, rank: int) -> None:
    with local_group(tmp_path, FAKE_STEP_S="0.1") as group:
        group.wait_ready()
        request = Streaming(group)
        leaver = group.nodes[rank]
        leaver.ask_to_stop()
        begin = time.monotonic()
        wait_until(lambda: not group.ready(), "not ready")
        assert time.monotonic() - begin < 1.0
        assert group.status()["phase"] == "draining"
        assert request.is_complete()
        assert leaver.status() == 0
        assert not leaver.node.living()
        assert group.nodes[0].says("drained\n")
        leaver.start()
        group.wait_ready()
        assert group.answer()


def test_an_engine_that_fails_twice_at_its_start_works_the_third_time(tmp_path: Path) -> None:
    with cleaned_up(LocalGroup(tmp_path)) as group:
        group.nodes[1].switch("fail-start", "2")
        group.start()
        group.wait_ready()
        status = group.status()
        assert (status["epoch"], status["failures"], status["restarts"]) == (3, 2, {"engine": 2})
        assert status["last_fault"]["rank"] == 1
        assert "ValueError: the switch fail-start is set" in "\n".join(status["last_fault"]["log"])
        assert group.answer()


def test_a_group_that_always_fails_stays_down_quietly_also_when_its_head_is_started_anew(tmp_path: Path) -> None:
    with cleaned_up(LocalGroup(tmp_path, 2, {"GEN_STACK_MAX_RESTARTS": "1"})) as group:
        head, worker = group.nodes
        worker.switch("fail-start", "always")
        group.start()
        wait_until(lambda: head.says("the group stays down"), "down")
        status = group.status()
        assert (status["phase"], status["epoch"], status["failures"]) == ("down", 2, 2)
        assert 290 < status["next_try_s"] <= 300
        wait_until(lambda: head.health()[1].startswith("unhealthy: head: down after 2 failures"), "the health file")
        before = group.logs()
        time.sleep(3)  # nothing can be waited for that does not come
        assert group.logs() == before
        head.kill_supervisor()
        head.start()
        wait_until(lambda: head.says("the group had failed 2 times when its head was last stopped"), "the saved state")
        wait_until(lambda: head.says("rank 1 (") and group.control_answers(), "both are there")
        status = group.status()
        assert (status["phase"], status["failures"]) == ("down", 2)
        assert status["last_fault"]["rank"] == 1


def test_taken_ports_are_named_and_waited_for_at_no_cost(tmp_path: Path) -> None:
    with cleaned_up(LocalGroup(tmp_path, 1)) as group, socket.socket() as control, socket.socket() as api:
        for number, sock in enumerate((control, api)):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.11", group.port + number))
            sock.listen()
        group.start()
        node = group.nodes[0]
        wait_until(lambda: node.says(f"the control port {group.port} cannot be opened (Address already in use"), "told")
        assert node.says(f" (process {os.getpid()}); end that, or set another GEN_STACK_CONTROL_PORT on every node\n")
        control.close()
        wait_until(lambda: node.says(f"the API's port {group.port + 1} is taken: "), "told")
        assert not node.titled("VLLM::")
        api.close()
        group.wait_ready()
        assert (group.status()["failures"], group.status()["last_fault"]) == (0, None)
        assert group.answer()
