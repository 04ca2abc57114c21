"""The gateway's service in a Compose file."""

from __future__ import annotations

from typing import Any

import yaml

from gen_stack.planner import make_plan
from gen_stack.render.compose import render_compose
from tests.generator.helpers import FOUR, load


def services(rest: str, node: str = "a") -> dict[str, Any]:
    files = render_compose(make_plan(load(f"{FOUR}replicas: 2\n{rest}\n", {"k": "sk-1"})))
    found: dict[str, Any] = yaml.safe_load(files[f"{node}/compose.yaml"])["services"]
    return found


def test_it_runs_where_the_spec_says_and_nowhere_else() -> None:
    for node in "abcd":
        assert ("gateway" in services("gateway: {nodes: [b, d]}", node)) is (node in "bd")


def test_its_workers_have_no_right_and_root_has_those_that_it_needs() -> None:
    gateway = services("gateway: {nodes: [a]}")["gateway"]
    assert (gateway["cap_drop"], gateway["read_only"], gateway["network_mode"]) == (["ALL"], True, "host")
    assert gateway["cap_add"] == ["DAC_READ_SEARCH", "KILL", "SETGID", "SETUID"]
    assert services("gateway: {nodes: [a], port: 443}")["gateway"]["cap_add"][-1] == "NET_BIND_SERVICE"


def test_an_ordinary_user_runs_it_without_any_right() -> None:
    gateway = services("engine: {user: '1000:1000'}\ngateway: {nodes: [a]}")["gateway"]
    assert (gateway["user"], gateway["cap_drop"], "cap_add" in gateway) == ("1000:1000", ["ALL"], False)


def test_a_folder_of_secrets_is_mounted_only_where_there_are_any() -> None:
    def sources(rest: str) -> list[str]:
        return [one["source"] for one in services(rest)["gateway"]["volumes"]]

    assert sources("gateway: {nodes: [a]}") == ["./gateway"]
    assert sources("gateway: {nodes: [a], keys_file: k}") == ["./gateway", "./secrets/gateway"]
