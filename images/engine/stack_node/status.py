"""`stack-node status`: how the group is, for a person in front of a terminal.

    docker compose exec engine stack-node status [--json]

It runs inside a container of the group, on any node: the container's environment says where the head is, and its token
file opens the head's `/status`.

Exit status: 0 the group is ready; 1 it is not; 2 wrong arguments or environment; 3 the head cannot be asked.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stack_node import config as configuration
from stack_node import health, launchers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stack_node.config import NodeConfig

TIMEOUT_S = 5.0
EXIT_READY, EXIT_NOT_READY, EXIT_ENVIRONMENT, EXIT_UNREACHABLE = 0, 1, 2, 3

USAGE = "usage: stack-node status [--json]\n"

_MAX_BYTES = 4 << 20  # an answer longer than this is no status


class UnreachableError(Exception):
    """The head has not given its status; the text says why and what to look at."""


def main(args: Sequence[str], environ: Mapping[str, str]) -> int:
    """Print the group's status; returns the exit status."""
    if list(args) in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if list(args) not in ([], ["--json"]):
        sys.stderr.write(USAGE)
        return EXIT_ENVIRONMENT
    environ, unassigned = launchers.assign(environ)
    config, problems = configuration.read(environ)
    problems = [*unassigned, *problems]
    if not problems and not config.in_group:
        problems = ["NNODES is not set: this node serves alone; `stack-node health` says how it is"]
    token, problem = read_token(config.token_file)
    problems += [problem] if problem else []
    if problems:
        for problem in problems:
            sys.stderr.write(f"stack-node status: {problem}\n")
        return EXIT_ENVIRONMENT
    healthy, sentence = health.judge(health.read(), time.monotonic())
    own = f"this node (rank {config.node_rank}): {'healthy' if healthy else 'unhealthy'}; {sentence}"
    try:
        status = ask(head(config), config.control_port, token)
        lines = table(status)
    except (UnreachableError, KeyError, TypeError) as error:
        why = str(error) if isinstance(error, UnreachableError) else "the head's status is of another version"
        sys.stderr.write(f"{printable(f'stack-node status: {why}')}\n{printable(own)}\n")
        return EXIT_UNREACHABLE
    if not config.serves_api:  # the head has just said all there is about itself
        status["this_node"] = {"rank": config.node_rank, "healthy": healthy, "sentence": sentence}
        lines += ["", own]
    print(json.dumps(status, indent=2) if args else "\n".join(map(printable, lines)))
    return EXIT_READY if status["ready"] is True else EXIT_NOT_READY


def head(config: NodeConfig) -> str:
    """Where the control port is; a group of one needs no address."""
    return config.master_addr or config.node_addr or "127.0.0.1"


def read_token(path: str | None) -> tuple[str | None, str | None]:
    """The group token, None where the group has none; and a sentence when it cannot be read."""
    if path is None:
        return None, None
    try:
        return Path(path).read_text().strip(), None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        return None, f"GEN_STACK_TOKEN_FILE={path} cannot be read: {reason}"


def ask(address: str, port: int, token: str | None) -> dict[str, Any]:
    """The head's status; raises UnreachableError."""
    import http.client  # here, because it takes longer than all the rest

    where = f"{configuration.url_host(address)}:{port}"
    connection = http.client.HTTPConnection(address, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/status", headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        code, text = response.status, response.read(_MAX_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise UnreachableError(
            f"the head does not answer at {where} ({error or type(error).__name__}); look whether the head's container "
            f"runs (docker compose ps, docker compose logs on its host) and whether a firewall closes TCP port {port}"
        ) from error
    finally:
        connection.close()
    if code == 401:
        raise UnreachableError(f"the head at {where} has another token; compare the group's token files on both hosts")
    if code == 403:
        raise UnreachableError(f"the group has no token, so the head at {where} tells only its own host; ask there")
    try:
        status = json.loads(text) if code == 200 else None
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict) or "phase" not in status:
        raise UnreachableError(f"what answers at {where} is no head (HTTP status {code}); look what listens there")
    return status


def table(status: dict[str, Any]) -> list[str]:
    """A status as lines of text."""
    api = status["api"]
    requests = ", ".join(f"{api[name]} {name}" for name in ("running", "waiting") if name in api) if api else "closed"
    failures = f"{status['failures']} of {status['max_restarts']}"
    if status["next_try_s"] is not None:
        failures += f", next attempt in {duration(status['next_try_s'])}"
    restarts = ", ".join(f"{count} {cause}" for cause, count in sorted(status["restarts"].items()))
    rows = [
        ("group", status["group"]),
        ("phase", status["phase"]),
        ("", status["sentence"] if status["sentence"] != status["phase"] else ""),
        ("epoch", str(status["epoch"])),
        ("requests", requests),
        ("failures", failures),
        ("restarts", restarts or "none"),
        ("recovery", _recovery(status)),
    ]
    lines = [f"{name:<12}{text}" for name, text in rows if text]
    return [*lines, *_fault(status["last_fault"]), "", *_members(status["members"])]


def _recovery(status: dict[str, Any]) -> str:
    if status["last_recovery_s"] is None:
        return ""
    noticed = status["last_detection_s"]
    return f"took {duration(status['last_recovery_s'])} the last time" + (
        f", noticed after {noticed:.1f} s" if noticed is not None else ""
    )


def _fault(fault: dict[str, Any] | None) -> list[str]:
    if fault is None:
        return []
    where = f", rank {fault['rank']}" if fault["rank"] is not None else ""
    return [
        f"{'last fault':<12}epoch {fault['epoch']}{where}, {fault['kind']}: {fault['reason']}",
        *(f"              {line}" for line in fault["log"]),
    ]


def _members(members: list[dict[str, Any]]) -> list[str]:
    rows = [["rank", "node", "address", "state", ""]]
    for member in members:
        text = member["text"]
        if member["total"] and member["state"] == "fetching":
            text = f"{gib(member['done'])} of {gib(member['total'])} GiB; {text}"
        rows.append([str(member["rank"]), member["node"] or "-", member["address"] or "-", member["state"], text])
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in rows]


def gib(size: int) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.1f}"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def printable(text: str) -> str:
    """A line without what could move a terminal's cursor: names and logs come from other hosts."""
    return "".join(char if char.isprintable() else "?" for char in text.replace("\t", "    "))
