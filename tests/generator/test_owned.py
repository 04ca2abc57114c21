from __future__ import annotations

import pytest

from gen_stack.owned import (
    FLAGS,
    FLAGS_WITHOUT_KEY,
    SHORT_FLAGS,
    VARIABLES,
    VARIABLES_WITHOUT_KEY,
    canonical_flag,
    why_flag_is_refused,
    why_variable_is_refused,
)
from tests.generator.helpers import TWO, error, errors


def spellings(flag: str) -> list[str]:
    return [flag, flag.replace("-", "_"), f"--{flag}", f"-{flag}", f"no-{flag}", f"--no-{flag}", f"{flag}.key"]


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_a_flag_that_the_generator_sets_is_refused_in_every_spelling_with_the_key_to_use(flag: str) -> None:
    for spelling in spellings(flag):
        assert why_flag_is_refused(spelling) == f"gen-stack sets --{flag} itself; use {FLAGS[flag]} instead"


@pytest.mark.parametrize("flag", sorted(FLAGS_WITHOUT_KEY))
def test_a_flag_that_no_key_replaces_is_refused_with_the_reason(flag: str) -> None:
    for spelling in spellings(flag):
        assert why_flag_is_refused(spelling) == f"--{flag} is refused: {FLAGS_WITHOUT_KEY[flag]}"


@pytest.mark.parametrize("short", sorted(SHORT_FLAGS))
def test_a_short_form_is_the_long_one(short: str) -> None:
    assert canonical_flag(f"-{short}") == SHORT_FLAGS[short]
    assert why_flag_is_refused(short) == why_flag_is_refused(SHORT_FLAGS[short])


@pytest.mark.parametrize(
    ("beginning", "flag"),
    [("tensor", "tensor-parallel-size"), ("nno", "nnodes"), ("api_k", "api-key")],
)
def test_a_beginning_that_argparse_would_take_for_such_a_flag_is_refused(beginning: str, flag: str) -> None:
    words = (
        f"vLLM takes {beginning} as short for --{flag}, which gen-stack sets itself; write the flag you mean in full"
    )
    assert why_flag_is_refused(beginning) == words


@pytest.mark.parametrize("flag", ["max-model-len", "enable-prefix-caching", "hf-overrides", "seed", "model-impl"])
def test_other_flags_are_free(flag: str) -> None:
    assert [why_flag_is_refused(one) for one in spellings(flag)] == [None] * len(spellings(flag))


def test_a_key_inside_a_flags_value_keeps_its_spelling() -> None:
    assert canonical_flag("--compilation_config.cudagraph_mode") == "compilation-config.cudagraph_mode"


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_a_variable_that_the_generator_sets_is_refused_with_the_key_to_use(name: str) -> None:
    words = f"gen-stack sets {name} itself; use {VARIABLES[name]} instead"
    assert error(f"{TWO}engine: {{env: {{{name}: x}}}}\n") == f"spec.yaml:6: engine.env.{name}: {words}"
    on_node = TWO.replace("12, gpus: 8", f"12, gpus: 8, env: {{{name}: x}}")
    assert error(on_node) == f"spec.yaml:5: nodes[1].env.{name}: {words}"


@pytest.mark.parametrize("name", sorted(VARIABLES_WITHOUT_KEY))
def test_a_variable_that_no_key_replaces_is_refused_with_the_reason(name: str) -> None:
    assert why_variable_is_refused(name) == f"{name} is refused: {VARIABLES_WITHOUT_KEY[name]}"


def test_variables_with_a_prefix_of_ours_are_refused() -> None:
    assert why_variable_is_refused("GEN_STACK_DRAIN") == (
        "gen-stack sets GEN_STACK_DRAIN itself; use the spec's api, network and recovery sections instead"
    )
    assert why_variable_is_refused("VLLM_DP_RANK") == "gen-stack sets VLLM_DP_RANK itself; use parallelism.data instead"


def test_the_log_format_is_the_users() -> None:
    assert errors(f"{TWO}engine: {{env: {{GEN_STACK_LOG_FORMAT: json}}}}\n") == []
    assert why_variable_is_refused("GEN_STACK_LOG_FORMATS") is not None


def test_other_variables_are_free() -> None:
    assert errors(f"{TWO}engine: {{env: {{NCCL_DEBUG: WARN, VLLM_LOGGING_LEVEL: INFO, no_proxy: '*', _: x}}}}\n") == []


def test_every_key_to_use_instead_is_one_of_the_spec() -> None:
    from gen_stack.spec import Spec

    sections = {*Spec.model_fields, "nodes[]", "nodes[0]", "the order of nodes"}
    for key in [*FLAGS.values(), *VARIABLES.values()]:
        assert key.split(".")[0] in sections
