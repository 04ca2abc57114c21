"""The matrices of a model, and how many bytes of them one rank holds.

Shapes and how they are split over tensor parallel ranks follow the models of vLLM 0.32 (`model_executor/models/`,
`layers/linear.py`, `layers/vocab_parallel_embedding.py`). Norms and biases are counted, scales within the scheme.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from gen_stack.quantization import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.facts import Layer, ModelFacts

Split = Literal["rows", "columns", "kv", "whole", "experts"]
"""By output, by input, by key and value heads (copied when ranks outnumber them), not at all, or as experts."""

VOCABULARY_PADDING = 64
"""`DEFAULT_VOCAB_PADDING_SIZE` of vLLM's `vocab_parallel_embedding.py`."""

MXFP4_PADDING = 128
"""What Hopper's and Blackwell's MXFP4 kernels round both sizes of an expert up to (`fused_moe/oracle/mxfp4.py`)."""

_ROUTER_BIAS = {"deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm_moe_dsa", "minimax_m2", "gpt_oss"}


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight of `count` matrices (experts, else one) of `rows` outputs and `columns` inputs."""

    name: str
    rows: int
    columns: int
    split: Split
    count: int = 1
    linear: bool = True
    """Whether quantisation can apply: it leaves norms, biases, embeddings and routers alone."""

    @property
    def parameters(self) -> int:
        """Count the parameters of the whole model's matrix."""
        return self.rows * self.columns * self.count


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Over how many ranks a layer is spread: tensor parallel ranks, replicas that share experts, expert parallel."""

    tensor: int = 1
    data: int = 1
    expert: bool = False


def embedding(facts: ModelFacts) -> Matrix:
    """Give the input embedding, its vocabulary padded as the engine pads it."""
    return Matrix("embed_tokens", _padded(facts.vocab, VOCABULARY_PADDING), facts.hidden, "rows", linear=False)


def output_layer(facts: ModelFacts) -> tuple[Matrix, ...]:
    """Give the final norm and the output layer; quantisation leaves it alone unless it names it."""
    quantised = facts.quantization is not None and any("lm_head" in names for names, _ in facts.quantization.schemes)
    head = Matrix("lm_head", _padded(facts.vocab, VOCABULARY_PADDING), facts.hidden, "rows", linear=quantised)
    return Matrix("norm", facts.hidden, 1, "whole", linear=False), head


def layer_matrices(facts: ModelFacts, index: int) -> tuple[Matrix, ...]:
    """List the matrices of one layer."""
    layer, prefix = facts.layers[index], f"layers.{index}"
    norms = 4 if facts.model_type.startswith("gemma") else 2
    return (
        *_attention(facts, layer, prefix),
        *_mlp(facts, layer, prefix),
        Matrix(f"{prefix}.norms", facts.hidden, norms, "whole", linear=False),
    )


def _attention(facts: ModelFacts, layer: Layer, prefix: str) -> Iterator[Matrix]:
    if layer.attention == "linear":
        yield from _delta_net(facts, f"{prefix}.linear_attn")
    elif facts.mla:
        yield from _mla(facts, f"{prefix}.self_attn")
    else:
        yield from _grouped(facts, layer, f"{prefix}.self_attn")


def _grouped(facts: ModelFacts, layer: Layer, name: str) -> Iterator[Matrix]:
    """Grouped-query attention: `QKVParallelLinear` and a row parallel output."""
    hidden, keys = facts.hidden, layer.kv_heads * layer.head_size
    queries, values = facts.query_heads_gated * layer.head_size, layer.kv_heads * layer.value_size
    shared = facts.shared_kv_projection and layer.attention == "full"
    yield Matrix(f"{name}.q_proj", queries, hidden, "rows")
    yield Matrix(f"{name}.k_proj", keys, hidden, "kv")
    yield Matrix(f"{name}.v_proj", keys if shared else values, hidden, "kv")
    yield Matrix(f"{name}.o_proj", hidden, facts.heads * layer.value_size, "columns")
    if facts.attention_bias:
        yield Matrix(f"{name}.bias", queries, 1, "rows", linear=False)
        yield Matrix(f"{name}.kv_bias", keys + values, 1, "kv", linear=False)
    if facts.model_type == "gpt_oss":
        yield Matrix(f"{name}.o_bias", hidden, 1, "whole", linear=False)
        yield Matrix(f"{name}.sinks", facts.heads, 1, "rows", linear=False)
    if facts.model_type.startswith(("qwen3", "gemma")):
        yield Matrix(f"{name}.qk_norm", layer.head_size, 2, "whole", linear=False)


def _mla(facts: ModelFacts, name: str) -> Iterator[Matrix]:
    """Multi-head latent attention: compressions on every rank, expansions split by head.

    `process_weights_after_loading` of vLLM's `mla_attention.py` keeps the key and value expansion a second time, in
    the model's dtype, for absorbed decoding: the matrix `absorbed`.
    """
    mla = facts.mla
    assert mla is not None
    hidden, query_size = facts.hidden, mla.nope + mla.rope
    if mla.query_rank:
        yield Matrix(f"{name}.q_a_proj", mla.query_rank, hidden, "whole")
        yield Matrix(f"{name}.q_b_proj", facts.heads * query_size, mla.query_rank, "rows")
        yield Matrix(f"{name}.q_a_layernorm", mla.query_rank, 1, "whole", linear=False)
    else:
        yield Matrix(f"{name}.q_proj", facts.heads * query_size, hidden, "rows")
    yield Matrix(f"{name}.kv_a_proj_with_mqa", mla.kv_rank + mla.rope, hidden, "whole")
    yield Matrix(f"{name}.kv_b_proj", facts.heads * (mla.nope + mla.value), mla.kv_rank, "rows")
    yield Matrix(f"{name}.kv_a_layernorm", mla.kv_rank, 1, "whole", linear=False)
    yield Matrix(f"{name}.o_proj", hidden, facts.heads * mla.value, "columns")
    if mla.index_heads and mla.query_rank:
        yield Matrix(f"{name}.indexer.wq_b", mla.index_heads * mla.index_size, mla.query_rank, "whole")
        yield Matrix(f"{name}.indexer.wk", mla.index_size, hidden, "whole")
        yield Matrix(f"{name}.indexer.weights_proj", mla.index_heads, hidden, "whole", linear=False)


def _delta_net(facts: ModelFacts, name: str) -> Iterator[Matrix]:
    """Gated delta net of Qwen3-Next and Qwen3.5 (`qwen3_next.py`): four projections in, a convolution, one out."""
    net = facts.delta_net
    assert net is not None
    keys, values = net.key_heads * net.key_size, net.value_heads * net.value_size
    yield Matrix(f"{name}.in_proj_qkv", 2 * keys + values, facts.hidden, "rows")
    yield Matrix(f"{name}.in_proj_z", values, facts.hidden, "rows")
    yield Matrix(f"{name}.in_proj_ba", 2 * net.value_heads, facts.hidden, "rows", linear=False)
    yield Matrix(f"{name}.conv1d", 2 * keys + values, net.kernel, "rows", linear=False)
    yield Matrix(f"{name}.state", 2 * net.value_heads, 1, "rows", linear=False)
    yield Matrix(f"{name}.norm", net.value_size, 1, "whole", linear=False)
    yield Matrix(f"{name}.out_proj", facts.hidden, values, "columns")


def _mlp(facts: ModelFacts, layer: Layer, prefix: str) -> Iterator[Matrix]:
    name, hidden, experts = f"{prefix}.mlp", facts.hidden, facts.experts
    if layer.dense and facts.intermediate:
        yield from _gated(name, hidden, facts.intermediate)
    if not (layer.sparse and experts):
        return
    shared = "shared_expert" if facts.model_type.startswith("qwen") else "shared_experts"
    inside = f"{prefix}.experts" if facts.model_type == "gemma4_text" else f"{name}.experts"
    yield Matrix(f"{name}.gate", experts.count, hidden, "whole", linear=False)
    if facts.model_type in _ROUTER_BIAS:
        yield Matrix(f"{name}.gate_bias", experts.count, 1, "whole", linear=False)
    yield Matrix(f"{inside}.gate_up", 2 * experts.intermediate, hidden, "experts", experts.count)
    yield Matrix(f"{inside}.down", hidden, experts.intermediate, "experts", experts.count)
    if facts.model_type == "gpt_oss":
        biases = 2 * experts.intermediate + hidden
        yield Matrix(f"{inside}.bias", biases, 1, "experts", experts.count, linear=False)
    if experts.shared_intermediate:
        yield from _gated(f"{name}.{shared}", hidden, experts.shared_intermediate)
        if facts.model_type.startswith("qwen"):
            yield Matrix(f"{name}.shared_expert_gate", 1, hidden, "whole", linear=False)


def _gated(name: str, hidden: int, width: int) -> Iterator[Matrix]:
    yield Matrix(f"{name}.gate_proj", width, hidden, "rows")
    yield Matrix(f"{name}.up_proj", width, hidden, "rows")
    yield Matrix(f"{name}.down_proj", hidden, width, "columns")


def parameters(facts: ModelFacts) -> int:
    """Count the parameters of the language model."""
    layers = sum(one.parameters for index in range(len(facts.layers)) for one in layer_matrices(facts, index))
    unpadded = facts.vocab * facts.hidden
    return layers + facts.hidden + unpadded + (0 if facts.tied else unpadded)


def active_parameters(facts: ModelFacts) -> int:
    """Count the parameters that one token passes through, as model cards do: without the input embedding's others."""
    if facts.experts is None:
        return parameters(facts)
    idle = sum(
        one.parameters * (1 - facts.experts.per_token / one.count)
        for index in range(len(facts.layers))
        for one in layer_matrices(facts, index)
        if one.split == "experts"
    )
    return parameters(facts) - int(idle)


