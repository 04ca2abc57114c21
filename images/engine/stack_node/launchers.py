"""Where a node's place in its group comes from when a launcher assigns it: one table, and a pure function over it.

`GEN_STACK_LAUNCHER` names the launcher; the files of `gen-stack export` set it. Nothing is guessed: a shell inside a
Slurm allocation has Slurm's variables, and a pod has Kubernetes', without this container being a rank of anything. Only
torchrun is known by itself, since a process with its variables is a worker that its agent started.

The group's own variables win where they are set. Where one of them says another rank or size than the launcher, one of
the two is wrong, and that is an error.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VARIABLE = "GEN_STACK_LAUNCHER"


def _as_it_is(text: str) -> str:
    return text


@dataclass(frozen=True)
class Source:
    """A variable of a launcher, and how it is read; `read` raises ValueError with the rule that the text breaks."""

    variable: str
    read: Callable[[str], str] = _as_it_is


@dataclass(frozen=True)
class Launcher:
    """How a launcher tells a process its place."""

    takes: Mapping[str, Source]  # the contract's variables and their sources; one that is not here has to be set
    rules: tuple[Source, ...] = ()  # read for their errors alone
    hides: tuple[str, ...] = ()  # names, and beginnings that end with `_`, that are kept from the engine
    known_by: tuple[str, ...] = ()  # variables that only its own processes have; none: it has to be named


def hosts(text: str) -> list[str]:
    """Expand a host list as Slurm writes it, such as `gpu[01-03,7],login`; raises ValueError for anything else."""
    found: list[str] = []
    for word in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        parts = [_choices(part) for part in re.findall(r"\[[^\[\]]*\]|[^\[\]]+", word)]
        found += ["".join(one) for one in itertools.product(*parts)]
    if not found or text.count("[") != text.count("]"):
        raise ValueError("is no list of hosts")
    return found


def _choices(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    found: list[str] = []
    for piece in part[1:-1].split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if bounds is None:
            raise ValueError("is no list of hosts")
        first, last = bounds[1], bounds[2] or bounds[1]
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _first_host(text: str) -> str:
    return hosts(text)[0]


def _first_word(text: str) -> str:
    return text.split()[0]


def _ordinal(text: str) -> str:
    """The number at the end of a pod's name, which is its host name."""
    if found := re.search(r"-(\d+)$", text.split(".")[0]):
        return found[1]
    raise ValueError("does not end with a pod's ordinal, as NAME-0 does")


def _one_process(text: str) -> str:
    """How many processes a node has: `1`, or Slurm's `1(x3)`."""
    if not re.fullmatch(r"1(\(x\d+\))?", text):
        raise ValueError("is not one process a node, and one stack-node runs all GPUs of its node")
    return text


LAUNCHERS: dict[str, Launcher] = {
    "torchrun": Launcher(
        takes={
            "NODE_RANK": Source("GROUP_RANK"),
            "NNODES": Source("GROUP_WORLD_SIZE"),
            "MASTER_ADDR": Source("MASTER_ADDR"),
            "MASTER_PORT": Source("GEN_STACK_MASTER_PORT"),
        },
        rules=(Source("LOCAL_WORLD_SIZE", _one_process),),
        # With TORCHELASTIC_USE_AGENT_STORE the engine's rank 0 would wait for a store instead of opening one.
        # Its MASTER_PORT is where its own store listens.
        hides=(
            *("TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_", "RANK", "WORLD_SIZE"),
            *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"),
        ),
        known_by=("TORCHELASTIC_RUN_ID", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    ),
    "slurm": Launcher(
        takes={
            "NODE_RANK": Source("SLURM_NODEID"),
            "NNODES": Source("SLURM_STEP_NUM_NODES"),
            "MASTER_ADDR": Source("SLURM_STEP_NODELIST", _first_host),
        },
        rules=(Source("SLURM_STEP_TASKS_PER_NODE", _one_process),),
    ),
    "leaderworkerset": Launcher(
        takes={
            "NODE_RANK": Source("LWS_WORKER_INDEX"),
            "NNODES": Source("LWS_GROUP_SIZE"),
            "MASTER_ADDR": Source("LWS_LEADER_ADDRESS"),
        }
    ),
    "statefulset": Launcher(takes={"NODE_RANK": Source("HOSTNAME", _ordinal)}),
    "skypilot": Launcher(
        takes={
            "NODE_RANK": Source("SKYPILOT_NODE_RANK"),
            "NNODES": Source("SKYPILOT_NUM_NODES"),
            "MASTER_ADDR": Source("SKYPILOT_NODE_IPS", _first_word),
        }
    ),
}

_PLACE = ("NNODES", "NODE_RANK", "MASTER_ADDR", "NODE_ADDR")
_NUMBERS = ("NNODES", "NODE_RANK")
_OPTIONAL = ("MASTER_PORT",)


def assign(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The environment with the group's variables as the launcher gives them, and a sentence for everything wrong.

    Without a launcher it is the environment as it was. With problems it has no group in it and is good for no engine.
    """
    name = _launcher(environ)
    if name is None:
        return dict(environ), []
    if name not in LAUNCHERS:
        return _without_place(environ), [f"{VARIABLE}={name!r}: is no launcher; use one of {', '.join(LAUNCHERS)}"]
    launcher = LAUNCHERS[name]
    kept = {key: value for key, value in environ.items() if not _is_hidden(key, launcher)}
    problems: list[str] = []
    for rule in launcher.rules:
        _read(name, rule, environ, problems)
    for variable, source in launcher.takes.items():
        own = _text(kept, variable)
        if own is not None and variable not in _NUMBERS:
            continue
        if own is None and _text(environ, source.variable) is None:
            if variable not in _OPTIONAL:
                problems.append(f"{source.variable} is not set: {name} sets it; set {variable}, or start by {name}")
            continue
        value = _read(name, source, environ, problems) if _text(environ, source.variable) else None
        if own is not None and value is not None and own != value:
            problems.append(
                f"{variable}={own} contradicts {source.variable}={environ[source.variable]} of {name}; unset {variable}"
            )
        elif own is None and value is not None:
            kept[variable] = value
    problems += [] if problems else _misfit(launcher, kept)
    return (_without_place(environ), problems) if problems else (kept, [])


def _launcher(environ: Mapping[str, str]) -> str | None:
    if named := _text(environ, VARIABLE):
        return named
    for name, launcher in LAUNCHERS.items():
        if launcher.known_by and all(_text(environ, variable) for variable in launcher.known_by):
            return name
    return None


def _is_hidden(variable: str, launcher: Launcher) -> bool:
    return any(variable.startswith(one) if one.endswith("_") else variable == one for one in launcher.hides)


def _read(name: str, source: Source, environ: Mapping[str, str], problems: list[str]) -> str | None:
    text = _text(environ, source.variable)
    if text is None:
        return None
    try:
        return source.read(text)
    except ValueError as error:
        problems.append(f"{source.variable}={text!r} of {name}: {error}")
        return None


def _misfit(launcher: Launcher, kept: Mapping[str, str]) -> list[str]:
    """A rank that is not below the size, in the launcher's own words; `config` judges all else."""
    rank, size = kept.get("NODE_RANK", ""), kept.get("NNODES", "")
    if not (rank.isdecimal() and size.isdecimal()) or int(rank) < int(size):
        return []
    words = {name: launcher.takes[name].variable if name in launcher.takes else name for name in _NUMBERS}
    return [f"{words['NODE_RANK']}={rank} is not below {words['NNODES']}={size}: ranks count from 0; correct one"]


def _without_place(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _PLACE}


def _text(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name, "").strip() or None
