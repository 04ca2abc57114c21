"""Run outside programs with progress a person can follow and errors without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

LAST_LINES = 15


class ToolError(Exception):
    """Something outside this repository failed; the text says what, and what to do."""


def say(line: str) -> None:
    """Print one progress line at once, also into a pipe."""
    print(line, flush=True)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Name a slow step when it begins and its seconds when it ends."""
    say(f"{what} ...")
    start = time.monotonic()
    yield
    say(f"{what}: {time.monotonic() - start:.1f} s")


def run(argv: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float | None = None) -> str:
    """Run a program to its end and return its standard output; ToolError with its last lines otherwise."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            env=None if env is None else {**os.environ, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError:
        raise ToolError(f"{words[0]}: not found on the PATH; it is needed for: {' '.join(words)}") from None
    except subprocess.TimeoutExpired:
        raise ToolError(f"no end after {timeout:.0f} s: {' '.join(words)}") from None
    if done.returncode:
        raise ToolError(failure(words, done.returncode, done.stdout + done.stderr))
    return done.stdout


def failure(words: Sequence[str], status: int, output: str) -> str:
    """Say which command failed, how, and with which last words."""
    tail = [line.rstrip() for line in output.splitlines() if line.strip()][-LAST_LINES:]
    return "\n".join([f"exit status {status}: {' '.join(words)}", *(f"  {line}" for line in tail)])


def docker(docker_host: str | None, *words: str | Path, timeout: float | None = None) -> str:
    """Run the docker client against the engine at docker_host, or the one the environment chooses."""
    return run(["docker", *words], docker_environment(docker_host), timeout)


def docker_environment(docker_host: str | None) -> dict[str, str]:
    """Return the variables that point the docker client at one engine."""
    return {} if docker_host is None else {"DOCKER_HOST": docker_host}


def main(body: Callable[[], None]) -> int:
    """Run a command's body; 3 when something outside failed, with its words and no traceback."""
    try:
        body()
    except ToolError as error:
        print(error, file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("interrupted; nothing half-made was kept", file=sys.stderr)
        return 130
    return 0
