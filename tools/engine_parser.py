"""Runs inside the engine's image, on its Python: what `vllm serve` takes, as its own argument parser says it.

    python3 engine_parser.py flags               the flags, as JSON
    python3 engine_parser.py parse FILE          a JSON list of argument lists; for each, null or why it is refused

It leans on vLLM and the standard library only, since nothing else of this repository is in the image.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import sys
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TYPES = {
    int: "int",
    float: "float",
    str: "text",
    None: "text",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size or auto",
    "loads": "json",
    "union_dict_and_str": "text or json",
    "parse_dataclass": "object",
}
"""What a flag's value is converted by, as the snapshot names it."""


def parser() -> argparse.ArgumentParser:
    """Make the parser of `vllm serve` as it is on a GPU, whose name is one more choice of one flag."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found, unused-ignore]
    from vllm.platforms import current_platform  # type: ignore[import-not-found, unused-ignore]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found, unused-ignore]

    current_platform.device_type = "cuda"  # which is what ROCm is called there, too
    made: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return made


def flags(of: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Describe every flag by its name without dashes."""
    actions = [one for one in of._actions if one.option_strings and not isinstance(one, argparse._HelpAction)]
    return {_long_names(one)[0]: dict(_described(one)) for one in actions}


def _long_names(action: argparse.Action) -> list[str]:
    names = [name[2:] for name in action.option_strings if name.startswith("--")]
    return [name for name in names if not (name.startswith("no-") and name[3:] in names)]


def _described(action: argparse.Action) -> Iterator[tuple[str, Any]]:
    if isinstance(action, argparse.BooleanOptionalAction):
        yield "type", "switch"
    elif action.nargs == 0:
        yield "type", "switch that is only set"
    else:
        plain, optional = _unwrapped(action.type)
        lora = type(action).__name__ == "LoRAParserAction"
        yield "type", "name=path" if lora else _type_name(plain)
        if optional:
            yield "may_be_none", True
        if action.nargs is not None:
            yield "values", action.nargs
        if lora:
            yield "keys", _keys(_lora_module())
        elif getattr(plain, "__name__", "") == "parse_dataclass":
            yield "keys", _keys(plain.__defaults__[0])
    if action.choices:
        yield "choices", [one for one in action.choices if one is not None]
    if aliases := _long_names(action)[1:]:
        yield "aliases", aliases
    if short := [name[1:] for name in action.option_strings if not name.startswith("--")]:
        yield "short", short


def _lora_module() -> type:
    from vllm.entrypoints.openai.models.protocol import (  # type: ignore[import-not-found, unused-ignore]
        LoRAModulePath,
    )

    found: type = LoRAModulePath
    return found


def _unwrapped(convert: Any) -> tuple[Any, bool]:
    """Take vLLM's `optional_type` and `parse_type` off a converter; also say whether it takes no value for None."""
    optional = False
    while getattr(convert, "__name__", "") in ("_optional_type", "_parse_type"):
        optional = optional or convert.__name__ == "_optional_type"
        convert = dict(zip(convert.__code__.co_freevars, convert.__closure__, strict=True))["return_type"].cell_contents
    return convert, optional


def _type_name(convert: Any) -> str:
    if convert in (int, float, str, None):
        return _TYPES[convert]
    if convert.__name__ == "<lambda>":
        return "folded text" if convert("A-b") == "a_b" else "text"
    return _TYPES[convert.__name__]


def _keys(of: type) -> dict[str, Any]:
    """List the keys of a configuration, and below those that are configurations themselves, theirs."""
    hints = typing.get_type_hints(of)
    return {one.name: _inner_keys(hints[one.name]) for one in dataclasses.fields(of) if one.init}


def _inner_keys(hint: Any) -> dict[str, Any] | None:
    for one in (hint, *typing.get_args(hint)):
        if isinstance(one, type) and dataclasses.is_dataclass(one):
            return _keys(one)
    return None


def refusals(of: argparse.ArgumentParser, lists: list[list[str]]) -> list[str | None]:
    """Parse each argument list; say why it is refused, or None."""
    return [_refusal(of.parse_args, arguments) for arguments in lists]


def _refusal(parse: Callable[[list[str]], Any], arguments: list[str]) -> str | None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse(arguments)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]
    except (ValueError, LookupError) as error:  # vLLM's own parser lets some through
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    from vllm import __version__  # type: ignore[import-not-found, unused-ignore]

    if sys.argv[1] == "parse":
        print(json.dumps(refusals(parser(), json.loads(Path(sys.argv[2]).read_text("utf-8")))))
    else:
        print(json.dumps({"version": __version__, "flags": flags(parser())}))
