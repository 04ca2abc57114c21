"""Facts of a model that decide how it can be split and what it takes: read from its config.json, and nothing guessed.

The keys are those of Hugging Face's configs, in the order in which vLLM 0.32 looks for them
(`transformers_utils/model_arch_config_convertor.py`). What a config does not say stays None.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from gen_stack.quantization import Quantization, quantization_of

if TYPE_CHECKING:
    from collections.abc import Mapping

Attention = Literal["full", "sliding", "chunked", "linear"]

KNOWN_TYPES = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "phi3", "phi4mm"),
        *("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe", "gpt_oss"),
        *("llama4_text", "gemma3_text", "gemma4_text", "minimax_m2", "mimo_v2_flash", "ministral3"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    }
)
"""Values of `model_type` whose layers `weights.py` knows; others are taken for Llama's, and the plan says so."""

_TEXT_CONFIGS = ("text_config", "language_config", "llm_config")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
_EXPERT_KEYS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_EXPERT_WIDTH_KEYS = ("moe_intermediate_size", "expert_intermediate_size", "intermediate_size")
_PER_TOKEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
KV_HEAD_KEYS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_OTHER_MIXERS = ("hybrid_override_pattern", "compress_ratios", "linear_attn_config", "mamba_d_state", "ssm_cfg")
"""Keys of configs whose layers hold something else than attention or a gated delta net: not planned by layer."""

_SCALED_ALREADY = {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}


@dataclasses.dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: the ranks of its compressions, and the sparse indexer of DeepSeek V3.2's kind."""

    kv_rank: int
    query_rank: int | None
    rope: int
    nope: int
    value: int
    index_heads: int = 0
    index_size: int = 0


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """A gated delta net: the linear attention of Qwen3-Next and later."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts: how many, how many of them for one token, and the width of one and of the shared ones."""

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer: its attention, with the heads of its cache, and which kinds of MLP it has."""

    attention: Attention
    kv_heads: int
    head_size: int
    value_size: int
    dense: bool
    sparse: bool


@dataclasses.dataclass(frozen=True)
class Vision:
    """A vision tower, as far as its size goes."""

    layers: int
    hidden: int
    intermediate: int


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """What a config.json says of a model."""

    architecture: str
    model_type: str
    heads: int
    kv_heads: int
    hidden: int
    intermediate: int
    vocab: int
    layers: tuple[Layer, ...]
    experts: Experts | None
    mla: Mla | None
    delta_net: DeltaNet | None
    window: int | None
    dtype: str
    quantization: Quantization | None
    context: int | None
    tied: bool
    query_gate: bool
    attention_bias: bool
    shared_kv_projection: bool
    """Whether keys and values of full attention come from one projection (Gemma 4)."""
    vision: Vision | None
    multimodal: bool
    known: bool
    """Whether the weights of this type's layers are known; else they are counted as Llama's."""
    checkpoint_bytes: int | None = None
    """The size of all weights, when an index of safetensors files says it."""
    checkpoint_extras: bool = False
    """Whether the checkpoint holds layers that plain serving does not load (multi-token prediction)."""

    @property
    def is_moe(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.experts is not None

    @property
    def query_heads_gated(self) -> int:
        """Count query heads as the projection makes them: twice as many with an output gate."""
        return self.heads * 2 if self.query_gate else self.heads


class UnknownModelError(ValueError):
    """A config lacks what every plan needs; its text says what."""


def facts_of(config: Mapping[str, Any], index: Mapping[str, Any] | None = None) -> ModelFacts:
    """Read the facts from a config.json and, if there is one, the index of its safetensors files.

    Raises `UnknownModelError` with the keys that are missing or no numbers.
    """
    text = text_config(config)
    wrong = [key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads") if not _size(text, key)]
    if wrong:
        raise UnknownModelError(f"it has no number above zero for {', '.join(wrong)}")
    if _first(text, _EXPERT_KEYS) and not _first(text, _EXPERT_WIDTH_KEYS):
        raise UnknownModelError(f"it has experts and no number above zero for {_EXPERT_WIDTH_KEYS[0]}")
    if not _head_size(text):
        raise UnknownModelError("its hidden_size is smaller than its num_attention_heads")
    model_type = str(text.get("model_type") or config.get("model_type") or "unknown")
    architectures = config.get("architectures") or text.get("architectures") or [model_type]
    mla = _mla(text)
    experts = _experts(text, model_type)
    layers = _layers(text, model_type, mla, experts)
    net = _delta_net(text)
    if net is None and any(layer.attention == "linear" for layer in layers):
        raise UnknownModelError("it has linear attention without the sizes of a gated delta net")
    total, extras = _checkpoint(index, len(layers))
    return ModelFacts(
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else model_type,
        model_type=model_type,
        heads=text["num_attention_heads"],
        kv_heads=_kv_heads(text),
        hidden=text["hidden_size"],
        intermediate=_size(text, "intermediate_size_mlp") or _size(text, "intermediate_size") or 0,
        vocab=_size(text, "vocab_size") or _size(config, "vocab_size") or 0,
        layers=layers,
        experts=experts,
        mla=mla,
        delta_net=net,
        window=_window(text),
        dtype=_dtype(config, text),
        quantization=quantization_of(config, text),
        context=_context(text, model_type),
        tied=_tied(config, text, model_type),
        query_gate=bool(text.get("attn_output_gate", model_type.startswith(("qwen3_next", "qwen3_5")))),
        attention_bias=bool(text.get("attention_bias")) or model_type.startswith("qwen2"),
        shared_kv_projection=bool(text.get("attention_k_eq_v")),
        vision=_vision(config),
        multimodal=text is not config or isinstance(config.get("vision_config"), dict),
        known=model_type in KNOWN_TYPES and not any(text.get(key) for key in _OTHER_MIXERS),
        checkpoint_bytes=total,
        checkpoint_extras=extras,
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the part of a config that is about text: a section of its own in models with vision."""
    return next((config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)), config)


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**40 else None


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((value for key in keys if (value := _size(config, key)) is not None), None)


