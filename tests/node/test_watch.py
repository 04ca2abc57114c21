"""Processes whose end is waited for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stack_node import processes
from stack_node.watch import Watch
from tests.node.conftest import wait_until


def test_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    watch = Watch()
    with subprocess.Popen(["sleep", "1000"]) as process:
        entry = processes.read(process.pid)
        assert entry
        assert watch.add(entry, "sleep")
        assert watch.wait(0.0) == []
        process.kill()
        assert [known.pid for known in watch.wait(30.0)] == [process.pid]
        assert watch.pids() == set()


def test_a_number_that_is_another_process_by_now_is_not_watched() -> None:
    entry = processes.read(os.getpid())
    assert entry
    other = processes.Process(entry.pid, entry.parent, "S", 1, 0, entry.started - 1, 0)
    watch = Watch()
    assert watch.add(other, "x") is None
    assert watch.pids() == set()


def test_a_zombie_with_a_living_thread_still_runs() -> None:
    """What a thread that hangs in a driver makes of a killed process."""
    code = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1000,)).start(); "
    code += "ctypes.CDLL(None).syscall(60, 0)"  # exit(2), of the first thread alone
    if os.uname().machine != "x86_64":
        pytest.skip("the number of exit(2)")
    with subprocess.Popen([sys.executable, "-c", code]) as process:

        def state() -> processes.Process:
            entry = processes.read(process.pid)
            assert entry
            return entry

        wait_until(lambda: state().state == "Z", "the first thread ended")
        assert state().alive
        assert process.pid in processes.descendants(os.getpid())
        process.kill()
        wait_until(lambda: not state().alive, "killed")
        assert process.pid not in processes.descendants(os.getpid())
