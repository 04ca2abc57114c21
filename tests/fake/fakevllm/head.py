"""The head's first process: binds the API's port, starts the engine core, serves, and drains at SIGTERM."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from typing import TYPE_CHECKING

from . import switches
from .api import Api
from .common import Settings, log, spawn
from .headless import flood
from .wire import Link

if TYPE_CHECKING:
    import subprocess

EXIT_INIT_INTERRUPTED = 130


class Head:
    """The API server's life."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.api = Api(settings)  # bound, not listening: raises OSError when the port is taken
        self.asked_to_stop = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.set_wakeup_fd(self._wake_write)
        handler = signal.SIG_IGN if switches.is_set("ignore-term") else self._stop
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGINT, handler)
        own, other = socket.socketpair()
        self.child: subprocess.Popen[bytes] = spawn("VLLM::EngineCore", "core", settings, other)
        self.core = Link(own)
        self.api.core = self.core

    def run(self) -> int:
        """Serve until the engine is dead or a stop was asked for; returns the exit status."""
        told_core = False
        while True:
            readable = select.select([self.core.fileno(), self._wake_read], [], [], 0.2)[0]
            self._switches()
            if self.core.fileno() in readable and not self._read():
                return self._ended(told_core)
            if self.asked_to_stop and not told_core:
                if not self.api.serving:
                    self._kill_core()
                    return EXIT_INIT_INTERRUPTED
                log("APIServer", f"Shutting down; waiting up to {self.settings.shutdown_timeout:g} s for requests")
                self.api.is_stopping = True
                told_core = self.core.send({"shutdown": self.settings.shutdown_timeout})

    def _stop(self, _number: int, _frame: object) -> None:
        self.asked_to_stop = True

    def _read(self) -> bool:
        messages = self.core.arrived()
        if messages is None:
            return False
        for message in messages:
            if "ready" in message:
                self.api.start()
                log("APIServer", "Application startup complete.")
            else:
                self.api.output(message)
        return True

    def _ended(self, asked: bool) -> int:
        if not self.api.serving:
            log("APIServer", "RuntimeError: Engine core initialization failed. See root cause above.", "ERROR")
            self._kill_core()
            return 1
        if not asked:
            log("APIServer", "AsyncLLM output_handler failed: EngineDeadError", "ERROR")
            self.api.dead()
            time.sleep(switches.seconds("DEATH_S"))
        self.api.stop()
        self._kill_core()
        log("APIServer", "Application shutdown complete.")
        return 0

    def _kill_core(self) -> None:
        self.child.kill()
        self.child.wait()

    @staticmethod
    def _switches() -> None:
        code = switches.take("exit")
        if code is not None:
            os._exit(int(code))
        flood()


def run(settings: Settings) -> int:
    """Be the head; returns the exit status, which is 0 also when the engine dies."""
    try:
        head = Head(settings)
    except OSError as error:
        log("APIServer", f"OSError: [Errno {error.errno}] {error.strerror}: {settings.host}:{settings.port}", "ERROR")
        return 1
    return head.run()
