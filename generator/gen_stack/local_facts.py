"""A word of warning when the model's own config.json, found on this host, says something else than the plan.

It never decides anything: the same spec makes the same files on every host. Only this host's disk is read; the hub is
asked by `gen-stack facts` alone. A file that cannot be read, or planned from, is passed over in silence.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gen_stack.facts import KV_HEAD_KEYS, ModelFacts, facts_of, text_config
from gen_stack.host_copies import CONFIG, host_folders
from gen_stack.problems import KeyPath, Problem, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from gen_stack.load import LoadedSpec
    from gen_stack.quantization import Quantization, Scheme

MAX_BYTES = 1 << 20
"""The largest config.json that is looked at, so that no file here makes planning slow."""

_SHOWN = 3
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where a checkpoint may say how it is quantised when its config.json does not."""


def local_warning(loaded: LoadedSpec, environment: Mapping[str, str]) -> str | None:
    """Compare the facts of the plan with the model's own config on this host; None when there is nothing to say."""
    path = _config_here(loaded, environment)
    local = _read(path) if path else None
    if path is None or local is None:
        return None
    config, facts = local
    given = loaded.spec.model.config
    remedy = f"run gen-stack facts {loaded.file}"
    if loaded.facts is None:
        words = f"{_plain(str(path))} on this host says what the model is; {remedy} to plan from it"
    elif differing := list(_differences(loaded.facts, facts, _unsaid(path, config, facts))):
        more = [f"{len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
        what = "; ".join(differing[:_SHOWN] + more)
        source = _plain(given) if given else "the catalogue"
        words = f"{_plain(str(path))} on this host says {what} (from {source}); {remedy}"
    else:
        return None
    key: KeyPath = ("model",) if isinstance(loaded.document.data["model"], str) else ("model", "id")
    return loaded.document.locate(Problem(("model", "config") if given else key, words)).render(loaded.file)


def _config_here(loaded: LoadedSpec, environment: Mapping[str, str]) -> Path | None:
    """Find the file; None when there is none, or when it is the one that the plan was made from."""
    try:
        files = (folder / CONFIG for folder in host_folders(loaded.spec, environment))
        path = next((file for file in files if file.is_file()), None)
        given = loaded.spec.model.config
        same = path is not None and given is not None and path.samefile(loaded.folder / given)
    except (OSError, ValueError, RuntimeError):  # the last: there is no home
        return None
    return None if same else path


def _read(path: Path) -> tuple[dict[str, Any], ModelFacts] | None:
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        config = json.loads(raw) if len(raw) <= MAX_BYTES else None
        return (config, facts_of(config)) if isinstance(config, dict) else None
    except (OSError, ValueError, RecursionError):
        return None


def _unsaid(path: Path, config: dict[str, Any], facts: ModelFacts) -> set[str]:
    """Name the figures that a config leaves to transformers' defaults, which differ by family and are not known."""
    text = text_config(config)
    return {
        *(() if any(text.get(key) for key in KV_HEAD_KEYS) else ("num_key_value_heads",)),
        *(() if text.get("head_dim") or facts.mla else ("head size",)),
        *(() if facts.experts else ("experts",)),
        *(("quantisation",) if not facts.quantization and _says_elsewhere(path.parent) else ()),
    }


def _says_elsewhere(folder: Path) -> bool:
    return any((folder / name).exists() for name in _QUANTIZATION_FILES)


def _differences(used: ModelFacts, local: ModelFacts, unsaid: set[str]) -> Iterator[str]:
    ours = _figures(used)
    for name, value in _figures(local).items():
        if name not in unsaid and None not in (value, ours[name]) and value != ours[name]:
            yield f"{name} {value}, the plan used {ours[name]}"


def _figures(facts: ModelFacts) -> dict[str, str | int | None]:
    """List what decides a plan, by the keys of configs where there is one name for it; None where it is not known."""
    return {
        "num_hidden_layers": len(facts.layers),
        "num_attention_heads": facts.heads,
        "num_key_value_heads": None if facts.mla else facts.kv_heads,
        "head size": listed(str(size) for size in sorted({layer.head_size for layer in facts.layers})),
        "hidden_size": facts.hidden,
        "vocab_size": facts.vocab or None,
        "experts": facts.experts.count if facts.experts else "none",
        "quantisation": _quantization(facts.quantization),
        "context length": facts.context,
    }


def _quantization(given: Quantization | None) -> str:
    if given is None:
        return "none"
    return " ".join([_plain(given.method or "unnamed"), *sorted({_scheme(scheme) for _, scheme in given.schemes})])


def _scheme(scheme: Scheme) -> str:
    block = f" by {scheme.block[0]}x{scheme.block[1]}" if scheme.block else ""
    return f"{scheme.bits:g}-bit{f' by {scheme.group}' if scheme.group else block}"


def _plain(text: str) -> str:
    """Keep a text on one line of a terminal, whatever it holds."""
    return text if text.isprintable() else ascii(text)
