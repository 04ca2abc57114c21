from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest
import yaml

from gen_stack.load import load_spec
from gen_stack.planner import make_plan
from gen_stack.render.docker_run import build_line, run_line
from tests.generator.helpers import HUB, ONE, TWO, engine_of, interpolated, plan_of
from tests.generator.regenerate import GOLDEN, stacks

KEYED = f"{HUB.replace('org/model', '{id: org/model, token_file: h}')}api: {{key_file: k}}\n"
FILES = {"h": "hf-very-secret", "k": "sk-very-secret"}
AWKWARD = f"""{TWO}engine:
  args: {{chat-template: "it's $HOME"}}
  env: {{A: "a b $c `d` 'e' \\"f\\"", B: "x=$PWD/y"}}
"""
SPECS = {
    "two": (TWO, {}),
    "secrets": (KEYED, FILES),
    "awkward": (AWKWARD, {}),
    "single": (ONE, {}),
    "single-ipv6": (ONE.replace("10.0.0.11", "fd00::1"), {}),
    "ids": (TWO.replace("gpus: 8", 'gpus: ["0", "1"]'), {}),
    "rdma-required": (f"{TWO}network: {{rdma: required}}\n", {}),
    "rocm": (f"{TWO}engine: {{device: rocm}}\n", {}),
    "user": (f'{TWO}engine: {{user: "1000:1000"}}\n', {}),
    "cpu": (f"{TWO.replace(', gpus: 8', '')}engine: {{device: cpu}}\n", {}),
}
MANY = (
    "mount",
    "volume",
    "env",
    "label",
    "log-opt",
    "cap-add",
    "cap-drop",
    "device",
    "group-add",
    "ulimit",
    "device-cgroup-rule",
    "security-opt",
    "publish",
)


def parsed(line: str) -> dict[str, Any]:
    """What Docker's own parser would make of the words that a shell makes of the line, in the folder /here."""
    words = shlex.split(line.replace('="$PWD"/', "=/here/"))
    assert words[:2] == ["docker", "run"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in MANY:
        parser.add_argument(f"--{name}", action="append", default=[])
    for name in ("name", "network", "restart", "log-driver", "user", "gpus", "shm-size", "stop-timeout"):
        parser.add_argument(f"--{name}")
    for name in ("cmd", "interval", "timeout", "start-period"):
        parser.add_argument(f"--health-{name}")
    end = next(i for i, word in enumerate(words[2:], 2) if not word.startswith("--"))
    found = vars(parser.parse_args(words[2:end]))
    return {**found, "image": words[end], "command": words[end + 1 :]}


def of_node(name: str, node: str = "a") -> tuple[dict[str, Any], dict[str, Any]]:
    text, files = SPECS[name]
    plan = plan_of(text, files)
    [line] = [run_line(plan, group, one) for group in plan.groups for one in group.nodes if one.name == node]
    return parsed(line), engine_of(text, node, files)


@pytest.mark.parametrize("name", SPECS)
def test_it_is_equal_to_the_compose_file_in_effect(name: str) -> None:
    run, service = of_node(name)
    assert run["image"] == service["image"]
    assert run["command"] == service["command"]
    assert dict(one.split("=", 1) for one in run["env"]) == service["environment"]
    assert dict(one.split("=", 1) for one in run["label"]) == service["labels"]
    assert run["network"] == service.get("network_mode")
    assert run["restart"] == service["restart"]
    assert run["log_driver"] == service["logging"]["driver"]
    assert dict(one.split("=", 1) for one in run["log_opt"]) == service["logging"]["options"]
    assert run["user"] == service.get("user")
    assert run["shm_size"] == service["shm_size"]
    assert f"{run['stop_timeout']}s" == service["stop_grace_period"]
    for option, key in (
        ("cap_add", "cap_add"),
        ("cap_drop", "cap_drop"),
        ("device", "devices"),
        ("group_add", "group_add"),
        ("device_cgroup_rule", "device_cgroup_rules"),
        ("security_opt", "security_opt"),
    ):
        assert run[option] == service.get(key, [])
    assert len(run["mount"]) + len(run["volume"]) == len(service["volumes"]) + len(service.get("secrets", []))
    assert bool(run["gpus"]) == ("deploy" in service)
    assert bool(run["health_cmd"]) == ("healthcheck" in service)
    assert len(run["ulimit"]) == len(service.get("ulimits", {}))


def test_mounts() -> None:
    run, _ = of_node("user")
    assert run["mount"] == [
        "source=/models/m,target=/models/m,type=bind,readonly",
        "source=/here/cache,target=/tmp/.cache,type=bind",
        "source=/here/state,target=/var/lib/gen-stack,type=bind",
    ]
    assert run["volume"] == ["/dev/infiniband:/dev/infiniband", "/here/secrets/group_token:/run/secrets/group_token:ro"]
    assert of_node("two")[0]["mount"][1:] == [
        "source=t-a_cache,target=/root/.cache,type=volume",
        "source=t-a_state,target=/var/lib/gen-stack,type=volume",
    ]


def test_gpus_ports_limits_and_health() -> None:
    assert of_node("two")[0]["gpus"] == "8"
    assert of_node("ids")[0]["gpus"] == '"device=0,1"'
    assert of_node("two")[0]["ulimit"] == ["memlock=-1:-1", "stack=67108864:67108864", "nofile=1048576:1048576"]
    assert of_node("single")[0]["publish"] == ["10.0.0.11:8000:8000"]
    assert of_node("single-ipv6")[0]["publish"] == ["[fd00::1]:8000:8000"]
    run, service = of_node("single")
    assert shlex.split(run["health_cmd"]) == service["healthcheck"]["test"][1:]
    assert run["health_start_period"] == "1h"


def test_no_secret_is_on_the_line() -> None:
    plan = plan_of(KEYED, FILES)
    for group in plan.groups:
        for node in group.nodes:
            line = run_line(plan, group, node)
            assert not [secret for secret in FILES.values() if secret in line]


def test_an_image_that_is_built_is_built_first() -> None:
    plan = plan_of(TWO)
    assert build_line(plan) == (
        f"docker build --tag={plan.image.reference} --build-arg=ENGINE_IMAGE={plan.image.engine_image} ./image"
    )
    assert build_line(plan_of(f"{TWO}engine: {{image: x}}\n")) is None


@pytest.mark.parametrize("stack", stacks(GOLDEN), ids=lambda stack: stack.name)
def test_every_golden_stack_has_its_lines(stack: Any) -> None:
    plan = make_plan(load_spec(stack / "spec.yaml"))
    for group in plan.groups:
        for node in group.nodes:
            compose = yaml.safe_load((stack / node.name / "compose.yaml").read_text())
            run = parsed(run_line(plan, group, node))
            assert run["command"] == interpolated(compose["services"]["engine"]["command"])
