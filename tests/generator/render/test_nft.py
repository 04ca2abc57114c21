from __future__ import annotations

from gen_stack.render.nft import nft_files
from tests.generator.helpers import FOUR, ONE, TWO, plan_of


def rules(text: str, node: str) -> list[str]:
    """The rules of a node's chain."""
    chain = nft_files(plan_of(text))[node].split("chain input {\n")[1]
    return [line.strip() for line in chain.splitlines() if line.startswith(" " * 8)][4:]


def test_the_head_closes_its_fixed_ports_and_every_node_those_that_the_system_picks() -> None:
    assert rules(TWO, "a") == [
        "ip saddr @watchers tcp dport 29600 accept",
        "tcp dport { 29600, 29500-29515 } counter drop",
        "ip daddr 10.0.0.11 tcp dport 32768-60999 counter drop  # net.ipv4.ip_local_port_range",
    ]
    assert rules(TWO, "b") == ["ip daddr 10.0.0.12 tcp dport 32768-60999 counter drop  # net.ipv4.ip_local_port_range"]


def test_a_node_lets_in_the_others_of_its_group() -> None:
    files = nft_files(plan_of(f"{FOUR}replicas: 2\n"))
    assert "elements = { 10.0.0.12 }\n" in files["a"]
    assert "elements = { 10.0.0.13 }\n" in files["d"]
    assert "elements = { 10.0.0.12, 10.0.0.13, 10.0.0.14 }\n" in nft_files(plan_of(FOUR))["a"]


def test_the_gateway_reaches_the_heads_and_nobody_goes_past_it() -> None:
    text = f"{FOUR}groups: [[a], [b, c, d]]\ngateway: {{nodes: [a, d]}}\n"
    text = text.replace("name: a, address: 10.0.0.11, gpus: 8", "name: a, address: 10.0.0.11, gpus: 24")
    assert rules(text, "b")[:4] == [
        "ip saddr { 10.0.0.11 } tcp dport 8000 accept  # requests that the gateway hands on",
        "ip saddr { 10.0.0.11 } tcp dport 29600 accept  # whether the group is ready",
        "ip saddr @watchers tcp dport 29600 accept",
        "tcp dport { 8000, 29600, 29500-29515 } counter drop",
    ]
    assert "elements" not in nft_files(plan_of(text))["a"]


def test_ipv6() -> None:
    file = nft_files(plan_of(TWO.replace("10.0.0.", "fd00::")))["a"]
    assert "type ipv6_addr\n        elements = { fd00::12 }" in file
    assert "ip6 saddr @nodes accept" in file
    assert "ip6 daddr fd00::11 tcp dport" in file
    assert "ip saddr" not in file


def test_a_file_names_its_host_its_spec_and_its_table_and_replaces_what_it_wrote_before() -> None:
    file = nft_files(plan_of(TWO))["b"]
    assert file.startswith(
        "# b (10.0.0.12) of t: made by gen-stack from spec.yaml; load it on this host alone, as root."
    )
    assert "\ntable inet gen-stack-t\ndelete table inet gen-stack-t\ntable inet gen-stack-t {\n" in file


def test_a_node_alone_has_nothing_to_close() -> None:
    file = nft_files(plan_of(ONE))["a"]
    assert file.endswith("# Nothing is to be closed: a node alone has its endpoint only, on a network of its own.\n")
    assert "drop\n" not in file
