from __future__ import annotations

import json
from typing import Any

import pytest

from tests.generator.helpers import FOUR, ONE, TWO, error, errors, plan_of, spec_file
from tests.generator.models import LLAMA_30B as LLAMA
from tests.generator.models import config_of

ONE_GPU = "  - {name: %s, address: 10.0.0.%d, gpus: 1}\n"


def with_config(text: str, config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    return text.replace("model: /models/m", "model: {id: /models/m, config: c.json}"), {"c.json": json.dumps(config)}


def sizes(text: str, config: dict[str, Any]) -> tuple[int, int, int, bool]:
    found = plan_of(*with_config(text, config)).parallelism
    return found.tensor, found.pipeline, found.data, found.expert


def one_gpu_nodes(count: int) -> str:
    return "name: t\nmodel: /models/m\nnodes:\n" + "".join(ONE_GPU % (f"n{i}", i + 1) for i in range(count))


def test_heads_that_do_not_divide() -> None:
    line = error(*with_config(f"{ONE}parallelism: {{tensor: 8}}\n", LLAMA))
    assert "parallelism.tensor: 52 attention heads cannot be split over tensor 8" in line
    assert "tensor can be 1, 2, 4, 13, 26 and 52" in line


def test_a_size_that_divides_is_chosen() -> None:
    assert sizes(ONE, LLAMA) == (4, 2, 1, False)
    reason = plan_of(*with_config(ONE, LLAMA)).choices[0].reason
    assert reason == "the first size that the model's 52 attention heads allow; it stays inside a node"


@pytest.mark.parametrize(
    ("change", "parallelism", "words"),
    [
        ({"num_attention_heads": 64, "num_key_value_heads": 6}, "{tensor: 8}", "6 key-value heads"),
        ({"num_attention_heads": 64, "intermediate_size": 17924}, "{tensor: 8}", "intermediate size of 17924"),
        ({"num_attention_heads": 63, "num_key_value_heads": 9}, "{tensor: 9, data: 1}", "do not divide"),
        ({"num_hidden_layers": 4}, "{pipeline: 8}", "4 layers cannot make 8 stages"),
        ({"architectures": ["Gemma3nForCausalLM"]}, "{tensor: 4, pipeline: 2}", "no pipeline for Gemma3nForCausalLM"),
        ({}, "{expert: true}", "this model has no experts"),
    ],
)
def test_what_the_engine_would_find_at_start(change: dict[str, Any], parallelism: str, words: str) -> None:
    assert words in "\n".join(errors(*with_config(f"{ONE}parallelism: {parallelism}\n", {**LLAMA, **change})))


def test_no_choice_at_all_is_a_problem_of_the_whole() -> None:
    config = {**LLAMA, "num_hidden_layers": 1, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 128}
    assert ": parallelism: " in error(*with_config(ONE, config))


def test_sequences_longer_than_the_models() -> None:
    long = f"{ONE}engine: {{args: {{max_model_len: 4096}}}}\n"
    assert "engine.args.max_model_len: 4096 is longer than the 2048 tokens" in error(*with_config(long, LLAMA))
    allowed = long.replace("}}\n", "}, env: {VLLM_ALLOW_LONG_MAX_MODEL_LEN: 1}}\n")
    assert errors(*with_config(allowed, LLAMA)) == []
    assert errors(*with_config(long.replace("4096", "2k"), LLAMA)) == []


def test_experts_stay_whole_where_slices_would_break_blocks() -> None:
    config = config_of("Qwen/Qwen3-235B-A22B-FP8")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert sizes(ONE, config) == (8, 1, 1, True)
    assert sizes(ONE.replace("gpus: 8", "gpus: 4"), config) == (4, 1, 1, False)
    line = error(*with_config(f"{ONE}parallelism: {{tensor: 8, expert: false}}\n", config))
    assert "parallelism.expert: a rank's share of mlp.experts.gate_up, 192, is no multiple of the 128" in line


def test_dense_replicas_may_not_span_nodes() -> None:
    config = {**LLAMA, "num_attention_heads": 64, "num_key_value_heads": 8}
    line = error(*with_config(f"{FOUR}parallelism: {{tensor: 16, data: 2}}\n", config))
    assert "parallelism.data: each of the 2 replicas of this dense model would span nodes" in line
    assert "write replicas: 2" in line
    with spec_file(*with_config(f"{TWO}parallelism: {{data: 2}}\n", config)) as path:
        from gen_stack.load import load_spec

        assert "fail and restart one by one" in load_spec(path).warnings[0]


def test_nodes_of_one_gpu() -> None:
    config = {**LLAMA, "num_attention_heads": 64, "num_key_value_heads": 8}
    assert sizes(one_gpu_nodes(2), config) == (1, 2, 1, False)
    assert sizes(one_gpu_nodes(2) + "network: {rdma: required}\n", config) == (2, 1, 1, False)
    odd = one_gpu_nodes(3) + "network: {rdma: required}\n"
    assert sizes(odd, config) == (1, 3, 1, False)


def test_a_model_without_a_pipeline_spans_nodes() -> None:
    config = {**LLAMA, "architectures": ["Gemma3nForCausalLM"], "num_attention_heads": 64, "num_key_value_heads": 8}
    assert sizes(TWO, config) == (16, 1, 1, False)


def test_a_config_of_another_kind_is_planned_without() -> None:
    text, files = with_config(ONE, {"n_layer": 3})
    with spec_file(text, files) as path:
        from gen_stack.load import load_spec

        loaded = load_spec(path)
    assert loaded.facts is None
    assert "is of no kind that can be planned from" in loaded.warnings[0]


def test_an_index_beside_the_config_must_be_one() -> None:
    text, files = with_config(ONE, LLAMA)
    assert "model.safetensors.index.json' is not JSON" in error(text, {**files, "model.safetensors.index.json": "{"})
