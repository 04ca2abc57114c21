"""What the generator's tests share: small specs, and the ways from a spec's text to errors, a plan and files."""

from __future__ import annotations

import contextlib
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gen_stack.load import LoadedSpec, load_spec
from gen_stack.output import outputs
from gen_stack.planner import make_plan
from gen_stack.problems import SpecError
from gen_stack.render.compose import render_compose

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gen_stack.plan import Plan

ROOT = Path(__file__).parents[2]

ONE = """\
name: t
model: /models/m
nodes:
  - {name: a, address: 10.0.0.11, gpus: 8}
"""

TWO = f"{ONE}  - {{name: b, address: 10.0.0.12, gpus: 8}}\n"
FOUR = f"{TWO}  - {{name: c, address: 10.0.0.13, gpus: 8}}\n  - {{name: d, address: 10.0.0.14, gpus: 8}}\n"
HUB = TWO.replace("/models/m", "org/model")

ERROR_LINE = re.compile(r"spec\.yaml:[1-9][0-9]*: (?P<key>(?:[\w.-]+|\[[^\n]+?\])+: )?(?P<words>\S[^\n]*)")


@contextlib.contextmanager
def spec_file(text: str | bytes, files: Mapping[str, str] | None = None) -> Iterator[Path]:
    """Write a spec and the files it names into a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, content in (files or {}).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(content, encoding="utf-8")
        spec = folder / "spec.yaml"
        spec.write_bytes(text if isinstance(text, bytes) else text.encode())
        yield spec


def load(text: str | bytes, files: Mapping[str, str] | None = None) -> LoadedSpec:
    """Load a spec that is right."""
    with spec_file(text, files) as spec:
        return load_spec(spec)


def errors(text: str | bytes, files: Mapping[str, str] | None = None) -> list[str]:
    """List the error lines of a spec, which stands in `spec.yaml`; none when it is right."""
    with spec_file(text, files) as spec:
        try:
            load_spec(spec)
        except SpecError as error:
            lines = str(error).replace(f"{spec.parent}/", "").split("\n")
            assert all(ERROR_LINE.fullmatch(line) for line in lines), lines
            return lines
    return []


def error(text: str | bytes, files: Mapping[str, str] | None = None) -> str:
    """Give the only error line of a spec."""
    lines = errors(text, files)
    assert len(lines) == 1, lines
    return lines[0]


def warnings(text: str) -> list[str]:
    """List the warnings of a spec that is right."""
    with spec_file(text) as spec:
        return [line.replace(f"{spec.parent}/", "") for line in load_spec(spec).warnings]


_FastLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def plan_of(text: str, files: Mapping[str, str] | None = None) -> Plan:
    """Plan a stack from the text of its spec."""
    return make_plan(load(text, files))


def composes_of(text: str, files: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Load the Compose file of every node as Compose sees it after its interpolation, by the node's name."""
    rendered = render_compose(plan_of(text, files))
    return {
        path.split("/")[0]: interpolated(yaml.load(content, _FastLoader))
        for path, content in rendered.items()
        if path.endswith("compose.yaml")
    }


def engine_of(text: str, node: str = "a", files: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Give the engine's service of one node, as Compose sees it."""
    service: dict[str, Any] = composes_of(text, files)[node]["services"]["engine"]
    return service


def output_texts(text: str, folder: Path, files: Mapping[str, str] | None = None) -> dict[str, str]:
    """Give the text of all files of a stack by their paths, secrets included."""
    loaded = load(text, files)
    return {path: file.text for path, file in outputs(loaded, make_plan(loaded), folder).items()}


_DOLLAR = re.compile(r"\$(?:(?P<escaped>\$)|.?)")


def interpolated(value: Any) -> Any:
    """Do to every text what Compose's interpolation does, in an environment that must not matter."""
    if isinstance(value, dict):
        return {key: interpolated(one) for key, one in value.items()}
    if isinstance(value, list):
        return [interpolated(one) for one in value]
    return _DOLLAR.sub(_dollar, value) if isinstance(value, str) else value


def _dollar(match: re.Match[str]) -> str:
    assert match["escaped"], f"Compose would interpolate {match[0]!r} in {match.string!r}"
    return "$"
