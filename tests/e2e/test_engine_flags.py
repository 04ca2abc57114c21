"""The shipped snapshot of the engine's flags, and what gen-stack makes of it, against the real engine's parser."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from gen_stack.engine_flags import DATA, argument_problems, flags_of
from gen_stack.owned import why_flag_is_refused
from gen_stack.planner import engine_flag
from gen_stack.release import ENGINE_VERSION
from gen_stack.spec import Engine
from tools.engine_flags import ask, snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from tools.docker_here import Docker

pytestmark = pytest.mark.lab

VALUES: list[Any] = [
    *(True, False, 0, 1, -1, 1.5, 1e3, "", "None", "x", "auto", "8k", "1.5k", "8K", "1.5K", " 7", "1_0"),
    *("{}", "{", "[1]", '{"a": 1k}', {}, {"a": 1}, [1], [1, 2], ["x", "y"], ["None"]),
]

BEGINNINGS: list[tuple[str, Any]] = [("long-prefill-token-threshold", False)]
"""What the engine takes for another flag that begins so (`--no-long-prefill-token-threshold-adaptive`)."""


def test_the_snapshot_is_what_the_engine_says(docker: Docker) -> None:
    path = DATA / f"engine-flags-{ENGINE_VERSION}.json"
    assert path.read_text("utf-8") == snapshot(ask(docker, "flags")), "run `python -m tools.engine_flags`"


def test_the_engine_refuses_what_gen_stack_refuses_and_takes_what_it_takes(docker: Docker, tmp_path: Path) -> None:
    cases = [*plain_cases(), *dotted_cases()]
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps([["m", *engine_flag(name, value)] for name, value in cases]))
    answers = ask(docker, "parse", lists)
    engine = Engine()
    wrong = []
    for (name, value), answer in zip(cases, answers, strict=True):
        ours = [one.words for one in argument_problems(engine, {name: value})]
        if bool(ours) != (answer is not None) and (name, value) not in BEGINNINGS:
            wrong.append(f"{name}: {value!r}: gen-stack says {ours}, the engine {answer}")
    assert len(cases) > 5000
    assert wrong == []


def plain_cases() -> list[tuple[str, Any]]:
    """Every free flag with every value, and with each of its choices."""
    flags = flags_of(ENGINE_VERSION) or {}
    free = {name: flag for name, flag in flags.items() if why_flag_is_refused(name) is None}
    return [(name, value) for name, flag in free.items() for value in [*VALUES, *flag.choices]]


def dotted_cases() -> list[tuple[str, Any]]:
    """Keys of flags that take mappings; those of other flags are refused for what they mean, not for their form."""
    return [
        ("compilation-config.mode", 3),
        ("compilation-config.pass_config.fuse_norm_quant", True),
        ("compilation-config.custom_ops", ["all", "+rms_norm"]),
        ("compilation-config.nope", 1),
        ("compilation-config.pass_config.nope", False),
        ("compilation_config.cudagraph_mode", "FULL"),
        ("hf-overrides.a.b", {"c": [1, None]}),
        ("max-num-seqs.a", 1),
        ("limit-mm-per-prompt.image", 2),
        ("nope.a", 1),
    ]
