"""The cache against public logs: from the memory that a log says is available to the sequences it says fit."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from gen_stack.facts import facts_of
from gen_stack.kv_cache import CacheOptions, layout, stage_layers
from tests.generator.models import DATA, config_of

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
LOGS = {one["id"]: one for one in yaml.load((DATA / "kv-logs.yaml").read_text("utf-8"), _Loader)}

STATED = {
    "qwen38-27b-fp8-tp2-3090": "Qwen/Qwen3.8-27B",
    "qwen36-35b-a3b-nvfp4-5090-a": "Qwen/Qwen3.6-35B-A3B",
    "qwen35-122b-a10b-int4-tp2-sm89": "Qwen/Qwen3.5-122B-A10B",
    "llama31-8b-rtx3090-len20000": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen2-vl-7b-v073": "Qwen/Qwen2-VL-7B-Instruct",
    "minimax-m27-awq-tp2-2x-dgx-spark-085": "MiniMaxAI/MiniMax-M2",
    "qwen3-32b-tp2-h100-lmcache-faq": "Qwen/Qwen3-32B",
    "ministral3-14b-tp2": "mistralai/Ministral-3-14B-Instruct-2512",
}
"""Logs that state the available memory, the cache's dtype or none, the length and the concurrency."""


@pytest.mark.parametrize("name", STATED)
def test_the_sequences_of_a_public_log(name: str) -> None:
    log = LOGS[name]
    facts = facts_of(config_of(STATED[name]))
    laid = layout(facts, log["tp"], CacheOptions("bfloat16", log["kv_cache_dtype"] or "auto"))
    assert laid is not None
    blocks = int(log["available_kv_cache_gib"] * 2**30) // laid.block_bytes(len(facts.layers), len(facts.layers))
    sequences = blocks / laid.blocks_per_sequence(log["max_model_len"])
    assert sequences == pytest.approx(log["max_concurrency"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("qwen3-coder-480b-fp8-dp8-h20-util095", "Qwen/Qwen3-Coder-480B-A35B-Instruct"),
        ("qwen3-235b-a22b-fp8-tp4-h100", "Qwen/Qwen3-235B-A22B"),
    ],
)
def test_the_need_and_the_blocks_of_a_public_log(name: str, model: str) -> None:
    log = LOGS[name]
    facts = facts_of(config_of(model))
    laid = layout(facts, log["tp"], CacheOptions("bfloat16"))
    assert laid is not None
    block = laid.block_bytes(len(facts.layers), len(facts.layers))
    if needed := log["extra"].get("kv_needed_gib"):
        assert block * laid.blocks_per_sequence(log["max_model_len"]) / 2**30 == pytest.approx(needed, rel=0.01)
    else:
        assert log["available_kv_cache_gib"] * 2**30 // block * 16 == pytest.approx(log["kv_cache_tokens"], rel=0.02)


def test_context_parallel_shares_the_latent_cache() -> None:
    log = LOGS["kimi-k2-thinking-tp8-dcp8-h200"]
    facts = facts_of(config_of("moonshotai/Kimi-K2-Thinking"))
    laid = layout(facts, 8, CacheOptions("bfloat16", context_parallel=8))
    assert laid is not None
    blocks = int(log["available_kv_cache_gib"] * 2**30) // laid.block_bytes(61, 61)
    length = 131072
    assert blocks / laid.blocks_per_sequence(length) * length == pytest.approx(log["kv_cache_tokens"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "block_size"), [("qwen38-27b-fp8-tp2-3090", 1568), ("qwen35-122b-a10b-int4-tp2-sm89", 4176)]
)
def test_blocks_grow_until_a_state_fits(name: str, block_size: int) -> None:
    laid = layout(facts_of(config_of(STATED[name])), 2, CacheOptions("bfloat16", "fp8"))
    assert laid is not None
    assert {kind.block_size for kind in laid.kinds} == {block_size, LOGS[name]["extra"]["attention_block_size"]}


def test_latent_attention_is_whole_on_every_rank() -> None:
    facts = facts_of(config_of("deepseek-ai/DeepSeek-V3"))
    sizes = {laid.block_bytes(61, 61) for tensor in (1, 8) if (laid := layout(facts, tensor, CacheOptions("bfloat16")))}
    assert sizes == {64 * 61 * 576 * 2}


def test_sparse_latent_attention_caches_its_index_too() -> None:
    config = {**config_of("deepseek-ai/DeepSeek-V3"), "index_n_heads": 64, "index_head_dim": 128}
    laid = layout(facts_of(config), 8, CacheOptions("bfloat16"))
    assert laid is not None
    assert laid.block_bytes(61, 61) == 64 * 61 * (656 + 132)


def test_heads_are_copied_when_ranks_outnumber_them() -> None:
    facts = facts_of(config_of("Qwen/Qwen3-30B-A3B"))
    four, eight = (layout(facts, tensor, CacheOptions("bfloat16")) for tensor in (4, 8))
    assert four == eight


def test_windows_hold_no_more_than_they_see() -> None:
    facts = facts_of(config_of("openai/gpt-oss-120b"))
    laid = layout(facts, 1, CacheOptions("bfloat16", in_flight_tokens=4096))
    assert laid is not None
    assert laid.blocks_per_sequence(131072) == 131072 // 16 + (128 - 1 + 4096 + 15) // 16 + 1


def test_two_sizes_of_heads_share_blocks() -> None:
    laid = layout(facts_of(config_of("google/gemma-4-31B-it")), 1, CacheOptions("bfloat16"))
    assert laid is not None
    assert {(kind.attention, kind.block_size) for kind in laid.kinds} == {("sliding", 16), ("full", 32)}
    assert laid.group_size == 10


def test_a_dtype_that_is_not_known() -> None:
    assert layout(facts_of(config_of("Qwen/Qwen3-8B")), 1, CacheOptions("bfloat16", "turboquant_4bit_nc")) is None


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(80, 2, (40, 40)), (61, 2, (31, 30)), (61, 4, (15, 15, 16, 15)), (30, 4, (7, 8, 8, 7)), (3, 3, (1, 1, 1))],
)
def test_stages_as_the_engine_makes_them(layers: int, stages: int, expected: tuple[int, ...]) -> None:
    assert stage_layers(layers, stages) == expected
    assert stage_layers(layers, stages, [layers]) == expected
