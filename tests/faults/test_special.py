"""The rows of faults.yaml that take steps of their own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml

from tests.asking import soon
from tests.faults.actions import ACTIONS
from tests.faults.harness import API, CONTROL, MASTER
from tests.faults.rows import one, several
from tests.faults.steps import START_S

if TYPE_CHECKING:
    from tests.faults.harness import Group
    from tests.faults.table import Result

pytestmark = [pytest.mark.lab, pytest.mark.faults, pytest.mark.timeout(420)]
Row = dict[str, Any]


def ready_again(group: Group, record: Result, seconds: float = START_S) -> None:
    """Wait for the group and ask it."""
    began = time.monotonic()
    assert soon(group.ready, seconds), group.story()
    assert group.ask() == "length"
    record.again = time.monotonic() - began


def member(group: Group, rank: int) -> dict[str, Any]:
    """A rank in `/status`."""
    members = group.status().get("members") or []
    return next((one for one in members if one["rank"] == rank), {})


@several("worker-dies-loading", "head-dies-loading", "worker-fails-then-works", "head-fails-then-works")
def test_a_start_that_fails_some_times_is_tried_again(row: Row, group: Group, record: Result) -> None:
    word, argument = row["do"]
    ACTIONS[word](group, row["rank"], argument)
    [times] = argument.values()
    group.up()
    ready_again(group, record, 150)
    status = group.status()
    assert status["failures"] == times
    fault = status["last_fault"]
    assert (fault["kind"], fault["rank"]) == ("engine", row["rank"]), fault
    assert "the switch" in "\n".join(fault["log"])
    record.said = fault["reason"]


@one("rank-never-comes")
def test_a_missing_rank_is_named_and_no_failure(row: Row, group: Group, record: Result) -> None:
    for rank in (1, 0):
        group.nodes[rank].up()
    assert soon(lambda: member(group, 1).get("state") == "waiting", 30), group.story()
    time.sleep(8)
    status = group.status()
    assert (status["phase"], status["failures"], status["epoch"]) == ("forming", 0, 0)
    assert member(group, 2)["state"] == "missing"
    record.said = status["sentence"]
    assert "lab3" in record.said or "rank 2" in record.said
    group.nodes[2].up()
    ready_again(group, record)


@one("head-lost-workers-wait")
def test_workers_wait_for_a_head_that_comes_back(row: Row, group: Group, record: Result) -> None:
    for rank in (1, 0):
        group.nodes[rank].up()
    assert soon(lambda: member(group, 1).get("state") == "waiting", 30), group.story()
    undo = ACTIONS["docker"](group, 0, "kill")
    time.sleep(8)
    assert undo is not None
    undo()
    group.nodes[2].up()
    ready_again(group, record)
    assert group.status()["failures"] == 0


def edit(group: Group, rank: int, **variables: str) -> str:
    """Change a node's variables in its Compose file; returns the file as it was."""
    path = group.host(rank).path(group.nodes[rank].folder) / "compose.yaml"
    before = path.read_text()
    data = yaml.safe_load(before)
    data["services"]["engine"]["environment"].update(variables)
    path.write_text(json.dumps(data))
    return before


def restore(group: Group, rank: int, text: str) -> None:
    """Write a node's Compose file as it was."""
    (group.host(rank).path(group.nodes[rank].folder) / "compose.yaml").write_text(text)


def refusals(group: Group, rank: int, value: str) -> list[str]:
    """Lines of a rank about its refusal that name what is different."""
    return [line for line in group.said(rank, "1m").splitlines() if "refused" in line and value in line]


@several("older-plan", "another-stack")
def test_a_stranger_is_refused_and_told_why(row: Row, group: Group, record: Result) -> None:
    changed = {"older-plan": ("GEN_STACK_DIGEST", "0123456789abcdef"), "another-stack": ("GEN_STACK_GROUP", "other")}
    name, value = changed[row["id"]]
    before = edit(group, row["rank"], **{name: value})
    try:
        group.up()
        assert soon(lambda: bool(refusals(group, row["rank"], value)), 30), group.story()
        record.said = refusals(group, row["rank"], value)[0]
        assert soon(lambda: group.status().get("failures") == 0, 10)
        assert not group.ready()
    finally:
        restore(group, row["rank"], before)
    group.nodes[row["rank"]].up()
    ready_again(group, record)


@one("another-token")
def test_another_token_is_refused(row: Row, group: Group, record: Result) -> None:
    token = group.host(1).path(group.nodes[1].folder) / "secrets/group_token"
    right = token.read_text()
    token.write_text("b" * 64)
    try:
        group.up()
        assert soon(lambda: "token" in group.said(1, "1m"), 30), group.story()
        [record.said, *_] = [line for line in group.said(1, "1m").splitlines() if "token" in line]
        assert "b" * 64 not in group.story()
        assert right.strip() not in group.story()
        assert not group.ready()
    finally:
        token.write_text(right)
    group.nodes[1].compose("up", "-d", "--force-recreate")
    ready_again(group, record)


