"""How much of a GPU's memory each rank's weights, activations, graphs and cache take, by pipeline stage.

The accounting is vLLM 0.32's (`v1/worker/gpu_worker.py`, `determine_available_memory`): the budget is
`gpu-memory-utilization` of the GPU's total, and the cache gets what weights, the profiled peak of activations and the
estimate for CUDA graphs leave of it. The CUDA context and NCCL's buffers are there before the first measurement, so
they lie in the part that utilization leaves free.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from gen_stack.kv_cache import CacheLayout, CacheOptions, layout, stage_layers
from gen_stack.options import GIB, Options
from gen_stack.quantization import DTYPE_BYTES
from gen_stack.weights import Sharing, embedding, layer_matrices, output_layer, rank_bytes, vision_bytes

if TYPE_CHECKING:
    from gen_stack.facts import ModelFacts
    from gen_stack.plan import Parallelism

GRAPHS = 0.4 * GIB
"""CUDA graphs: public logs of this accounting say 0.08 to 0.69 GiB, without a rule that would tell them apart."""

CPU_BLOCK = 128
"""Tokens of a block on the CPU engine; its latent attention has the usual 16 (`platforms/cpu.py`)."""

SAMPLER_BYTES = 16
"""Bytes for each number of the profiled sampler's logits (requests times vocabulary): twice bfloat16 while gathered,
then float32 logits, probabilities and random numbers (`_dummy_sampler_run` of `gpu_model_runner.py`)."""

DEFAULT_LENGTH = 2048
"""The sequence length that vLLM assumes when a config says none (`_get_and_verify_max_len`)."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one rank of a pipeline stage holds, in bytes; `layers` is the first and the one after the last."""

    layers: tuple[int, int]
    weights: int
    activations: int
    graphs: int
    cache: int
    """What is left of the budget; below zero when not even the weights fit."""
    block: int


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory of a group's ranks. `total` is the smallest GPU's, which decides."""

    total: int | None
    utilization: float
    stages: tuple[Stage, ...]
    max_model_len: int
    blocks: int
    blocks_per_sequence: int
    notes: tuple[str, ...]
    """What the figures leave out or assume."""

    @property
    def sequences(self) -> float:
        """How many sequences of full length fit at once; vLLM prints it as maximum concurrency."""
        return self.blocks / self.blocks_per_sequence

    @property
    def kv_tokens(self) -> int:
        """How many tokens the cache holds, as vLLM counts them: sequences times their length."""
        return int(self.sequences * self.max_model_len)

    @property
    def tightest(self) -> Stage:
        """The stage that decides how many blocks there are."""
        return min(self.stages, key=lambda stage: stage.cache / stage.block)

    @property
    def needed(self) -> int:
        """Bytes of cache that one sequence of full length takes on the tightest stage, and the block kept back."""
        return self.tightest.block * (self.blocks_per_sequence + 1)

    @property
    def margin(self) -> int:
        """Bytes that the tightest stage has above what one sequence of full length takes."""
        return self.tightest.cache - self.needed


def estimate(
    facts: ModelFacts, options: Options, sizes: Parallelism, total: int | None, device: str = "cuda", gpu: str = ""
) -> MemoryPlan | None:
    """Estimate the memory of every stage; `total` is the smallest GPU's, None when it is not known.

    None when the model's layers or its quantisation are not known, or nothing says how large the cache is to be.
    """
    unknown = facts.quantization is not None and not facts.quantization.schemes
    if unknown or options.quantization or not facts.vocab or (total is None and options.kv_bytes is None):
        return None
    dtype = _dtype(facts, options)
    batch, sequences = batch_defaults(options, total, device, gpu, sizes)
    cache = CacheOptions(
        dtype=dtype,
        kv_dtype=options.kv_dtype,
        block_size=options.block_size or (CPU_BLOCK if device == "cpu" and not facts.mla else None),
        prefix_caching=options.prefix_caching,
        in_flight_tokens=(sizes.pipeline + 1) * batch,
        context_parallel=options.context_parallel,
    )
    laid = layout(facts, sizes.tensor, cache)
    if laid is None or sizes.pipeline > len(facts.layers):
        return None
    stages = _stages(facts, options, sizes, laid, (batch, sequences), total, dtype, device)
    length = options.max_model_len or facts.context or DEFAULT_LENGTH
    blocks = max(0, min(stage.cache // stage.block for stage in stages))
    plan = MemoryPlan(
        total=total,
        utilization=options.utilization,
        stages=stages,
        max_model_len=length,
        blocks=blocks,
        blocks_per_sequence=laid.blocks_per_sequence(length),
        notes=_notes(facts, options),
    )
    if options.auto_length and options.max_model_len is None:
        fitting = longest_sequence(laid, blocks - 1, length)
        per_sequence = laid.blocks_per_sequence(max(1, fitting))
        return dataclasses.replace(plan, max_model_len=max(1, fitting), blocks_per_sequence=per_sequence)
    return plan


def longest_sequence(laid: CacheLayout, blocks: int, limit: int) -> int:
    """Find the longest sequence that so many blocks hold, up to a limit; 0 when none fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if laid.blocks_per_sequence(middle) <= blocks else (low, middle - 1)
    return low


