"""YAML in block style with indented lists, as people write it.

A text that is plain to see is written here, and PyYAML decides about all others: it takes a hundred times as long.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIMPLE = re.compile(r"(--|\./)?[A-Za-z0-9_/]([A-Za-z0-9_/.,:=@%+$-]*[A-Za-z0-9_/.,=@%+$-])?", re.ASCII)
"""Texts that YAML takes for themselves in a block, unless they look like a number, a truth value or a date."""

_LONGEST_KEY = 127
"""PyYAML writes a longer key behind a question mark; YAML demands it of those above 1024 characters."""


def block(section: dict[str, Any], indent: int = 0) -> str:
    """Write a mapping of texts, numbers, lists and mappings, with so many spaces before each line."""
    return "\n".join(_lines(section, " " * indent))


def _lines(value: dict[str, Any] | list[Any], indent: str) -> Iterator[str]:
    deeper = f"{indent}  "
    if isinstance(value, dict):
        for key, one in value.items():
            name = _scalar(key)
            start = f"{indent}{name}:" if len(key) <= _LONGEST_KEY else f"{indent}? {name}\n{indent}:"
            if one and isinstance(one, dict | list):
                yield start
                yield from _lines(one, deeper)
            else:
                yield f"{start} {_scalar(one)}"
        return
    for one in value:
        if one and isinstance(one, dict | list):
            first, *rest = _lines(one, deeper)
            yield f"{indent}- {first[len(deeper) :]}"
            yield from rest
        else:
            yield f"{indent}- {_scalar(one)}"


def _scalar(value: Any) -> str:
    """Write what stands on one line: a text, a number, or a list or mapping that is empty."""
    if isinstance(value, str):
        if not _SIMPLE.fullmatch(value):
            return _by_pyyaml(value)
        patterns = _Dumper.yaml_implicit_resolvers.get(value[0], ())
        return f"'{value}'" if any(pattern.match(value) for _, pattern in patterns) else value
    if isinstance(value, dict | list):
        return "{}" if isinstance(value, dict) else "[]"
    return _by_pyyaml(value)


@functools.lru_cache(maxsize=None, typed=True)  # the nodes of a stack share nearly all of their texts
def _by_pyyaml(value: str | float | None) -> str:
    return yaml.dump([value], Dumper=_Dumper, width=float("inf"), allow_unicode=True, default_flow_style=False)[2:-1]


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = yaml.SafeDumper.yaml_implicit_resolvers.copy()


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    """Write what is not plain to see, line breaks too, as escapes: dialects of YAML differ in it."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)
# Compose's YAML takes more texts for numbers than PyYAML's, such as 1e5, 0o17 and 12_3.4: they need quotation marks.
_NUMBER = r"[-+]?(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9_]+)?$|[-+]?0[xob][0-9a-fA-F_]+$"
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_NUMBER), list("-+.0123456789"))
