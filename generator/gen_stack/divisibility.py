"""What the engine refuses about a model split in so many ways, with the sizes that would do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gen_stack.problems import listed
from gen_stack.weights import VOCABULARY_PADDING, Matrix, layer_matrices

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.facts import ModelFacts
    from gen_stack.plan import Parallelism

NO_PIPELINE = frozenset(
    {
        *("AriaForConditionalGeneration", "CohereAsrForConditionalGeneration", "DiffusionGemmaForBlockDiffusion"),
        *("FireRedASR2ForConditionalGeneration", "FunASRForConditionalGeneration", "Gemma3nForCausalLM"),
        *("Gemma3nForConditionalGeneration", "HrmTextForCausalLM", "IQuestLoopCoderForCausalLM"),
        *("Idefics3ForConditionalGeneration", "Mamba2ForCausalLM", "NemotronH_Nano_VL_V2"),
        *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3"),
        *("NemotronParseForConditionalGeneration", "PaddleOCRVLForConditionalGeneration", "Phi4MMForCausalLM"),
        *("SmolVLMForConditionalGeneration", "WhisperForConditionalGeneration", "Zamba2ForCausalLM"),
    }
)
"""Generative architectures of vLLM 0.32's registry whose classes do not have the `SupportsPP` interface."""


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """A reason why the engine would refuse a split: the parallel size that is wrong, and words."""

    key: str
    words: str


def obstacles(facts: ModelFacts, sizes: Parallelism, ranks_on_node: int) -> Iterator[Obstacle]:
    """Find everything that the engine would refuse, with vLLM's own check in the docstring of each."""
    yield from _heads(facts, sizes.tensor)
    yield from _widths(facts, sizes)
    yield from _experts(facts, sizes)
    yield from _blocks(facts, sizes)
    yield from _pipeline(facts, sizes.pipeline)
    yield from _data(facts, sizes, ranks_on_node)


def _heads(facts: ModelFacts, tensor: int) -> Iterator[Obstacle]:
    """Attention heads: `verify_with_parallel_config`; key heads: `QKVParallelLinear`; linear: `mamba_utils.py`."""
    if facts.heads % tensor:
        words = f"{facts.heads} attention heads cannot be split over tensor {tensor}; tensor can be"
        yield Obstacle("tensor", f"{words} {_divisors(facts.heads)}")
        return
    for heads in sorted({layer.kv_heads for layer in facts.layers if layer.attention != "linear" and not facts.mla}):
        if heads % tensor and tensor % heads:
            words = f"{heads} key-value heads can neither be split over tensor {tensor} nor copied; tensor must divide"
            yield Obstacle("tensor", f"{words} {heads}, or be a multiple of it")
    net = facts.delta_net
    if net and (net.key_heads % tensor or net.value_heads % tensor):
        words = f"{net.key_heads} key and {net.value_heads} value heads of linear attention cannot be split over"
        yield Obstacle("tensor", f"{words} tensor {tensor}; it must divide both")


def _divisors(number: int) -> str:
    return listed(str(one) for one in range(1, number + 1) if number % one == 0)