def rank_bytes(facts: ModelFacts, matrix: Matrix, sharing: Sharing, dtype: str) -> float:
    """Give the bytes of a matrix on one rank.

    Experts are spread over tensor ranks and replicas: whole experts with expert parallel (the ranks with the most
    decide), slices of each without (`FusedMoEParallelConfig.make` in vLLM's `fused_moe/config.py`).
    """
    scheme = facts.quantization.scheme_of(matrix.name) if facts.quantization and matrix.linear else None
    each = scheme.bytes_per_weight if scheme else DTYPE_BYTES.get(dtype, 2)
    if matrix.split == "experts":
        return each * _expert_parameters(facts, matrix, sharing)
    share = 1.0 / sharing.tensor
    if matrix.split == "kv":
        heads = max(1, matrix.rows // max(1, _kv_size(facts, matrix)))
        share = max(share, 1.0 / heads)
    elif matrix.split == "whole":
        share = 1.0
    absorbed = matrix.name.endswith(".kv_b_proj") and facts.mla is not None
    return matrix.parameters * share * (each + (DTYPE_BYTES.get(dtype, 2) if absorbed else 0))


def _kv_size(facts: ModelFacts, matrix: Matrix) -> int:
    index = int(matrix.name.split(".")[1])
    return matrix.rows // facts.layers[index].kv_heads


def _expert_parameters(facts: ModelFacts, matrix: Matrix, sharing: Sharing) -> float:
    ranks = sharing.tensor * sharing.data
    rows, columns = matrix.rows, matrix.columns
    if facts.quantization and facts.quantization.method == "mxfp4" and matrix.linear and facts.experts:
        width = facts.experts.intermediate if sharing.expert else facts.experts.intermediate / ranks
        padded = _padded(math.ceil(width), MXFP4_PADDING) / (facts.experts.intermediate if sharing.expert else width)
        padded *= _padded(facts.hidden, MXFP4_PADDING) / facts.hidden
        rows = math.ceil(rows * padded)
    if sharing.expert:
        return math.ceil(matrix.count / ranks) * rows * columns
    return matrix.count * rows * columns / ranks


def vision_bytes(facts: ModelFacts, sharing: Sharing, dtype: str) -> float:
    """Estimate the vision tower from its width and depth, split like any layer; its dtype is the model's."""
    if facts.vision is None:
        return 0.0
    tower = facts.vision
    layer = 4 * tower.hidden**2 + 2 * tower.hidden * tower.intermediate
    return tower.layers * layer * DTYPE_BYTES.get(dtype, 2) / sharing.tensor


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step
