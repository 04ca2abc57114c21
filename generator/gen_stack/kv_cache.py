"""The KV cache as vLLM 0.32 lays it out: bytes of a block on a rank, and the blocks that one sequence takes.

From `v1/core/kv_cache_utils.py` (`get_kv_cache_groups`, `_get_kv_cache_groups_uniform_page_size`,
`unify_kv_cache_spec_page_size`), `v1/kv_cache_interface.py` (`max_memory_usage_bytes` of each kind) and
`platforms/interface.py` (`_align_hybrid_block_size`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gen_stack.quantization import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gen_stack.facts import Layer, ModelFacts

KERNEL_BLOCK = 16
"""What FlashAttention's and most other kernels' block sizes are multiples of."""

SPARSE_BYTES = 656
"""Bytes for a token and layer in the packed FP8 cache of sparse latent attention (`fp8_ds_mla`)."""

_KV_BYTES = {
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "int8_per_token_head": 1.0,
    "fp8_per_token_head": 1.0,
    "nvfp4": 0.5625,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 4.0,
}


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What the engine's flags decide about the cache."""

    dtype: str
    """What the model computes in."""
    kv_dtype: str = "auto"
    block_size: int | None = None
    prefix_caching: bool = True
    in_flight_tokens: int = 16384
    """Tokens scheduled and not settled: each step in flight holds a batch (`VllmConfig.max_in_flight_tokens`)."""
    context_parallel: int = 1


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Layers that share a page: their number, bytes for a token (or a state), and the tokens of a block."""

    attention: str
    layers: int
    page: int
    block_size: int
    window: int | None = None


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Groups of layers with block tables of their own, which draw from one pool of equal blocks."""

    kinds: tuple[_Kind, ...]
    group_size: int
    options: CacheOptions

    @property
    def groups(self) -> tuple[tuple[_Kind, int], ...]:
        """List the kinds with the number of groups that each makes."""
        return tuple((kind, -(-kind.layers // self.group_size)) for kind in self.kinds)

    def block_bytes(self, stage_layers: int, all_layers: int) -> int:
        """Give the bytes of one block on a stage with some of the layers: the largest group's share decides."""
        if len(self.kinds) == 1:
            return self.kinds[0].page * stage_layers
        return max(kind.page for kind in self.kinds) * -(-self.group_size * stage_layers // all_layers)

    def blocks_per_sequence(self, length: int) -> int:
        """Count the blocks of one sequence of `length` tokens."""
        return sum(self._blocks(kind, length) * groups for kind, groups in self.groups)

    def _blocks(self, kind: _Kind, length: int) -> int:
        """Count blocks in one group: `max_memory_usage_bytes` of its kind over its page."""
        if kind.attention == "linear":
            return 2 if self.options.prefix_caching else 1
        if kind.window is not None:
            held = min(kind.window - 1 + self.options.in_flight_tokens, length)
            return -(-held // kind.block_size) + (1 if kind.attention == "sliding" else 0)
        share = -(-length // self.options.context_parallel)
        return -(-share // kind.block_size)


def layout(facts: ModelFacts, tensor: int, options: CacheOptions) -> CacheLayout | None:
    """Lay the cache of a model out on one of `tensor` ranks; None when a dtype or a layer is not known."""
    if kv_bytes(facts, options) is None:
        return None
    state = _state_bytes(facts, tensor, options.dtype)
    size = options.block_size or (64 if facts.mla else KERNEL_BLOCK)
    if state:
        token = max(
            (_token_bytes(facts, one, tensor, options) for one in facts.layers if one.attention != "linear"), default=0
        )
        if not token:
            return None
        size = max(size, KERNEL_BLOCK * -(-state // (KERNEL_BLOCK * token)))
    kinds = _unified(_kinds(facts, tensor, options, size, state))
    counts = [kind.layers for kind in kinds]
    # Groups are as large as the smallest kind, or as the largest when it is not much larger.
    group = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    return CacheLayout(tuple(kinds), group, options)


def kv_bytes(facts: ModelFacts, options: CacheOptions) -> float | None:
    """Give the bytes of one cached number; `auto` follows the checkpoint, else the model's dtype."""
    name = options.kv_dtype
    if name == "auto":
        if facts.quantization and facts.quantization.kv_cache_bits == 8:
            return 1.0
        return float(DTYPE_BYTES.get(options.dtype, 2))
    return _KV_BYTES.get(name)


def _kinds(facts: ModelFacts, tensor: int, options: CacheOptions, size: int, state: int) -> list[_Kind]:
    found: dict[tuple[str, int, int | None], int] = {}
    for one in facts.layers:
        windowed = one.attention in ("sliding", "chunked")
        page = state if one.attention == "linear" else _token_bytes(facts, one, tensor, options) * size
        key = (one.attention, page, facts.window if windowed else None)
        found[key] = found.get(key, 0) + 1
    return [_Kind(attention, layers, page, size, window) for (attention, page, window), layers in found.items()]


def _unified(kinds: list[_Kind]) -> list[_Kind]:
    """Make pages equal: blocks of small ones hold more tokens where the pages divide, the rest is padding."""
    largest = max(kind.page for kind in kinds)
    return [
        dataclasses.replace(
            kind,
            page=largest,
            block_size=kind.block_size * (largest // kind.page if largest % kind.page == 0 else 1),
        )
        for kind in kinds
    ]


def _token_bytes(facts: ModelFacts, layer: Layer, tensor: int, options: CacheOptions) -> int:
    """Give the bytes of a token in one layer on a rank.

    Heads are copied when ranks outnumber them (`get_num_kv_heads`). Latent attention has one compressed vector, whole
    on every rank; a sparse one adds the indexer's keys, in FP8 with a scale for every 128.
    """
    each = kv_bytes(facts, options) or 2.0
    if facts.mla is None:
        return int(max(1, layer.kv_heads // tensor) * (layer.head_size + layer.value_size) * each)
    if not facts.mla.index_size:
        return int(layer.head_size * each)
    # Sparse latent attention caches FP8 unless told otherwise (`get_default_kv_cache_dtype` of its config).
    main = 2 * layer.head_size if options.kv_dtype in ("bfloat16", "float16") else SPARSE_BYTES
    return main + facts.mla.index_size + facts.mla.index_size // 128 * 4


def _state_bytes(facts: ModelFacts, tensor: int, dtype: str) -> int:
    """Give the bytes of one state of a gated delta net on a rank.

    `gated_delta_net_state_shape` of `mamba_utils.py`: the convolution's last inputs in the model's dtype, and a matrix
    for each value head in float32.
    """
    net = facts.delta_net
    if net is None or all(layer.attention != "linear" for layer in facts.layers):
        return 0
    convolution = (2 * net.key_heads * net.key_size + net.value_heads * net.value_size) // tensor * (net.kernel - 1)
    return convolution * DTYPE_BYTES.get(dtype, 2) + net.value_heads // tensor * net.value_size * net.key_size * 4


def stage_layers(layers: int, stages: int, partition: Sequence[int] | None = None) -> tuple[int, ...]:
    """Split layers over pipeline stages: a rest goes to the stages before the last (`get_pp_indices`)."""
    if partition is not None and len(partition) == stages and sum(partition) == layers:
        return tuple(partition)
    split = [layers // stages] * stages
    for index in range(2, layers % stages + 2):
        split[-index] += 1
    return tuple(split)
