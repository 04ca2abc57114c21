"""What a spec's engine flags say about memory, with the defaults that vLLM 0.32 has for what they leave out."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from gen_stack.owned import canonical_flag

if TYPE_CHECKING:
    from gen_stack.spec import Spec

GIB = 2**30
UTILIZATION = 0.92
"""Default of `--gpu-memory-utilization` (vLLM 0.32, `config/cache.py`)."""

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclasses.dataclass(frozen=True)
class Options:
    """Engine flags that decide memory; None where the engine's default depends on the model or the GPU."""

    max_model_len: int | None = None
    auto_length: bool = False
    """`--max-model-len -1` or `auto`: the engine takes what fits."""
    utilization: float = UTILIZATION
    kv_dtype: str = "auto"
    kv_bytes: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    eager: bool = False
    block_size: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    prefix_caching: bool = True
    context_parallel: int = 1
    text_only: bool = False
    partition: tuple[int, ...] | None = None
    """Layers of each pipeline stage, from `VLLM_PP_LAYER_PARTITION`."""
    uncounted: tuple[str, ...] = ()
    """Flags that take memory, or change the model, in ways that are not modelled."""


_UNCOUNTED = (
    *("speculative-config", "hf-overrides", "enable-lora", "cpu-offload-gb", "kv-transfer-config", "enable-eplb"),
    *("enable-sleep-mode", "num-gpu-blocks-override", "prefill-context-parallel-size", "load-format"),
)


def options_of(spec: Spec) -> Options:
    """Read the flags; a value that the engine would refuse counts as left out."""
    flags = {canonical_flag(name): value for name, value in spec.engine.args.items()}
    length = flags.get("max-model-len")
    space = _number(spec.engine.env.get("VLLM_CPU_KVCACHE_SPACE")) if spec.engine.device == "cpu" else None
    images = flags.get("limit-mm-per-prompt")
    no_images = isinstance(images, dict) and images.get("image") == 0 and images.get("video") == 0
    return Options(
        max_model_len=whole_number(length),
        auto_length=str(length) in {"-1", "auto"},
        utilization=_fraction(flags.get("gpu-memory-utilization", flags.get("device-memory-utilization")))
        or UTILIZATION,
        kv_dtype=str(flags.get("kv-cache-dtype", "auto")),
        kv_bytes=whole_number(flags.get("kv-cache-memory-bytes")) or (int(space * GIB) if space else None),
        max_num_seqs=whole_number(flags.get("max-num-seqs")),
        max_num_batched_tokens=whole_number(flags.get("max-num-batched-tokens")),
        eager=flags.get("enforce-eager") is True,
        block_size=whole_number(flags.get("block-size")),
        dtype=str(flags["dtype"]) if flags.get("dtype") not in (None, "auto") else None,
        quantization=str(flags["quantization"]) if flags.get("quantization") else None,
        prefix_caching=flags.get("enable-prefix-caching") is not False,
        context_parallel=whole_number(flags.get("decode-context-parallel-size")) or 1,
        text_only=flags.get("language-model-only") is True or no_images,
        partition=_partition(spec.engine.env.get("VLLM_PP_LAYER_PARTITION")),
        uncounted=tuple(name for name in _UNCOUNTED if flags.get(name) not in (None, False)),
    )


def whole_number(value: Any) -> int | None:
    """Read a whole number above zero as vLLM's flags write it: 32768, `32k` (thousands), `32K` (of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if value > 0 else None
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kKmMgG]?)", str(value)) if isinstance(value, str) else None
    if not match:
        return None
    found = float(match[1]) * _UNITS.get(match[2], 1)
    return int(found) if found > 0 and found == int(found) else None


def _number(value: str | None) -> float | None:
    return float(value) if value and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", value) else None


def _fraction(value: Any) -> float | None:
    if isinstance(value, str) and re.fullmatch(r"[01]?\.[0-9]{1,9}|1", value):
        value = float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1 else None


def _partition(value: str | None) -> tuple[int, ...] | None:
    if not value or not re.fullmatch(r"[0-9]{1,5}(,[0-9]{1,5})*", value):
        return None
    return tuple(int(one) for one in value.split(","))
