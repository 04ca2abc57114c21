"""The choice of parallel sizes that a spec leaves open, with the reason for each.

What vLLM's documentation says (`docs/serving/parallelism_scaling.md`): tensor parallel inside a node, where the links
are fast, pipeline parallel across nodes. Nodes of one GPU have no inside: there tensor parallel is worth its traffic
only with RDMA. Within that, only what the engine accepts for the model (`divisibility.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gen_stack.divisibility import obstacles
from gen_stack.plan import Choice, Parallelism
from gen_stack.rules import groups_of, ranks_per_node

if TYPE_CHECKING:
    from gen_stack.facts import ModelFacts
    from gen_stack.spec import Spec

SPEC_SAYS = "the spec says so"


def choose(spec: Spec, facts: ModelFacts | None) -> tuple[Parallelism, tuple[Choice, ...]]:
    """Complete the parallel sizes of a spec that keeps the rules of `rules.py`."""
    given = spec.parallelism
    per_node = smallest_node(spec)
    rest = ranks_of_replica(spec)
    wanted = _tensor_sizes(spec, per_node, rest)
    tensor, why = wanted[0]
    if facts is not None:
        found = next(((size, reason) for size, reason in wanted if _accepted(facts, spec, size, rest)), None)
        if found and found[0] != tensor:
            tensor, why = found[0], f"the first size that the model's {_what_counts(facts)} allow; {found[1]}"
    pipeline = given.pipeline or rest // tensor
    why_pipeline = f"what tensor {tensor} leaves of {rest} rank{'s' if rest > 1 else ''}"
    expert, why_expert = _expert(spec, facts, tensor, pipeline)
    choices = [
        Choice("tensor parallel", str(tensor), why),
        Choice("pipeline parallel", str(pipeline), SPEC_SAYS if given.pipeline is not None else why_pipeline),
    ]
    if given.data > 1:
        choices.append(Choice("data parallel", str(given.data), SPEC_SAYS))
    if why_expert:
        choices.append(Choice("expert parallel", "on" if expert else "off", why_expert))
    return Parallelism(tensor, pipeline, given.data, expert), tuple(choices)


def smallest_node(spec: Spec) -> int:
    """Count the ranks on the smallest node; groups may differ in that, if not in their world size."""
    return min(ranks_per_node(spec, node) for node in spec.nodes)


def ranks_of_replica(spec: Spec) -> int:
    """Count the ranks that hold one copy of the model."""
    group = groups_of(spec)[0]
    return ranks_per_node(spec, spec.nodes[group[0]]) * len(group) // spec.parallelism.data


def _tensor_sizes(spec: Spec, per_node: int, rest: int) -> list[tuple[int, str]]:
    """List the sizes to try, the one to prefer first, with the reasons; a size that is given is the only one."""
    given = spec.parallelism
    if given.tensor is not None:
        return [(given.tensor, SPEC_SAYS)]
    if given.pipeline is not None:
        return [(rest // given.pipeline, f"what pipeline {given.pipeline} leaves of {rest} ranks")]
    if spec.engine.device == "cpu":
        across = "no smaller size works, so it spans nodes"
        return [(1, "the CPU engine runs one rank on a node"), *((size, across) for size in _sizes(rest) if size > 1)]
    if per_node == 1 and rest > 1 and spec.network.rdma == "required":
        why = "nodes of one GPU with RDMA, which is fast enough for it"
        return [(size, why) for size in reversed(_sizes(rest))]
    inside = math.gcd(per_node, rest)
    why = "one rank for each GPU of a node, where the links are fastest"
    if rest % per_node:
        left = f"the {rest} ranks that data {given.data} leaves"
        why = f"what divides both the {per_node} GPUs of a node and {left}"
    elif per_node == 1 and rest > 1:
        why = "nodes of one GPU; across them it is worth its traffic with network.rdma: required"
    within = [(inside, why), *((size, "it stays inside a node") for size in reversed(_sizes(inside)[:-1]))]
    across = "no size inside a node works, so it spans nodes"
    return [*within, *((size, across) for size in _sizes(rest) if size > inside)]


def _sizes(number: int) -> list[int]:
    """List the divisors of a number, in order."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


def _accepted(facts: ModelFacts, spec: Spec, tensor: int, rest: int) -> bool:
    """Tell whether the engine takes a size, with experts whole or sliced as far as the spec leaves that open."""
    pipeline = spec.parallelism.pipeline or rest // tensor
    options = [spec.parallelism.expert] if spec.parallelism.expert is not None else [False, True]
    sizes = (Parallelism(tensor, pipeline, spec.parallelism.data, expert) for expert in options)
    return any(not any(obstacles(facts, one, smallest_node(spec))) for one in sizes)


def _what_counts(facts: ModelFacts) -> str:
    heads = f"{facts.heads} attention heads"
    return f"{heads} and quantisation blocks" if facts.quantization else heads


def _expert(spec: Spec, facts: ModelFacts | None, tensor: int, pipeline: int) -> tuple[bool, str]:
    """Choose whether experts stay whole: only where slices of them would not do, since it needs balanced traffic."""
    given = spec.parallelism.expert
    if given is not None:
        return given, SPEC_SAYS if given else ""
    if facts is None or not facts.is_moe:
        return False, ""
    sliced = Parallelism(tensor, pipeline, spec.parallelism.data, expert=False)
    if not any(one.key == "expert" for one in obstacles(facts, sliced, smallest_node(spec))):
        return False, ""
    return True, f"slices of an expert over {tensor * spec.parallelism.data} ranks would break its quantisation blocks"
