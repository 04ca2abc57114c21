from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stack_node import config

if TYPE_CHECKING:
    from stack_node.config import NodeConfig

GROUP = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.11"}


def good(**variables: str) -> NodeConfig:
    read, problems = config.read(variables)
    assert problems == []
    return read


def only_problem(**variables: str) -> str:
    _, problems = config.read({**GROUP, **variables})
    assert len(problems) == 1, problems
    return problems[0]


def test_without_variables_upstream_decides_everything() -> None:
    plain = good()
    assert not plain.in_group
    assert plain.serves_api
    assert (plain.api_bind, plain.api_port, plain.api_key_file, plain.drain) == (None, None, None, None)
    assert plain.label == "stack-node"


def test_plain_node_takes_the_endpoint() -> None:
    plain = good(GEN_STACK_API_BIND="0.0.0.0", GEN_STACK_API_PORT="8080", GEN_STACK_API_KEY_FILE="/run/secrets/api_key")
    assert (plain.api_bind, plain.api_port, plain.api_key_file) == ("0.0.0.0", 8080, "/run/secrets/api_key")


def test_group_defaults() -> None:
    node = good(**GROUP)
    assert (node.nnodes, node.node_rank, node.master_addr) == (3, 1, "10.0.0.11")
    assert (node.master_port, node.control_port, node.api_port) == (29500, 29600, 8000)
    assert (node.node_timeout, node.stall_timeout, node.max_restarts, node.drain) == (10, 300, 5, 60)
    assert (node.group, node.digest, node.rdma, node.state_dir) == ("default", "", "auto", "/var/lib/gen-stack")
    assert node.spans_nodes
    assert not node.serves_api
    assert node.label == "stack-node[1/3]"


def test_empty_variables_are_unset() -> None:
    assert good(NNODES="", NODE_RANK="", GEN_STACK_API_PORT=" ") == good()


def test_group_of_one_needs_no_head_address() -> None:
    alone = good(NNODES="1")
    assert alone.in_group
    assert not alone.spans_nodes
    assert alone.serves_api


@pytest.mark.parametrize(
    ("given", "bare"),
    [("10.0.0.11", "10.0.0.11"), ("fd00::11", "fd00::11"), ("[fd00::11]", "fd00::11"), ("FD00::0:11", "fd00::11")],
)
def test_addresses_lose_their_brackets(given: str, bare: str) -> None:
    assert good(**{**GROUP, "MASTER_ADDR": given}).master_addr == bare


def test_head_may_have_a_name() -> None:
    assert good(**{**GROUP, "MASTER_ADDR": "head-0.svc"}).master_addr == "head-0.svc"


@pytest.mark.parametrize("value", ["<HEAD_IP>", "10.0.0", "10.0.0.256", "0.0.0.0", "ff02::1", "fe80::1", "[10.0.0.1]"])
def test_wrong_head_address(value: str) -> None:
    problem = only_problem(MASTER_ADDR=value)
    assert problem.startswith(f"MASTER_ADDR={value!r}: ")
    assert problem.endswith(("give the head's address, the same on every node", "use a routable or fd00::/8 address"))


def test_node_address_is_numeric() -> None:
    assert only_problem(NODE_ADDR="gpu-b") == (
        "NODE_ADDR='gpu-b': must be a numeric IPv4 or IPv6 address; "
        "give this node's own address on the group's network, or leave it out"
    )


def test_one_address_family() -> None:
    assert only_problem(NODE_ADDR="fd00::2") == (
        "NODE_ADDR=fd00::2 and MASTER_ADDR=10.0.0.11 are of two address families; "
        "use IPv4 for all nodes or IPv6 for all"
    )


def test_missing_group_variables_come_together() -> None:
    _, problems = config.read({"NNODES": "2"})
    assert problems == [
        "NODE_RANK is not set: every node of a group needs its own rank (NNODES=2); "
        "set 0 on the head and 1 to 1 on the others",
        "MASTER_ADDR is not set: a group has to find its head (NNODES=2); "
        "give the head's address, the same on every node",
    ]


def test_all_problems_at_once() -> None:
    _, problems = config.read({**GROUP, "NODE_RANK": "3", "MASTER_PORT": "x", "GEN_STACK_DRAIN": "60"})
    assert problems == [
        "NODE_RANK='3': must be a whole number from 0 to 2; ranks count from 0 on the head (NNODES=3)",
        "MASTER_PORT='x': must be a whole number from 1 to 65520; it is the first of 16 ports",
        "GEN_STACK_DRAIN='60': must be a duration with a unit (ms, s, m, h); for example GEN_STACK_DRAIN=60s",
    ]


