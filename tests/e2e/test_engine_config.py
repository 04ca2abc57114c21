"""What the planner accepts and refuses of a model's split, against the real engine's own check."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import tools.engine_config
from gen_stack.catalogue import catalogue
from gen_stack.divisibility import obstacles
from gen_stack.facts import facts_of
from gen_stack.plan import Parallelism
from tests.generator.models import LLAMA_30B
from tools.engine_image import TAG

if TYPE_CHECKING:
    from tools.docker_here import Docker

pytestmark = pytest.mark.lab

LLAMA: dict[str, Any] = {**LLAMA_30B, "dtype": "bfloat16"}
MADE = [
    LLAMA,
    {**LLAMA, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192},
    {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
]
FAMILIES = [
    *("Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-72B-Instruct", "deepseek-ai/DeepSeek-V3"),
    "openai/gpt-oss-20b",
]


def cases() -> list[dict[str, Any]]:
    """Every model with every split at its own length, and one token above it."""
    configs = [*MADE, *(catalogue()[name.lower()] for name in FAMILIES)]
    found = []
    for config in configs:
        length = facts_of(config).context or 0
        for tensor, pipeline, expert in itertools.product([1, 3, 4, 8], [1, 2], [False, True]):
            found.append(case_of(config, tensor, pipeline, expert=expert, length=length))
        found.append(case_of(config, 1, 1, expert=False, length=length + 1))
    return found


def case_of(config: dict[str, Any], tensor: int, pipeline: int, *, expert: bool, length: int) -> dict[str, Any]:
    """Write a case as `engine_config.py` reads it."""
    return {"config": config, "tensor": tensor, "pipeline": pipeline, "expert": expert, "length": length}


def ours(case: dict[str, Any]) -> list[str]:
    """What the planner says of a case: the keys that are wrong."""
    facts = facts_of(case["config"])
    sizes = Parallelism(case["tensor"], case["pipeline"], 1, case["expert"])
    found = [one.key for one in obstacles(facts, sizes, 8)]
    return [*found, *(["length"] if facts.context and case["length"] > facts.context else [])]


def test_the_engine_takes_what_is_accepted(docker: Docker, tmp_path: Path) -> None:
    asked = cases()
    (tmp_path / "cases.json").write_text(json.dumps(asked))
    script = Path(tools.engine_config.__file__)
    mounts = [f"--volume={script}:/engine_config.py:ro", f"--volume={tmp_path / 'cases.json'}:/cases.json:ro"]
    words = ["--entrypoint=python3", TAG, "/engine_config.py", "/cases.json"]
    answers = json.loads(docker.run("run", "--rm", "--network=none", *mounts, *words).splitlines()[-1])
    accepted, early, wrong = 0, 0, []
    for case, answer in zip(asked, answers, strict=True):
        keys = ours(case)
        shown = f"{case['config']['model_type']}, {case['tensor']} x {case['pipeline']}, expert {case['expert']}"
        if not keys and answer is not None:
            wrong.append(f"{shown}, {case['length']}: accepted, but the engine says {answer}")
        # The rest of what we refuse (key heads, widths, blocks) the engine finds later, when it makes the layers.
        if answer is None and ("length" in keys or (case["config"] is LLAMA and case["tensor"] in (3, 8))):
            wrong.append(f"{shown}, {case['length']}: refused for {keys}, but the engine takes it")
        accepted += not keys
        early += answer is not None
    assert wrong == []
    assert accepted > 30
    assert early > 20
