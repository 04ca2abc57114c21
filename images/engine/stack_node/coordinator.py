"""The head's side of the group at work: feeds `group.Group` with what happens and does what it asks for.

Everything here runs on the control loop; nothing decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from stack_node import events as ev
from stack_node import metrics, ports, report, statefile
from stack_node.config import MASTER_PORTS
from stack_node.group import Group, Phase
from stack_node.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from stack_node.config import NodeConfig
    from stack_node.messages import Join, ToHead
    from stack_node.probe import Api
    from stack_node.roster import Settings

TICK_S = 0.25
LISTEN_AGAIN_S = 2.0
REMIND_S = 60.0
ALIVE_EVERY_S = 0.25
GAUGES_EVERY_S = 5.0
GAUGES_EVERY_DRAINING_S = 0.25
MEETING_EVERY_S = 1.0
PROBE_AGAIN_S = 1.0
SAVE_S = 2.0  # for the disk to take the last state when this node ends
FOREVER_S = 1e9  # the group decides when a request of ours is overdue


class Coordinator:
    """The head: the control port, the watch over the API, the rendezvous port, the saved state."""

    def __init__(
        self,
        config: NodeConfig,
        settings: Settings,
        instance: str,
        address: str,
        token: bytes,
        api: Api,
        api_address: str,
        world: int | None,
        kill_own_engine: Callable[[], None],
        finished: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`world`: connections that the rendezvous will have; None where they cannot be counted."""
        self._config = config
        self._path = statefile.path(config.state_dir, config.group)
        self._api = api
        self._api_address = api_address
        self._world = world
        self._kill_own_engine = kill_own_engine
        self._finished = finished
        self._say = say
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: list[asyncio.Task[None]] = []
        self._used_ports: list[int] = []
        self._drains = asyncio.Event()
        self._saving = asyncio.Lock()
        self._saves: set[asyncio.Task[None]] = set()
        self._refusals: dict[str, float] = {}  # what was said of late, and when
        saved, problem = statefile.load(self._path)
        if problem:
            say(f"warning: {problem}")
        self.group = Group(settings, instance, time.monotonic(), saved.failures, saved.retries, saved.last_fault)
        self._server = Server(address, config.control_port, token, instance, self, say=say)

    async def run(self) -> None:
        """Open the control port, however long that takes, then let time pass; ends when cancelled."""
        await self._listen()
        while True:
            self._handle(ev.Tick())
            await asyncio.sleep(TICK_S)

    async def _listen(self) -> None:
        told: float | None = None
        port = self._config.control_port
        while (error := await self._server_error()) is not None:
            if told is None or time.monotonic() - told >= REMIND_S:
                told = time.monotonic()
                holder = await asyncio.to_thread(ports.holder, port)
                self._say(
                    f"the control port {port} cannot be opened ({error.strerror}): {holder}; end that, or set "
                    "another GEN_STACK_CONTROL_PORT on every node"
                )
            await asyncio.sleep(LISTEN_AGAIN_S)

    async def _server_error(self) -> OSError | None:
        try:
            await self._server.start()
        except OSError as error:
            return error
        return None

    async def close(self) -> None:
        """End everything that `run` and the actions have begun."""
        self._unwatch()
        for task in self._tasks - self._saves:
            task.cancel()
        if self._saves & self._tasks:
            await asyncio.wait(self._saves & self._tasks, timeout=SAVE_S)
        await self._server.close()
        await self._api.close()

    def stop_asked(self) -> None:
        """A stop signal came to this node."""
        self._handle(ev.StopAsked())

    @property
    def health(self) -> tuple[bool, str]:
        """Whether the group is ready, and a sentence about it."""
        return self.group.ready, report.sentence(self.group, time.monotonic())

    # --- what the control port asks and tells (server.Callbacks)

    def judge(self, join: Join, peer: str) -> str | None:  # noqa: ARG002
        """Why a node is refused."""
        now = time.monotonic()
        reason = self.group.judge(join, now)
        self._refusals = {said: when for said, when in self._refusals.items() if now - when < REMIND_S}
        if reason is not None and reason not in self._refusals:
            self._refusals[reason] = now
            self._say(f"refused: {reason}")
        return reason

    def joined(self, link: int, join: Join) -> None:
        """A node is in."""
        self._handle(ev.Joined(link, join))

    def received(self, link: int, message: ToHead) -> None:
        """A node said something."""
        self._handle(ev.FromNode(link, message))

    def lost(self, link: int, why: str) -> None:
        """A node's connection has ended."""
        self._handle(ev.LinkLost(link, why))

    def ready(self) -> tuple[bool, str]:
        """What /readyz answers."""
        return self.health

    def status(self) -> dict[str, Any]:
        """What /status answers."""
        return report.status(self.group, time.monotonic())

    def metrics(self) -> bytes:
        """What /metrics answers."""
        return metrics.render(self.status())

    # --- actions

    def _handle(self, event: ev.HeadEvent) -> None:
        for action in self.group.handle(event, time.monotonic()):
            self._do(action)
        if self.group.phase is Phase.DRAINING:
            self._drains.set()

    def _do(self, action: ev.HeadAction) -> None:
        match action:
            case ev.Say(sentence):
                self._say(sentence)
            case ev.Send(link, message):
                self._server.send(link, message)
            case ev.Drop(link, why):
                self._server.drop(link, why)
            case ev.KillOwnEngine():
                self._kill_own_engine()
            case ev.PickPort(epoch):
                self._task(self._pick_port(epoch))
            case _:
                self._do_later(action)

    def _do_later(self, action: ev.HeadAction) -> None:
        match action:
            case ev.Watch(epoch, master_port):
                self._unwatch()
                self._watching = [self._task(self._meeting(epoch, master_port)), self._task(self._watch(epoch))]
            case ev.Unwatch():
                self._unwatch()
            case ev.Probe(epoch):
                self._watching.append(self._task(self._probe(epoch)))
            case ev.Save(failures, retries, last_fault):
                state = statefile.State(failures=failures, last_fault=last_fault, retries=retries)
                self._saves.add(self._task(self._save(state)))
            case ev.Exit():
                self._finished()
            case _:
                raise AssertionError(action)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._saves.discard)
        return task

    def _unwatch(self) -> None:
        for task in self._watching:
            task.cancel()
        self._watching = []

    async def _pick_port(self, epoch: int) -> None:
        port, problem = ports.pick_master_port(self._config.master_port, MASTER_PORTS, self._used_ports), ""
        api_port = self._config.api_port
        if api_port is not None and not ports.free(self._api_address, api_port):
            holder = await asyncio.to_thread(ports.holder, api_port)
            problem = f"the API's port {api_port} is taken: {holder}; end that, or set another GEN_STACK_API_PORT"
        elif port is None:
            first = self._config.master_port
            problem = (
                f"every rendezvous port from {first} to {first + MASTER_PORTS - 1} is taken; set another MASTER_PORT"
            )
        else:
            self._used_ports = [*self._used_ports[1 - MASTER_PORTS :], port]
        self._handle(ev.PortPicked(epoch, port or 0, problem))

    async def _save(self, state: statefile.State) -> None:
        async with self._saving:
            problem = await asyncio.to_thread(statefile.save, self._path, state)
        if problem:
            self._say(f"warning: {problem}")

    # --- the watch over an epoch

    async def _meeting(self, epoch: int, master_port: int) -> None:
        while self._world is not None and ports.established(master_port) < self._world:
            await asyncio.sleep(MEETING_EVERY_S)
        self._handle(ev.Rendezvoused(epoch))

    async def _watch(self, epoch: int) -> None:
        while not await self._api.alive():
            await asyncio.sleep(ALIVE_EVERY_S)
        self._handle(ev.ApiAnswered(epoch))
        while True:
            counters = await self._api.counters()
            running = counters.running + counters.waiting if counters else 0
            self._handle(ev.Gauges(epoch, counters.progress if counters else None, running))
            await self._until_next_look()

    async def _until_next_look(self) -> None:
        if self.group.phase is Phase.DRAINING:
            await asyncio.sleep(GAUGES_EVERY_DRAINING_S)
            return
        self._drains.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._drains.wait(), min(GAUGES_EVERY_S, self._config.stall_timeout / 5))

    async def _probe(self, epoch: int) -> None:
        while (proof := await self._api.prove(FOREVER_S)).outcome == "unanswered":
            await asyncio.sleep(PROBE_AGAIN_S)  # a full queue says no at once; whether it stands still, counters tell
        if proof.outcome == "answered":
            self._handle(ev.Proved(epoch, ""))
        elif proof.outcome == "refused":
            self._handle(ev.Proved(epoch, f" (a request of ours was refused, which proves less: {proof.detail})"))
        else:
            self._handle(ev.Disproved(epoch, proof.detail))
