"""YAML text to plain data, safely, with the line of every key kept for the errors that come later."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import TYPE_CHECKING, Any

import yaml

from gen_stack.problems import KeyPath, Located, Problem, SpecError, shown

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_BITS = 63


@dataclasses.dataclass(frozen=True)
class Document:
    """A YAML file as plain data."""

    file: str
    data: dict[str, Any]
    lines: dict[KeyPath, int]

    def line_of(self, path: KeyPath) -> int:
        """Find the line (from 1) of a key, or of the nearest thing around it that is there."""
        while path not in self.lines:
            path = path[:-1]
        return self.lines[path]

    def locate(self, problem: Problem) -> Located:
        """Give a problem the number of its line."""
        return Located(self.line_of(problem.path), problem)


class WrittenFloat(float):
    """A number with a point or an exponent that still knows how it was written: `1.10` stays `1.10`, not `1.1`."""

    def __new__(cls, text: str, value: float) -> WrittenFloat:
        """Keep the text beside the value."""
        number = super().__new__(cls, value)
        number._text = text
        return number

    _text: str

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__


class _CoreLoader(yaml.SafeLoader):
    """YAML 1.2's core schema: `yes`, `on` and `012` are words here, as they are for Compose."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own form


_CORE = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "tag:yaml.org,2002:int": (r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    "tag:yaml.org,2002:float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
}
_SCALAR_TAGS = {*_CORE, "tag:yaml.org,2002:str"}
for _tag, (_pattern, _first) in _CORE.items():
    _CoreLoader.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)


def read_document(path: Path) -> Document:
    """Read a YAML mapping from a file.

    Raises `SpecError` when the file cannot be read, is not UTF-8 text, no YAML, empty, or no mapping, and when a key
    is given twice: all such keys at once.
    """
    return parse_document(_read_text(path), str(path))


def parse_document(text: str, file: str) -> Document:
    """Parse the text of a YAML mapping; `file` is its name in errors. Raises `SpecError` as `read_document` does."""
    try:
        loader = _CoreLoader(text)
        root = loader.get_single_node()
        if root is None:
            words = "the file is empty; `gen-stack init` writes one to start from"
            raise SpecError(file, [Located(1, Problem((), words))])
        builder = _Builder(loader)
        data = builder.build(root, ())
    except yaml.MarkedYAMLError as error:
        raise SpecError(file, [_syntax_problem(error)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        words = f"the character {chr(error.character)!r} is not allowed in YAML; take it out"
        raise SpecError(file, [Located(line, Problem((), words))]) from None
    except RecursionError:
        words = f"nested more than {MAX_DEPTH} deep; a spec is flat"
        raise SpecError(file, [Located(1, Problem((), words))]) from None
    if builder.problems:
        raise SpecError(file, builder.problems)
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else "a single value"
        words = f"the file is {kind}, not a mapping; write keys such as `name:`, `model:` and `nodes:` at the top"
        raise SpecError(file, [Located(1, Problem((), words))])
    return Document(file, data, builder.lines)


def _read_text(path: Path) -> str:
    def refuse(words: str) -> SpecError:
        return SpecError(str(path), [Located(1, Problem((), words))])

    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise refuse("there is no such file; `gen-stack init` writes one to start from") from None
    except IsADirectoryError:
        raise refuse("this is a folder; name the spec file in it") from None
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise refuse(f"the file has more than the {MAX_BYTES} bytes a spec may have; is it the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        words = f"byte {raw[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        raise SpecError(str(path), [Located(line, Problem((), words))]) from None


def _syntax_problem(error: yaml.MarkedYAMLError) -> Located:
    mark = error.context_mark if error.context and "quoted" in error.context else error.problem_mark
    context = f" {error.context}" if error.context else ""
    words = f"not valid YAML: {error.problem}{context}".replace("\n", " ")
    if "found character '\\t'" in words:
        words += "; indent with spaces"
    elif "cannot start any token" in words or "undefined alias" in words:
        words += "; put a text that begins with this character into quotation marks"
    elif "another document" in words or "'<document start>'" in words:
        words += "; keep one spec in a file, without a line of '---' or '...' between"
    elif "while parsing a flow" in words:
        words += "; close every bracket, and put a comma between the things in it"
    elif "expected <block end>" in words:
        words += "; give keys of one mapping the same indentation"
    elif "quoted" in words:
        words += "; close the quotation mark that opens on this line"
    elif "mapping values are not allowed" in words:
        words += "; put a text that has ': ' in it into quotation marks"
    return Located((mark.line if mark else 0) + 1, Problem((), words))


_HALF = "{} has half a character (\\ud800 to \\udfff) in it; take it out"


def _is_text(text: str) -> bool:
    """Whether a text can be written as UTF-8; an escape such as `"\\ud800"` makes one that cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


class _Builder:
    """Builds plain data from YAML nodes, noting the line of each key, and refusing what a spec never needs."""

    def __init__(self, loader: _CoreLoader) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Located] = []
        self._loader = loader
        self._nodes = 0
        self._too_deep = False

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._nodes += 1
        if self._nodes > MAX_NODES:  # aliases of aliases grow without end from a few lines
            if self._nodes == MAX_NODES + 1:
                self._problem(path, node, f"more than {MAX_NODES} values, aliases counted; write a smaller spec")
            return None
        if len(path) > MAX_DEPTH:
            if not self._too_deep:
                self._problem(path, node, f"nested more than {MAX_DEPTH} deep; a spec is flat")
            self._too_deep = True
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _scalar(self, node: yaml.Node, path: KeyPath) -> str | int | float | None:
        value: Any = None
        if node.tag in _SCALAR_TAGS:
            # The constructors of a tag that was written out trust that the text fits it.
            with contextlib.suppress(yaml.YAMLError, ValueError, LookupError, AttributeError):
                value = self._loader.construct_object(node)
        if value is None and node.tag != "tag:yaml.org,2002:null":
            words = f"{shown(node.value)} with the tag {node.tag} is not allowed; write a plain value"
            if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MAX_BITS:
                words = "this number is too large; write a smaller one, or put it into quotation marks"
            self._problem(path, node, words)
        elif isinstance(value, int) and value.bit_length() > MAX_BITS:
            self._problem(path, node, "this number is too large; write a smaller one, or put it into quotation marks")
            return None
        elif isinstance(value, str) and not _is_text(value):
            self._problem(path, node, _HALF.format(shown(value)))
            return None
        return WrittenFloat(node.value, value) if isinstance(value, float) else value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.value == "<<" and key_node.style is None:
                self._problem(path, key_node, "merge keys (<<) are not supported; write the keys out")
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(path, key_node, "a key must be a word, not a list or a mapping")
                continue
            key = str(key_node.value)
            if not _is_text(key):
                self._problem(path, key_node, _HALF.format(shown(key)))
                continue
            here = (*path, key)
            if key in data:
                words = f"this key is already given in line {self.lines[here]}; keep one of the two"
                self.problems.append(Located(key_node.start_mark.line + 1, Problem(here, words)))
                continue
            self.lines[here] = key_node.start_mark.line + 1
            data[key] = self.build(value_node, here)
        return data

    def _problem(self, path: KeyPath, node: yaml.Node, words: str) -> None:
        self.problems.append(Located(node.start_mark.line + 1, Problem(path, words)))
