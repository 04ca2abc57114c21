"""The engine core: schedules requests; every token is one step through all ranks.

Of the ranks it watches only its own node's. That a remote one is gone it learns from a step, or never: connections to
remote ranks that end are not even noticed here, as with the real one's queues.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from . import switches
from .common import Settings, inherited, log, spawn
from .wire import Link, Message, connect


@dataclass
class Request:
    """A request that runs or waits."""

    id: int
    prompt_tokens: int
    max_tokens: int
    done: int = 0


class FatalError(Exception):
    """The engine cannot go on."""


class Core:
    """The scheduler of the head."""

    def __init__(self, settings: Settings, api: Link):
        self.settings = settings
        self.api = api
        own, other = socket.socketpair()
        self.child = spawn(settings.worker_title, "worker", settings, other)
        self.local = Link(own)
        self.workers: dict[int, Link] = {0: self.local}
        self.watched = select.poll()
        self.sources: dict[int, Link] = {}
        self.pidfd = os.pidfd_open(self.child.pid)
        self.watched.register(self.pidfd, select.POLLIN)
        self._watch(self.local)
        self._watch(api)
        self.loaded: set[int] = set()
        self.ready = False
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.step = 0
        self.missing: set[int] = set()  # ranks whose part of the step is not done
        self.step_until = 0.0
        self.drain_until: float | None = None
        self.stats: dict[str, Any] = {
            "running": 0, "waiting": 0, "prompt": 0, "generation": 0, "iterations": 0, "success": {},
        }  # fmt: skip

    def run(self) -> None:
        """Work until told to stop; raises FatalError when the engine is dead."""
        while not self._drained():
            for fd, _ in self.watched.poll(100 if self.missing or self.drain_until is not None else None):
                if fd == self.pidfd:
                    raise FatalError(f"Worker proc {self.settings.worker_title} died unexpectedly")
                self._read(self.sources[fd])
            if self.missing and time.monotonic() > self.step_until:
                raise FatalError("RPC call to execute_model timed out.")
            self._schedule()

    def _watch(self, link: Link) -> None:
        self.sources[link.fileno()] = link
        self.watched.register(link.fileno(), select.POLLIN)

    def _read(self, link: Link) -> None:
        messages = link.arrived()
        if messages is None:
            self.watched.unregister(link.fileno())
            if link is self.api:
                time.sleep(3600)  # the API server is gone: nobody tells this process
            return
        for message in messages:
            if link is self.api:
                self._asked(message)
            else:
                self._answered(next(rank for rank, worker in self.workers.items() if worker is link), message)

    def _answered(self, rank: int, message: Message) -> None:
        if "table" in message:
            for peer in range(1, self.settings.nnodes):
                link = connect(*message["table"][str(peer)])
                link.send({"core": True})
                self.workers[peer] = link
                self._watch(link)
        elif "ready" in message:
            self.loaded.add(rank)
            if len(self.loaded) == self.settings.nnodes:
                self.ready = True
                self.api.send({"ready": True})
        elif "error" in message:
            raise FatalError(f"Worker failed with error '{message['error']}', please check the stack trace above")
        elif message.get("done") == self.step:
            self.missing.discard(rank)
            if not self.missing:
                self._stepped()

    def _asked(self, message: Message) -> None:
        if "add" in message:
            request = Request(**message["add"])
            if self.drain_until is None:
                self.waiting.append(request)
            else:  # the real one answers these with 200
                self._output([[request.id, "", "abort"]])
        elif "abort" in message:
            self.running = [request for request in self.running if request.id != message["abort"]]
            self.waiting = deque(request for request in self.waiting if request.id != message["abort"])
        elif "shutdown" in message:
            self.drain_until = time.monotonic() + message["shutdown"]

    def _schedule(self) -> None:
        if self.missing or not self.ready:
            return
        while self.waiting and len(self.running) < self.settings.max_num_seqs:
            self.running.append(self.waiting.popleft())
        if not self.running:
            return
        self.step += 1
        self.missing = set(self.workers)
        self.step_until = time.monotonic() + switches.seconds("EXECUTE_S")
        for link in self.workers.values():
            link.send({"step": self.step})

    def _stepped(self) -> None:
        outputs: list[list[Any]] = []
        for request in self.running:
            if request.done == 0:
                self.stats["prompt"] += request.prompt_tokens
            request.done += 1
            self.stats["generation"] += 1
            reason = "length" if request.done >= request.max_tokens else None
            outputs.append([request.id, f" fake{request.done}", reason])
            if reason:
                self.stats["success"][reason] = self.stats["success"].get(reason, 0) + 1
        self.running = [request for request in self.running if request.done < request.max_tokens]
        self.stats["iterations"] += 1
        self.stats["running"], self.stats["waiting"] = len(self.running), len(self.waiting)
        self._output(outputs)

    def _output(self, outputs: list[list[Any]]) -> None:
        self.api.send({"outputs": outputs, "stats": self.stats})

    def _drained(self) -> bool:
        if self.drain_until is None:
            return False
        busy = bool(self.running or self.waiting)
        if busy and time.monotonic() < self.drain_until:
            return False
        self._output([[request.id, "", "abort"] for request in (*self.running, *self.waiting)])
        return True


def run() -> int:
    """Be the engine core; returns the exit status."""
    settings, sock = inherited()
    # A stop is the API server's business; when that is killed, the real core is not told either.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    core = Core(settings, Link(sock))
    try:
        core.run()
    except FatalError as error:
        log("EngineCore", f"EngineCore encountered a fatal error. {error}", "ERROR")
        status = 1
    else:
        status = 0
    core.child.kill()
    core.child.wait()
    return status
