"""Real supervisors, real sockets, real processes, a fake engine: a group on this machine's loopback."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from tests.asking import http
from tests.node.conftest import wait_until
from tests.node.local_group import TOKEN, LocalGroup, cleaned_up, local_group

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.slow


def test_three_nodes_become_ready_answer_and_stop_without_a_trace(tmp_path: Path) -> None:
    with local_group(tmp_path) as group:
        group.wait_ready()
        assert group.answer()
        assert [member["state"] for member in group.status()["members"]] == ["running"] * 3
        assert http(f"{group.control}/status")[0] == 401
        wait_until(lambda: group.nodes[0].health()[0] == 0, "healthy")
        assert group.nodes[0].health()[1] == "healthy: head: ready\n"
        assert group.nodes[1].health() == (0, "healthy: worker: epoch 1: the engine is running\n")
        assert b"gen_stack_group_ready 1" in http(f"{group.control}/metrics", token=TOKEN)[1].encode()
        assert [node.stop() for node in group.nodes] == [0, 0, 0]
        assert [node.node.living() for node in group.nodes] == [[], [], []]
        assert TOKEN not in group.logs()


def test_a_killed_worker_process_is_noticed_at_once_and_the_group_is_ready_again(tmp_path: Path) -> None:
    with local_group(tmp_path) as group:
        group.wait_ready()
        group.nodes[2].kill_engine_process("VLLM::Worker")
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
        group.nodes[0].kill_engine_process("VLLM::EngineCore")
        wait_until(lambda: group.status()["epoch"] == 2 and group.ready(), "ready again")
        assert group.answer()
        assert group.nodes[0].stop() == 0


def test_strangers_are_refused_by_name_and_unhealthy(tmp_path: Path) -> None:
    with cleaned_up(LocalGroup(tmp_path)) as group:
        head, other_token, other_plan = group.nodes
        (tmp_path / "other").write_text("a-token-of-another-group\n")
        other_token.variables["GEN_STACK_TOKEN_FILE"] = str(tmp_path / "other")
        other_plan.variables["GEN_STACK_DIGEST"] = "sha256:2"
        group.start()
        plan = (
            f"rank 2 ({socket.gethostname()}, 127.0.0.13) has plan sha256:2, the head has none; bring both to the same"
        )
        wait_until(lambda: head.says(f"refused: {plan}\n"), "the head names the plan")
        token = "(rank 1) and the head at 127.0.0.11 (rank 0) do not have the same group token\n"
        wait_until(lambda: head.says(token), "the head names the token")
        wait_until(lambda: other_token.says("the head has refused this node: "), "its own log")
        assert other_plan.says(f"the head has refused this node: {plan}; trying again\n")
        wait_until(lambda: "refused by the head: " in other_token.health()[1], "health")
        wait_until(lambda: f"refused by the head: {plan}" in other_plan.health()[1], "health")
        assert [node.health()[0] for node in group.nodes] == [1, 1, 1]
        assert {member["state"] for member in group.status()["members"][1:]} == {"missing"}
        assert "a-token" not in group.logs()
