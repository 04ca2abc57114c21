"""The reference stacks in `compose/`: exactly what gen-stack makes, and what the Compose Specification allows."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.generator.helpers import ROOT, interpolated
from tests.generator.regenerate import GOLDEN, REFERENCE, expected, present, stacks

FILES = sorted([*REFERENCE.glob("*/*/compose.yaml"), *GOLDEN.glob("*/*/compose.yaml")])


@cache
def validator() -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(json.loads((ROOT / "tests/data/compose-spec.json").read_text("utf-8")))


def name_of(path: Path) -> str:
    return "/".join(path.parts[-3:-1])


def test_the_stacks_that_the_documentation_names_are_there() -> None:
    names = {stack.name for stack in stacks(REFERENCE)}
    assert {"demo", "cpu-single", "cpu-pp2", "cpu-tp3", "qwen-72b", "dgx-spark-pair", "rdma-4x8"} <= names


@pytest.mark.parametrize("stack", stacks(REFERENCE), ids=lambda stack: Path(stack).name)
def test_a_reference_stack_is_exactly_what_gen_stack_makes(stack: Path) -> None:
    """`python -m tests.generator.regenerate` writes it again."""
    assert present(stack) == expected(stack)


@pytest.mark.parametrize("stack", stacks(REFERENCE), ids=lambda stack: Path(stack).name)
def test_a_reference_stack_holds_nothing_else(stack: Path) -> None:
    files = {str(path.relative_to(stack)) for path in stack.rglob("*") if path.is_file()}
    assert files == {"spec.yaml", *expected(stack)}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_compose_file_keeps_the_specification_and_leaves_nothing_to_interpolate(path: Path) -> None:
    compose = yaml.safe_load(path.read_text("utf-8"))
    validator().validate(compose)
    interpolated(compose)


MUTATIONS: dict[str, tuple[tuple[str | int, ...], object]] = {
    "unknown key": (("services", "engine", "imgae"), "x"),
    "a number for a text": (("services", "engine", "image"), 7),
    "a command of numbers": (("services", "engine", "command", 0), 7),
    "a mount without a type": (("services", "engine", "volumes", 0), {"target": "/x"}),
    "a mapping for a list": (("services", "engine", "cap_drop"), {"ALL": True}),
    "a port without a target": (("services", "engine", "ports"), [{"published": "8000", "nope": 1}]),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_check_can_fail(mutation: str) -> None:
    compose = yaml.safe_load(FILES[0].read_text("utf-8"))
    validator().validate(compose)
    assert not validator().is_valid(changed(compose, *MUTATIONS[mutation]))


@pytest.mark.parametrize("text", ["$HOME", "${HOME}", "a$", "$$$", "$1"])
def test_the_check_for_dollars_can_fail(text: str) -> None:
    compose = yaml.safe_load(FILES[0].read_text("utf-8"))
    with pytest.raises(AssertionError, match="Compose would interpolate"):
        interpolated(changed(compose, ("services", "engine", "environment", "DO_NOT_TRACK"), text))


def test_the_check_of_a_stack_can_fail(tmp_path: Path) -> None:
    stack = stacks(REFERENCE)[0]
    (tmp_path / "spec.yaml").write_text((stack / "spec.yaml").read_text("utf-8"))
    for path, text in expected(stack).items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text.replace("unless-stopped", "always"))
    assert present(tmp_path) != expected(tmp_path)


def changed(compose: Any, path: tuple[str | int, ...], value: object) -> Any:
    compose = copy.deepcopy(compose)
    place = compose
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return compose
