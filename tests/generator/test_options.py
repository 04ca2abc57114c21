from __future__ import annotations

from typing import Any

import pytest

from gen_stack.options import Options, options_of, whole_number
from tests.generator.helpers import ONE, load


def options(args: str, more: str = "") -> Options:
    return options_of(load(f"{ONE}engine: {{args: {{{args}}}{more}}}\n").spec)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *[(32768, 32768), ("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("0", None), (-1, None)],
        *[(True, None), ("x", None), (None, None), (1.5, None), ("1.00001k", None)],
    ],
)
def test_numbers_as_the_engine_reads_them(value: Any, expected: int | None) -> None:
    assert whole_number(value) == expected


def test_defaults() -> None:
    assert options("seed: 1") == Options()


def test_flags_in_any_spelling() -> None:
    found = options(
        "max_model_len: 32K, gpu-memory-utilization: 0.85, kv-cache-dtype: fp8, enforce-eager: true, max-num-seqs: 8,"
        " enable-prefix-caching: false, decode-context-parallel-size: 2, dtype: float16"
    )
    assert (found.max_model_len, found.utilization, found.kv_dtype, found.eager) == (32768, 0.85, "fp8", True)
    assert (found.max_num_seqs, found.prefix_caching, found.context_parallel) == (8, False, 2)
    assert found.dtype == "float16"


def test_a_length_left_to_the_engine() -> None:
    assert options("max-model-len: -1").auto_length
    assert options("max-model-len: auto").auto_length


def test_what_is_not_modelled_is_noted() -> None:
    assert options("enable-lora: true").uncounted == ("enable-lora",)
    assert options("enable-lora: false").uncounted == ()


def test_variables_that_count() -> None:
    assert options("seed: 1", ", env: {VLLM_PP_LAYER_PARTITION: '10,20'}").partition == (10, 20)
    assert options("seed: 1", ", env: {VLLM_PP_LAYER_PARTITION: a}").partition is None
