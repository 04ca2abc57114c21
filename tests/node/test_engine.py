"""What the engine's watcher notices, how fast, and what is left after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stack_node import devices
from tests.node import engine_stage
from tests.node.conftest import Node, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

NOTICED_S = 0.2
SLACK_S = 0.8  # for the scheduler of a busy machine


class Stage:
    """A supervisor in a process of its own, so that nothing of pytest's is below it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []

    def do(self, what: str, **details: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps({"do": what, **details}) + "\n")
        self.process.stdin.flush()

    def next(self, *wanted: str) -> dict[str, Any]:
        """The next event of these kinds; the engine's own lines are kept aside."""
        assert self.process.stdout
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "line":
                self.lines.append(event["text"])
            if event["event"] in wanted:
                return event
            assert event["event"] == "line", f"waited for {wanted}, got {event}"
        raise AssertionError(f"the stage ended while {wanted} was waited for")

    def ask(self, what: str, answer: str, **details: Any) -> dict[str, Any]:
        self.do(what, **details)
        return self.next(answer)

    def start(self, code: str, epoch: int = 1) -> int:
        pid: int = self.ask("start", "started", epoch=epoch, code=code)["pid"]
        return pid

    def numbers(self, count: int) -> list[int]:
        """Process ids that the engine printed, one a line."""
        while len(self.lines) < count:
            self.next("line")
        return [int(line) for line in self.lines[:count]]

    def wait_for_watch(self, pids: set[int]) -> None:
        wait_until(lambda: pids <= set(self.ask("watched", "watched")["pids"]), "the processes are watched")

    def kill(self, epoch: int = 1) -> None:
        self.do("kill")
        assert self.next("gone") == {"event": "gone", "epoch": epoch, "left": []}


@pytest.fixture
def stage(node: Node) -> Iterator[Stage]:
    path = f"{Path(devices.__file__).parent.parent}:{Path(__file__).parent.parent.parent}"
    with subprocess.Popen(
        [sys.executable, "-m", engine_stage.__name__],
        env=node.environment({"PYTHONPATH": path}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Stage(process)
        finally:
            process.kill()
            for pid in node.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)


def living(node: Node, stage: Stage) -> list[int]:
    return [pid for pid in node.living() if pid != stage.process.pid]


TREE = """
core = child(HOLD, "VLLM::EngineCore")
alone = child(HOLD, "VLLM::Worker_TP1", session=True)
print(core, alone, sep="\\n", flush=True)
exec(HOLD)
"""


def test_the_first_process_is_killed(stage: Stage, node: Node) -> None:
    first = stage.start(TREE)
    stage.numbers(2)
    os.kill(first, signal.SIGKILL)
    died = time.monotonic()
    event = stage.next("ended")
    assert event["at"] - died < NOTICED_S + SLACK_S
    name = Path(sys.executable).name
    assert event["reason"] == f"{name} (process {first}) was killed by SIGKILL; out of memory, perhaps"
    assert len(living(node, stage)) > 1  # to kill the rest is the caller's decision
    stage.kill()
    assert living(node, stage) == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_child_is_killed(stage: Stage, node: Node, which: int) -> None:
    stage.start(TREE)
    pids = stage.numbers(2)
    stage.wait_for_watch(set(pids))
    os.kill(pids[which], signal.SIGKILL)
    died = time.monotonic()
    event = stage.next("ended")
    assert event["at"] - died < NOTICED_S + SLACK_S
    title = ["VLLM::EngineCore", "VLLM::Worker_TP1"][which]
    # Its parent takes no notice here, so the zombie still has its status.
    assert event["reason"] == f"{title} (process {pids[which]}) was killed by SIGKILL; out of memory, perhaps"
    os.kill(pids[1 - which], signal.SIGKILL)  # told once an epoch
    stage.kill()
    assert living(node, stage) == []


def test_a_grandchild_whose_parent_takes_its_status_away(stage: Stage) -> None:
    stage.start(
        'signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nprint(child(HOLD, "VLLM::W"), flush=True)\nexec(HOLD)\n'
    )
    (pid,) = stage.numbers(1)
    stage.wait_for_watch({pid})
    os.kill(pid, signal.SIGKILL)
    assert stage.next("ended")["reason"] == f"VLLM::W (process {pid}) has ended"
    stage.kill()


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("sys.exit(0)", "ended with 0 without being asked"),
        ("sys.exit(1)", "ended with exit code 1"),
        ("os.abort()", "was killed by SIGABRT"),
    ],
)
def test_the_first_process_ends_by_itself(stage: Stage, code: str, how: str) -> None:
    first = stage.start(f"print('RuntimeError: the cause', file=sys.stderr, flush=True)\n{code}\n")
    event = stage.next("ended")
    assert event["reason"] == f"{Path(sys.executable).name} (process {first}) {how}"
    assert event["log"] == ["RuntimeError: the cause"]
    stage.kill()