def _kv_heads(text: Mapping[str, Any]) -> int:
    return _first(text, KV_HEAD_KEYS) or int(text["num_attention_heads"])


def _head_size(text: Mapping[str, Any]) -> int:
    return _size(text, "head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"])


def _mla(text: Mapping[str, Any]) -> Mla | None:
    rank, rope, nope = (_size(text, key) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"))
    value = _size(text, "v_head_dim")
    if not (rank and rope and nope and value):
        return None
    return Mla(
        kv_rank=rank,
        query_rank=_size(text, "q_lora_rank"),
        rope=rope,
        nope=nope,
        value=value,
        index_heads=_size(text, "index_n_heads") or 0,
        index_size=_size(text, "index_head_dim") or 0,
    )


def _delta_net(text: Mapping[str, Any]) -> DeltaNet | None:
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    found = [_size(text, key) for key in (*keys, "linear_conv_kernel_dim")]
    return DeltaNet(*(one for one in found if one)) if all(found) else None


def _experts(text: Mapping[str, Any], model_type: str) -> Experts | None:
    count = _first(text, _EXPERT_KEYS)
    if not count or text.get("enable_moe_block") is False:
        return None
    width = _first(text, _EXPERT_WIDTH_KEYS) or 0
    shared = _size(text, "shared_expert_intermediate_size") or width * (_size(text, "n_shared_experts") or 0)
    if model_type == "llama4_text":  # one shared expert as wide as a routed one
        shared = width
    return Experts(count, _first(text, _PER_TOKEN_KEYS) or 1, width, shared)


def _layers(text: Mapping[str, Any], model_type: str, mla: Mla | None, experts: Experts | None) -> tuple[Layer, ...]:
    return tuple(
        _layer(text, model_type, index, mla, experts) for index in range(min(int(text["num_hidden_layers"]), 10_000))
    )


def _layer(text: Mapping[str, Any], model_type: str, index: int, mla: Mla | None, experts: Experts | None) -> Layer:
    attention = _attention(text, model_type, index)
    size, heads = _head_size(text), _kv_heads(text)
    value = _size(text, "v_head_dim") or size
    if mla:
        size, heads, value = mla.kv_rank + mla.rope, 1, 0
    elif attention == "full" and _size(text, "global_head_dim"):
        size = value = text["global_head_dim"]
        heads = _size(text, "num_global_key_value_heads") or heads
    elif attention == "sliding" and _size(text, "swa_num_key_value_heads"):
        heads, size = text["swa_num_key_value_heads"], _size(text, "swa_head_dim") or size
        value = _size(text, "swa_v_head_dim") or value
    sparse = experts is not None and _is_sparse(text, index)
    return Layer(attention, heads, size, value, dense=not sparse or bool(text.get("enable_moe_block")), sparse=sparse)


def _attention(text: Mapping[str, Any], model_type: str, index: int) -> Attention:
    """Tell a layer's attention from the list of layer types, or from the rule that its family has for it."""
    kinds = text.get("layer_types") or text.get("hybrid_layer_pattern")
    if isinstance(kinds, list) and index < len(kinds):
        kind = str(kinds[index])
        known: dict[str, Attention] = {"1": "sliding", "sliding_attention": "sliding"}
        known |= {"chunked_attention": "chunked", "linear_attention": "linear"}
        return known.get(kind, "full")
    if interval := _size(text, "full_attention_interval"):
        return "full" if (index + 1) % interval == 0 else "linear"
    if model_type == "llama4_text":  # every fourth layer has no rotary embedding and sees everything
        return "full" if (index + 1) % 4 == 0 else "chunked"
    if _window(text) is None:
        return "full"
    if pattern := _size(text, "sliding_window_pattern") or (6 if model_type == "gemma3_text" else None):
        return "full" if (index + 1) % pattern == 0 else "sliding"
    return "sliding"


def _window(text: Mapping[str, Any]) -> int | None:
    if text.get("use_sliding_window") is False:
        return None
    window = _size(text, "sliding_window") or _size(text, "attention_chunk_size")
    context = _first(text, _CONTEXT_KEYS)
    return window if window and (context is None or window < context) else None


def _is_sparse(text: Mapping[str, Any], index: int) -> bool:
    frequency, only = text.get("moe_layer_freq"), text.get("mlp_only_layers")
    if isinstance(frequency, list):
        return index < len(frequency) and bool(frequency[index])
    if isinstance(only, list) and index in only:
        return False
    step = _size(text, "decoder_sparse_step") or _size(text, "interleave_moe_layer_step") or 1
    every = frequency if isinstance(frequency, int) and frequency > 0 else 1
    return index >= (_size(text, "first_k_dense_replace") or 0) and index % every == 0 and (index + 1) % step == 0


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Name the dtype; vLLM takes float32 weights down to bfloat16 or float16, and a config without one for bfloat16."""
    named = next((one[key] for one in (config, text) for key in ("dtype", "torch_dtype") if one.get(key)), "bfloat16")
    return str(named).removeprefix("torch.")


def _context(text: Mapping[str, Any], model_type: str) -> int | None:
    """Find the longest sequence that vLLM accepts: the smallest of the keys, times the factor of plain scaling.

    `_get_and_verify_max_len` in vLLM 0.32's `config/model.py`: YaRN, Llama 3's and LongRoPE's configs state the length
    scaled already, and so does Gemma 3's.
    """
    found = [size for key in _CONTEXT_KEYS if (size := _size(text, key))]
    if not found:
        return None
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = str(scaling.get("rope_type", scaling.get("type", "default"))) if isinstance(scaling, dict) else "default"
    factor = scaling.get("factor", 1) if isinstance(scaling, dict) and kind not in _SCALED_ALREADY else 1
    if "gemma3" in model_type or not isinstance(factor, int | float) or isinstance(factor, bool) or not factor >= 1:
        factor = 1
    return int(min(found) * min(factor, 1024))


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], model_type: str) -> bool:
    """Tell whether the output layer is the embedding; transformers' default is that it is, and Gemma relies on it."""
    for one in (config, text):
        if isinstance(one.get("tie_word_embeddings"), bool):
            return bool(one["tie_word_embeddings"])
    return model_type.startswith("gemma")


def _vision(config: Mapping[str, Any]) -> Vision | None:
    tower = config.get("vision_config")
    if not isinstance(tower, dict):
        return None
    layers = _first(tower, ("depth", "num_hidden_layers", "layers", "vt_num_hidden_layers"))
    hidden = _first(tower, ("embed_dim", "hidden_size", "width", "vt_hidden_size"))
    if "depth" in tower and _size(tower, "embed_dim") is None:
        hidden = _size(tower, "hidden_size")
    if not layers or not hidden:
        return None
    ratio = tower.get("mlp_ratio", 4)
    wide = _first(tower, ("intermediate_size", "vt_intermediate_size"))
    ratio = ratio if isinstance(ratio, int | float) and 0 < ratio < 1024 else 4
    return Vision(layers, hidden, wide or int(hidden * ratio))


def _checkpoint(index: Mapping[str, Any] | None, layers: int) -> tuple[int | None, bool]:
    """Read the size of all weights from `model.safetensors.index.json`, and whether it has layers beyond the model's.

    Multi-token prediction is stored as one layer more, or under `mtp`.
    """
    if index is None:
        return None, False
    metadata, names = index.get("metadata"), index.get("weight_map")
    total = _size(metadata, "total_size") if isinstance(metadata, dict) else None
    beyond = (f".layers.{layers}.", "mtp.")
    extras = isinstance(names, dict) and any(one in str(name) for name in names for one in beyond)
    return total, extras
