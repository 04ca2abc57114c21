from __future__ import annotations

import pytest

from gen_stack.facts import ModelFacts, facts_of
from gen_stack.weights import Sharing, active_parameters, layer_matrices, parameters, rank_bytes
from tests.generator.models import config_of, geometries


def layers_bytes(facts: ModelFacts, sharing: Sharing) -> float:
    return sum(
        rank_bytes(facts, one, sharing, "bfloat16")
        for index in range(len(facts.layers))
        for one in layer_matrices(facts, index)
    )


EXACT = sorted(
    {
        one["model"]
        for one in geometries().values()
        if one["total_params"] and not one["vision"] and one["model"] != "deepseek-ai/DeepSeek-V4-Flash"
    }
)


@pytest.mark.parametrize("name", EXACT)
def test_parameters_are_counted_exactly(name: str) -> None:
    assert parameters(facts_of(config_of(name))) == geometries()[name]["total_params"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek-ai/DeepSeek-V3", 37.6), ("Qwen/Qwen3-235B-A22B", 22.2), ("meta-llama/Llama-3.1-70B", 70.6)],
)
def test_active_parameters(name: str, billions: float) -> None:
    assert active_parameters(facts_of(config_of(name))) / 1e9 == pytest.approx(billions, abs=0.1)


def test_tensor_parallel_splits_all_but_what_every_rank_needs() -> None:
    facts = facts_of(config_of("meta-llama/Llama-3.1-70B"))
    assert layers_bytes(facts, Sharing(8)) == pytest.approx(layers_bytes(facts, Sharing()) / 8, rel=1e-3)


def test_key_heads_are_copied_when_ranks_outnumber_them() -> None:
    facts = facts_of(config_of("Qwen/Qwen3-30B-A3B"))
    key = next(one for one in layer_matrices(facts, 0) if one.name.endswith("k_proj"))
    assert rank_bytes(facts, key, Sharing(8), "bfloat16") == rank_bytes(facts, key, Sharing(4), "bfloat16")


def test_experts_are_spread_over_replicas_too() -> None:
    facts = facts_of(config_of("Qwen/Qwen3-30B-A3B"))
    experts = next(one for one in layer_matrices(facts, 0) if one.split == "experts")
    whole = rank_bytes(facts, experts, Sharing(), "bfloat16")
    assert rank_bytes(facts, experts, Sharing(4, 2), "bfloat16") == whole / 8
    assert rank_bytes(facts, experts, Sharing(4, 2, expert=True), "bfloat16") == whole / 8
    assert rank_bytes(facts, experts, Sharing(6, 1, expert=True), "bfloat16") == pytest.approx(whole * 22 / 128)


def test_compressions_of_latent_attention_are_on_every_rank() -> None:
    facts = facts_of(config_of("deepseek-ai/DeepSeek-V3"))
    down = next(one for one in layer_matrices(facts, 0) if one.name.endswith("kv_a_proj_with_mqa"))
    assert rank_bytes(facts, down, Sharing(8), "bfloat16") == 576 * 7168 * 2
