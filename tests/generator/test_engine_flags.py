from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gen_stack.engine_flags import DATA, argument_problems, flags_of
from gen_stack.owned import FLAGS, FLAGS_WITHOUT_KEY, SHORT_FLAGS, canonical_flag
from gen_stack.problems import key_text
from gen_stack.release import ENGINE_VERSION
from gen_stack.spec import Engine
from stack_node.flags import API_ONLY, Arity
from tests.generator.helpers import ONE, engine_of, error, errors, warnings
from tests.generator.strategies import JSON

KNOWN = flags_of(ENGINE_VERSION) or {}
NAME = st.from_regex(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", fullmatch=True)
OWN_IMAGE = "registry.lab/vllm:0.32.0"


def refused(args: str, image: str = "build") -> str:
    """Give the only error of arguments, without the file and the key that it is about."""
    return error(f"{ONE}engine: {{image: {image}, args: {args}}}\n").partition(": ")[2].partition(": ")[2]


def taken(args: str) -> None:
    assert errors(f"{ONE}engine: {{args: {args}}}\n") == []


# -- the snapshot -------------------------------------------------------------------------------------------------


def test_the_tested_version_has_a_snapshot_and_every_snapshot_says_where_it_is_from() -> None:
    assert len(KNOWN) > 300
    for path in DATA.glob("engine-flags-*.json"):
        version = path.stem.removeprefix("engine-flags-")
        source = json.loads(path.read_text("utf-8"))["source"]
        assert source == f"vllm serve of vLLM {version}, made by tools/engine_flags.py"


def test_the_flags_that_gen_stack_sets_are_flags_of_the_engine() -> None:
    assert {*FLAGS, *FLAGS_WITHOUT_KEY} - {"data-parallel-rank", "model"} <= KNOWN.keys()


def test_the_short_forms_are_the_engines() -> None:
    assert {short: name for name, flag in KNOWN.items() for short in flag.short} == SHORT_FLAGS


def test_the_entrypoint_knows_how_many_values_the_flags_take_that_it_drops() -> None:
    for name, arity in API_ONLY.items():
        flag = KNOWN[name.removeprefix("--")]
        switch = flag.type.startswith("switch")
        assert (arity is Arity.SWITCH) == switch, name
        assert (arity is Arity.ONE) == (not switch and flag.values is None), name


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("{max-model-length: 1}", "vLLM 0.32.0 has no flag --max-model-length; did you mean max-model-len?"),
        ("{enable-prefix: true}", "vLLM 0.32.0 has no flag --enable-prefix; did you mean enable-prefix-caching?"),
        ("{task: embed}", "vLLM 0.32.0 has no flag --task; `vllm serve --help=all` lists those that it has"),
        ("{help: true}", "vLLM 0.32.0 has no flag --help"),
        ("{device-memory-utilization: 0.9}", "this is another name of gpu-memory-utilization; write"),
        ("{cc: {mode: 3}}", "'cc' is a short form; write compilation-config"),
    ],
)
def test_a_flag_that_the_engine_does_not_have(args: str, words: str) -> None:
    assert refused(args).startswith(words)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("{enable-prefix-caching: 'yes'}", "'yes' is not allowed: --enable-prefix-caching takes true or false"),
        ("{enable-prefix-caching: 1}", "1 is not allowed: --enable-prefix-caching takes true or false"),
        (
            "{aggregate-engine-logging: false}",
            "false is not allowed: --aggregate-engine-logging takes true alone; leave it out",
        ),
        ("{max-num-seqs: many}", "'many' is not allowed: --max-num-seqs takes a whole number"),
        ("{max-num-seqs: 1.0}", "1.0 is not allowed: --max-num-seqs takes a whole number"),
        ("{max-num-seqs: true}", "true is not allowed: --max-num-seqs takes a whole number"),
        ("{max-num-seqs: [1, 2]}", "[1, 2] are 2 values, and --max-num-seqs takes one"),
        ("{max-num-seqs: {a: 1}}", "{'a': 1} is not allowed: --max-num-seqs takes a whole number"),
        ("{max-num-seqs.a: 1}", "--max-num-seqs takes a whole number, which has no keys; write max-num-seqs"),
        ("{gpu-memory-utilization: 90%}", "'90%' is not allowed: --gpu-memory-utilization takes a number"),
        (
            "{max-model-len: 1.5K}",
            "'1.5K' is not allowed: --max-model-len takes a whole number, a short one such as 8k (8000) or 8K (8192), "
            "or auto",
        ),
        ("{max-num-batched-tokens: auto}", "'auto' is not allowed: --max-num-batched-tokens takes a whole number, or"),
        (
            "{dtype: fp16}",
            "'fp16' is not allowed: --dtype takes auto, bfloat16, float, float16, float32 or half",
        ),
        ("{kv-cache-dtype: fp8_e4m}", "or ultraquant_4bit; did you mean fp8_e4m3?"),
        ("{max-lora-rank: 3}", "3 is not allowed: --max-lora-rank takes 1, 8, 16, 32, 64, 128, 256, 320 or 512"),
        ("{collect-detailed-traces: [model, wroker]}", "'wroker' is not allowed: --collect-detailed-traces takes"),
        ("{cudagraph-capture-sizes: [1, x]}", "'x' is not allowed: --cudagraph-capture-sizes takes a whole number"),
        ("{chat-template: false}", "false is not allowed: --chat-template takes a text"),
        ("{allowed-origins: [a, b]}", "['a', 'b'] would be several words; write the list as one text of JSON"),
        ("{allowed-origins: a}", "'a' is not allowed: --allowed-origins takes JSON"),
        ("{hf-overrides: '{a}'}", "'{a}' is not allowed: --hf-overrides takes a text or a mapping"),
        ("{kv-transfer-config: '[1]'}", "'[1]' is not allowed: --kv-transfer-config takes a mapping"),
        ("{kv-transfer-config: '{'}", "'{' is not allowed: --kv-transfer-config takes a mapping"),
        (
            "{compilation-config: {cudagraph-mode: FULL}}",
            "compilation-config has no key 'cudagraph-mode'; did you mean cudagraph_mode?",
        ),
        ("{compilation-config.zzz: 1}", "compilation-config has no key 'zzz'; its keys are mode, "),
        (
            "{compilation-config: {pass_config: {fuse_norm: true}}}",
            "compilation-config.pass_config has no key 'fuse_norm'; did you mean fuse_norm_quant?",
        ),
        ("{compilation-config.pass_config.x: true}", "compilation-config.pass_config has no key 'x'"),
        (
            "{compilation_config.mode: 3, compilation-config: {backend: eager}}",
            "the engine would forget compilation-config, which is given too; put this key into that mapping",
        ),
    ],
)
def test_a_value_that_the_engine_would_refuse(args: str, words: str) -> None:
    assert words in refused(args)


