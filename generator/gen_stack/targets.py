"""The launchers that a stack can be exported to, and the one rule they share: what no launcher can express."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING

from gen_stack.problems import InputError, Problem, listed, shown, suggestion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.load import LoadedSpec
    from gen_stack.plan import GroupPlan, Plan
    from gen_stack.spec import Node


@dataclasses.dataclass(frozen=True)
class Target:
    """A launcher, and what the export to it is. Its renderer is the module of its name in `gen_stack.render`."""

    name: str
    summary: str

    def render(self, plan: Plan, group: GroupPlan) -> dict[str, str]:
        """Write a group's files, by their paths below its folder, in which `secrets/` holds the head's secrets.

        Raises `InputError`, with one reason a line, when the target cannot do what the plan says.
        """
        files: dict[str, str] = importlib.import_module(f"gen_stack.render.{self.name}").render(plan, group)
        return files


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (Target("torchrun", "a script that runs torchrun, with fixed ranks or a c10d rendezvous"),)
}


def target_of(name: str) -> Target:
    """Find a target; raises `InputError` that names those there are."""
    if name not in TARGETS:
        raise InputError(f"{name}: no such target{suggestion(name, TARGETS)}; there are {listed(TARGETS)}")
    return TARGETS[name]


def check_exportable(loaded: LoadedSpec, plan: Plan) -> None:
    """Raise `InputError` with all that keeps a stack from being run by any launcher but a person's own hands."""
    problems = list(_problems(loaded, plan))
    if problems:
        raise InputError("\n".join(loaded.document.locate(one).render(loaded.file) for one in problems))


def _problems(loaded: LoadedSpec, plan: Plan) -> Iterator[Problem]:
    index = {node.name: number for number, node in enumerate(loaded.spec.nodes)}
    for group in plan.groups:
        if not group.supervised:
            yield Problem(("nodes",), "a single node is no group and needs no launcher; run `gen-stack` alone on it")
        head = loaded.spec.nodes[index[group.head.name]]
        for node in group.nodes[1:]:
            number = index[node.name]
            for key, words in _differences(loaded.spec.nodes[number], head):
                yield Problem(("nodes", number, key), words)


def _differences(node: Node, head: Node) -> Iterator[tuple[str, str]]:
    """A launcher starts the same thing on every node, whichever host that is."""
    for key in ("env", "interface", "cache", "model", "gpus"):
        own, first = getattr(node, key), getattr(head, key)
        if own != first:
            yield (
                key,
                f"{shown(own)} differs from {shown(first)} of {head.name}, and a launcher starts the same on every "
                "node of a group; make them equal",
            )
