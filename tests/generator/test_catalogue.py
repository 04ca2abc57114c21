from __future__ import annotations

import importlib.resources
import json
from typing import Any

import pytest

from gen_stack.catalogue import catalogue, catalogue_config
from gen_stack.facts import facts_of
from gen_stack.weights import active_parameters, parameters
from tests.generator.helpers import TWO, plan_of
from tests.generator.models import geometries

ENTRIES: list[dict[str, Any]] = json.loads(
    (importlib.resources.files("gen_stack") / "data" / "catalogue.json").read_text("utf-8")
)["models"]


def test_every_entry_has_its_source_and_an_id_of_its_own() -> None:
    names = [name.lower() for one in ENTRIES for name in one["ids"]]
    assert len(set(names)) == len(names) == len(catalogue())
    assert all(one["source"] for one in ENTRIES)
    assert len(ENTRIES) >= 40


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda one: str(one["ids"][0]))
def test_every_entry_can_be_planned(entry: dict[str, Any]) -> None:
    facts = facts_of(entry["config"])
    assert facts.known
    assert facts.context
    assert facts.quantization is None or facts.quantization.schemes


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen/Qwen3.5-397B-A17B", 397, 17),
        ("Qwen/Qwen3.5-122B-A10B", 122, 10),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480, 35),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 400, 17),
        ("XiaomiMiMo/MiMo-V2-Flash", 309, 15),
        ("google/gemma-4-26B-A4B", 25.2, 3.8),
    ],
)
def test_parameters_are_those_of_the_models_names(name: str, billions: float, active: float) -> None:
    config = catalogue_config(name)
    assert config is not None
    facts = facts_of(config)
    assert parameters(facts) / 1e9 == pytest.approx(billions, rel=0.01)
    assert active_parameters(facts) / 1e9 == pytest.approx(active, rel=0.04)


@pytest.mark.parametrize("name", sorted(geometries().keys() & {name for one in ENTRIES for name in one["ids"]}))
def test_the_catalogue_agrees_with_the_geometry_of_the_logs(name: str) -> None:
    config, geometry = catalogue_config(name), geometries()[name]
    assert config is not None
    facts = facts_of(config)
    assert len(facts.layers) == geometry["num_hidden_layers"]
    assert (facts.heads, facts.hidden) == (geometry["num_attention_heads"], geometry["hidden_size"])


def test_a_model_is_found_by_its_id_in_any_case() -> None:
    assert catalogue_config("qwen/qwen2.5-72b-instruct") is not None
    assert catalogue_config("org/model") is None
    plan = plan_of(TWO.replace("/models/m", "Qwen/Qwen2.5-72B-Instruct") + "gpu: {type: H100-80GB}\n")
    assert plan.memory is not None
    assert plan.memory.max_model_len == 32768
