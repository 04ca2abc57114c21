from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pydantic
import pytest
import yaml

from gen_stack.schema import schema_text
from tests.generator.helpers import ONE, TWO, errors
from tests.generator.regenerate import GOLDEN, REFERENCE, SCHEMA, stacks
from tests.generator.test_spec import EVERYTHING

VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema_text()))


@pytest.mark.skipif(
    tuple(map(int, pydantic.VERSION.split(".")[:2])) < (2, 11), reason="older pydantic says the same in other words"
)
def test_the_published_schema_is_up_to_date() -> None:
    """`python -m tests.generator.regenerate` writes it."""
    assert SCHEMA.read_text("utf-8") == schema_text()


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("stack", [*stacks(REFERENCE), *stacks(GOLDEN)], ids=lambda stack: Path(stack).name)
def test_every_spec_here_keeps_it(stack: Path) -> None:
    VALIDATOR.validate(yaml.safe_load((stack / "spec.yaml").read_text("utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        ONE,
        TWO,
        EVERYTHING,
        f"{ONE}api:\n",
        f"{ONE}engine: {{args: , env: }}\n",
        ONE.replace("gpus: 8", "gpus: [0, '1']"),
    ],
)
def test_it_takes_what_gen_stack_takes(text: str) -> None:
    VALIDATOR.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("name: t", "nmae: t"),
        ("name: t", "name: T"),
        ("name: t", "name: 7"),
        ("name: t", "name: t\nversion: 2"),
        ("name: t", "name: t\nbananas: 1"),
        ("name: t", "name: t\napi: {port: 70000}"),
        ("name: t", "name: t\napi: {port: '8000'}"),
        ("name: t", "name: t\nengine: {device: gpu}"),
        ("name: t", "name: t\nengine: {env: {A: true}}"),
        ("name: t", "name: t\ngpu: {memory: 80G}"),
        ("name: t", "name: t\nrecovery: {drain: 60}"),
        ("name: t", "name: t\nreplicas: 0"),
        ("model: /models/m", "model: 7"),
        ("model: /models/m", "model: {revision: main}"),
        ("gpus: 8", "gpus: all"),
        ("gpus: 8", "gpus: -1"),
        ("gpus: 8", "gpu: 8"),
        ("nodes:\n  - {name: a, address: 10.0.0.11, gpus: 8}", "nodes: []"),
    ],
)
def test_it_refuses_what_gen_stack_refuses(old: str, new: str) -> None:
    text = ONE.replace(old, new)
    assert errors(text)
    assert not VALIDATOR.is_valid(yaml.safe_load(text))


def test_every_key_says_what_it_is() -> None:
    """Editors show it: in the schema of a key itself, or of the section it holds."""
    schema = json.loads(schema_text())
    bare = {"port", "bind", "control_port", "node_timeout", "stall_timeout", "max_restarts", "drain", "version"}
    for part in (schema, *schema["$defs"].values()):
        for key, value in part["properties"].items():
            described = "description" in value or "$ref" in json.dumps(value)
            assert described or key in bare or part["title"] in ("Tls", "Gateway"), (part["title"], key)
