from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gen_stack.facts import ModelFacts, UnknownModelError, facts_of
from tests.generator.models import config_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}


def kinds(facts: ModelFacts) -> dict[str, int]:
    return dict(Counter(layer.attention for layer in facts.layers))


def test_a_plain_config() -> None:
    facts = facts_of(LLAMA)
    assert (facts.architecture, facts.heads, facts.kv_heads, facts.hidden) == ("LlamaForCausalLM", 64, 8, 8192)
    assert (facts.layers[0].head_size, facts.context, facts.dtype, facts.tied) == (128, 131072, "bfloat16", False)
    assert (facts.known, facts.is_moe, facts.multimodal, facts.quantization) == (True, False, False, None)


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", True, 1.5])
def test_what_every_plan_needs_must_be_a_number(missing: str, value: Any) -> None:
    with pytest.raises(UnknownModelError, match=missing):
        facts_of({**LLAMA, missing: value})


def test_a_text_model_inside_a_larger_one() -> None:
    tower = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
    facts = facts_of({"architectures": ["X"], "model_type": "x", "text_config": LLAMA, "vision_config": tower})
    assert (facts.multimodal, facts.heads, facts.architecture, facts.model_type) == (True, 64, "X", "llama")
    assert facts.vision is not None
    assert (facts.vision.layers, facts.vision.hidden, facts.vision.intermediate) == (27, 1152, 4304)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 524288),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"rope_scaling": None, "seq_length": 4096}, 4096),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 131072),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_the_context_is_the_engines(change: dict[str, Any], expected: int | None) -> None:
    assert facts_of({**LLAMA, **change}).context == expected


def test_windows_and_linear_attention_layer_by_layer() -> None:
    assert kinds(facts_of(config_of("google/gemma-3-27b-it"))) == {"sliding": 52, "full": 10}
    assert kinds(facts_of(config_of("openai/gpt-oss-120b"))) == {"sliding": 18, "full": 18}
    assert kinds(facts_of(config_of("Qwen/Qwen3.6-27B"))) == {"linear": 48, "full": 16}
    assert kinds(facts_of({**LLAMA, "sliding_window": 4096, "use_sliding_window": False})) == {"full": 80}
    assert kinds(facts_of({**LLAMA, "sliding_window": 262144})) == {"full": 80}
    assert kinds(facts_of({**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192})) == {
        "chunked": 60,
        "full": 20,
    }


def test_two_sizes_of_heads() -> None:
    facts = facts_of(config_of("google/gemma-4-31B-it"))
    heads = {layer.attention: (layer.kv_heads, layer.head_size) for layer in facts.layers}
    assert heads == {"sliding": (16, 256), "full": (4, 512)}


def test_latent_attention_has_one_cache_head() -> None:
    facts = facts_of(config_of("deepseek-ai/DeepSeek-V3"))
    assert facts.mla is not None
    assert {(layer.kv_heads, layer.head_size, layer.value_size) for layer in facts.layers} == {(1, 576, 0)}
    assert [layer.sparse for layer in facts.layers].count(False) == 3
    assert facts.experts is not None
    assert (facts.experts.count, facts.experts.per_token, facts.experts.shared_intermediate) == (256, 8, 2048)


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"mlp_only_layers": [0, 1]}, [False, False, True, True]),
        ({"interleave_moe_layer_step": 1}, [True, True, True, True]),
        ({"moe_layer_freq": [0, 1, 1, 0]}, [False, True, True, False]),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, [False, False, True, False]),
    ],
)
def test_which_layers_have_experts(change: dict[str, Any], sparse: list[bool]) -> None:
    facts = facts_of({**LLAMA, "num_experts": 8, "num_hidden_layers": 4, **change})
    assert [layer.sparse for layer in facts.layers] == sparse


def test_other_kinds_of_layers_are_not_known() -> None:
    assert not facts_of({**LLAMA, "model_type": "something_new"}).known
    assert not facts_of({**LLAMA, "hybrid_override_pattern": "M*"}).known


def test_an_index_says_how_large_all_weights_are() -> None:
    index = {"metadata": {"total_size": 123}, "weight_map": {"model.layers.79.x": "a", "model.layers.80.x": "b"}}
    facts = facts_of(LLAMA, index)
    assert (facts.checkpoint_bytes, facts.checkpoint_extras) == (123, True)
    assert facts_of(LLAMA, {"weight_map": {}}).checkpoint_bytes is None


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1, "x", [], None])
def test_numbers_that_are_none(odd: Any) -> None:
    facts = facts_of({**LLAMA, "rope_scaling": {"factor": odd}, "max_position_embeddings": 8})
    assert facts.context in (8, 8 * 1024)
    vision = facts_of({"text_config": LLAMA, "vision_config": {"depth": 2, "hidden_size": 8, "mlp_ratio": odd}}).vision
    assert vision is not None
    assert vision.intermediate == 32
