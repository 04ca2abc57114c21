"""What holds for every spec, looked for with Hypothesis."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gen_stack.output import outputs
from gen_stack.planner import make_plan
from gen_stack.render.compose import render_compose
from tests.generator.helpers import composes_of, errors, interpolated, load, plan_of
from tests.generator.strategies import SECRETS, Made, slips, specs

OWN = {"environment", "labels", "volumes", "secrets", "deploy", "ports"}
"""What may differ between the engines of two nodes."""

slow = [HealthCheck.too_slow, HealthCheck.filter_too_much]
few = settings(max_examples=20, deadline=None, suppress_health_check=slow)
many = settings(few, max_examples=60)


@few
@given(specs())
def test_the_product_of_the_parallel_sizes_is_the_world_size(made: Made) -> None:
    sizes = plan_of(made.text, SECRETS).parallelism
    assert sizes.tensor * sizes.pipeline * sizes.data == made.world_size


@few
@given(specs())
def test_ranks_are_in_the_order_of_the_nodes(made: Made) -> None:
    plan = plan_of(made.text, SECRETS)
    assert [node.name for node in plan.nodes] == [node["name"] for node in made.data["nodes"]]
    for group in plan.groups:
        assert [node.rank for node in group.nodes] == list(range(made.nodes_in_group))


@few
@given(specs())
def test_nodes_differ_in_what_is_their_own_only(made: Made) -> None:
    composes = list(composes_of(made.text, SECRETS).values())
    first = composes[0]["services"]["engine"]
    for compose in composes:
        engine = compose["services"]["engine"]
        assert {key for key in first.keys() | engine.keys() if first.get(key) != engine.get(key)} <= OWN
        assert engine["command"] == first["command"]
    assert len({compose["name"] for compose in composes}) == len(composes)


@few
@given(specs())
def test_the_same_spec_gives_the_same_bytes(made: Made) -> None:
    assert render_compose(plan_of(made.text, SECRETS)) == render_compose(plan_of(made.text, SECRETS))


@many
@given(specs())
def test_what_the_spec_says_arrives_as_it_was_said(made: Made) -> None:
    """Through our YAML, Compose's YAML and Compose's interpolation."""
    engine = made.data["engine"]
    composes = composes_of(made.text, SECRETS)
    for node in made.data["nodes"]:
        service = composes[node["name"]]["services"]["engine"]
        for name, value in {**engine["env"], **node.get("env", {})}.items():
            arrived = service["environment"][name]
            assert isinstance(arrived, str)
            assert type(value)(arrived) == value
        assert service["command"][0] == made.data["model"]["id"]
        for name, value in engine["args"].items():
            assert flag_value(service["command"], name.replace("_", "-")) == expected_value(value)


def flag_value(command: list[str], flag: str) -> Any:
    """Read a flag's value as vLLM does."""
    if f"--no-{flag}" in command:
        return False
    for index, item in enumerate(command):
        if item == f"--{flag}":
            values = list(command[index + 1 :])
            end = next((place for place, one in enumerate(values) if one.startswith("--")), len(values))
            return values[:end] or True
        if item.startswith(f"--{flag}="):
            text = item.split("=", 1)[1]
            return json.loads(text) if text.startswith("{") else number(text)
    raise AssertionError(f"no {flag} in {command}")


def expected_value(value: Any) -> Any:
    """Say what `flag_value` must read of a value."""
    if isinstance(value, list):
        return [str(one) for one in value]
    if isinstance(value, str):
        return json.loads(value) if value.startswith("{") else number(value)
    return value


def number(text: str) -> Any:
    """Take a text for a number where it is one."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            return value if math.isfinite(value) else text
    return text


@few
@given(specs())
def test_no_secret_is_outside_of_the_folders_for_them(made: Made) -> None:
    loaded = load(made.text, SECRETS)
    with tempfile.TemporaryDirectory() as folder:
        files = outputs(loaded, make_plan(loaded), Path(folder))
    secrets = {file.text.strip() for file in files.values() if file.secret}
    assert not [path for path, file in files.items() if not file.secret and any(one in file.text for one in secrets)]
    assert all(path.split("/")[-2] == "secrets" for path, file in files.items() if file.secret)


@few
@given(specs())
def test_a_compose_file_is_yaml_that_leaves_nothing_to_interpolate(made: Made) -> None:
    for path, text in render_compose(plan_of(made.text, SECRETS)).items():
        if path.endswith("compose.yaml"):
            interpolated(yaml.safe_load(text))
            assert text.splitlines() == text.split("\n")[:-1]  # some YAML breaks lines at more than this


@many
@given(slips())
def test_a_slip_of_the_hand_is_told_in_words_or_harmless(text: str) -> None:
    if not errors(text, SECRETS):
        composes_of(text, SECRETS)


def joined(pieces: list[str]) -> bytes:
    """Put pieces together to the content of a file."""
    return "".join(pieces).encode()


PIECES = [
    "name: t\n",
    "nodes:\n",
    "- ",
    "  ",
    ": ",
    "<<",
    "? ",
    "0x",
    "1e",
    "\\u",
    "&a ",
    "*a ",
    "!!int ",
    "---\n",
    "...\n",
]
ALPHABET = st.sampled_from([*PIECES, *"{}[]a\n'\"!|>%@`#\t\r.-é\x85"])


@many
@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode) | st.lists(ALPHABET, max_size=40).map(joined))
def test_any_file_is_refused_in_words(content: bytes) -> None:
    assert errors(content)
