"""The plan as people read it, and as programs do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from gen_stack.options import GIB
from gen_stack.plan import GroupPlan, NodePlan, Plan, endpoint, gateway_endpoints

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.memory import MemoryPlan, Stage

SCHEMA = "gen-stack.plan/1"
"""The name of the JSON form; the number rises when a program that reads it would have to change."""

BAR = 40
"""Characters that stand for the whole memory of a GPU."""


def picture(plan: Plan, warnings: tuple[str, ...] = ()) -> str:
    """Draw the plan: groups, nodes and what they hold, memory, choices, warnings."""
    lines = [f"{plan.name}: {plan.model} on {len(plan.nodes)} node{'s' if len(plan.nodes) > 1 else ''}"]
    lines += [f"endpoint {url}, the gateway on {node.name}" for node, url in gateway_endpoints(plan)]
    for group in plan.groups:
        lines += ["", *_group(plan, group)]
    lines += ["", *_memory(plan), "", "choices", *_choices(plan)]
    notes = [*plan.advice, *(plan.memory.notes if plan.memory else ()), *warnings]
    if notes:
        lines += ["", "to know", *(f"  {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _group(plan: Plan, group: GroupPlan) -> Iterator[str]:
    ports = f"control {group.ports.control}, rendezvous {group.ports.master} and up" if group.supervised else ""
    yield f"group {group.name}: endpoint {endpoint(plan, group)}{'; ' + ports if ports else ''}"
    names = max(len(node.name) for node in group.nodes)
    addresses = max(len(node.address) for node in group.nodes)
    for node in group.nodes:
        devices = "CPU" if node.devices.kind == "cpu" else f"{node.devices.count} GPU{'s'[: node.devices.count > 1]}"
        yield (
            f"  {node.name:<{names}}  {node.address:<{addresses}}  {devices:<7} "
            f"{_holds(plan, group, node)}{', head' if node.is_head else ''}"
        )


def _per_node(plan: Plan, group: GroupPlan) -> int:
    sizes = plan.parallelism
    return sizes.tensor * sizes.pipeline * sizes.data // len(group.nodes)


def _stages_of(plan: Plan, group: GroupPlan, node: NodePlan) -> list[int]:
    """List the pipeline stages on a node: ranks are in the order data, pipeline, tensor (`parallel_state.py`)."""
    sizes, count = plan.parallelism, _per_node(plan, group)
    ranks = range(node.rank * count, (node.rank + 1) * count)
    return sorted({rank % (sizes.tensor * sizes.pipeline) // sizes.tensor for rank in ranks})


def _holds(plan: Plan, group: GroupPlan, node: NodePlan) -> str:
    count = _per_node(plan, group)
    first, last = node.rank * count, (node.rank + 1) * count - 1
    words = f"rank {first}" if count == 1 else f"ranks {first}-{last}"
    stages = _stages_of(plan, group, node)
    if plan.parallelism.pipeline > 1:
        words += f", stage{'s' if len(stages) > 1 else ''} {_span(stages)}"
    if plan.memory:
        held = [plan.memory.stages[stage].layers for stage in stages]
        words += f", layers {held[0][0]}-{held[-1][1] - 1}"
    return words


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    if memory is None:
        yield f"memory: {plan.unchecked}"
        return
    if memory.total is None:
        yield "memory of each rank, beside the cache that the spec says"
    else:
        yield f"memory of each GPU: {_gib(memory.total)} GiB, of which the engine takes {memory.utilization:g}"
    for number, stage in enumerate(memory.stages):
        bar = f"[{_bar(memory.total, stage)}]  " if memory.total else ""
        yield (
            f"  stage {number}  {bar}weights {_gib(stage.weights)}, activations {_gib(stage.activations)}, "
            f"graphs {_gib(stage.graphs)}, cache {_gib(max(0, stage.cache))} GiB"
        )
    if memory.total:
        yield "           W weights, A activations and graphs, C cache, . not the engine's"
    yield (
        f"  cache for {memory.kv_tokens} tokens: {memory.sequences:.2f} sequences of {memory.max_model_len} tokens; "
        f"margin {_gib(memory.margin)} GiB"
    )


def _bar(total: int, stage: Stage) -> str:
    """Draw a GPU's memory: what does not fit is cut off at the end."""
    parts = [("W", stage.weights), ("A", stage.activations + stage.graphs), ("C", max(0, stage.cache))]
    drawn, done = "", 0.0
    for letter, size in parts:
        done += size
        drawn += letter * (round(done / total * BAR) - len(drawn))
    return f"{drawn[:BAR]:.<{BAR}}"


def _choices(plan: Plan) -> Iterator[str]:
    for choice in plan.choices:
        yield f"  {choice.key} {choice.value}: {choice.reason}"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def as_data(plan: Plan, warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Give the plan as plain data for programs; sizes are in bytes."""
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "model": plan.model,
        "engine": {"version": plan.engine_version, "image": plan.image.reference, "command": list(plan.command)},
        "parallelism": dataclasses.asdict(plan.parallelism),
        "gateway": [{"node": node.name, "endpoint": url} for node, url in gateway_endpoints(plan)],
        "groups": [_group_data(plan, group) for group in plan.groups],
        "memory": _memory_data(plan.memory) if plan.memory else None,
        "unchecked": plan.unchecked,
        "choices": [dataclasses.asdict(choice) for choice in plan.choices],
        "advice": list(plan.advice),
        "warnings": list(warnings),
        "errors": list(plan.forced),
    }


def _group_data(plan: Plan, group: GroupPlan) -> dict[str, Any]:
    count = _per_node(plan, group)
    return {
        "name": group.name,
        "endpoint": endpoint(plan, group),
        "ports": dataclasses.asdict(group.ports),
        "nodes": [
            {
                "name": node.name,
                "address": node.address,
                "rank": node.rank,
                "devices": node.devices.count,
                "ranks": [node.rank * count, (node.rank + 1) * count],
                "stages": _stages_of(plan, group, node),
            }
            for node in group.nodes
        ],
    }


def _memory_data(memory: MemoryPlan) -> dict[str, Any]:
    return {
        **dataclasses.asdict(memory),
        "kv_tokens": memory.kv_tokens,
        "sequences": round(memory.sequences, 4),
        "margin": memory.margin,
    }
