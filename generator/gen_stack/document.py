"""YAML text to plain data, safely, with the line of every key kept for the errors that come later."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import yaml

from gen_stack.problems import KeyPath, Located, Problem, SpecError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_NODES = 100_000


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
        raw = path.read_bytes()
    except FileNotFoundError:
        raise refuse("there is no such file; `gen-stack init` writes one to start from") from None
    except IsADirectoryError:
        raise refuse("this is a folder; name the spec file in it") from None
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise refuse(f"the file has {len(raw)} bytes, more than the {MAX_BYTES} a spec may have; is it the right file?")
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
    elif "quoted" in words:
        words += "; close the quotation mark that opens on this line"
    elif "mapping values are not allowed" in words:
        words += "; put a text that has ': ' in it into quotation marks"
    return Located((mark.line if mark else 0) + 1, Problem((), words))


class _Builder:
    """Builds plain data from YAML nodes, noting the line of each key, and refusing what a spec never needs."""

    def __init__(self, loader: _CoreLoader) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Located] = []
        self._loader = loader
        self._nodes = 0

    def build(self, node: yaml.Node, path: KeyPath) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._nodes += 1
        if self._nodes > MAX_NODES:  # aliases of aliases grow without end from a few lines
            if self._nodes == MAX_NODES + 1:
                self._problem(path, node, f"more than {MAX_NODES} values, aliases counted; write a smaller spec")
            return None
        if len(path) > MAX_DEPTH:
            self._problem(path, node, f"nested more than {MAX_DEPTH} deep; a spec is flat")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        try:
            value = self._loader.construct_object(node)
        except (yaml.constructor.ConstructorError, ValueError):
            value = None
        if not isinstance(value, str | int | float | bool | None) or (value is None and node.tag[-5:] != ":null"):
            self._problem(path, node, f"the tag {node.tag} is not allowed; write a plain value")
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge" or key_node.value == "<<":
                self._problem(path, key_node, "merge keys (<<) are not supported; write the keys out")
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(path, key_node, "a key must be a word, not a list or a mapping")
                continue
            key = str(key_node.value)
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
