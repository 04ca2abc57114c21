"""The command line.

Exit status: 0 done, 1 a check found something, 2 the input is wrong, 3 something outside failed.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from gen_stack import __version__
from gen_stack.problems import GenStackError, InputError, listed

if TYPE_CHECKING:
    from gen_stack.plan import Plan

app = cyclopts.App(
    name="gen-stack",
    version=f"gen-stack {__version__}",
    help="Turn one YAML spec into one Docker Compose file per host, which together serve one large language model.",
    help_epilogue="gen-stack init writes a spec to start from.",
    suppress_keyboard_interrupt=False,
)


@app.default
def generate(
    spec: Annotated[Path, Parameter(help="The spec file.")],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["-o", "--output"], help="Folder to write into. Default: stacks/NAME."),
    ] = None,
    check: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Write nothing; exit 1 if the folder differs from what would be written.",
        ),
    ] = False,
    diff: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Write nothing; show what would change, as a unified diff."),
    ] = False,
    stdout: Annotated[str | None, Parameter(help="Write nothing; print this node's Compose file.")] = None,
) -> int:
    """Write the folder of every node: its Compose file, its secrets, and what its image is built from."""
    from gen_stack.disk import differences, locked, unified_diff, write
    from gen_stack.load import load_spec
    from gen_stack.output import outputs
    from gen_stack.planner import make_plan

    if [check, diff, stdout is not None].count(True) > 1:
        raise InputError("--check, --diff and --stdout exclude each other; choose one")
    loaded = load_spec(spec)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    plan = make_plan(loaded)
    if stdout is not None:
        print(_compose_of(plan, stdout), end="")
        return 0
    folder = output or Path("stacks") / plan.name
    if check:
        found = differences(folder, outputs(loaded, plan, folder))
        for one in found:
            print(f"{folder / one.path}: {one.kind}")
        return 1 if any(one.kind != "left over" for one in found) else 0
    if diff:
        sys.stdout.writelines(unified_diff(folder, outputs(loaded, plan, folder)))
        return 0
    with locked(folder):
        changes = write(folder, outputs(loaded, plan, folder))
    _report(plan, folder, [(one.path, one.kind) for one in changes])
    return 0


@app.command
def schema() -> int:
    """Print the JSON Schema of the spec."""
    from gen_stack.schema import schema_text

    print(schema_text(), end="")
    return 0


@app.command
def init(
    file: Annotated[Path, Parameter(help="The file to write; it must not exist yet.")] = Path("spec.yaml"), /
) -> int:
    """Write a commented spec to start from."""
    from gen_stack.template import TEMPLATE

    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(TEMPLATE.format(file=file.name))
    except FileExistsError:
        raise InputError(f"{file}: this file exists already; name another, or move it away") from None
    print(f"wrote {file}; change the nodes and the model in it, then run: gen-stack {file}")
    return 0


def _compose_of(plan: Plan, name: str) -> str:
    from gen_stack.render.compose import compose_file

    for group in plan.groups:
        for node in group.nodes:
            if node.name == name:
                return compose_file(plan, group, node)
    known = [node.name for node in plan.nodes]
    raise InputError(f"--stdout {name}: no such node in the spec, whose nodes are {listed(known)}")


def _report(plan: Plan, folder: Path, changes: list[tuple[str, str]]) -> None:
    """Say what was decided, what was written, and what to do next."""
    from gen_stack.plan import endpoint

    sizes = plan.parallelism
    print(f"{plan.name}: {plan.model} on {len(plan.nodes)} node{'s' if len(plan.nodes) > 1 else ''}")
    for choice in plan.choices:
        print(f"  {choice.key} {choice.value}: {choice.reason}")
    if sizes.data > 1 or sizes.expert:
        print(f"  data parallel {sizes.data}{', expert parallel' if sizes.expert else ''}: the spec says so")
    written = sum(kind not in ("left over", "obsolete") for _, kind in changes)
    print(f"{folder}: {written} file{'s' if written != 1 else ''} written" if written else f"{folder}: up to date")
    for line in _left_over(plan, folder, changes):
        print(line)
    print("next: copy each folder to its host, and in it run")
    for group in plan.groups:
        for node in group.nodes:
            wait = f"up -d --wait   then the endpoint is {endpoint(plan, group)}" if node.is_head else "up -d"
            print(f"  {node.name} ({node.address}): docker compose {wait}")


def _left_over(plan: Plan, folder: Path, changes: list[tuple[str, str]]) -> list[str]:
    """Name what an earlier run wrote and this one does not need, but cannot delete for the user."""
    paths = [path for path, kind in changes if kind == "left over"]
    kept = {"secrets", *(node.name for node in plan.nodes)}
    gone = sorted({path.split("/")[0] for path in paths} - kept)
    changed = sorted(path for path in paths if path.split("/")[0] in kept)
    return [
        *(
            f"{folder / name}: left over from an earlier spec; stop it on its host, then delete the folder"
            for name in gone
        ),
        *(f"{folder / path}: not needed any more; delete it if it is of no use to you" for path in changed),
    ]


def main() -> None:
    """Run the command line, and turn every error a user can meet into words and an exit status."""
    _prepare_output()
    try:
        status = app(result_action="return_value", exit_on_error=False, print_error=True)
        sys.stdout.flush()
    except cyclopts.CycloptsError:
        sys.exit(InputError.status)
    except GenStackError as error:
        print(error, file=sys.stderr)
        sys.exit(error.status)
    except BrokenPipeError:
        _drop_output()
        sys.exit(GenStackError.status)
    except OSError as error:
        _drop_output()
        print(f"{error.filename or 'gen-stack'}: {error.strerror}; nothing more was done", file=sys.stderr)
        sys.exit(GenStackError.status)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    sys.exit(status)


def _prepare_output() -> None:
    """Print UTF-8 in every locale, file names that are none as they are, and nothing where the stream is closed."""
    for name, errors in (("stdout", "surrogateescape"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)


def _drop_output() -> None:
    """Keep Python from trying once more, at its end, to write what the other side does not take."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
