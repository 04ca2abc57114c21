"""How a checkpoint's weights are stored: bytes for one parameter, and which matrices keep their full precision."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4, "fp16": 2, "bf16": 2}
"""Bytes of the dtypes that vLLM computes in, by their names in configs and in `--dtype`."""

ROOTS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""What stands before `layers.0` in the names of checkpoints: models with vision have more around their text model."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Weights of `bits`, with a scale of `scale_bits` (and a zero point) for every `group` of them along the input.

    `block` is the square that a block-wise FP8 scale covers; it must divide what a rank gets of a matrix.
    """

    bits: float
    scale_bits: float = 0
    group: int | None = None
    block: tuple[int, int] | None = None

    @property
    def bytes_per_weight(self) -> float:
        """Bytes for one weight, scales included."""
        if self.block:
            return (self.bits + 32 / (self.block[0] * self.block[1])) / 8
        return (self.bits + (self.scale_bits / self.group if self.group else 0)) / 8


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A checkpoint's quantisation: schemes with the names they are for (none: every linear layer), and exceptions.

    Without schemes, the method is not one that we know the sizes of.
    """

    method: str
    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()
    experts_only: bool = False
    kv_cache_bits: int | None = None

    def scheme_of(self, name: str) -> Scheme | None:
        """Find the scheme of a matrix by its name below the model, such as `layers.0.mlp.gate_proj`."""
        if self.experts_only and ".experts" not in name:
            return None
        if _matches(name, self.ignored):
            return None
        for targets, scheme in self.schemes:
            if not targets or _matches(name, targets):
                return scheme
        return None


@functools.lru_cache(maxsize=64)
def _sorted_patterns(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Split patterns into plain names and regular expressions, so that thousands of names stay fast to match."""
    plain, expressions = set(), []
    for pattern in patterns:
        if pattern.startswith("re:"):
            with contextlib.suppress(re.error):
                expressions.append(re.compile(pattern[3:]))
        elif "*" in pattern:
            expressions.append(re.compile(fnmatch.translate(pattern)))
        else:
            plain.add(pattern.removesuffix(".weight"))
    return frozenset(plain), tuple(expressions)


@functools.lru_cache(maxsize=65536)
def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Match a module's name as vLLM does: exact, by a module above or below it, by regular expression, by wildcard."""
    plain, expressions = _sorted_patterns(patterns)
    parts = name.split(".")
    for root in ROOTS:
        if any(f"{root}{'.'.join(parts[:end])}" in plain for end in range(1, len(parts) + 1)):
            return True
        if any(one.match(f"{root}{name}") for one in expressions):
            return True
    spans = ((start, end) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
    return any(".".join(parts[start:end]) in plain for start, end in spans)


def quantization_of(config: Mapping[str, Any], text: Mapping[str, Any]) -> Quantization | None:
    """Read the quantisation from a config.json; None when there is none. One that is not known has no schemes."""
    given = config.get("quantization_config") or text.get("quantization_config") or config.get("compression_config")
    if not isinstance(given, dict):
        return None
    method = str(given.get("quant_method", "")).lower().replace("_", "-")
    ignored = given.get("ignore") or given.get("modules_to_not_convert") or given.get("exclude_modules") or []
    names = tuple(str(one) for one in ignored) if isinstance(ignored, list) else ()
    schemes = _grouped(given) if isinstance(given.get("config_groups"), dict) else _plain(method, given)
    cache = given.get("kv_cache_scheme")
    bits = (
        cache.get("num_bits") if isinstance(cache, dict) else 8 if given.get("kv_cache_quant_algo") == "FP8" else None
    )
    return Quantization(method, schemes, names, method == "mxfp4", bits if isinstance(bits, int) else None)


def _whole(value: object) -> int | None:
    """Take a whole number above zero, and nothing else that a config may hold."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def _square(value: object) -> tuple[int, int] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    rows, columns = _whole(value[0]), _whole(value[1])
    return (rows, columns) if rows and columns else None


def _plain(method: str, given: Mapping[str, Any]) -> tuple[tuple[tuple[str, ...], Scheme], ...]:
    bits, group = given.get("bits", given.get("w_bit", 4)), given.get("group_size", given.get("q_group_size", 128))
    bits, group = _whole(bits) or 4, _whole(group)
    bits = bits if bits <= 8 else 4
    algorithm = str(given.get("quant_algo", "")).upper()
    scheme = None
    if method in {"fp8", "fbgemm-fp8"} or algorithm.startswith("FP8"):
        scheme = Scheme(8, block=_square(given.get("weight_block_size")))
    elif method == "mxfp4":
        scheme = Scheme(4, 8, 32)
    elif "NVFP4" in algorithm:
        scheme = Scheme(4, 8, 16)
    elif method in {"awq", "gptq", "awq-marlin", "gptq-marlin", "auto-round", "auto-awq"}:
        scheme = Scheme(bits, 16 + bits, group)
    elif method == "bitsandbytes":
        scheme = Scheme(4 if given.get("load_in_4bit", True) else 8, 32, 64)
    return (((), scheme),) if scheme else ()


def _grouped(given: Mapping[str, Any]) -> tuple[tuple[tuple[str, ...], Scheme], ...]:
    """Read the groups of compressed-tensors and ModelOpt: each with its weights' bits and the modules it is for."""
    schemes: list[tuple[tuple[str, ...], Scheme]] = []
    for group in given["config_groups"].values():
        weights = group.get("weights") if isinstance(group, dict) else None
        bits = _whole(weights.get("num_bits")) if isinstance(weights, dict) else None
        if not isinstance(weights, dict) or bits is None or bits > 16:
            continue
        size = _whole(weights.get("group_size"))
        square = _square(weights.get("block_structure"))
        scheme = Scheme(bits, 8 if weights.get("type") == "float" else 16, size, square)
        targets = group.get("targets") if isinstance(group.get("targets"), list) else []
        everything = any(str(one) == "Linear" for one in targets)
        schemes.append((() if everything else tuple(str(one) for one in targets), scheme))
    return tuple(sorted(schemes, key=lambda one: not one[0]))