def test_a_program_that_is_not_there(stage: Stage) -> None:
    stage.do("start", epoch=3, argv=["/nowhere/vllm", "serve"])
    stage.next("started")
    event = stage.next("ended")
    assert event["reason"].endswith("ended with exit code 127")
    assert event["log"] == ["stack-node: cannot run /nowhere/vllm: No such file or directory"]
    stage.kill(3)


def test_the_earliest_of_two_ends_is_named(stage: Stage) -> None:
    """A parent that ends because its child did, within the time in which last lines are gathered."""
    stage.start('print(child(HOLD, "VLLM::Worker_TP0"), flush=True)\nos.wait()\nsys.exit(1)\n')
    (pid,) = stage.numbers(1)
    stage.wait_for_watch({pid})
    os.kill(pid, signal.SIGKILL)
    assert stage.next("ended")["reason"].startswith(f"VLLM::Worker_TP0 (process {pid})")
    stage.kill()


def test_an_orphan_in_a_session_of_its_own(stage: Stage, node: Node) -> None:
    stage.start(
        "if os.fork() == 0:\n"
        "    print(child(HOLD, 'VLLM::Worker_PP1', session=True), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\nexec(HOLD)\n"
    )
    (orphan,) = stage.numbers(1)
    stage.wait_for_watch({orphan})
    os.kill(orphan, signal.SIGTERM)
    assert stage.next("ended")["reason"] == f"VLLM::Worker_PP1 (process {orphan}) was killed by SIGTERM"
    stage.kill()
    assert living(node, stage) == []


def test_short_lived_helpers_may_end(stage: Stage) -> None:
    """A compiler, a fork that still has its parent's name, a tracker, and what a helper spawns."""
    stage.start(
        "tracker = child('time.sleep(1.5)', 'python -c from multiprocessing.resource_tracker import main')\n"
        "helper = child('time.sleep(1.5)', 'ptxas')\n"
        "fork = 'pid = os.fork()\\nif pid == 0:\\n    time.sleep(1.5)\\n    os._exit(3)\\n' + HOLD\n"
        "core = child(fork, 'VLLM::EngineCore')\n"
        "print(core, flush=True)\n"
        "os.waitpid(tracker, 0), os.waitpid(helper, 0)\n"
        "print(0, flush=True)\nexec(HOLD)\n"
    )
    core, _ = stage.numbers(2)
    stage.wait_for_watch({core})
    assert len(stage.ask("watched", "watched")["pids"]) == 2
    time.sleep(0.3)  # time enough for a wrong report, which the next line would trip over
    stage.kill()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGTSTP])
def test_a_stopped_process_is_killed(stage: Stage, node: Node, number: signal.Signals) -> None:
    first = stage.start(TREE)
    pids = stage.numbers(2)
    for pid in (first, *pids):
        os.kill(pid, number)
    stage.kill()
    assert living(node, stage) == []


def test_a_process_that_ignores_sigterm(stage: Stage, node: Node) -> None:
    stage.start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\nexec(HOLD)\n")
    stage.numbers(1)
    begin = time.monotonic()
    stage.do("terminate", seconds=0.5)
    assert stage.next("gone") == {"event": "gone", "epoch": 1, "left": []}
    assert 0.5 <= time.monotonic() - begin < 0.5 + 2 * SLACK_S
    assert living(node, stage) == []


def test_a_kill_cuts_a_terminate_short(stage: Stage) -> None:
    stage.start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\nexec(HOLD)\n")
    stage.numbers(1)
    stage.do("terminate", seconds=3600)
    stage.kill()


def test_terminate_lets_the_first_process_finish(stage: Stage, node: Node) -> None:
    stage.start(
        "def stop(*_):\n    os.write(1, b'drained\\n')\n    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "child(HOLD, 'VLLM::EngineCore')\nprint(1, flush=True)\nexec(HOLD)\n"
    )
    stage.numbers(1)
    stage.do("terminate", seconds=60)
    assert stage.next("gone")["left"] == []
    wait_until(lambda: "drained" in stage.lines or stage.next("line"), "the last line came")
    assert living(node, stage) == []


def test_a_kill_with_nothing_there_is_answered(stage: Stage) -> None:
    stage.kill(epoch=0)
    stage.start("exec(HOLD)", epoch=5)
    stage.kill(epoch=5)
    stage.do("terminate", seconds=5)
    assert stage.next("gone") == {"event": "gone", "epoch": 5, "left": []}


def test_what_cannot_be_killed_is_told_and_told_again_when_it_has_gone(stage: Stage) -> None:
    """A driver holds such processes; here a kill that reaches nobody stands for it."""
    first = stage.start("exec(HOLD)")
    stage.do("immune")
    stage.do("kill")
    event = stage.next("gone")
    assert event["epoch"] == 1
    assert first in event["left"]
    stage.do("start", epoch=2, code="exec(HOLD)")
    assert stage.next("refused")["why"] == "the engine of epoch 1 is still there"
    stage.do("mortal")
    assert stage.next("gone") == {"event": "gone", "epoch": 1, "left": []}
    stage.start("exec(HOLD)", epoch=2)
    stage.kill(2)


