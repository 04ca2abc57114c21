"""A node without an API: it waits for the end of its own worker and for nothing else."""

from __future__ import annotations

import os
import signal
import socket
import time

from . import switches
from .common import Settings, log, spawn


def run(settings: Settings) -> int:
    """Be the first process of a headless node; returns the exit status, which is 0 when its worker dies."""

    def leave(_number: int, _frame: object) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if switches.is_set("ignore-term") else leave)
    own, other = socket.socketpair()
    child = spawn(settings.worker_title, "worker", settings, other)
    try:
        if not own.recv(4096):  # the worker tells nothing but that it is ready
            log("MainProcess", "Exception: WorkerProc initialization failed due to an exception in a background "
                "process. See stack trace for root cause.", "ERROR")  # fmt: skip
            child.wait()
            return 1
        log("MainProcess", "Launching vLLM in headless multiproc mode, with head node address "
            f"{settings.master_addr}:{settings.master_port}.")  # fmt: skip
        while child.poll() is None:
            time.sleep(0.2)
            _switches()
        time.sleep(switches.seconds("NOTICE_S"))
        log("MainProcess", f"Worker proc {settings.worker_title} died unexpectedly "
            f"(exit code: {child.returncode}), shutting down executor.", "ERROR")  # fmt: skip
        return 0
    except SystemExit:
        time.sleep(switches.seconds("LEAVE_S"))
        raise
    finally:
        child.kill()
        child.wait()


def _switches() -> None:
    code = switches.take("exit")
    if code is not None:
        leave_at_once(int(code))
    flood()


def leave_at_once(code: int) -> None:
    """End at once, without a word; the worker is left behind."""
    os._exit(code)


def flood() -> None:
    """Log some megabytes a second, while asked to."""
    if switches.is_set("flood"):
        for _ in range(20):
            log("MainProcess", "flood " * 4000)
