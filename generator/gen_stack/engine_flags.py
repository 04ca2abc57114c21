"""The engine's flags: what `vllm serve` takes, and what `engine.args` says that it would not take.

The snapshots in `data/` are what the engine's own argument parser says of itself (`tools/engine_flags.py` makes them),
one for each version that is supported. The conversions below are those of vLLM 0.32.0's `engine/arg_utils.py` and
`utils/argparse_utils.py`: what is refused here, the engine refuses when it starts.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen_stack.owned import canonical_flag, why_flag_is_refused
from gen_stack.problems import Problem, listed, shown, suggestion
from gen_stack.release import ENGINE_VERSION, is_upstream_engine

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gen_stack.spec import Engine

DATA = Path(__file__).parent / "data"

_KINDS = {
    "switch": "true or false",
    "switch that is only set": "true alone",
    "int": "a whole number",
    "float": "a number",
    "text": "a text",
    "folded text": "a text",
    "size": "a whole number, or a short one such as 8k (8000) or 8K (8192)",
    "size or auto": "a whole number, a short one such as 8k (8000) or 8K (8192), or auto",
    "json": "JSON: a mapping, or anything else as one text",
    "text or json": "a text or a mapping",
    "object": "a mapping",
    "name=path": "texts such as name=/path, or mappings with name and path",
}
"""The types of a snapshot, in words."""

_WITH_KEYS = {"json", "text or json", "object"}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_SIZE_IN_JSON = re.compile(r"\b\d+(?:\.\d+)?[kKmMgGtT]\b")
_QUOTED = re.compile(r'("(?:[^"\\]|\\.)*")')


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag as a snapshot describes it."""

    type: str
    values: str | None = None
    """How many values it takes: one, `?` none or one, `+` one or more."""
    choices: Sequence[str | int] = ()
    may_be_none: bool = False
    """Whether an empty text and `None` stand for no value."""
    keys: Mapping[str, Any] | None = None
    """The keys of its mapping, where the engine takes no others, and below each its own keys, or null."""
    aliases: Sequence[str] = ()
    short: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why the engine would not take a flag; `extensible` when a plugin in its image could make it take it."""

    words: str
    extensible: bool = False


@functools.cache
def flags_of(version: str) -> Mapping[str, Flag] | None:
    """Read the flags of a version of the engine, by their names; `None` when there is no snapshot of it."""
    path = DATA / f"engine-flags-{version}.json"
    if not path.exists():
        return None
    described: dict[str, dict[str, Any]] = json.loads(path.read_text("utf-8"))["flags"]
    return {name: Flag(**fields) for name, fields in described.items()}


def argument_text(value: Any) -> str:
    """Write one value of a flag as the command line carries it."""
    if isinstance(value, bool | dict | list):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return str(value)


def argument_problems(engine: Engine, args: Mapping[str, Any]) -> Iterator[Problem]:
    """Find what the engine would refuse among arguments, but for what a plugin in somebody's own image may add."""
    for name, refusal in _refusals(engine.version, args):
        if is_upstream_engine(engine.image) or not refusal.extensible:
            yield Problem(("engine", "args", name), refusal.words)


def argument_warnings(engine: Engine) -> Iterator[Problem]:
    """Find what about a spec's arguments could not be checked."""
    if engine.args and flags_of(engine.version) is None:
        words = f"not checked: gen-stack knows the flags of vLLM {ENGINE_VERSION}, not those of {engine.version}"
        yield Problem(("engine", "args"), words)
    if not is_upstream_engine(engine.image):
        for name, refusal in _refusals(engine.version, engine.args):
            words = f"{refusal.words}; the engine starts only if a plugin in {shown(engine.image)} adds it"
            yield Problem(("engine", "args", name), words)


def _refusals(version: str, args: Mapping[str, Any]) -> Iterator[tuple[str, Refusal]]:
    flags = flags_of(version) if args else None
    if flags is None:
        return
    whole = {flag: name for name in args if "." not in (flag := canonical_flag(name))}
    for name, value in args.items():
        base, *keys = canonical_flag(name).split(".")
        if base not in flags:
            yield name, _unknown(version, base, flags)
        elif keys and base in whole:
            words = f"the engine would forget {whole[base]}, which is given too; put this key into that mapping"
            yield name, Refusal(words)
        elif refusal := _dotted(base, flags[base], keys, value) if keys else _plain(base, flags[base], value):
            yield name, refusal


