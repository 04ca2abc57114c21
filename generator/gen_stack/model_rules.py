"""Rules that need the model's facts: what the engine would only find at start, with the spec's line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gen_stack.divisibility import obstacles
from gen_stack.options import options_of, whole_number
from gen_stack.owned import canonical_flag
from gen_stack.parallel import choose, smallest_node
from gen_stack.problems import Problem, shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.facts import ModelFacts
    from gen_stack.spec import Spec


def problems_of_model(spec: Spec, facts: ModelFacts) -> list[Problem]:
    """Find what the engine would refuse about this model with this spec, which keeps all other rules."""
    return [*_split(spec, facts), *_length(spec, facts)]


def _split(spec: Spec, facts: ModelFacts) -> Iterator[Problem]:
    sizes, _ = choose(spec, facts)
    given = {key for key in ("tensor", "pipeline", "expert") if getattr(spec.parallelism, key) is not None}
    if spec.parallelism.data > 1:
        given.add("data")
    for one in obstacles(facts, sizes, smallest_node(spec)):
        path = ("parallelism", one.key) if one.key in given else ("parallelism",)
        yield Problem(path, one.words)


def _length(spec: Spec, facts: ModelFacts) -> Iterator[Problem]:
    """Refuse sequences longer than the model's (`_get_and_verify_max_len`), unless the spec changes the model."""
    asked = options_of(spec).max_model_len
    flags = {canonical_flag(name) for name in spec.engine.args}
    if asked is None or facts.context is None or asked <= facts.context or "hf-overrides" in flags:
        return
    if whole_number(spec.engine.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")):
        return
    name = next(name for name in spec.engine.args if canonical_flag(name) == "max-model-len")
    words = f"{shown(spec.engine.args[name])} is longer than the {facts.context} tokens of the model's config"
    yield Problem(("engine", "args", name), f"{words}; write {facts.context} or less")


def advice(spec: Spec, facts: ModelFacts | None) -> Iterator[Problem]:
    """Warn about what works and serves worse than something else."""
    if facts is None:
        return
    if spec.parallelism.data > 1 and not facts.is_moe:
        data = spec.parallelism.data
        words = f"{data} copies of a dense model in one engine gain nothing over replicas: {data}"
        yield Problem(("parallelism", "data"), f"{words}, which fail and restart one by one")
