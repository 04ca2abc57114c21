from __future__ import annotations

import json

import pytest

from gen_stack.fit import changes, max_context
from gen_stack.load import load_spec
from gen_stack.parallel import choose
from gen_stack.planner import make_plan
from gen_stack.render.compose import render_compose
from tests.generator.helpers import ONE, TWO, error, load, plan_of, spec_file
from tests.generator.models import config_of

LLAMA_70B = {**config_of("meta-llama/Llama-3.1-70B"), "max_position_embeddings": 131072}
FILES = {"c.json": json.dumps(LLAMA_70B)}


def spec(text: str, more: str) -> str:
    return text.replace("model: /models/m", "model: {id: /models/m, config: c.json}") + more


TWO_GPUS = ONE.replace("gpus: 8", "gpus: 2")


def test_weights_above_the_memory() -> None:
    line = error(spec(TWO_GPUS, "gpu: {memory: 24GiB}\n"), FILES)
    assert "gpu.memory: the weights take 65.71 GiB of each GPU's memory, and 0.92 of its 24.00 GiB is 22.08 GiB" in line
    assert "--force" in line


def test_a_cache_too_small_for_one_sequence() -> None:
    line = error(spec(TWO_GPUS, "gpu: {type: H100-80GB}\n"), FILES)
    assert "gpu.type: one sequence of 131072 tokens needs 20.00 GiB of cache" in line
    assert "set engine.args.max-model-len to" in line
    assert "use 2 nodes instead of 1" in line
    line = error(spec(TWO_GPUS, "gpu: {type: H100-80GB}\nengine: {args: {max_model_len: 100000}}\n"), FILES)
    assert ":6: engine.args.max_model_len: one sequence of 100000" in line


def test_what_helps_does_help() -> None:
    text = spec(TWO_GPUS, "gpu: {type: H100-80GB}\n")
    with spec_file(text, FILES) as path:
        loaded = load_spec(path, force=True)
    assert loaded.facts is not None
    sizes, _ = choose(loaded.spec, loaded.facts)
    longest = max_context(loaded.spec, loaded.facts, sizes)
    assert longest is not None
    assert [one.words for one in changes(loaded.spec, loaded.facts, sizes)] == [
        f"set engine.args.max-model-len to {longest // 1024 * 1024} or less",
        "use 2 nodes instead of 1",
    ]
    assert load(f"{text}engine: {{args: {{max-model-len: {longest}}}}}\n", FILES).forced == ()
    error(f"{text}engine: {{args: {{max-model-len: {longest + 16}}}}}\n", FILES)


def test_force_writes_the_warning_into_the_file() -> None:
    with spec_file(spec(TWO_GPUS, "gpu: {memory: 24GiB}\n"), FILES) as path:
        loaded = load_spec(path, force=True)
    assert "the weights take" in loaded.warnings[0]
    compose = render_compose(make_plan(loaded))["a/compose.yaml"]
    assert "# WARNING, written with --force: the weights take 65.71 GiB" in compose


def test_force_is_for_memory_only() -> None:
    with (
        spec_file(spec(ONE, "parallelism: {tensor: 3}\n"), FILES) as path,
        pytest.raises(Exception, match=r"parallelism"),
    ):
        load_spec(path, force=True)


def test_a_model_that_fits() -> None:
    plan = plan_of(spec(TWO, "gpu: {type: H100-80GB}\n"), FILES)
    assert plan.memory is not None
    assert plan.unchecked is None
    assert [stage.layers for stage in plan.memory.stages] == [(0, 40), (40, 80)]
    assert plan.memory.sequences > 1
    assert plan.advice == (
        "the model fits on one node; replicas: 2 would serve more, and no node would wait for another",
    )


def test_the_smallest_gpu_decides() -> None:
    text = TWO.replace("12, gpus: 8", "12, gpus: 8, gpu: {memory: 8GiB}")
    assert "nodes[1].gpu.memory: the weights take" in error(spec(text, "gpu: {memory: 80GiB}\n"), FILES)


@pytest.mark.parametrize(
    ("text", "files", "words"),
    [
        (ONE, {}, "nothing says what the model is"),
        (spec(ONE, ""), FILES, "say gpu.type"),
        (spec(ONE.replace(", gpus: 8", ""), "engine: {device: cpu}\n"), FILES, "VLLM_CPU_KVCACHE_SPACE"),
        (spec(ONE, "gpu: {memory: 80GiB}\nengine: {args: {quantization: fp8}}\n"), FILES, "quantisation"),
    ],
)
def test_why_the_fit_was_not_checked(text: str, files: dict[str, str], words: str) -> None:
    unchecked = plan_of(text, files).unchecked
    assert unchecked is not None
    assert words in unchecked


def test_the_cpu_engine_says_its_cache_itself() -> None:
    config = {"c.json": json.dumps({**config_of("Qwen/Qwen3-1.7B"), "max_position_embeddings": 4096})}
    text = spec(ONE.replace(", gpus: 8", ""), "engine: {device: cpu, env: {VLLM_CPU_KVCACHE_SPACE: 1}}\n")
    plan = plan_of(text, config)
    assert plan.memory is not None
    assert plan.memory.kv_tokens == 2**30 // (28 * 8 * 256 * 2 * 128) * 128


def test_a_length_left_to_the_engine() -> None:
    plan = plan_of(spec(TWO_GPUS, "gpu: {type: H100-80GB}\nengine: {args: {max-model-len: -1}}\n"), FILES)
    assert plan.memory is not None
    assert 1000 < plan.memory.max_model_len < 131072


def test_a_thin_margin_is_a_warning() -> None:
    with spec_file(spec(TWO_GPUS, "gpu: {type: H100-80GB}\n"), FILES) as path:
        loaded = load_spec(path, force=True)
    assert loaded.facts is not None
    sizes, _ = choose(loaded.spec, loaded.facts)
    longest = max_context(loaded.spec, loaded.facts, sizes) or 0
    text = spec(TWO_GPUS, f"gpu: {{type: H100-80GB}}\nengine: {{args: {{max-model-len: {longest}}}}}\n")
    with spec_file(text, FILES) as path:
        warned = load_spec(path).warnings
    assert len(warned) == 1
    assert "leaves 0.0" in warned[0]
    assert "less than the estimate may be wrong by" in warned[0]
