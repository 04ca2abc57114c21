"""The faults of the soak: each does something to a group on this machine, and says whether the group has to notice."""

# ruff: noqa: ARG001 (every fault is called in the same way)

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.bench.local import engine_processes, says_ready, supervisor, wait
from tools.bench.usage import command

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from tests.node.local_group import LocalGroup, LocalNode

NODE_TIMEOUT_S = 3.0
STALL_S = 15.0
NOTICED_S = 60.0
SWITCHES = ("stall", "fail-start", "die-loading", "exit", "orphan")  # of the fake engine, that are used here


@dataclass(frozen=True)
class Fault:
    """Something that can happen to a rank."""

    name: str
    act: Callable[[LocalGroup, LocalNode, Random], str]  # does it; returns what exactly was done
    weight: int = 4
    notices: bool = True  # a new epoch has to follow


def _process(group: LocalGroup, node: LocalNode, random: Random) -> str:
    pid = random.choice(engine_processes(node))
    words = " ".join(command(pid).split()[:3])
    os.kill(pid, signal.SIGKILL)
    return words


def _supervisor(group: LocalGroup, node: LocalNode, random: Random) -> str:
    node.kill_supervisor()
    return _start_later(node, random)


def _node(group: LocalGroup, node: LocalNode, random: Random) -> str:
    node.kill()
    return _start_later(node, random)


def _restart(group: LocalGroup, node: LocalNode, random: Random) -> str:
    status = node.stop()
    if status != 0:
        raise AssertionError(f"a stop that was asked for ended with {status}")
    return _start_later(node, random)


def _start_later(node: LocalNode, random: Random) -> str:
    pause = random.choice((0.0, random.uniform(0, 2), random.uniform(0, 2 * NODE_TIMEOUT_S)))
    time.sleep(pause)
    node.start()
    return f"started again after {pause:.1f} s"


def _freeze(group: LocalGroup, node: LocalNode, random: Random) -> str:
    """For longer than anybody waits."""
    return _freeze_for(node, random.uniform(1.5, 4) * NODE_TIMEOUT_S)


def _freeze_supervisor(group: LocalGroup, node: LocalNode, random: Random) -> str:
    pause = random.uniform(1.5, 4) * NODE_TIMEOUT_S
    os.kill(supervisor(node), signal.SIGSTOP)
    time.sleep(pause)
    os.kill(supervisor(node), signal.SIGCONT)
    return f"{pause:.1f} s"


def _hiccup(group: LocalGroup, node: LocalNode, random: Random) -> str:
    """For less than anybody minds."""
    return _freeze_for(node, random.uniform(0.1, 0.5) * NODE_TIMEOUT_S)


def _freeze_for(node: LocalNode, pause: float) -> str:
    node.signal(signal.SIGSTOP)
    time.sleep(pause)
    node.signal(signal.SIGCONT)
    return f"{pause:.1f} s"


def _stall(group: LocalGroup, node: LocalNode, random: Random) -> str:
    node.switch("stall")
    try:
        asking = threading.Thread(target=_ask, args=(group,), daemon=True)
        asking.start()
        took = wait(lambda: says_ready(group) != 200, "the stall is noticed", NOTICED_S)
    finally:
        (node.node.folder / "stall").unlink()
    return f"noticed after {took:.1f} s"


def _ask(group: LocalGroup) -> None:
    try:
        group.answer()
    except AssertionError:
        return  # that it gets no answer is what this is about


def _fails_at_start(group: LocalGroup, node: LocalNode, random: Random) -> str:
    node.switch(name := random.choice(("fail-start", "die-loading")), "1")
    os.kill(random.choice(engine_processes(random.choice(group.nodes))), signal.SIGKILL)
    return name


def _exit_0(group: LocalGroup, node: LocalNode, random: Random) -> str:
    node.switch("exit", "0")
    return "with 0, unasked"


def _orphan(group: LocalGroup, node: LocalNode, random: Random) -> str:
    """The engines that come next leave a process behind in a session of its own; then it is gone with them."""
    node.switch("orphan")
    before = group.status()["epoch"]
    os.kill(random.choice(engine_processes(node)), signal.SIGKILL)
    wait(lambda: group.ready() and group.status()["epoch"] > before, "ready with an orphan")
    (node.node.folder / "orphan").unlink()
    os.kill(node.titled("VLLM::Worker")[0], signal.SIGKILL)
    wait(lambda: says_ready(group) != 200, "the second death is noticed", NOTICED_S)
    return "twice"


FAULTS = (
    Fault("an engine process is killed", _process, 8),
    Fault("the supervisor is killed", _supervisor),
    Fault("the whole node is killed", _node),
    Fault("the node is stopped and started", _restart),
    Fault("the node is frozen", _freeze),
    Fault("the supervisor is frozen", _freeze_supervisor),
    Fault("the node is frozen for a moment", _hiccup, notices=False),
    Fault("a step of the engine hangs", _stall, 1),
    Fault("the engine fails at its next start, too", _fails_at_start),
    Fault("the engine ends", _exit_0),
    Fault("an orphan of the engine's", _orphan, 2),
)
