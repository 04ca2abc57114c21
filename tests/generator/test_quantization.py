from __future__ import annotations

from typing import Any

import pytest

from gen_stack.quantization import Quantization, quantization_of


def read(given: dict[str, Any]) -> Quantization:
    found = quantization_of({"quantization_config": given}, {})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("given", "bytes_per_weight"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, (4 + 20 / 128) / 8),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32}, (4 + 20 / 32) / 8),
        ({"quant_method": "mxfp4"}, 0.53125),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625),
    ],
)
def test_bytes_for_one_weight_with_its_scales(given: dict[str, Any], bytes_per_weight: float) -> None:
    scheme = read(given).scheme_of("layers.0.mlp.experts.gate_up")
    assert scheme is not None
    assert scheme.bytes_per_weight == pytest.approx(bytes_per_weight)


def test_groups_of_compressed_tensors() -> None:
    weights = {"num_bits": 4, "group_size": 32, "type": "int"}
    given = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    found = read({**given, "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": {"num_bits": 8}})
    assert found.scheme_of("layers.3.self_attn.q_proj") is None
    scheme = found.scheme_of("layers.3.mlp.experts.down")
    assert scheme is not None
    assert (scheme.bits, scheme.bytes_per_weight, found.kv_cache_bits) == (4, (4 + 16 / 32) / 8, 8)


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.3.mlp.gate_proj",
        "model.language_model.layers.3.mlp",
        "model.layers.3.*",
        "re:.*gate_proj$",
        "gate_proj",
        "mlp",
    ],
)
def test_what_is_left_in_full_precision(pattern: str) -> None:
    found = read({"quant_method": "fp8", "modules_to_not_convert": [pattern]})
    assert found.scheme_of("layers.3.mlp.gate_proj") is None
    assert found.scheme_of("layers.33.self_attn.q_proj") is not None


def test_mxfp4_is_for_experts() -> None:
    assert read({"quant_method": "mxfp4"}).scheme_of("layers.0.self_attn.q_proj") is None


def test_a_method_that_is_not_known_has_no_schemes() -> None:
    assert read({"quant_method": "exl3"}).schemes == ()


@pytest.mark.parametrize("given", [None, [], "fp8"])
def test_no_quantisation(given: Any) -> None:
    assert quantization_of({"quantization_config": given}, {}) is None
