"""Whether a model fits: findings about memory, and the smallest change that helps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from gen_stack.divisibility import obstacles
from gen_stack.gpus import gpu_key, memory_of, one_group, smallest
from gen_stack.memory import MemoryPlan, estimate
from gen_stack.options import GIB, Options, options_of
from gen_stack.owned import canonical_flag
from gen_stack.parallel import choose, smallest_node
from gen_stack.problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.facts import ModelFacts
    from gen_stack.plan import Parallelism
    from gen_stack.problems import KeyPath
    from gen_stack.spec import Spec

THIN = 0.03
"""A margin below this share of the GPU's memory is less than what the estimate may be wrong by."""

CONTEXT_STEP = 1024
"""Suggested lengths are multiples of this."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about memory that a person should know before anything starts."""

    severity: Literal["error", "warning"]
    problem: Problem


def memory_plan(spec: Spec, facts: ModelFacts, sizes: Parallelism, options: Options | None = None) -> MemoryPlan | None:
    """Estimate the memory of the group with the smallest GPU; None when too little is known."""
    group = one_group(spec)
    least = smallest(spec, group)
    gpu = (spec.nodes[least[1]].gpu or spec.gpu).type if least else None
    total = least[0] if least else None
    return estimate(facts, options or options_of(spec), sizes, total, spec.engine.device, gpu or "")


def findings(spec: Spec, facts: ModelFacts) -> list[Finding]:
    """Judge the memory of a spec that keeps all other rules."""
    sizes, _ = choose(spec, facts)
    plan = memory_plan(spec, facts, sizes)
    if plan is None:
        return []
    where = _place(spec)
    stage = plan.tightest
    on = f" of stage {plan.stages.index(stage)}" if len(plan.stages) > 1 else ""
    if plan.total is not None and stage.weights > plan.utilization * plan.total:
        words = f"the weights take {_gib(stage.weights)} of each GPU's memory{on}, and {plan.utilization:g} of its"
        words += f" {_gib(plan.total)} is {_gib(plan.utilization * plan.total)}"
        return [Finding("error", Problem(where, f"{words}; use more or larger GPUs, or a quantised release"))]
    if plan.margin < 0:
        words = (
            f"one sequence of {plan.max_model_len} tokens needs {_gib(plan.needed)} of cache in each GPU's memory{on}"
        )
        words += f", and {_gib(max(0, stage.cache))} are left beside weights, activations and graphs"
        return [Finding("error", Problem(_length_place(spec) or where, f"{words}; {_remedies(spec, facts, sizes)}"))]
    if plan.total is not None and plan.margin < THIN * plan.total:
        words = f"one sequence of {plan.max_model_len} tokens leaves {_gib(plan.margin)} of each GPU's memory{on}"
        words += ", less than the estimate may be wrong by; a smaller max-model-len is safe"
        return [Finding("warning", Problem(where, words))]
    return []


def unchecked(spec: Spec, facts: ModelFacts | None, plan: MemoryPlan | None) -> str | None:
    """Say why the fit was not checked; None when it was."""
    if plan is not None:
        return None
    if facts is None:
        return "fit not checked: nothing says what the model is; set model.config to its config.json"
    if spec.engine.device == "cpu":
        return "fit not checked: on the CPU engine, set engine.env.VLLM_CPU_KVCACHE_SPACE (GiB) to plan its cache"
    if any(memory_of(node.gpu or spec.gpu) is None for node in spec.nodes):
        return "fit not checked: say gpu.type, such as H100-80GB, or gpu.memory"
    return "fit not checked: the quantisation or the cache of this model is not known here"


def max_context(spec: Spec, facts: ModelFacts, sizes: Parallelism, options: Options | None = None) -> int | None:
    """Find the longest sequence that fits, up to the model's; 0 when none does, None when nothing is known."""
    asked = dataclasses.replace(options or options_of(spec), max_model_len=None, auto_length=True)
    plan = memory_plan(spec, facts, sizes, asked)
    if plan is None:
        return None
    return plan.max_model_len if plan.margin >= 0 and plan.blocks > 1 else 0


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the spec that makes a model fit."""

    words: str


def changes(spec: Spec, facts: ModelFacts, sizes: Parallelism) -> list[Change]:
    """List single changes that make it fit, the smallest first: a cache of FP8, shorter sequences, more nodes."""
    options = options_of(spec)
    found = []
    wide = dataclasses.replace(options, kv_dtype="fp8")
    plan = memory_plan(spec, facts, sizes, wide)
    if options.kv_dtype == "auto" and plan is not None and plan.margin >= 0:
        found.append(Change("set engine.args.kv-cache-dtype to fp8"))
    length = max_context(spec, facts, sizes) or 0
    length = length // CONTEXT_STEP * CONTEXT_STEP or length
    if length:
        found.append(Change(f"set engine.args.max-model-len to {length} or less"))
    nodes = len(one_group(spec))
    for times in range(2, 9):
        more = dataclasses.replace(sizes, pipeline=sizes.pipeline * times)
        plan = memory_plan(spec, facts, more)
        if plan is not None and plan.margin >= 0:
            found.append(Change(f"use {nodes * times} nodes instead of {nodes}"))
            break
    return found


def better(spec: Spec, facts: ModelFacts, sizes: Parallelism) -> Iterator[str]:
    """Say what would serve better: a model that fits on one node of several gains by replicas, not by its parts.

    Each replica answers alone, with no traffic between nodes and no common fate.
    """
    nodes = len(one_group(spec))
    if nodes == 1 or spec.parallelism.tensor or spec.parallelism.pipeline or sizes.data > 1:
        return
    alone = spec.model_copy(update={"nodes": spec.nodes[:1], "groups": None, "replicas": 1})
    split, _ = choose(alone, facts)
    if any(obstacles(facts, split, smallest_node(alone))):
        return
    plan = memory_plan(alone, facts, split)
    if plan is not None and plan.total is not None and plan.margin > THIN * plan.total:
        count = len(spec.nodes)
        yield f"the model fits on one node; replicas: {count} would serve more, and no node would wait for another"


def _remedies(spec: Spec, facts: ModelFacts, sizes: Parallelism) -> str:
    found = [one.words for one in changes(spec, facts, sizes)][:2]
    return ", or ".join(found) if found else "use more or larger GPUs, or a quantised release"


def _place(spec: Spec) -> KeyPath:
    least = smallest(spec, one_group(spec))
    return gpu_key(spec, least[1]) if least else ("engine", "env", "VLLM_CPU_KVCACHE_SPACE")


def _length_place(spec: Spec) -> KeyPath | None:
    name = next((name for name in spec.engine.args if canonical_flag(name) == "max-model-len"), None)
    return ("engine", "args", name) if name else None


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