def test_no_number_of_nodes() -> None:
    _, problems = config.read({"NNODES": "two", "NODE_RANK": "9"})
    assert problems == [
        "NNODES='two': must be a whole number of at least 1; set it to the number of nodes in the group"
    ]


@pytest.mark.parametrize(
    ("text", "seconds"), [("10s", 10), ("2m", 120), ("1h", 3600), ("500ms", 0.5), ("1h30m", 5400), ("1.5s", 1.5)]
)
def test_durations(text: str, seconds: float) -> None:
    assert config.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "-1s", "s", "10 s", "1d", "0s"])
def test_wrong_durations(text: str) -> None:
    if text:
        assert "must be a duration" in only_problem(GEN_STACK_NODE_TIMEOUT=text)
    else:
        with pytest.raises(ValueError, match=r"^$"):
            config.parse_duration(text)


def test_no_drain_is_allowed() -> None:
    assert good(**GROUP, GEN_STACK_DRAIN="0s").drain == 0


def test_ports_do_not_overlap() -> None:
    assert only_problem(GEN_STACK_CONTROL_PORT="29515") == (
        "GEN_STACK_CONTROL_PORT=29515 is one of the 16 ports from MASTER_PORT on (29500-29515); use a port outside"
    )
    assert only_problem(GEN_STACK_API_PORT="29500").startswith("GEN_STACK_API_PORT=29500 is one of the 16 ports")
    assert only_problem(GEN_STACK_API_PORT="29600") == (
        "GEN_STACK_CONTROL_PORT and GEN_STACK_API_PORT are both 29600; use two different ports"
    )
    assert good(**GROUP, GEN_STACK_CONTROL_PORT="29516").control_port == 29516


def test_choices_names_and_paths() -> None:
    assert only_problem(GEN_STACK_RDMA="on") == (
        "GEN_STACK_RDMA='on': must be auto, required or off; the default is auto"
    )
    assert "must be a name" in only_problem(GEN_STACK_GROUP="a b")
    assert "must be an absolute path" in only_problem(GEN_STACK_TOKEN_FILE="token")


def test_the_log_is_text_unless_json_is_wanted() -> None:
    assert good().log_format == good(**GROUP).log_format == "text"
    assert good(GEN_STACK_LOG_FORMAT="json").log_format == "json"
    assert good(**GROUP, GEN_STACK_LOG_FORMAT="json").log_format == "json"
    assert only_problem(GEN_STACK_LOG_FORMAT="logfmt") == (
        "GEN_STACK_LOG_FORMAT='logfmt': must be text or json; the default is text"
    )


def test_the_api_key_has_one_source() -> None:
    problem = only_problem(GEN_STACK_API_KEY_FILE="/k", VLLM_API_KEY="very-secret")
    assert problem == (
        "GEN_STACK_API_KEY_FILE and VLLM_API_KEY are both set: the key has one source; unset VLLM_API_KEY"
    )


def test_engine_variables_that_contradict() -> None:
    assert only_problem(VLLM_HOST_IP="10.0.0.12") == (
        "VLLM_HOST_IP='10.0.0.12': in a group it is made from NODE_ADDR; set NODE_ADDR instead"
    )
    assert only_problem(GEN_STACK_RDMA="required", NCCL_IB_DISABLE="1").startswith("NCCL_IB_DISABLE='1': contradicts")
    assert only_problem(GEN_STACK_RDMA="off", NCCL_IB_DISABLE="0").startswith("NCCL_IB_DISABLE='0': contradicts")
    assert good(**GROUP, NODE_ADDR="10.0.0.12", VLLM_HOST_IP="10.0.0.12").node_addr == "10.0.0.12"


def test_warnings() -> None:
    assert config.warnings({**GROUP, "GEN_STACK_API_PROT": "1", "GEN_STACK_PORT_8000_TCP": "x"}) == [
        "GEN_STACK_API_PROT is not a variable of this image; did you mean GEN_STACK_API_PORT?",
        "GEN_STACK_PORT_8000_TCP is not a variable of this image; did you mean GEN_STACK_API_PORT?",
    ]
    assert config.warnings({"MASTER_ADDR": "10.0.0.11"}) == [
        "MASTER_ADDR without NNODES: this node serves alone; set NNODES to form a group"
    ]
    assert config.warnings(GROUP) == []
