"""What is wrong with an input, in words: one problem is one line that names file, line, key, value, rule and fix."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

KeyPath = tuple[str | int, ...]
"""Where a value stands in a document: `("nodes", 1, "address")` is `nodes[1].address`."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong, or worth a warning, at one place of a spec."""

    path: KeyPath
    words: str


@dataclasses.dataclass(frozen=True)
class Located:
    """A problem with the number of its line, counted from 1."""

    line: int
    problem: Problem

    def render(self, file: str) -> str:
        """Say it as `FILE:LINE: KEY.PATH: words`; a problem of the whole file has no key path."""
        key = f"{key_text(self.problem.path)}: " if self.problem.path else ""
        return f"{file}:{self.line}: {key}{self.problem.words}"


def _place(one: Located) -> tuple[int, str, str]:
    return one.line, key_text(one.problem.path), one.problem.words


class GenStackError(Exception):
    """An error that a user can meet; its text is all that is shown. `status` is the exit status."""

    status = 3


class InputError(GenStackError):
    """The input is wrong; nothing was written."""

    status = 2


class SpecError(InputError):
    """A spec has problems; all of them are in the text, one a line, in the order of their lines."""

    def __init__(self, file: str, located: Iterable[Located]) -> None:
        self.located = tuple(sorted(set(located), key=_place))
        super().__init__("\n".join(one.render(file) for one in self.located))


def key_text(path: KeyPath) -> str:
    """Write a key path as users do: `nodes[1].address`; a key that is no plain word stands in brackets, too."""
    text = ""
    for step in path:
        if isinstance(step, int) or not re.fullmatch(r"[\w.-]+", step):
            text += f"[{step if isinstance(step, int) else shown(step)}]"
        else:
            text += f".{step}" if text else step
    return text


def shown(value: object) -> str:
    """Show a value in an error line: short, on one line, as YAML would write it."""
    text = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, bool | None) else None
    text = text or repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(words: Iterable[str]) -> str:
    """Join words for a sentence: `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def suggestion(word: str, known: Iterable[str]) -> str:
    """Suggest the closest known word, as a piece of a sentence that may be empty."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
