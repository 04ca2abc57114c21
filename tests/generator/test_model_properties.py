"""Whatever a config.json and a spec say, there is a plan or there are errors, and never anything else."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gen_stack.catalogue import catalogue
from gen_stack.load import load_spec
from gen_stack.picture import as_data, picture
from gen_stack.planner import make_plan
from gen_stack.problems import SpecError
from tests.generator.helpers import ERROR_LINE, spec_file
from tests.generator.strategies import dump, places

if TYPE_CHECKING:
    from collections.abc import Callable

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 8, 64, 127, 128, 4096, 10**6, 2**40, 1.5, True])
JUNK: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.lists(NUMBERS, max_size=3) | st.just({})
)
CONFIGS = sorted({json.dumps(config) for config in catalogue().values()})


@st.composite
def configs(draw: Callable[..., Any]) -> dict[str, Any]:
    """Draw a config of the catalogue, with up to three of its values replaced or taken out."""
    config: dict[str, Any] = json.loads(draw(st.sampled_from(CONFIGS)))
    for _ in range(draw(st.integers(0, 3))):
        container, key = draw(st.sampled_from(places(config) or [(config, "model_type")]))
        if isinstance(container, dict) and draw(st.booleans()):
            container.pop(key, None)
        else:
            container[key] = draw(JUNK)
    return config


@st.composite
def stacks(draw: Callable[..., Any]) -> dict[str, Any]:
    """Draw a spec with a model, some nodes, any sizes and any flags that count for memory."""
    nodes, gpus = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 8]))
    sizes = st.sampled_from([1, 2, 3, 4, 8, 16])
    return {
        "name": "t",
        "model": {"id": "org/model", "config": "config.json"},
        "nodes": [{"name": f"n{i}", "address": f"10.0.0.{i + 1}", "gpus": gpus} for i in range(nodes)],
        "gpu": draw(st.sampled_from([{}, {"type": "H100-80GB"}, {"memory": "1GiB"}, {"memory": "999GiB"}])),
        "parallelism": draw(
            st.fixed_dictionaries(
                {}, optional={"tensor": sizes, "pipeline": sizes, "data": sizes, "expert": st.booleans()}
            )
        ),
        "network": {"rdma": draw(st.sampled_from(["auto", "off"]))},
        "engine": {
            "args": draw(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "max-model-len": st.sampled_from([1, 100, 4096, "32k", -1]),
                        "kv-cache-dtype": st.sampled_from(["auto", "fp8", "bfloat16"]),
                        "gpu-memory-utilization": st.sampled_from([0.1, 0.5, 0.95]),
                        "max-num-batched-tokens": st.sampled_from([1, 8192]),
                        "block-size": st.sampled_from([16, 128]),
                        "enforce-eager": st.booleans(),
                        "enable-prefix-caching": st.booleans(),
                        "decode-context-parallel-size": st.sampled_from([1, 2]),
                    },
                )
            )
        },
    }


@settings(max_examples=150, suppress_health_check=SLOW, deadline=None)
@given(stacks(), configs())
def test_a_plan_or_errors_and_nothing_else(data: dict[str, Any], config: dict[str, Any]) -> None:
    with spec_file(dump(data), {"config.json": json.dumps(config)}) as path:
        try:
            loaded = load_spec(path, force=True)
        except SpecError as error:
            lines = str(error).replace(f"{path.parent}/", "").split("\n")
            assert all(ERROR_LINE.fullmatch(line) for line in lines), lines
            return
    plan = make_plan(loaded)
    assert picture(plan, loaded.warnings)
    json.dumps(as_data(plan))
    sizes = plan.parallelism
    assert sizes.tensor * sizes.pipeline * sizes.data == sum(node.devices.count for node in plan.nodes)
    if plan.memory:
        assert all(stage.weights > 0 and stage.block > 0 for stage in plan.memory.stages)


@settings(max_examples=50, suppress_health_check=SLOW, deadline=None)
@given(stacks(), st.sampled_from(CONFIGS))
def test_more_memory_never_holds_less(data: dict[str, Any], config: str) -> None:
    held = []
    for size in ("200GiB", "400GiB"):
        other = copy.deepcopy(data)
        other["gpu"] = {"memory": size}
        other["engine"]["args"] = {"max-model-len": 1024, "max-num-batched-tokens": 2048, "max-num-seqs": 64}
        with spec_file(dump(other), {"config.json": config}) as path:
            try:
                memory = make_plan(load_spec(path, force=True)).memory
            except SpecError:
                return
        held.append(memory.blocks if memory else 0)
    assert held[0] <= held[1]
