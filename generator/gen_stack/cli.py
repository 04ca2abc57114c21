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
from gen_stack.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gen_stack.disk import Difference
    from gen_stack.load import LoadedSpec
    from gen_stack.output import OutputFile
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
    force: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Write even if the model does not fit in the GPUs' memory."),
    ] = False,
) -> int:
    """Write the folder of every node: its Compose file, its secrets, and what its image is built from."""
    from gen_stack.load import load_spec
    from gen_stack.output import outputs
    from gen_stack.planner import make_plan

    if [check, diff, stdout is not None].count(True) > 1:
        raise InputError("--check, --diff and --stdout exclude each other; choose one")
    loaded = load_spec(spec, force=force)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    _warn_of_local(loaded)
    plan = make_plan(loaded)
    if stdout is not None:
        print(_compose_of(plan, stdout), end="")
        return 0
    folder = output or Path("stacks") / plan.name
    changes = _put(folder, lambda: outputs(loaded, plan, folder), check=check, diff=diff)
    if isinstance(changes, int):
        return changes
    _report(plan, folder, [(one.path, one.kind) for one in changes])
    return 0


def _put(
    folder: Path, files: Callable[[], Mapping[str, OutputFile]], *, check: bool, diff: bool
) -> int | list[Difference]:
    """Write files and give what changed; with --check or --diff, print it instead and give the exit status."""
    from gen_stack.disk import differences, locked, unified_diff, write

    if check:
        found = differences(folder, files())
        for one in found:
            print(f"{folder / one.path}: {one.kind}")
        return 1 if any(one.kind != "left over" for one in found) else 0
    if diff:
        sys.stdout.writelines(unified_diff(folder, files()))
        return 0
    with locked(folder):
        return write(folder, files())


@app.command
def export(
    target: Annotated[str, Parameter(help=f"What starts the nodes: {listed(TARGETS)}.")],
    spec: Annotated[Path, Parameter(help="The spec file.")],
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(name=["-o", "--output"], help="Folder to write into. Default: stacks/NAME.TARGET."),
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
    force: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Write even if the model does not fit in the GPUs' memory."),
    ] = False,
) -> int:
    """Write what another launcher than Compose starts the same stack from: one folder for each group."""
    from gen_stack.load import load_spec
    from gen_stack.output import exports
    from gen_stack.planner import make_plan
    from gen_stack.targets import check_exportable, target_of

    chosen = target_of(target)
    if check and diff:
        raise InputError("--check and --diff exclude each other; choose one")
    loaded = load_spec(spec, force=force)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    _warn_of_local(loaded)
    plan = make_plan(loaded)
    check_exportable(loaded, plan)
    if plan.gateway:
        print("warning: the gateway is no part of an export; it runs beside it, from `gen-stack SPEC`", file=sys.stderr)
    folder = output or Path("stacks") / f"{plan.name}.{target}"
    changes = _put(folder, lambda: exports(loaded, plan, chosen, folder), check=check, diff=diff)
    if isinstance(changes, int):
        return changes
    written = sum(one.kind not in ("left over", "obsolete") for one in changes)
    print(f"{folder}: {written} file{'s' if written != 1 else ''} written" if written else f"{folder}: up to date")
    print(f"next: docs/launchers.md, {target}; the group's folder says how it is started")
    return 0


@app.command
def plan(
    spec: Annotated[Path, Parameter(help="The spec file.")],
    /,
    *,
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Print it as JSON, for programs.")] = False,
    max_context: Annotated[
        bool, Parameter(negative="", show_default=False, help="Print the longest sequence that fits, and nothing else.")
    ] = False,
    fit: Annotated[
        bool, Parameter(negative="", show_default=False, help="Print single changes that make the model fit.")
    ] = False,
) -> int:
    """Show what would be written and why: nodes, ranks, memory, ports, the endpoint."""
    from gen_stack.load import load_spec
    from gen_stack.picture import as_data, picture
    from gen_stack.planner import make_plan

    if [json, max_context, fit].count(True) > 1:
        raise InputError("--json, --max-context and --fit exclude each other; choose one")
    loaded = load_spec(spec, force=True)
    _warn_of_local(loaded)
    made = make_plan(loaded)
    if max_context or fit:
        return _what_if(loaded, made, fit=fit)
    if json:
        from json import dumps

        print(dumps(as_data(made, loaded.warnings), indent=2, ensure_ascii=False))
    else:
        print(picture(made, loaded.warnings), end="")
    return InputError.status if loaded.forced else 0


def _warn_of_local(loaded: LoadedSpec) -> None:
    """Say it when this host's copy of the model contradicts the plan: never in an output, which no host may change."""
    from gen_stack.local_facts import local_warning

    if warning := local_warning(loaded, os.environ):
        print(f"warning: {warning}", file=sys.stderr)


