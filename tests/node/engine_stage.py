"""Plays the supervisor for test_engine.py, in a process of its own: commands come on stdin, events go to stdout.

Lines of JSON: {"do": "start", "epoch": 1, "code": "..."}, "kill", "terminate", "signs", "census", "child"; and what the
engine reports: {"event": "ended", ...}, {"event": "gone", ...}, {"event": "line", ...}.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from typing import Any

from stack_node import engine as engine_module
from stack_node import processes
from stack_node.argv import EngineCommand
from stack_node.engine import Engine

# In front of every stand-in for an engine: forks that get a title and what they do, as vLLM's processes have.
PRELUDE = """
import ctypes, os, signal, sys, time

def child(code, title=None, session=False):
    # A process with a title of its own; returns its number once it has that title.
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        os.read(read_end, 1)
        os.close(read_end)
        return pid
    if session:
        os.setsid()
    os.set_inheritable(write_end, True)
    body = f"import os, signal, sys, time; os.close({write_end})\\n" + code
    os.execv(sys.executable, [title or sys.executable, "-ISc", body])

HOLD = "while True: signal.pause()"
"""


def _print(**event: Any) -> None:
    print(json.dumps(event), flush=True)


class _Lines:
    def put(self, data: bytes) -> None:
        for line in data.decode().splitlines():
            _print(event="line", text=line)


def _census() -> dict[str, Any]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": threading.active_count(),
        "cpu": sum(resource.getrusage(resource.RUSAGE_SELF)[:2]),
        "monotonic": time.monotonic(),
    }


def main() -> None:
    """Do what stdin says until it ends."""
    engine = Engine(
        say=lambda text: _print(event="said", text=text),
        ended=lambda epoch, reason, log: _print(
            event="ended", epoch=epoch, reason=reason, log=log, at=time.monotonic()
        ),
        gone=lambda epoch, left: _print(event="gone", epoch=epoch, left=left),
        output=_Lines(),
        errors=_Lines(),
    )
    environment = dict(os.environ)
    send = processes.send
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for line in sys.stdin:
        order = json.loads(line)
        match order["do"]:
            case "start":
                argv = order.get("argv") or (sys.executable, "-ISc", PRELUDE + order["code"])
                try:
                    engine.start(order["epoch"], EngineCommand(tuple(argv), environment, (), None, 10.0))
                    _print(event="started", pid=engine.pid)
                except RuntimeError as error:
                    _print(event="refused", why=str(error))
            case "kill":
                engine.kill()
            case "terminate":
                engine.terminate(order["seconds"])
            case "signs":
                _print(event="signs", found=engine.signs())
            case "watched":
                _print(event="watched", pids=sorted(engine._watch.pids()))
            case "census":
                _print(event="census", **_census())
            case "immune":
                engine_module.KILL_S = 0.3
                processes.send = lambda pid, number: None
            case "mortal":
                processes.send = send
            case "starve":
                resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            case "feed":
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            case "spare":
                with engine.sparing() as spare:
                    child = subprocess.Popen(["sleep", "1000"])
                    spare.add(child.pid)
                _print(event="spared", pid=child.pid)


if __name__ == "__main__":
    main()