@one("another-engine-version")
def test_another_engine_version_is_refused(row: Row, group: Group, record: Result) -> None:
    folder = group.host(1).mkdir("/srv/fake/site/vllm-0.33.0.dist-info")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0+cpu\n")
    before = edit(group, 1, PYTHONPATH="/srv/fake/site")
    try:
        group.up()
        assert soon(lambda: "0.33.0" in group.said(1, "1m"), 30), group.story()
        [record.said, *_] = [line for line in group.said(1, "1m").splitlines() if "0.33.0" in line]
        assert not group.ready()
    finally:
        restore(group, 1, before)
    group.nodes[1].up()
    ready_again(group, record)


@one("same-rank-twice")
def test_a_rank_that_another_address_holds_is_refused(row: Row, group: Group, record: Result) -> None:
    before = edit(group, 2, NODE_RANK="1")
    try:
        group.nodes[0].up()
        group.nodes[1].up()
        assert soon(lambda: member(group, 1).get("state") == "waiting", 30), group.story()
        group.nodes[2].up()
        address = group.host(1).address
        assert soon(lambda: f"{address}" in last_refusal(group, 2), 30), group.story()
        record.said = last_refusal(group, 2)
    finally:
        restore(group, 2, before)
    group.nodes[2].up()
    ready_again(group, record)


def last_refusal(group: Group, rank: int) -> str:
    """The last line of a rank that speaks of the rank being held."""
    lines = [line for line in group.said(rank, "1m").splitlines() if "rank 1" in line]
    return lines[-1] if lines else ""


@several("control-port-taken", "api-port-taken", "master-port-taken")
def test_a_port_that_is_taken_is_named_or_avoided(row: Row, group: Group, record: Result) -> None:
    undo = ACTIONS["take_port"](group, 0, row["do"][1])
    assert undo is not None
    try:
        group.up()
        if row["do"][1] == "master":
            ready_again(group, record)
            lines = group.host(0).sh(["ss", "-Htnl"], user=None).stdout
            assert any(f":{port} " in lines for port in range(MASTER + 1, MASTER + 16)), lines
            return
        words = {"control": f"control port {CONTROL} cannot be opened", "api": f"port {API} is taken"}[row["do"][1]]
        assert soon(lambda: words in group.said(0, "1m"), 30), group.story()
        [record.said, *_] = [line for line in group.said(0, "1m").splitlines() if words in line]
        assert "something else, outside this container" in record.said
        assert not group.ready()
    finally:
        undo()
    ready_again(group, record, 150)


@one("address-comes-late")
def test_an_address_that_comes_late_is_waited_for(row: Row, group: Group, record: Result) -> None:
    host = group.host(1)
    address = f"{host.address}/24"
    host.sh(["ip", "addr", "del", address, "dev", "eth0"], user=None)
    try:
        group.up()
        time.sleep(30)
        assert not group.ready()
    finally:
        host.sh(["ip", "addr", "add", address, "dev", "eth0"], user=None)
    ready_again(group, record)


@one("stop-while-starting")
def test_a_stop_while_starting_is_quick_and_a_start_heals(row: Row, group: Group, record: Result) -> None:
    for rank in range(3):
        group.switch(rank, "slow-load", 30)
    group.up()
    assert soon(lambda: group.status().get("phase") == "starting", 40), group.story()
    began = time.monotonic()
    group.nodes[0].compose("stop")
    assert time.monotonic() - began < 20
    for rank in range(3):
        group.clear(rank, "slow-load")
        assert soon(lambda rank=rank: not group.pids(rank, "VLLM::"), 15), group.processes(rank)  # type: ignore[misc]
    group.nodes[0].up()
    ready_again(group, record)


@several("drain-head", "drain-worker")
def test_running_requests_are_finished_before_a_stop(row: Row, group: Group, record: Result) -> None:
    group.up()
    assert soon(group.ready, START_S), group.story()
    answers: list[str | None] = []
    asking = threading.Thread(target=lambda: answers.append(group.ask(tokens=250, timeout=60)))
    asking.start()
    time.sleep(1)
    stopping = threading.Thread(target=lambda: group.nodes[row["rank"]].compose("stop"))
    began = time.monotonic()
    stopping.start()
    assert soon(lambda: not group.ready(), 3, 0.05)
    record.detected = time.monotonic() - began
    asking.join()
    stopping.join()
    assert answers == ["length"], group.story()
    for rank in range(3):
        assert soon(lambda rank=rank: not group.pids(rank, "VLLM::") or group.ready(), 20)  # type: ignore[misc]
    group.nodes[row["rank"]].up()
    ready_again(group, record)
    assert group.status()["failures"] == 0