def _widths(facts: ModelFacts, sizes: Parallelism) -> Iterator[Obstacle]:
    """Widths of the vocabulary (padded to 64) and the MLP: `divide` in `vocab_parallel_embedding.py`, `linear.py`."""
    padded = -(-facts.vocab // VOCABULARY_PADDING) * VOCABULARY_PADDING
    widths = {"vocabulary (padded to 64)": padded}
    if any(layer.dense for layer in facts.layers):
        widths["intermediate size"] = facts.intermediate
    if facts.experts and facts.experts.shared_intermediate:
        widths["intermediate size of shared experts"] = facts.experts.shared_intermediate
    for what, width in widths.items():
        if width % sizes.tensor:
            words = f"the {what} of {width} cannot be split over tensor {sizes.tensor}; choose one that divides it"
            yield Obstacle("tensor", words)


def _experts(facts: ModelFacts, sizes: Parallelism) -> Iterator[Obstacle]:
    """Experts: `_verify_with_expert_parallelism`, and slices of `FusedMoE` over tensor ranks and replicas."""
    if facts.experts is None:
        if sizes.expert:
            yield Obstacle("expert", "this model has no experts; leave it out")
        return
    ranks = sizes.tensor * sizes.data
    if sizes.expert and ranks > facts.experts.count:
        words = f"{facts.experts.count} experts are fewer than the {ranks} ranks that would share them"
        yield Obstacle("expert", f"{words}; use fewer, or expert: false")
    elif not sizes.expert and facts.experts.intermediate % ranks:
        words = f"experts of width {facts.experts.intermediate} cannot be sliced over {ranks} ranks"
        yield Obstacle("expert", f"{words}; set parallelism.expert: true, which keeps each whole")


def _blocks(facts: ModelFacts, sizes: Parallelism) -> Iterator[Obstacle]:
    """Quantisation blocks: `validate_fp8_block_shape`, `validate_fp8_block_shape_moe`, and groups of 4-bit weights."""
    if facts.quantization is None:
        return
    seen: set[str] = set()
    for index in _examples(facts):
        for one in layer_matrices(facts, index):
            if (wrong := _wrong_block(facts, one, sizes)) and wrong.key not in seen:
                seen.add(wrong.key)  # the first of its kind says it all
                yield wrong


def _examples(facts: ModelFacts) -> list[int]:
    """Pick one layer of each kind, from the end, where quantisation has fewer exceptions."""
    found = {layer: index for index, layer in enumerate(facts.layers)}
    return sorted(found.values())


def _wrong_block(facts: ModelFacts, one: Matrix, sizes: Parallelism) -> Obstacle | None:
    scheme = facts.quantization.scheme_of(one.name) if facts.quantization and one.linear else None
    if scheme is None or (facts.quantization and facts.quantization.method == "mxfp4"):
        return None
    ranks = sizes.tensor
    if one.split == "experts":
        ranks = 1 if sizes.expert else sizes.tensor * sizes.data
    if ranks == 1 or one.split == "whole":
        return None
    block = scheme.block or ((None, scheme.group) if scheme.group else (None, None))
    by_input = one.split == "columns" or one.name.endswith(".experts.down")
    size, unit = (one.columns, block[1]) if by_input else (one.rows, block[0])
    if one.split == "kv":
        size = max(one.rows, one.rows // facts.kv_heads * ranks)
    share = size // (2 if one.name.endswith(".gate_up") else 1) / ranks
    if unit is None or share % unit == 0:
        return None
    what = one.name.split(".", 2)[-1]
    words = f"a rank's share of {what}, {share:g}, is no multiple of the {unit} that quantisation needs"
    if one.split == "experts":
        return Obstacle("expert", f"{words}; set parallelism.expert: true, which keeps each expert whole")
    return Obstacle("tensor", f"{words}; choose a smaller tensor than {ranks}")


def _pipeline(facts: ModelFacts, pipeline: int) -> Iterator[Obstacle]:
    """Stages: `get_pp_indices` would leave one without a layer; `is_pp_supported_model` refuses some models."""
    if pipeline > len(facts.layers):
        words = f"{len(facts.layers)} layers cannot make {pipeline} stages; choose {len(facts.layers)} or less"
        yield Obstacle("pipeline", words)
    elif pipeline > 1 and facts.architecture in NO_PIPELINE:
        yield Obstacle("pipeline", f"the engine has no pipeline for {facts.architecture}; choose 1")


def _data(facts: ModelFacts, sizes: Parallelism, ranks_on_node: int) -> Iterator[Obstacle]:
    """Dense replicas over nodes: the engine gives leader and followers different sizes (vLLM 0.32, `serve.py`)."""
    if sizes.data > 1 and not facts.is_moe and sizes.tensor * sizes.pipeline > ranks_on_node:
        words = f"each of the {sizes.data} replicas of this dense model would span nodes, which the engine cannot do"
        yield Obstacle("data", f"{words}; leave data out and write replicas: {sizes.data}")