def batch_defaults(options: Options, total: int | None, device: str, gpu: str, sizes: Parallelism) -> tuple[int, int]:
    """Give `max-num-batched-tokens` and `max-num-seqs`, as flags or as the API server's defaults.

    `get_batch_defaults` of vLLM's `engine/arg_utils.py`: they depend on the GPU's memory, and an A100 is an exception.
    """
    world = sizes.tensor * sizes.pipeline
    if device == "cpu":
        default = 2048 * world, 128 * world
    elif (total or 0) >= 160 * GIB:
        default = 16384, 1024
    elif (total or 0) >= 70 * GIB and "a100" not in gpu.lower():
        default = 8192, 1024
    else:
        default = 2048, 256
    batch = options.max_num_batched_tokens or default[0]
    return batch, options.max_num_seqs or min(default[1], batch)


def _dtype(facts: ModelFacts, options: Options) -> str:
    """Name the dtype that the engine computes in: float32 models are taken down to bfloat16."""
    name = options.dtype or facts.dtype
    return "bfloat16" if name not in DTYPE_BYTES or (options.dtype is None and name.startswith("float32")) else name


def _stages(
    facts: ModelFacts,
    options: Options,
    sizes: Parallelism,
    laid: CacheLayout,
    batch: tuple[int, int],
    total: int | None,
    dtype: str,
    device: str,
) -> tuple[Stage, ...]:
    sharing = Sharing(sizes.tensor, sizes.data, sizes.expert)
    graphs = 0 if options.eager or device == "cpu" else int(GRAPHS)
    split = stage_layers(len(facts.layers), sizes.pipeline, options.partition)
    each = [_layer_bytes(facts, index, sharing, dtype) for index in range(len(facts.layers))]
    factor, rest = _from_checkpoint(facts, each, dtype)
    tower = 0.0 if options.text_only else (rest / sizes.tensor if rest is not None else None)
    if tower is None:
        tower = vision_bytes(facts, sharing, dtype)
    found, start = [], 0
    for number, count in enumerate(split):
        last = number == len(split) - 1
        weights = sum(each[start : start + count]) * factor + tower
        weights += _ends(facts, sharing, dtype, first=number == 0, last=last)
        activations = activation_bytes(facts, sizes, batch, dtype, last=last)
        budget = options.utilization * total if total else 0
        free = options.kv_bytes if options.kv_bytes else int(budget - weights - activations - graphs)
        block = laid.block_bytes(count, len(facts.layers))
        found.append(Stage((start, start + count), int(weights), int(activations), graphs, free, block))
        start += count
    return tuple(found)


def _layer_bytes(facts: ModelFacts, index: int, sharing: Sharing, dtype: str) -> float:
    return sum(rank_bytes(facts, one, sharing, dtype) for one in layer_matrices(facts, index))


