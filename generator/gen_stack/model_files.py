"""The files that say what a model is: `model.config` and the index beside it, else the catalogue of the package."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from gen_stack.catalogue import catalogue_config
from gen_stack.facts import ModelFacts, UnknownModelError, facts_of
from gen_stack.gpus import problems_of_gpus
from gen_stack.problems import KeyPath, Problem, shown

if TYPE_CHECKING:
    from pathlib import Path

    from gen_stack.spec import Spec

MAX_FILE_BYTES = 32 << 20
"""How large a file may be that a spec names; the indexes of the largest models have some ten megabytes."""

INDEX = "model.safetensors.index.json"
KEY: KeyPath = ("model", "config")


@dataclasses.dataclass(frozen=True)
class Found:
    """The facts of a model, None when nothing says what it is; what is wrong; and what deserves a warning."""

    facts: ModelFacts | None
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def read_facts(spec: Spec, folder: Path) -> Found:
    """Find the facts of a spec's model; files are relative to `folder`."""
    problems = list(problems_of_gpus(spec))
    value = spec.model.config
    if value is None:
        config = catalogue_config(spec.model.id)
        return Found(facts_of(config) if config else None, tuple(problems))
    config, wrong = _object(folder / value, value)
    index = None
    wrong_index: list[Problem] = []
    beside = (folder / value).parent / INDEX
    if not wrong and beside.is_file():
        index, wrong_index = _object(beside, f"{value.rpartition('/')[0] or '.'}/{INDEX}")
    problems += wrong + wrong_index
    if wrong or wrong_index or config is None:
        return Found(None, tuple(problems))
    try:
        return Found(facts_of(config, index), tuple(problems))
    except UnknownModelError as error:
        words = f"the file {shown(value)} is of no kind that can be planned from: {error}; nothing of it is checked"
        return Found(None, tuple(problems), (Problem(KEY, words),))


def _object(path: Path, value: str) -> tuple[dict[str, Any] | None, list[Problem]]:
    text, problems = text_of(path, KEY, value)
    if problems:
        return None, problems
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else error
        return None, [Problem(KEY, f"the file {shown(value)} is not JSON: {why}")]
    if not isinstance(content, dict):
        return None, [Problem(KEY, f"the file {shown(value)} is no JSON object; name the model's config.json")]
    return content, []


def text_of(path: Path, key: KeyPath, value: str) -> tuple[str, list[Problem]]:
    """Read a file that a spec names at `key` as `value`, or say what is wrong with it."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        if len(raw) <= MAX_FILE_BYTES:
            return raw.decode("utf-8-sig"), []
        words = f"the file {shown(value)} has more than {MAX_FILE_BYTES} bytes; is it the right file?"
    except FileNotFoundError:
        words = (
            f"there is no file {shown(value)} beside the spec; write its path from the spec's folder, or make the file"
        )
    except UnicodeDecodeError:
        words = f"the file {shown(value)} is not UTF-8 text; is it the right file?"
    except OSError as error:
        words = f"the file {shown(value)} cannot be read: {error.strerror}"
    except ValueError:
        words = f"{shown(value)} is no name for a file; write its path from the spec's folder"
    return "", [Problem(key, words)]