def _what_if(loaded: LoadedSpec, made: Plan, *, fit: bool) -> int:
    """Answer --max-context or --fit. Nothing of it is applied."""
    from gen_stack.fit import changes, max_context

    if loaded.facts is None or made.memory is None:
        print(made.unchecked)
        return 1
    if not fit:
        longest = max_context(loaded.spec, loaded.facts, made.parallelism)
        print(longest or 0)
        return 0 if longest else 1
    if not loaded.forced:
        print("it fits as it is")
        return 0
    found = changes(loaded.spec, loaded.facts, made.parallelism)
    for one in found:
        print(one.words)
    if not found:
        print("no single change makes it fit: use larger GPUs, or a quantised release")
    return 0 if found else 1


@app.command
def commands(
    spec: Annotated[Path, Parameter(help="The spec file.")],
    /,
    *,
    node: Annotated[str | None, Parameter(help="Of this node alone.")] = None,
) -> int:
    """Print one `docker run` for each node, for a person with a terminal on each of them."""
    from gen_stack.load import load_spec
    from gen_stack.planner import make_plan
    from gen_stack.render.docker_run import build_line, run_line

    loaded = load_spec(spec)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    plan = make_plan(loaded)
    if node is not None and node not in {one.name for one in plan.nodes}:
        known = [one.name for one in plan.nodes]
        raise InputError(f"--node {node}: no such node in the spec, whose nodes are {listed(known)}")
    print(f"# Each in a copy of the node's folder, which `gen-stack {spec}` writes with its secrets.")
    for group in plan.groups:
        for one in group.nodes:
            if node in (None, one.name):
                lines = [f"# {one.name} ({one.address})", build_line(plan), run_line(plan, group, one)]
                print("\n".join(line for line in lines if line))
    return 0


@app.command
def facts(
    spec: Annotated[Path, Parameter(help="The spec file.")],
    /,
) -> int:
    """Write the model's config.json, and its weights' index, beside the spec: from its folder, a cache, or the hub."""
    from gen_stack.hub import model_texts
    from gen_stack.load import load_spec

    loaded = load_spec(spec, force=True, without_config=True)
    place, texts = model_texts(loaded.spec, loaded.secrets.get("hub_token"), os.environ)
    given = loaded.spec.model.config
    config = spec.parent / (given or f"{loaded.spec.name}.model/config.json")
    config.parent.mkdir(parents=True, exist_ok=True)
    for name, content in texts.items():
        (config if name == "config.json" else config.parent / name).write_bytes(content)
    print(f"{config}: written from {place}")
    if not given:
        print(f"set model.config to ./{config.relative_to(spec.parent)} to plan from it")
    return 0


@app.command
def schema() -> int:
    """Print the JSON Schema of the spec."""
    from gen_stack.schema import schema_text

    print(schema_text(), end="")
    return 0


@app.command
def ports(
    spec: Annotated[Path, Parameter(help="The spec file.")],
    /,
    *,
    nft: Annotated[
        bool, Parameter(negative="", show_default=False, help="Print the rules of each node's firewall, for nftables.")
    ] = False,
    node: Annotated[str | None, Parameter(help="With --nft: of this node alone, as its host loads them.")] = None,
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Print JSON.")] = False,
) -> int:
    """Print who connects to whom on what."""
    from gen_stack.load import load_spec
    from gen_stack.planner import make_plan
    from gen_stack.ports import ports_json, ports_table
    from gen_stack.render.nft import nft_files

    if (nft and json) or (node is not None and not nft):
        raise InputError("--json and --nft exclude each other, and --node goes with --nft")
    loaded = load_spec(spec, force=True)
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    plan = make_plan(loaded)
    if not nft:
        print(ports_json(plan) if json else ports_table(plan), end="")
        return 0
    files = nft_files(plan)
    if node is not None and node not in files:
        raise InputError(f"--node {node}: no such node in the spec, whose nodes are {listed(files)}")
    print("\n".join(files.values() if node is None else [files[node]]), end="")
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
    from gen_stack.plan import endpoint, gateway_endpoints

    print(f"{plan.name}: {plan.model} on {len(plan.nodes)} node{'s' if len(plan.nodes) > 1 else ''}")
    for choice in plan.choices:
        print(f"  {choice.key} {choice.value}: {choice.reason}")
    for line in (*([plan.unchecked] if plan.unchecked else []), *plan.advice):
        print(f"  {line}")
    written = sum(kind not in ("left over", "obsolete") for _, kind in changes)
    print(f"{folder}: {written} file{'s' if written != 1 else ''} written" if written else f"{folder}: up to date")
    for line in _left_over(plan, folder, changes):
        print(line)
    print("next: copy each folder to its host, and in it run")
    for group in plan.groups:
        for node in group.nodes:
            what = f"group {group.name} is at" if plan.gateway else "the endpoint is"
            wait = f"up -d --wait   then {what} {endpoint(plan, group)}" if node.is_head else "up -d"
            print(f"  {node.name} ({node.address}): docker compose {wait}")
    for node, url in gateway_endpoints(plan):
        print(f"the endpoint is {url}, the gateway on {node.name}")


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