def _ends(facts: ModelFacts, sharing: Sharing, dtype: str, *, first: bool, last: bool) -> float:
    """Weigh the embedding on the first stage and the output layer on the last; a tied one is one when they meet."""
    norm, head = output_layer(facts)
    weights = rank_bytes(facts, embedding(facts), sharing, dtype) if first else 0.0
    if last:
        weights += rank_bytes(facts, norm, sharing, dtype)
        weights += 0 if facts.tied and first else rank_bytes(facts, head, sharing, dtype)
    return weights


def _from_checkpoint(facts: ModelFacts, each: list[float], dtype: str) -> tuple[float, float | None]:
    """Correct the weights by the checkpoint's own size: a factor for the layers, and what a vision tower has.

    The index says one number for all. Less what we count, and less one layer with its own embedding and output layer
    where multi-token prediction is stored with the rest, it is the tower's of a model that has one, else the layers'.
    """
    if facts.checkpoint_bytes is None:
        return 1.0, None
    whole = Sharing()
    layers = sum(_stored(facts, index, dtype) for index in range(len(facts.layers)))
    ends = _ends(facts, whole, dtype, first=True, last=True)
    extra = 0.0
    if facts.checkpoint_extras:
        extra = _stored(facts, len(each) - 1, dtype) + (ends if facts.mla else 0.0)
    rest = facts.checkpoint_bytes - layers - ends - extra
    if facts.multimodal:
        return 1.0, max(0.0, rest)
    return max(0.1, (layers + rest) / layers), None


def _stored(facts: ModelFacts, index: int, dtype: str) -> float:
    """Weigh a layer as the checkpoint stores it: without what the engine keeps a second time, and not padded."""
    found = 0.0
    for one in layer_matrices(facts, index):
        scheme = facts.quantization.scheme_of(one.name) if facts.quantization and one.linear else None
        found += one.parameters * (scheme.bytes_per_weight if scheme else DTYPE_BYTES.get(dtype, 2))
    return found


def activation_bytes(facts: ModelFacts, sizes: Parallelism, batch: tuple[int, int], dtype: str, *, last: bool) -> float:
    """Estimate the peak of the profiling run: a full batch through the widest layer, or the sampler after it.

    The batch holds the residual, the hidden states, and either an MLP's two widths and their product, or the buffers
    of `fused_experts` (`fused_moe.py`): for every expert of a token its input or both widths, and their product. The
    sampler runs on the last stage, on as many requests as there may be.
    """
    tokens, sequences = batch
    each = DTYPE_BYTES.get(dtype, 2)
    wide = 3 * facts.intermediate / sizes.tensor
    experts = facts.experts
    if experts:
        share = 1 if sizes.expert else sizes.tensor * sizes.data
        width = experts.intermediate / share
        wide = max(wide, experts.per_token * (max(2 * width, facts.hidden) + width))
    queries = 2 * sum(facts.heads * layer.head_size for layer in facts.layers[:1]) / sizes.tensor
    if facts.mla:
        queries = facts.heads * (2 * (facts.mla.nope + facts.mla.rope) + facts.mla.value) / sizes.tensor
    forward = tokens * each * (2 * facts.hidden + max(wide, queries))
    sampler = min(sequences, tokens) * facts.vocab * SAMPLER_BYTES + tokens * facts.hidden * each if last else 0
    return math.ceil(max(forward, sampler))


def _notes(facts: ModelFacts, options: Options) -> tuple[str, ...]:
    notes = []
    if not facts.known:
        notes.append(f"the layers of {facts.model_type} are not known here; they are counted as Llama's")
    if facts.vision and not options.text_only:
        notes.append("what an image takes while it is encoded is not counted")
    if facts.multimodal and not facts.vision and facts.checkpoint_bytes is None and not options.text_only:
        notes.append("parts of the model beside its text layers are not counted")
    notes += [f"{name} is not counted" for name in options.uncounted]
    return tuple(notes)
