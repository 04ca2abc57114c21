"""A runc for machines whose root may not raise limits (no CAP_SYS_RESOURCE): it lowers what a container asks for.

    capped_runc.py RUNC [arguments of runc]

A real host's engine grants `ulimits: {memlock: -1}`. In a sandbox without that capability the kernel refuses, and no
container that asks for it could be started. The lab then puts this in runc's place; everything else passes unchanged.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

CAP_SYS_RESOURCE = 24


def needed() -> bool:
    """Whether this process lacks the right to raise limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [effective] = [int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")]
    return not effective >> CAP_SYS_RESOURCE & 1


def spec_file(args: list[str]) -> Path | None:
    """Find the file in which these arguments of runc describe a process: a bundle's, or that of an exec."""
    for option, name in (("--bundle", "config.json"), ("-b", "config.json"), ("--process", ""), ("-p", "")):
        if option in args[:-1]:
            return Path(args[args.index(option) + 1]) / name
    return None


def cap(process: dict[str, Any]) -> None:
    """Lower each limit of a process to the hard one that this process has itself."""
    for limit in process.get("rlimits") or []:
        hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if hard != resource.RLIM_INFINITY:
            limit["hard"] = min(limit["hard"], hard)
            limit["soft"] = min(limit["soft"], hard)


def main(argv: list[str]) -> None:
    """Lower the limits in the file that the arguments name, then become the real runc."""
    path = spec_file(argv)
    if path is not None and path.exists():
        content = json.loads(path.read_text())
        cap(content.get("process", content))
        path.write_text(json.dumps(content))
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