def _unknown(version: str, name: str, flags: Mapping[str, Flag]) -> Refusal:
    for known, flag in flags.items():
        if name in flag.aliases:
            return Refusal(f"this is another name of {known}; write {known}")
    free = [one for one in flags if why_flag_is_refused(one) is None]
    beginnings = [one for one in free if one.startswith(name)]
    hint = f"; did you mean {beginnings[0]}?" if len(beginnings) == 1 else suggestion(name, free)
    words = f"vLLM {version} has no flag --{name}"
    return Refusal(f"{words}{hint or '; `vllm serve --help=all` lists those that it has'}", extensible=True)


def _plain(name: str, flag: Flag, value: Any) -> Refusal | None:
    if flag.type == "switch" or (flag.type == "switch that is only set" and value is not False):
        return None if isinstance(value, bool) else _not_taken(name, flag, value)
    if isinstance(value, bool):
        return None if value and flag.values == "?" else _not_taken(name, flag, value)
    if not isinstance(value, list):
        return _one(name, flag, value)
    if len(value) > 1 and flag.values != "+":
        if flag.type in _WITH_KEYS:
            return Refusal(f"{shown(value)} would be several words; write the list as one text of JSON")
        return Refusal(f"{shown(value)} are {len(value)} values, and --{name} takes one")
    return next((refusal for one in value if (refusal := _one(name, flag, one))), None)


def _one(name: str, flag: Flag, value: Any) -> Refusal | None:
    """Say why one value is refused."""
    text = argument_text(value)
    if flag.may_be_none and text in ("", "None"):
        return None
    try:
        found = _converted(flag.type, text)
    except (ValueError, OverflowError, RecursionError):
        return _not_taken(name, flag, value)
    if flag.choices and found not in flag.choices:
        choices = [str(one) for one in flag.choices]
        hint = suggestion(text, choices) if len(choices) > 8 and isinstance(value, str) else ""
        return Refusal(f"{shown(value)} is not allowed: --{name} takes {_any_of(choices)}{hint}", extensible=True)
    return _unknown_key(name, flag.keys, found)


def _any_of(choices: list[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


def _not_taken(name: str, flag: Flag, value: Any) -> Refusal:
    fix = "; leave it out" if flag.type == "switch that is only set" and value is False else ""
    return Refusal(f"{shown(value)} is not allowed: --{name} takes {_KINDS[flag.type]}{fix}")


def _converted(kind: str, text: str) -> Any:
    """Convert a text as the engine does. Raises `ValueError` where it would refuse."""
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "folded text":
        return text.lower().replace("-", "_")
    if kind == "size or auto" and text.strip().lower() in ("auto", "-1"):
        return -1
    if kind in ("size", "size or auto"):
        return _size(text.strip())
    if kind == "json" or (kind == "text or json" and re.match(r"(?s)^\s*{.*}\s*$", text)):
        return json.loads(text)
    if kind == "object":
        return _object(text)
    if kind == "name=path" and text and ("=" not in text or "," in text):
        return _named_path(text)
    return text


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        return int(text)
    number, suffix = match.groups()
    return int(number) * _BINARY[suffix] if suffix in _BINARY else int(float(number) * _DECIMAL[suffix])


def _object(text: str) -> dict[str, Any]:
    """Read a mapping, in which numbers may be short ones such as 80g."""
    parts = _QUOTED.split(text)
    parts[::2] = [_SIZE_IN_JSON.sub(lambda match: str(_size(match[0])), part) for part in parts[::2]]
    found = json.loads("".join(parts))
    if not isinstance(found, dict):
        raise ValueError("no mapping")
    return found


def _named_path(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict) or not found.keys() >= {"name", "path"}:
        raise ValueError("no mapping with name and path")
    return found


def _dotted(name: str, flag: Flag, keys: list[str], value: Any) -> Refusal | None:
    """Judge `flag.key: value`, which the engine puts together to a mapping."""
    if flag.type not in _WITH_KEYS:
        return Refusal(f"--{name} takes {_KINDS[flag.type]}, which has no keys; write {name}")
    inner: Any = value
    for key in reversed(keys):
        inner = {key: inner}
    return _unknown_key(name, flag.keys, inner)


def _unknown_key(where: str, known: Mapping[str, Any] | None, value: Any) -> Refusal | None:
    """Find the first key that the engine does not know in a mapping."""
    if known is None or not isinstance(value, dict):
        return None
    for key, inner in value.items():
        if key not in known:
            return Refusal(f"{where} has no key {shown(key)}{_known_keys(str(key), known)}")
        if refusal := _unknown_key(f"{where}.{key}", known[key], inner):
            return refusal
    return None


def _known_keys(key: str, known: Iterable[str]) -> str:
    return suggestion(key, known) or f"; its keys are {listed(known)}"