def test_without_file_descriptors_nothing_is_lost(stage: Stage, node: Node) -> None:
    first = stage.start("exec(HOLD)")
    stage.wait_for_watch({first})
    stage.do("starve")
    os.kill(first, signal.SIGKILL)
    assert "was killed by SIGKILL" in stage.next("ended")["reason"]  # the pidfd was there before
    stage.do("kill")
    assert "cannot be watched: [Errno 24]" in stage.next("said")["text"]
    stage.do("feed")
    assert stage.next("gone")["left"] == []
    stage.do("starve")
    stage.do("start", epoch=2, code="exec(HOLD)")
    stage.next("started")
    assert stage.next("ended")["reason"] == f"{sys.executable} cannot be started: [Errno 24] Too many open files"
    stage.do("feed")
    stage.kill(2)
    assert living(node, stage) == []


def test_a_kill_during_the_start(stage: Stage, node: Node) -> None:
    """In every moment between the supervisor's fork and the engine's own."""
    for epoch in range(1, 21):
        stage.start("while True:\n    child('time.sleep(0.01)', session=True)\n", epoch)
        time.sleep(epoch * 0.005)
        stage.kill(epoch)
        assert living(node, stage) == []


def test_a_spared_child_lives_on(stage: Stage, node: Node) -> None:
    spared = stage.ask("spare", "spared")["pid"]
    stage.start(TREE)
    stage.numbers(2)
    stage.kill()
    assert living(node, stage) == [spared]


def test_a_killed_supervisor_takes_the_engine_with_it(stage: Stage, node: Node) -> None:
    first = stage.start("child(HOLD, 'VLLM::EngineCore')\nprint(1, flush=True)\nexec(HOLD)\n")
    stage.numbers(1)
    stage.process.kill()
    stage.process.wait()
    wait_until(lambda: not living(node, stage), f"the guard killed session {first}")


def test_fifty_epochs_leave_nothing(stage: Stage, node: Node) -> None:
    before: dict[str, Any] = {}
    for epoch in range(1, 51):
        stage.start("child(HOLD, 'VLLM::EngineCore')\nprint(1, flush=True)\nexec(HOLD)\n", epoch)
        stage.lines.clear()
        stage.numbers(1)
        stage.kill(epoch)
        if epoch == 1:
            before = _census(stage, 0, 0)
    assert living(node, stage) == []
    _census(stage, before["descriptors"], before["threads"])


def _census(stage: Stage, descriptors: int, threads: int) -> dict[str, Any]:
    """What the stage holds, once the readers of the engine's output have seen its end."""
    seen: list[dict[str, Any]] = []

    def settled() -> bool:
        seen.append(stage.ask("census", "census"))
        wanted = (descriptors or seen[-1]["descriptors"], threads or 3)
        return (seen[-1]["descriptors"], seen[-1]["threads"]) == wanted

    wait_until(settled, "as many descriptors and threads as after the first epoch")
    return seen[-1]


def test_signs_of_life(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * (2 << 20))
    stage.start(
        "def on(number, what):\n    signal.signal(number, lambda *_: what())\n"
        "def burn():\n    end = time.process_time() + 0.5\n    while time.process_time() < end: pass\n"
        f"on(signal.SIGUSR1, burn)\non(signal.SIGUSR2, lambda: open({str(tmp_path / 'data')!r}, 'rb').read())\n"
        "on(signal.SIGHUP, lambda: print(2, flush=True))\nprint(1, flush=True)\nexec(HOLD)\n"
    )
    stage.numbers(1)

    def found() -> bool:
        return bool(stage.ask("signs", "signs")["found"])

    first = stage.ask("watched", "watched")["pids"][0]
    wait_until(lambda: not found(), "quiet after the start")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        os.kill(first, number)
        wait_until(found, f"a sign of life after {number.name}")
        time.sleep(0.6 if number == signal.SIGUSR1 else 0.1)
        wait_until(lambda: not found(), f"quiet after {number.name}")
    stage.kill()


def test_a_killed_engine_leaves_no_shared_memory(stage: Stage) -> None:
    stage.start(
        "from multiprocessing import resource_tracker, shared_memory\n"
        "resource_tracker.register = lambda *_: None\n"  # nobody cleans up after a kill of everything
        "memory = shared_memory.SharedMemory(create=True, size=4096)\n"
        "sys.stderr.write(memory.name + '\\n'); print(1, flush=True)\nexec(HOLD)\n"
    )
    while len(stage.lines) < 2:
        stage.next("line")
    (name,) = [line for line in stage.lines if line.startswith("psm_")]
    assert (Path("/dev/shm") / name).exists()
    stage.kill()
    assert not (Path("/dev/shm") / name).exists()
