"""The tables of `make bench`, and what it starts by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from tools.bench.figures import Figure, all_below, below, replaced, spread, table
from tools.bench.leaks import Look
from tools.bench.real import interval
from tools.bench.real_stacks import by_hand
from tools.process import ToolError

if TYPE_CHECKING:
    from pathlib import Path

LOG = """\
stack-node[1/2]: worker of group bench: 10.1.0.12 on eth0, head 10.1.0.11:29500
stack-node[1/2]: added to the engine's flags: --nnodes=2 --node-rank=1 --headless
"""
COMPOSE = {
    "name": "bench-lab2",
    "services": {
        "engine": {
            "command": ["/srv/models/m", "--pipeline-parallel-size=2"],
            "environment": {"NNODES": "2", "NODE_ADDR": "10.1.0.12", "GEN_STACK_DRAIN": "60s", "OMP_NUM_THREADS": "1"},
            "labels": {"gen-stack.rank": "1"},
            "secrets": ["group_token"],
        }
    },
    "secrets": {"group_token": {"file": "./secrets/group_token"}},
}


def a_look(**changed: object) -> Look:
    same = dict.fromkeys(range(2), 10)
    usual: dict[str, object] = {
        "processes": same,
        "zombies": 0,
        "files": same,
        "threads": same,
        "memory": same,
        "sockets": 5,
        "half_closed": 0,
        "shared": frozenset({"before"}),
    }
    return Look(**{**usual, **changed})  # type: ignore[arg-type]


def test_a_row_says_whether_its_bound_was_kept() -> None:
    rows = [below("memory", 43.94, 50, "MB"), below("memory", 50, 50, "MB"), Figure("CPU", "1 %")]
    assert table(rows).splitlines()[2:] == [
        "| memory | 43.9 MB | under 50 MB, kept |",
        "| memory | 50.0 MB | under 50 MB, **missed** |",
        "| CPU | 1 % |  |",
    ]


def test_several_values_are_a_median_with_its_spread_and_the_worst_one_counts() -> None:
    assert spread([3.0, 1.0, 2.0]) == "2.00 s (median of 3; 1.00 to 3.00)"
    assert all_below("death", [0.1, 1.2], 1.0).kept is False
    assert all_below("death", [0.1, 0.2], 1.0).kept is True


def test_the_interval_is_of_students_t() -> None:
    assert interval([1.0, 1.0, 1.1, 0.9, 1.0]) == "1.000 ± 0.088 (95 %, 5 pairs)"
    assert interval([1.0]) == "1.000 (one pair: no interval)"


def test_a_section_of_the_page_is_replaced_and_what_others_wrote_stays() -> None:
    page = replaced("# Measurements\n\nBy hand.\n", "soak", "old")
    page = replaced(page, "members", "m")
    assert replaced(page, "soak", r"new \1") == page.replace("old", r"new \1")
    assert page.startswith("# Measurements\n\nBy hand.\n\n<!-- make bench: soak -->\nold\n")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"files": {0: 10, 1: 13}}, "rank 1: 13 open files, 10 at first"),
        ({"processes": {0: 9, 1: 10}}, "rank 0: 9 processes, 10 at first"),
        ({"zombies": 1}, "1 zombies"),
        ({"sockets": 8}, "8 sockets at the group's ports, 5 at first"),
        ({"half_closed": 2}, "2 sockets that were never closed here"),
        ({"shared": frozenset({"before", "psm_1"})}, "in /dev/shm: psm_1"),
    ],
)
def test_what_is_more_than_before_has_leaked(changed: dict[str, object], said: str) -> None:
    assert a_look(**changed).compared(a_look()) == [said]


def test_a_connection_that_is_just_being_made_is_no_leak() -> None:
    assert a_look(files={0: 12, 1: 8}, sockets=7, shared=frozenset()).compared(a_look()) == []


def test_by_hand_is_the_same_engine_without_the_entrypoint(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text(yaml.safe_dump(COMPOSE))
    made = yaml.safe_load((by_hand(tmp_path, LOG, tmp_path / "hand") / "compose.yaml").read_text())
    service = made["services"]["engine"]
    assert service["entrypoint"] == ["vllm", "serve"]
    assert service["command"][2:] == ["--nnodes=2", "--node-rank=1", "--headless"]
    assert service["environment"] == {
        "OMP_NUM_THREADS": "1",
        "VLLM_HOST_IP": "10.1.0.12",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_IB_DISABLE": "1",
    }
    assert "secrets" not in made
    assert not {"secrets", "labels"} & set(service)
    with pytest.raises(ToolError, match="which flags were added"):
        by_hand(tmp_path, "", tmp_path / "other")