@one("fault-while-draining")
def test_a_fault_ends_a_drain(row: Row, group: Group, record: Result) -> None:
    group.up()
    assert soon(group.ready, START_S), group.story()
    threading.Thread(target=lambda: group.ask(tokens=2000, timeout=60), daemon=True).start()
    time.sleep(1)
    began = time.monotonic()
    stopping = threading.Thread(target=lambda: group.nodes[0].compose("stop"))
    stopping.start()
    assert soon(lambda: not group.ready(), 3, 0.05)
    group.kill(row["rank"], "VLLM::Worker")
    stopping.join()
    assert time.monotonic() - began < 18, "the drain of 20 s was not waited for"
    group.nodes[0].up()
    ready_again(group, record)


@one("orphan-of-the-engine")
def test_a_process_in_a_session_of_its_own_is_killed_with_its_engine(row: Row, group: Group, record: Result) -> None:
    group.switch(1, "orphan")
    group.up()
    assert soon(group.ready, START_S), group.story()
    assert len(group.pids(1, "VLLM::Worker")) == 2
    before = set(group.pids(1, "VLLM::Worker"))
    group.clear(1, "orphan")
    group.kill(0, "VLLM::EngineCore")
    assert soon(lambda: not before & set(group.pids(1, "VLLM::Worker")), 10), group.processes(1)
    ready_again(group, record)


@one("engine-ignores-sigterm")
def test_an_engine_that_ignores_sigterm_is_killed(row: Row, group: Group, record: Result) -> None:
    group.switch(0, "ignore-term")
    group.up()
    assert soon(group.ready, START_S), group.story()
    began = time.monotonic()
    group.nodes[0].compose("stop")
    assert time.monotonic() - began < 45
    assert not group.pids(0, "VLLM::")
    group.clear(0, "ignore-term")
    group.nodes[0].up()
    ready_again(group, record)


@one("worker-node-killed-while-starting")
def test_a_node_that_dies_while_starting_uses_the_budget_up(row: Row, group: Group, record: Result) -> None:
    for rank in range(3):
        group.switch(rank, "slow-load", 30)
    group.up()
    for _ in range(4):  # GEN_STACK_MAX_RESTARTS is 3
        assert soon(lambda: group.status().get("phase") == "starting", 60), group.story()
        assert soon(lambda: bool(group.pids(1, "VLLM::Worker")), 20)
        undo = ACTIONS["docker"](group, 1, "kill")
        assert soon(lambda: group.status().get("phase") != "starting", 5)
        assert undo is not None
        undo()
    assert soon(lambda: group.status().get("phase") == "down", 20), group.story()
    status = group.status()
    assert (status["last_fault"]["kind"], status["last_fault"]["rank"]) == ("lost", 1)
    record.said = status["sentence"]
    for rank in range(3):
        group.clear(rank, "slow-load")
    group.nodes[0].compose("restart")
    ready_again(group, record, 60 + START_S)


@several("all-stopped-head-first", "all-stopped-workers-first", "all-down-head-last", "all-restarted-at-once")
def test_any_order_of_stops_and_starts_ends_ready(row: Row, group: Group, record: Result) -> None:
    group.up()
    assert soon(group.ready, START_S), group.story()
    word, orders = row["do"]
    if word == "restart":
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda node: node.compose("restart"), group.nodes))
    else:
        for rank in orders["stop"]:
            group.nodes[rank].compose(word)
            assert not group.pids(rank, "VLLM::")
        for rank in orders["start"]:
            group.nodes[rank].up()
    ready_again(group, record)
    assert group.status()["failures"] == 0


@one("newer-protocol")
def test_a_newer_protocol_is_refused_and_both_versions_are_named(row: Row, group: Group, record: Result) -> None:
    group.up()
    assert soon(group.ready, START_S), group.story()
    assert group.host(1).inside(lambda: asyncio.run(speak_version(group, 2))) == {"refused": "protocol"}
    assert soon(lambda: "speaks version 2" in group.said(0, "1m"), 5), group.said(0, "1m")
    [record.said, *_] = [line for line in group.said(0, "1m").splitlines() if "speaks version 2" in line]
    assert "speaks version 1" in record.said
    assert group.ready()


async def speak_version(group: Group, version: int) -> Any:
    """Join as a node of another version; what the head answers."""
    url = f"http://{group.host(0).address}:{CONTROL}/control"
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
        challenge = await socket.receive_json()
        assert challenge["protocol"] == 1
        join = {"protocol": version, "rank": 1, "what-this-version-does-not-know": True}
        await socket.send_json({"join": join, "nonce": "0" * 32, "mac": ""})
        return await socket.receive_json()


@one("full-disk-of-the-state")
def test_a_full_disk_is_said_and_the_group_heals_all_the_same(row: Row, group: Group, record: Result) -> None:
    group.up()
    assert soon(group.ready, START_S), group.story()
    ACTIONS["full_disk"](group, 0, row["do"][1])
    group.kill(1, "VLLM::Worker")
    assert soon(lambda: not group.ready(), 2, 0.05)
    ready_again(group, record)
    assert soon(lambda: "cannot be saved" in group.said(0, "1m"), 5), group.said(0, "1m")
    [record.said, *_] = [line for line in group.said(0, "1m").splitlines() if "cannot be saved" in line]
    assert "No space left" in record.said
