"""A rank: meets the others at rank 0's store, loads, and does its part of every step.

Two properties of the real one matter most. A rank that waits for work reads from nobody but the engine core, so it
does not notice that another rank is gone; and a remote rank does not notice that the head is gone either.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

from . import switches
from .common import Settings, inherited, log
from .wire import Link, connect, listen


class PeerLostError(Exception):
    """Another rank's connection ended in the middle of a collective."""


class Store:
    """Rank 0's meeting point on *:MASTER_PORT. Who comes when all are there waits for ever, as with the real one."""

    def __init__(self, settings: Settings):
        self._world = settings.nnodes
        wildcard = "::" if ":" in settings.master_addr else "0.0.0.0"
        self._listener = listen(wildcard, settings.master_port)
        self._links: list[Link] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        table: dict[str, list[object]] = {}
        complete = False
        while True:
            link = Link(self._listener.accept()[0])
            self._links.append(link)
            if complete:
                continue
            hello = link.receive()
            if hello is None:
                continue
            table[str(hello["rank"])] = [hello["address"], hello["port"]]
            if complete := len(table) == self._world:
                for other in self._links:
                    other.send({"table": table})


class Worker:
    """One rank."""

    def __init__(self, settings: Settings, parent: Link):
        self.settings = settings
        self.parent = parent
        self.name = settings.worker_title.removeprefix("VLLM::")
        self.control = parent  # where steps come from: of a remote rank, a connection of the head's engine core
        self.mesh: dict[int, Link] = {}
        self.store: Link | None = None

    def meet(self) -> bool:
        """Find the other ranks; False when rank 0's store goes away meanwhile."""
        settings = self.settings
        if settings.nnodes == 1:
            self.parent.send({"table": {}})
            return True
        listener = listen(settings.own_address)
        if settings.rank == 0:
            self._store = Store(settings)
        self.store = connect(settings.master_addr, settings.master_port)
        self.store.send({"rank": settings.rank, "address": settings.own_address, "port": listener.getsockname()[1]})
        told = self.store.receive()
        if told is None:
            return False
        table = told["table"]
        if settings.rank == 0:
            self.parent.send({"table": table})
        for peer in range(settings.rank):
            link = connect(*table[str(peer)])
            link.send({"rank": settings.rank})
            self.mesh[peer] = link
        waits_for_core = settings.rank > 0
        while waits_for_core or len(self.mesh) < settings.nnodes - 1:
            link = Link(listener.accept()[0])
            hello = link.receive() or {}
            if "rank" in hello:
                self.mesh[hello["rank"]] = link
            elif "core" in hello:
                self.control, waits_for_core = link, False
        log(self.name, f"world_size={settings.nnodes} rank={settings.rank} backend=gloo")
        return True

    def load(self) -> None:
        """Read the weights, with signs of life; short helper processes come and go meanwhile, as in the real one."""
        duration = switches.number("slow-load", switches.seconds("LOAD_S"))
        log(self.name, f"Loading {self.settings.model}")
        helper = os.fork()
        if helper == 0:
            os._exit(1)
        os.waitpid(helper, 0)
        parts = max(3, int(duration))
        for part in range(parts):
            time.sleep(duration / parts)
            log(self.name, f"Loading safetensors checkpoint shards: {part + 1}/{parts}")
            if part == 0 and switches.strikes("die-loading"):
                log(self.name, "RuntimeError: the switch die-loading is set", "ERROR")
                os._exit(1)
        log(self.name, f"Loading weights took {duration:.2f} seconds")
        if switches.is_set("orphan"):
            leave_orphan()

    def collective(self, number: int) -> None:
        """Exchange one message with every other rank; raises PeerLostError when one of them is gone."""
        for link in self.mesh.values():
            link.send({"step": number})
        for peer, link in self.mesh.items():
            if link.receive() is None:
                raise PeerLostError(f"[rank {self.settings.rank}] Connection closed by peer, rank {peer}")

    def serve(self) -> int:
        """Do steps until the engine core of this node ends; a remote rank waits for ever."""
        while True:
            told = self.control.receive()
            if told is None:
                if self.settings.headless:
                    threading.Event().wait()
                return 0
            switches.wait_while("stall")
            time.sleep(switches.number("step", switches.seconds("STEP_S")))
            switches.wait_while("stall")
            try:
                self.collective(told["step"])
            except PeerLostError as error:
                log(self.name, f"RuntimeError: {error}", "ERROR")
                self.control.send({"done": told["step"], "error": str(error)})
            else:
                self.control.send({"done": told["step"]})


def run() -> int:
    """Be a rank; returns the exit status."""
    settings, sock = inherited()
    parent = Link(sock)
    worker = Worker(settings, parent)
    try:
        met = worker.meet()
    except OSError as error:
        log(worker.name, f"DistNetworkError: {error}", "ERROR")
        return 1
    if not met:
        log(worker.name, "DistNetworkError: failed to recv, got 0 bytes", "ERROR")
        return 1
    worker.load()
    try:
        worker.collective(-1)
    except PeerLostError as error:
        log(worker.name, f"RuntimeError: {error}", "ERROR")
        return 1
    parent.send({"ready": True})
    if worker.control is not parent:
        worker.control.send({"ready": True})
    return worker.serve()


def leave_orphan() -> None:
    """Leave a process behind that belongs to nobody: another session, another parent."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.closerange(3, 256)
            while True:
                time.sleep(3600)
        os._exit(0)
    os.wait()
