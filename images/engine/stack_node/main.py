"""`stack-node`: the entrypoint of the image.

    stack-node MODEL --flags...    serve, as `vllm serve` would; with NNODES set, as a node of a group
    stack-node health              the container's HEALTHCHECK
    stack-node status [--json]     how the group is (status.py has its exit statuses)
    stack-node PROGRAM ...         run any other program of the image instead
    stack-node --help, --version   those of `vllm serve`

Exit status, which restart policies and other launchers rely on:
    0          stopped as asked (SIGTERM, SIGINT or SIGHUP)
    1          the engine ended with 0 without being asked to; vLLM does that when its engine process dies
    2          the arguments or the environment are wrong
    3          a start check failed
    otherwise  the engine's own exit code, or 128 + the signal that ended it
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE = """\
usage: stack-node MODEL [flags of vllm serve]
       stack-node health
       stack-node status [--json]
       stack-node PROGRAM [arguments]
On its own it serves the model as `vllm serve` does. For a node of a group set NNODES, NODE_RANK and MASTER_ADDR.
"""

_INFORMATION = {"-h", "--help", "-v", "--version"}


def main(args: Sequence[str]) -> int:
    """Do what the arguments say; returns the exit status, or never where another program takes over."""
    if not args:
        sys.stderr.write(USAGE)
        return 2
    if list(args) == ["health"]:
        from stack_node import health  # each way imports only what it needs: this one runs every few seconds

        return health.main()
    if args[0] == "status":
        from stack_node import status

        return status.main(args[1:], os.environ)
    if _is_program(args[0]):
        return _become(args)
    if any(arg in _INFORMATION or arg.startswith("--help=") for arg in args):
        return _become(["vllm", "serve", *args])
    from stack_node import node

    return node.serve(args, os.environ)


def _is_program(word: str) -> bool:
    """Whether a word is a program, on the PATH or by its path; some file systems call every file executable."""
    path = shutil.which(word)
    if path is None:
        return False
    try:
        with Path(path).open("rb") as file:
            return file.read(4).startswith((b"#!", b"\x7fELF"))
    except OSError:  # it may be run, though not read
        return True


def _become(argv: Sequence[str]) -> int:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would pass that on
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"stack-node: cannot run {argv[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126
