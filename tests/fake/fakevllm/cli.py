"""The command line: what vLLM's own has and the fake one needs; every other flag is ignored."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from . import switches
from .common import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = "0.32.0"
_SWITCHES = {"--headless", "--enforce-eager", "--enable-prefix-caching", "--trust-remote-code", "--disable-log-stats"}
_SHORT = {"-n": "--nnodes", "-r": "--node-rank", "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}


def main(args: Sequence[str]) -> int:
    """Do what the command line says; returns the exit status."""
    if args and args[0] in ("--version", "-v"):
        print(VERSION)
        return 0
    roles = {"serve": _serve, "fake-core": _core, "fake-worker": _worker}
    if not args or args[0] not in roles:
        sys.stderr.write("usage: vllm serve MODEL --flags\n")
        return 2
    return roles[args[0]](args[1:])


def parse(args: Sequence[str]) -> Settings:
    """Read the flags of `vllm serve`, in their long forms with `=` or a space, with `_` or `-`."""
    found: dict[str, list[str]] = {}
    model, name = "", ""
    for word in args:
        if word.startswith("-") and not word.lstrip("-").isdecimal():
            flag, given, value = word.partition("=")
            flag = _SHORT.get(flag, flag).replace("_", "-")
            found[flag] = [value] if given else []
            name = "" if given or flag in _SWITCHES or flag.startswith("--no-") else flag
        elif name:
            found[name].append(word)
            name = name if name == "--served-model-name" else ""
        else:
            model = model or word

    def last(flag: str, otherwise: str) -> str:
        return (found.get(flag) or [otherwise])[-1]

    return Settings(
        model=model,
        served=found.get("--served-model-name") or [model],
        nnodes=int(last("--nnodes", "1")),
        rank=int(last("--node-rank", "0")),
        master_addr=last("--master-addr", "127.0.0.1"),
        master_port=int(last("--master-port", "29501")),
        headless="--headless" in found,
        host=last("--host", "0.0.0.0"),
        port=int(last("--port", "8000")),
        max_num_seqs=int(last("--max-num-seqs", "256")),
        shutdown_timeout=float(last("--shutdown-timeout", "0")),
        kind="PP" if int(last("--pipeline-parallel-size", "1")) > 1 else "TP",
        certfile=last("--ssl-certfile", "") or None,
        keyfile=last("--ssl-keyfile", "") or None,
    )


def _serve(args: Sequence[str]) -> int:
    from . import head, headless

    settings = parse(args)
    if switches.strikes("fail-start"):
        sys.stderr.write("Traceback (most recent call last):\nValueError: the switch fail-start is set\n")
        return 1
    return headless.run(settings) if settings.headless else head.run(settings)


def _core(_args: Sequence[str]) -> int:
    from . import core

    return core.run()


def _worker(_args: Sequence[str]) -> int:
    from . import worker

    return worker.run()
