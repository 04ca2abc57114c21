"""Real supervisors, real sockets, real processes, a fake engine: a group on this machine's loopback."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from tests.node.conftest import wait_until
from tests.node.local_group import TOKEN, LocalGroup, http, local_group

if TYPE_CHECKING:
    from pathlib import Path


def kill_one(group: LocalGroup, rank: int, title: str) -> None:
    pid, *_ = group.nodes[rank].titled(title)
    os.kill(pid, signal.SIGKILL)


def test_three_nodes_become_ready_answer_and_stop_without_a_trace(tmp_path: Path) -> None:
    with local_group(tmp_path) as group:
        group.wait_ready()
        assert group.answer()
        assert [member["state"] for member in group.status()["members"]] == ["running"] * 3
        assert http(f"{group.control}/status")[0] == 401
        assert b"gen_stack_group_ready 1" in http(f"{group.control}/metrics", token=TOKEN)[1].encode()
        assert [node.stop() for node in group.nodes] == [0, 0, 0]
        assert [node.node.living() for node in group.nodes] == [[], [], []]
        assert TOKEN not in group.logs()


def test_a_killed_worker_process_is_noticed_at_once_and_the_group_is_ready_again(tmp_path: Path) -> None:
    with local_group(tmp_path) as group:
        group.wait_ready()
        kill_one(group, 2, "VLLM::Worker")
        begin = time.monotonic()
        wait_until(lambda: not group.ready(), "detection")
        assert time.monotonic() - begin < 1.0
        group.wait_ready()
        status = group.status()
        assert status["epoch"] == 2
        assert status["last_fault"]["rank"] == 2
        assert "VLLM::Worker" in status["last_fault"]["reason"]
        assert group.answer()


def test_a_group_of_one_is_supervised_too(tmp_path: Path) -> None:
    with local_group(tmp_path, 1) as group:
        group.wait_ready()
        kill_one(group, 0, "VLLM::EngineCore")
        wait_until(lambda: group.status()["epoch"] == 2 and group.ready(), "ready again")
        assert group.answer()
        assert group.nodes[0].stop() == 0
