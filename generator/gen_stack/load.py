"""From a spec file to a validated spec, the files it names, and warnings; or to every problem of it at once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError

from gen_stack.document import Document, read_document
from gen_stack.engine_flags import argument_warnings
from gen_stack.fit import findings
from gen_stack.gateway_files import gateway_files
from gen_stack.model_files import Found, read_facts, text_of
from gen_stack.model_rules import advice, problems_of_model
from gen_stack.problems import KeyPath, Problem, SpecError, key_text, listed, shown, suggestion
from gen_stack.release import ENGINE_VERSION
from gen_stack.rules import problems_of
from gen_stack.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pydantic_core import ErrorDetails

    from gen_stack.facts import ModelFacts

_STAND_INS: dict[str, Any] = {
    "name": "stand-in",
    "model": "stand-in",
    "nodes": [{"name": "stand-in", "address": "192.0.2.1", "gpus": 1}],
}
_LEANS_ON = {
    "nodes": {
        *("parallelism", "replicas", "groups", "gateway.nodes", "engine.user", "engine.image"),
        *("api.bind", "api.port", "network.control_port", "network.rdma"),
    },
    "engine": {"nodes", "nodes.gpus", "parallelism", "groups", "network.rdma"},
    "model": {"nodes.model", "engine.user"},
    "api": {"network.control_port", "gateway.port", "engine.image"},
    "network": {"api.port", "gateway.port"},
    "parallelism": {"api.port", "network.control_port"},
    "gateway": {"engine.image"},
    "replicas": {"groups", "parallelism", "nodes", "api.bind", "network.rdma"},
    "groups": {"replicas", "parallelism", "nodes", "api.bind", "network.rdma"},
}
"""Where problems between fields cannot be judged when a section has errors in its own; indexes are left out."""

SECRET_FILES: dict[str, KeyPath] = {
    "api_key": ("api", "key_file"),
    "hub_token": ("model", "token_file"),
    "group_token": ("network", "token_file"),
}
"""Secrets that a spec names as files, by the name they have in a node's `secrets/`. Each holds one line."""


@dataclasses.dataclass(frozen=True)
class LoadedSpec:
    """A spec that keeps all rules, what the files it names hold, and what deserves a warning."""

    document: Document
    folder: Path
    """Where the files are that it names."""
    spec: Spec
    secrets: dict[str, str]
    warnings: tuple[str, ...]
    facts: ModelFacts | None = None
    """Facts of the model, from `model.config` or the catalogue."""
    forced: tuple[str, ...] = ()
    """What is wrong and was to be written anyway."""
    gateway_keys: tuple[str, ...] = ()
    """The API keys of the gateway's users."""
    gateway_tls: str | None = None
    """Its certificate chain and private key, in one text."""

    @property
    def file(self) -> str:
        """Name the spec's file, as it was given."""
        return self.document.file


def load_spec(path: Path, *, force: bool = False, without_config: bool = False) -> LoadedSpec:
    """Read and validate a spec file.

    Raises `SpecError` with all problems of the file, of its fields, between its fields, with the files it names, and
    with its model. With `force`, a model that does not fit in memory is no problem. With `without_config`, nothing
    about the model is judged, and its config need not exist yet.
    """
    document = read_document(path)
    spec, problems = _validated(document)
    secrets: dict[str, str] = {}
    problems += _named_files(document.data, path.parent, secrets)
    files = gateway_files(document.data.get("gateway"), path.parent)
    problems += files.problems
    found = read_facts(spec, path.parent) if spec is not None and not without_config else Found(None)
    facts = found.facts
    problems += found.problems
    if spec is not None and facts is not None and not problems:
        problems += problems_of_model(spec, facts)
    judged = findings(spec, facts) if spec is not None and facts is not None and not problems else []
    errors = [one.problem for one in judged if one.severity == "error"]
    if not force:
        problems += [Problem(one.path, f"{one.words} (or --force)") for one in errors]
    if problems or spec is None:
        raise SpecError(document.file, [document.locate(problem) for problem in problems])
    noted = [*_warnings(spec), *found.warnings, *advice(spec, facts), *(one.problem for one in judged)]
    warnings = tuple(document.locate(problem).render(document.file) for problem in noted)
    return LoadedSpec(
        document,
        path.parent,
        spec,
        secrets,
        warnings,
        facts,
        forced=tuple(one.words for one in errors),
        gateway_keys=files.keys or ((secrets["api_key"],) if spec.gateway and "api_key" in secrets else ()),
        gateway_tls=files.tls,
    )


