"""Configs of public models for tests, from the geometry in `data/model-configs.yaml`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SAME = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    *("intermediate_size", "vocab_size", "tie_word_embeddings"),
)
_TYPES = {
    "Qwen/Qwen3.": "qwen3_5_text",
    "Qwen/Qwen3": "qwen3",
    "Qwen/": "qwen2",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen": "qwen2",
    "deepseek-ai/DeepSeek-V3": "deepseek_v3",
    "openai/": "gpt_oss",
    "google/gemma-3": "gemma3_text",
    "google/gemma-4": "gemma4_text",
    "MiniMaxAI/": "minimax_m2",
    "zai-org/": "glm4_moe",
    "moonshotai/": "kimi_k2",
}


LLAMA_30B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 6656,
    "num_hidden_layers": 60,
    "num_attention_heads": 52,
    "num_key_value_heads": 52,
    "intermediate_size": 17920,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}


@functools.lru_cache(maxsize=1)
def geometries() -> dict[str, dict[str, Any]]:
    """Load the geometry of every model, by each of its names."""
    entries = yaml.load((DATA / "model-configs.yaml").read_text("utf-8"), _Loader)
    return {name: one for one in entries for name in [one["model"], *one["aliases"]]}


def config_of(name: str) -> dict[str, Any]:
    """Write a config.json with a model's geometry, in the keys of its family."""
    one = geometries()[name]
    kind = next((kind for start, kind in _TYPES.items() if one["model"].startswith(start)), "llama")
    config = {key: one[key] for key in _SAME if one[key] is not None}
    config |= {"model_type": kind, "torch_dtype": "bfloat16", "attention_bias": one["attention_bias"] is True}
    if isinstance(one["num_key_value_heads"], dict):  # two kinds of heads: those of windows, those of full attention
        config |= {"num_key_value_heads": one["num_key_value_heads"]["sliding"], "head_dim": one["head_dim"]["sliding"]}
        config |= {"global_head_dim": one["head_dim"]["full"], "attention_k_eq_v": True}
        config |= {"num_global_key_value_heads": one["num_key_value_heads"]["full"]}
    if experts := one["experts"]:
        config |= {"num_experts": experts["num_experts"], "num_experts_per_tok": experts["experts_per_tok"]}
        config |= {"moe_intermediate_size": experts["moe_intermediate_size"]}
        config |= {"n_shared_experts": experts["num_shared_experts"]}
        config |= {"first_k_dense_replace": experts["first_dense_layers"] or 0}
        config |= {"enable_moe_block": True} if kind == "gemma4_text" else {}
    if hybrid := one["hybrid"]:
        config |= {
            key: value for key, value in hybrid.items() if key.startswith(("linear_", "full_attention_interval"))
        }
    if window := one["sliding_window"]:
        every = one["num_hidden_layers"] // window["full_layers"]
        kinds = ["full_attention" if index % every == every - 1 else "sliding_attention" for index in range(1000)]
        config |= {"sliding_window": window["window"], "layer_types": kinds[: one["num_hidden_layers"]]}
    return config | (one["mla"] or {})
