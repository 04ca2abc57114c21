from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from gen_stack.ports import Connection, connections, ports_json, ports_table
from gen_stack.render.nft import nft_files
from tests.generator.helpers import FOUR, ONE, TWO, plan_of
from tests.generator.test_cli import run

if TYPE_CHECKING:
    from pathlib import Path

GATEWAY = f"{FOUR}replicas: 2\ngateway: {{nodes: [a], port: 8080}}\n"


def table(text: str) -> list[list[str]]:
    """The rows of a table, cell by cell."""
    lines = ports_table(plan_of(text)).splitlines()
    return [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines if line[0] == " "]


def test_a_group_of_two() -> None:
    assert connections(plan_of(TWO)) == (
        Connection(None, ("a",), (8000, 8000), "the endpoint"),
        Connection(("b",), ("a",), (29600, 29600), "the group's control channel"),
        Connection(("b",), ("a",), (29500, 29515), "the engine's rendezvous: each start takes another of these"),
        Connection(("a", "b"), ("a", "b"), None, "the engine's queues and collectives"),
    )


def test_a_node_alone_has_its_endpoint_only() -> None:
    assert connections(plan_of(ONE)) == (Connection(None, ("a",), (8000, 8000), "the endpoint"),)


def test_the_ports_are_those_of_the_spec() -> None:
    text = f"{TWO}api: {{port: 9000}}\nnetwork: {{control_port: 9001, master_port: 9100}}\n"
    assert [one.ports for one in connections(plan_of(text))] == [(9000, 9000), (9001, 9001), (9100, 9115), None]


def test_data_parallel_ranks_meet_at_a_port_of_their_own() -> None:
    assert (29550, 29550) in [one.ports for one in connections(plan_of(f"{TWO}parallelism: {{data: 2}}\n"))]


def test_a_gateway_stands_between_the_clients_and_every_head() -> None:
    found = connections(plan_of(GATEWAY))
    assert [(one.targets, one.ports) for one in found if one.sources is None] == [(("a",), (8080, 8080))]
    by_gateway = [(one.targets, one.ports) for one in found if one.sources == ("a",)]
    assert by_gateway == [((head,), (port, port)) for head in ("a", "c") for port in (8000, 29600)]


def test_the_table() -> None:
    assert (
        ports_table(plan_of(TWO))
        == """\
t: who connects to whom, all of it TCP
  from     to             port         what
  clients  a (10.0.0.11)  8000         the endpoint
  b        a (10.0.0.11)  29600        the group's control channel
  b        a (10.0.0.11)  29500-29515  the engine's rendezvous: each start takes another of these
  a and b  each other     any          the engine's queues and collectives
Whoever reaches the engine's own ports can run programs on the nodes: they belong on a private network.
`--nft` writes rules that close them, and the control channel, to everybody but the nodes.
With RDMA, data also goes past the kernel (RoCE v2: UDP 4791), where no firewall of a host sees it.
"""
    )


def test_what_does_not_apply_is_not_in_the_table() -> None:
    assert "RDMA" not in ports_table(plan_of(f"{TWO}network: {{rdma: 'off'}}\n"))
    assert ports_table(plan_of(ONE)).count("\n") == 3


def test_the_table_says_where_the_endpoint_listens() -> None:
    rows = {bind: table(f"{TWO}api: {{bind: {bind}}}\n")[1][:2] for bind in ("0.0.0.0", "127.0.0.1", "192.168.7.7")}
    assert rows == {
        "0.0.0.0": ["clients", "a (10.0.0.11)"],
        "127.0.0.1": ["a itself", "a (127.0.0.1)"],
        "192.168.7.7": ["clients", "a (192.168.7.7)"],
    }


def test_many_nodes_are_counted_not_named() -> None:
    nodes = "".join(f"  - {{name: n{number}, address: 10.0.1.{number}, gpus: 8}}\n" for number in range(1, 200))
    rows = table(f"name: t\nmodel: /m\nnodes:\n{nodes}")
    assert [row[0] for row in rows[2:]] == ["198 nodes, n2 to n199"] * 2 + ["199 nodes, n1 to n199"]
    assert ["a", "itself", "8000", "requests that the gateway hands on"] in table(GATEWAY)


def test_json_names_every_node() -> None:
    content = json.loads(ports_json(plan_of(GATEWAY)))
    assert (content["schema"], content["stack"]) == ("gen-stack/ports/1", "t")
    assert content["nodes"][2] == {"name": "c", "address": "10.0.0.13", "group": "t-1"}
    assert content["connections"][0] == {
        "from": None,
        "to": ["a"],
        "protocol": "tcp",
        "ports": [8080, 8080],
        "what": "the endpoint, at the gateway",
    }
    assert len(content["connections"]) == len(connections(plan_of(GATEWAY)))


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(TWO)
    return tmp_path


def test_the_command_prints_the_table_json_or_rules_and_writes_nothing(folder: Path) -> None:
    plan = plan_of(TWO)
    files = nft_files(plan)
    expected = {
        (): ports_table(plan),
        ("--json",): ports_json(plan),
        ("--nft",): f"{files['a']}\n{files['b']}",
        ("--nft", "--node", "b"): files["b"],
    }
    for options, text in expected.items():
        done = run(folder, "ports", "spec.yaml", *options)
        assert (done.returncode, done.stdout) == (0, text)
    assert list(folder.iterdir()) == [folder / "spec.yaml"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--json", "--nft"], "--json and --nft exclude each other, and --node goes with --nft\n"),
        (["--node", "a"], "--json and --nft exclude each other, and --node goes with --nft\n"),
        (["--nft", "--node", "c"], "--node c: no such node in the spec, whose nodes are a and b\n"),
    ],
)
def test_wrong_use_of_the_command_is_status_2(options: list[str], words: str, folder: Path) -> None:
    done = run(folder, "ports", "spec.yaml", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(words)


def test_a_wrong_spec_has_no_table(folder: Path) -> None:
    (folder / "spec.yaml").write_text(TWO.replace("10.0.0.12", "10.0.0.11"))
    assert run(folder, "ports", "spec.yaml").returncode == 2