@pytest.mark.parametrize(
    "args",
    [
        "{max-model-len: 8K, max-num-batched-tokens: 1.5k, max-num-seqs: '64'}",
        "{max-model-len: auto, gpu-memory-utilization: 1, enable-prefix-caching: false}",
        "{quantization: '', collect-detailed-traces: [model, worker], cudagraph-capture-sizes: 4}",
        "{moe-backend: FlashInfer-CUTLASS, aggregate-engine-logging: true}",
        "{allowed-origins: '[\"*\"]', hf-overrides: {a: [1]}, additional-config: some text}",
        '{kv-transfer-config: \'{"kv_connector_extra_config": {"bytes": 80g}}\'}',
        "{compilation_config.pass_config.fuse_norm_quant: true, compilation-config.mode: 3}",
        "{speculative-config: {method: ngram, whatever: 1}, override-generation-config: {temperature: 0.5}}",
        "{lora-modules: [a=/x, b=/y], mm-processor-device: cuda, enforce_eager: true}",
    ],
)  # fmt: skip
def test_a_value_that_the_engine_takes(args: str) -> None:
    taken(args)


def test_all_wrong_arguments_are_told_at_once_each_with_its_line() -> None:
    text = f"{ONE}engine:\n  args:\n    dtyp: half\n    seed: x\n    max-num-seqs: 4\n    load-format: [a, b]\n"
    assert [line.partition(": ")[0] for line in errors(text)] == ["spec.yaml:7", "spec.yaml:8", "spec.yaml:10"]


def test_a_key_of_a_mapping_reaches_the_engine_as_json() -> None:
    args = "{compilation-config.pass_config.fuse_norm_quant: false, compilation-config.custom_ops: [all, 1]}"
    assert engine_of(f"{ONE}engine: {{args: {args}}}\n")["command"][-2:] == [
        "--compilation-config.pass_config.fuse_norm_quant=false",
        '--compilation-config.custom_ops=["all",1]',
    ]


@given(
    st.sampled_from(sorted(KNOWN)) | st.sampled_from(sorted(KNOWN)).map(lambda name: f"{name}.a.b") | NAME,
    JSON | st.sampled_from(["9" * 5000, f"{'9' * 400}k", "[" * 5000, "{" * 5000, '{"a": 1.5K}', "1e999"]),
)
def test_any_value_of_any_flag_is_taken_or_refused_in_one_line(name: str, value: Any) -> None:
    for problem in argument_problems(Engine(), {name: value}):
        assert problem.words
        assert "\n" not in problem.words


# -- what cannot be known -----------------------------------------------------------------------------------------


def test_another_version_is_not_checked_and_that_is_said() -> None:
    text = f"{ONE}engine: {{version: 0.31.0, args: {{nope: 1}}}}\n"
    words = "not checked: gen-stack knows the flags of vLLM 0.32.0, not those of 0.31.0"
    assert f"spec.yaml:5: engine.args: {words}" in warnings(text)
    assert len(warnings(f"{ONE}engine: {{version: 0.31.0}}\n")) == len(warnings(text)) - 1


def test_what_a_plugin_may_add_is_a_warning_with_an_image_of_ones_own() -> None:
    text = f"{ONE}engine: {{image: {OWN_IMAGE}, args: {{my-flag: 1, load-format: mine, dtype: mine}}}}\n"
    adds = f"the engine starts only if a plugin in '{OWN_IMAGE}' adds it"
    found = [line for line in warnings(text) if adds in line]
    assert [line.split(": ")[1] for line in found] == ["engine.args.my-flag", "engine.args.dtype"]


def test_what_no_plugin_changes_is_an_error_with_any_image() -> None:
    assert refused("{max-num-seqs: x}", OWN_IMAGE) == "'x' is not allowed: --max-num-seqs takes a whole number"


@pytest.mark.parametrize("image", ["vllm/vllm-openai:v0.32.0", "ghcr.io/gen-stack/vllm:0.32.0-0.1.0"])
def test_upstreams_images_and_ours_have_no_plugins(image: str) -> None:
    assert refused("{nope: 1}", image).startswith("vLLM 0.32.0 has no flag --nope")


def test_a_problem_names_the_argument_as_it_was_written() -> None:
    args = {"max_num_seqs": "x"}
    assert [key_text(one.path) for one in argument_problems(Engine(args=args), args)] == ["engine.args.max_num_seqs"]
    assert canonical_flag("max_num_seqs") == "max-num-seqs"
