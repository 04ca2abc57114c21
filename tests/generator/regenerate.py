"""Writes again what the generator's tests compare with: `python -m tests.generator.regenerate`.

Golden files (`tests/generator/golden/`), the reference stacks (`compose/`) and the spec's JSON Schema (`docs/`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from gen_stack.load import load_spec
from gen_stack.planner import make_plan
from gen_stack.render.compose import render_compose
from gen_stack.schema import schema_text
from gen_stack.targets import TARGETS
from tests.generator.helpers import ROOT

if TYPE_CHECKING:
    from pathlib import Path

GOLDEN = ROOT / "tests" / "generator" / "golden"
EXPORTS = ROOT / "tests" / "generator" / "golden-exports"
REFERENCE = ROOT / "compose"
FILES = ("/compose.yaml", "/gateway/haproxy.cfg")
SCHEMA = ROOT / "docs" / "spec.schema.json"


def stacks(folder: Path) -> list[Path]:
    """List the folders that hold a spec and, beside it, what gen-stack makes of it."""
    return sorted(spec.parent for spec in folder.glob("*/spec.yaml"))


def expected(stack: Path) -> dict[str, str]:
    """Render a stack's files, by their paths below its folder; a secret or an image is no part of it."""
    files = render_compose(make_plan(load_spec(stack / "spec.yaml")))
    return {path: text for path, text in files.items() if path.endswith(FILES)}


def present(stack: Path) -> dict[str, str]:
    """Read the same files as they stand there."""
    found = sorted(path for name in FILES for path in stack.glob(f"*{name}"))
    return {str(path.relative_to(stack)): path.read_text("utf-8") for path in found}


def expected_exports() -> dict[str, str]:
    """Render the one spec of `EXPORTS` for every target, by path below that folder, without the secrets."""
    plan = make_plan(load_spec(EXPORTS / "spec.yaml"))
    return {
        f"{target.name}/{group.name}/{path}": text
        for target in TARGETS.values()
        for group in plan.groups
        for path, text in target.render(plan, group).items()
    }


def present_exports() -> dict[str, str]:
    """Read the exports as they stand there."""
    files = [path for path in sorted(EXPORTS.glob("*/**/*")) if path.is_file()]
    return {str(path.relative_to(EXPORTS)): path.read_text("utf-8") for path in files}


def main() -> None:
    """Write all of it, and remove Compose files of nodes that are gone."""
    for stack in [*stacks(GOLDEN), *stacks(REFERENCE)]:
        wanted = expected(stack)
        for path in present(stack).keys() - wanted.keys():
            (stack / path).unlink()
            with contextlib.suppress(OSError):  # another file is in it
                for above in list((stack / path).parents)[: path.count("/")]:
                    above.rmdir()
        for path, text in wanted.items():
            (stack / path).parent.mkdir(parents=True, exist_ok=True)
            (stack / path).write_text(text, encoding="utf-8")
    for path in present_exports():
        (EXPORTS / path).unlink()
    for path, text in expected_exports().items():
        (EXPORTS / path).parent.mkdir(parents=True, exist_ok=True)
        (EXPORTS / path).write_text(text, encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
