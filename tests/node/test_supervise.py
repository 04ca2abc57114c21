"""How engines end, and what is left of them: nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stack_node import node as node_module
from stack_node.supervise import Outcome
from tests.node.conftest import SCRIPT, wait_until

if TYPE_CHECKING:
    from tests.node.conftest import Node

pytestmark = pytest.mark.slow

HOLD = "import signal; signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"

# A child in the engine's session and a grandchild in one of its own; both are orphans, and both ignore SIGTERM.
TREE = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for alone in (False, True):
    if os.fork() == 0:
        if alone:
            os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(1000)
        os._exit(0)
    os.wait()
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("grown", flush=True)
"""


@pytest.mark.parametrize(
    ("outcome", "status", "sentence"),
    [
        (Outcome(asked=True, status=0), 0, "stopped"),
        (Outcome(asked=True, status=-9), 0, "stopped"),
        (
            Outcome(asked=False, status=0),
            1,
            "the engine ended with 0 without being asked to: a failure, reported as 1",
        ),
        (Outcome(asked=False, status=7), 7, "the engine ended with exit code 7"),
        (Outcome(asked=False, status=-9), 137, "the engine was killed by SIGKILL; out of memory, perhaps"),
        (Outcome(asked=False, status=-6), 134, "the engine was killed by SIGABRT"),
    ],
)
def test_exit_status(outcome: Outcome, status: int, sentence: str) -> None:
    assert node_module.conclusion(outcome) == (status, sentence)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("", 1),
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.kill(os.getpid(), 11)", 139),
        ("os.kill(os.getpid(), 15)", 143),
    ],
)
def test_an_engine_that_ends_by_itself(node: Node, code: str, status: int) -> None:
    assert node.run("m", SHIM=code).returncode == status
    assert node.living() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop(node: Node, number: signal.Signals) -> None:
    with node.start("m", SHIM=HOLD) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(30) == 0
        assert node.living() == []
        assert process.stderr
        assert process.stderr.read().startswith(f"stack-node: {number.name}: stopping the engine, which has 10 s")


def test_the_engines_own_stop_is_waited_for(node: Node) -> None:
    # os.write, since the signal may come while `print` still holds the stream
    code = "import os, signal\ndef stop(*_):\n    os.write(1, b'drained\\n')\n    sys.exit(3)\n"
    code += "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\nsignal.pause()"
    with node.start("m", SHIM=code, GEN_STACK_DRAIN="30s") as process:
        assert process.stdout
        process.stdout.readline()
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "drained\n"
        assert process.wait(30) == 0


def test_a_second_stop_hastens(node: Node) -> None:
    with node.start("m", SHIM=DEAF, GEN_STACK_DRAIN="1h") as process:
        assert process.stdout
        process.stdout.readline()
        assert process.stdout.readline() == "deaf\n"
        process.terminate()
        assert process.stderr
        process.stderr.readline()
        assert "has 3610 s to end" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "stack-node: SIGINT again: not waiting any longer\n"
        assert process.wait(30) == 0
        assert node.living() == []
        assert "did not end in time and is killed" in process.stderr.read()


@pytest.mark.parametrize("asked", [True, False])
def test_nothing_of_the_tree_is_left(node: Node, asked: bool) -> None:
    with node.start("m", SHIM=TREE + (HOLD if asked else "sys.exit(4)")) as process:
        assert process.stdout
        process.stdout.readline()
        assert process.stdout.readline() == "grown\n"
        if asked:
            process.terminate()
        assert process.wait(30) == (0 if asked else 4)
        assert node.living() == []


def test_orphans_are_reaped_while_the_engine_runs(node: Node) -> None:
    code = "\nif os.fork() == 0:\n    pid = os.fork()\n    print(pid, flush=True) if pid else None\n    os._exit(0)\n"
    with node.start("m", SHIM=code + "os.wait()\n" + HOLD) as process:
        assert process.stdout
        process.stdout.readline()
        orphan = int(process.stdout.readline())
        wait_until(lambda: not os.path.exists(f"/proc/{orphan}"), "orphan reaped")  # noqa: PTH110
        process.terminate()
        assert process.wait(30) == 0


def test_the_engine_does_not_outlive_a_killed_supervisor(node: Node) -> None:
    with node.start("m", SHIM=TREE + HOLD) as process:
        assert process.stdout
        process.stdout.readline()
        process.stdout.readline()
        process.kill()
        process.wait(30)
        # Except for what left the engine's session; that takes a supervisor, or the end of the container.
        wait_until(lambda: len(node.living()) == 1, "engine killed")


def test_a_stuck_reader_does_not_stop_the_engine(node: Node) -> None:
    done = node.folder / "done"
    code = f"for n in range(200000): print('x' * 99, n)\nsys.stdout.flush()\nopen({str(done)!r}, 'w').close()\n" + HOLD
    with node.start("m", SHIM=code) as process:
        wait_until(done.exists, "20 MB written while nobody reads")
        assert process.stdout
        assert process.stderr
        text = process.stdout.readline()
        while "dropped here" not in text:
            text = process.stdout.readline()
        assert re.fullmatch(r"stack-node: \d+ lines of output dropped here, because nobody read them in time\n", text)
        process.terminate()
        # communicate() reads, so that the last lines find their way out as well.
        assert process.communicate(timeout=30)[0].endswith("x 199999\n")
        assert process.returncode == 0


def test_a_stuck_reader_does_not_stop_a_stop(node: Node) -> None:
    code = "print('y' * 5_000_000, flush=True)\n" + HOLD
    with node.start("m", SHIM=code) as process:
        wait_until(lambda: len(node.living()) >= 2, "engine started")
        begin = time.monotonic()
        process.terminate()
        assert process.wait(30) == 0
        assert time.monotonic() - begin < 25
        assert node.living() == []


def test_the_engine_starts_with_clean_signals(node: Node) -> None:
    code = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), os.getsid(0) == os.getpid())\n"
    code += "print([line for line in open('/proc/self/status') if line.startswith('SigBlk')])"
    lines = node.run("m", SHIM=code).stdout.splitlines()
    assert lines[1] == "[] True"
    assert lines[2] == r"['SigBlk:\t0000000000000000\n']"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("asked", [True, False])
def test_as_pid_1(node: Node, asked: bool) -> None:
    """In a process namespace of its own, where the kernel drops signals that PID 1 does not handle."""
    prefix = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with node.start("m", prefix=prefix, SHIM=TREE + (HOLD if asked else "sys.exit(4)")) as process:
        assert process.stdout
        process.stdout.readline()
        assert process.stdout.readline() == "grown\n"
        if asked:
            child = int(subprocess.check_output(["pgrep", "--parent", str(process.pid)]))
            os.kill(child, signal.SIGTERM)
        assert process.wait(30) == (0 if asked else 4)
        assert node.living() == []


def test_a_parents_ignored_sigchld_is_undone(node: Node) -> None:
    code = f"import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv({str(SCRIPT)!r}, ['s', 'm'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=node.environment({"SHIM": "sys.exit(7)"}), capture_output=True, check=False
    )
    assert done.returncode == 7


def test_a_freeze_is_no_stop_signal() -> None:
    code = (
        "from stack_node import supervise; supervise.take_signals(); print('pauses', flush=True); supervise.pause(0.5)"
    )
    path = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=path, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline()
        state = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: ") S " in state.read_text(), "it sleeps")
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.7)  # the pause is over meanwhile
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0