def _validated(document: Document) -> tuple[Spec | None, list[Problem]]:
    try:
        spec = Spec.model_validate(document.data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems = [_problem_of(detail, document.data) for detail in details]
        return None, problems + _remaining_problems(document.data, details)
    return spec, problems_of(spec)


def _remaining_problems(data: dict[str, Any], details: list[ErrorDetails]) -> list[Problem]:
    """Judge the rules between fields on what is left of a spec, without the sections that have errors of their own.

    Unknown keys and single variables are taken out alone, since no other rule leans on them.
    """
    apart = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden" or "env" in detail["loc"][:-1]]
    broken = {str(detail["loc"][0]) for detail in details if detail["loc"] not in apart}
    rest = {key: _without(value, [loc[1:] for loc in apart if loc[0] == key]) for key, value in data.items()}
    rest = {key: value for key, value in rest.items() if key not in broken and (key,) not in apart}
    for section in broken & _STAND_INS.keys():
        rest[section] = _STAND_INS[section]
    unjudged = {key for section in broken for key in _LEANS_ON.get(section, ())}
    return [
        problem
        for problem in problems_of(Spec.model_validate(rest))
        if problem.path[0] not in broken
        and ".".join(one for one in problem.path if isinstance(one, str)) not in unjudged
    ]


def _without(value: Any, locations: list[tuple[int | str, ...]]) -> Any:
    if isinstance(value, dict):
        return {
            key: _without(one, [loc[1:] for loc in locations if loc and loc[0] == key])
            for key, one in value.items()
            if (key,) not in locations
        }
    if isinstance(value, list):
        return [
            _without(one, [loc[1:] for loc in locations if loc and loc[0] == index]) for index, one in enumerate(value)
        ]
    return value


def _problem_of(detail: ErrorDetails, data: dict[str, Any]) -> Problem:
    path = tuple(detail["loc"])
    if path == ("model", "id") and not isinstance(data.get("model"), dict):
        path = ("model",)  # the short form has no key of its own for the id
    return Problem(path, _words_of(detail))


def _words_of(detail: ErrorDetails) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    rule = "a hub id, an absolute path, or a mapping with `id`" if (detail["loc"], kind) == _NO_MODEL else None
    if value is None and kind.endswith("_type"):
        return f"there is no value here; write {rule or _KINDS.get(kind, 'one')}"
    if rule:
        return f"{shown(value)} is not allowed; write {rule}"
    if kind == "missing":
        return "this key is required; add it"
    if kind == "extra_forbidden":
        name = str(detail["loc"][-1])
        known = _known_keys(detail["loc"][:-1])
        return f"unknown key {shown(name)}{suggestion(name, known) or f'; the keys here are {listed(known)}'}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"{shown(value)} is not allowed here; write {context['expected']}"
    rules = {
        **_KINDS,
        "string_type": "a text; put it into quotation marks",
        "list_type": "a list; write one '- item' a line, or [a, b]",
        "dict_type": "a mapping; write 'key: value' below it",
        "model_type": "a mapping; write 'key: value' below it",
        "greater_than_equal": f"{context.get('ge')} or more",
        "less_than_equal": f"{context.get('le')} or less",
        "too_short": "a list with at least one item",
        "too_long": f"a list of at most {context.get('max_length')} items",
        "string_too_short": "a text that is not empty",
        "string_too_long": f"a text of at most {context.get('max_length')} characters",
    }
    return f"{shown(value)} is not allowed; it must be {rules.get(kind, detail['msg'])}"


_NO_MODEL = (("model",), "model_type")
_KINDS = {
    "int_type": "a whole number, without quotation marks",
    "float_type": "a number, without quotation marks",
    "bool_type": "true or false, without quotation marks",
    "string_type": "a text",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a mapping, such as {key: value}",
    "model_type": "a mapping, such as {key: value}",
}


def _known_keys(path: KeyPath) -> list[str]:
    """List the keys that the spec knows at a place."""
    model: type[BaseModel] = Spec
    for step in path:
        if isinstance(step, str):
            model = _model_in(model.model_fields[step].annotation)
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel]:
    if parts := get_args(annotation):
        return next(_model_in(one) for one in parts if one is not type(None))
    model: type[BaseModel] = annotation
    return model


def _value_at(data: Any, path: KeyPath) -> Any:
    for step in path:
        data = data.get(step) if isinstance(data, dict) else None
    return data


def _named_files(data: dict[str, Any], folder: Path, secrets: dict[str, str]) -> list[Problem]:
    """Check the files that a spec names, relative to its folder, and put the secrets they hold into `secrets`."""
    problems = []
    for name, key in SECRET_FILES.items():
        if isinstance(value := _value_at(data, key), str) and value:
            secret, wrong = _one_line(folder / value, key, value)
            problems += wrong
            secrets[name] = secret
    return problems


def _one_line(path: Path, key: KeyPath, value: str) -> tuple[str, list[Problem]]:
    """Read a secret; neither it nor any part of it is ever in a message."""
    text, problems = text_of(path, key, value)
    secret = text.strip()
    if not problems and (not secret or not secret.isprintable() or " " in secret):
        words = f"the file {shown(value)} must hold one line without spaces: the secret itself"
        problems = [Problem(key, words)]
    return secret, problems


def _warnings(spec: Spec) -> Iterator[Problem]:
    if spec.engine.version != ENGINE_VERSION:
        words = f"gen-stack is tested with vLLM {ENGINE_VERSION}, not with {spec.engine.version}"
        yield Problem(("engine", "version"), words)
    yield from argument_warnings(spec.engine)
    if spec.gateway and not (spec.gateway.keys_file or spec.api.key_file):
        yield Problem(("gateway",), "has no API keys, so whoever reaches it may use the model; name a keys_file")
    for index, node in enumerate(spec.nodes):
        for name in sorted(node.env.keys() & spec.engine.env.keys()):
            where: KeyPath = ("nodes", index, "env", name)
            yield Problem(where, f"overrides {key_text(('engine', 'env', name))} on this node")
