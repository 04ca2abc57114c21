"""The documents that are made from the code, so that they cannot drift: commands, ports and the spec, in `docs/`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from gen_stack.owned import FLAGS, FLAGS_WITHOUT_KEY, VARIABLES, VARIABLES_WITHOUT_KEY
from gen_stack.release import ENGINE_VERSION
from gen_stack.spec import Spec
from gen_stack.template import TEMPLATE
from tools.ports_page import ports_page

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

GENERATED = "<!-- Made by `make generated`; do not edit. -->"
COMMANDS: tuple[list[str], ...] = ([], ["plan"], ["facts"], ["export"], ["commands"], ["ports"], ["init"], ["schema"])


def documents() -> dict[str, str]:
    """Write the generated documents, by path from the repository's root."""
    return {"docs/commands.md": commands_page(), "docs/ports.md": ports_page(GENERATED), "docs/spec.md": spec_page()}


def commands_page() -> str:
    """Show what the commands say of themselves."""
    parts = [f"# Commands\n\n{GENERATED}\n", EXIT_STATUSES]
    plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "TERM": "dumb"}
    for words in COMMANDS:
        argv = [sys.executable, "-m", "gen_stack", *words, "--help"]
        shown = subprocess.run(argv, capture_output=True, text=True, check=True, env=plain).stdout
        text = "\n".join(line.rstrip() for line in shown.strip().splitlines())
        parts.append(f"## gen-stack {' '.join([*words, '--help'])}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


EXIT_STATUSES = """\
Exit status: 0 done; 1 `--check` found a difference, or `plan` nothing that fits; 2 the input is wrong, and nothing was
written; 3 something outside failed (a disk, a file that somebody edited); 130 stopped by Ctrl-C, with no file half
written.
"""


def spec_page() -> str:
    """Describe every key of the spec from the models that check it, and what a spec may not set."""
    rows = "\n".join(f"| `{key}` | {default} | {words} |" for key, default, words in keys(Spec, ""))
    owned = {**FLAGS, **FLAGS_WITHOUT_KEY}
    flags = "\n".join(f"| `--{name}` | {_instead(words, name in FLAGS)} |" for name, words in owned.items())
    variables = "\n".join(
        f"| `{name}` | {_instead(words, name in VARIABLES)} |"
        for name, words in {**VARIABLES, **VARIABLES_WITHOUT_KEY}.items()
    )
    return PAGE.format(
        generated=GENERATED,
        engine_version=ENGINE_VERSION,
        template=TEMPLATE.format(file="spec.yaml"),
        rows=rows,
        flags=flags,
        variables=variables,
    )


PAGE = """\
# The spec, version 1

{generated}

What `gen-stack init` writes:

```yaml
{template}```

Unknown keys are errors. Files are named as seen from the spec's folder. Sizes are written as `80GiB`, durations as
`10s`. Editors complete and check a spec with [spec.schema.json](spec.schema.json).

In `engine.args`, `flag: true` becomes `--flag`, `flag: false` becomes `--no-flag`, a text or a number `--flag=value`, a
mapping `--flag={{"as":"JSON"}}`, and a list the words `--flag a b`, for flags that take several values. A flag that
takes a JSON list wants it as a text: `allowed-origins: '["*"]'`. A key of such a mapping may also stand alone, as
`compilation-config.mode: 3`.

Names, types and choices are checked against the flags of vLLM {engine_version}, as its own parser tells them
(`tools/engine_flags.py`); with another `engine.version` they are not, and a warning says so. With an image of your own,
which may have plugins, a flag or a choice that vLLM does not have is a warning.

| key | default | meaning |
|---|---|---|
{rows}

`replicas`, `groups` and `recovery` reach the nodes' environment. What the gateway does is in
[gateway.md](gateway.md). What
`model.config` and `gpu` are for, and how parallel sizes are chosen, is in [planning.md](planning.md).

## Flags that gen-stack sets

They are refused in `engine.args` in every spelling: with dashes or underscores, short, abbreviated, negated.

| flag | instead |
|---|---|
{flags}

## Variables that gen-stack sets

They are refused in `engine.env` and `nodes[].env`, and so are all that begin with `GEN_STACK_` or `VLLM_DP_`, but for
`GEN_STACK_LOG_FORMAT` ([operations](operations.md#logs)).

| variable | instead |
|---|---|
{variables}
"""


def keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    """List the keys of a model and of those inside it, with default and description."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner, many = _inner(field.annotation)
        if inner is None:
            yield path, _default(field), field.description or ""
        else:
            if field.description:
                yield path, _default(field), field.description
            yield from keys(inner, f"{path}[]." if many else f"{path}.")


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for argument in get_args(annotation):
        if (found := _inner(argument)[0]) is not None:
            return found, "list" in str(annotation)
    return None, False


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or isinstance(field.default, BaseModel | list | dict):
        return ""
    shown = {True: "true", False: "false"}.get(field.default) if isinstance(field.default, bool) else field.default
    return f"`{shown}`"


def _instead(words: str, is_key: bool) -> str:
    return f"`{words}`" if is_key and " " not in words else words


def write(root: Path) -> None:
    """Write them all."""
    for path, text in documents().items():
        (root / path).write_text(text, "utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parent.parent)
