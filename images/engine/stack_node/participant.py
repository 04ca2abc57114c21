"""A node's side of the group at work: feeds `member.Member` with what happens and does what it asks for.

Everything here runs on the control loop, except that the engine and the weights report from threads of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from stack_node import events as ev
from stack_node.argv import EXIT_S
from stack_node.client import Client
from stack_node.member import Engine as EngineState
from stack_node.member import Member
from stack_node.reach import Listener, try_all

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from stack_node.argv import EngineCommand
    from stack_node.config import NodeConfig
    from stack_node.engine import Engine
    from stack_node.messages import Join, ToNode
    from stack_node.weights import Weights

TICK_S = 0.25
SIGNS_EVERY_S = 10.0


class Participant:
    """One rank: its connection to the head, its engine, its weights."""

    def __init__(
        self,
        config: NodeConfig,
        join: Join,
        head: str,
        token: bytes,
        engine: Engine,
        weights: Weights,
        command: Callable[[int], EngineCommand],
        finished: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`command` makes the engine's start from the epoch's rendezvous port."""
        self._config = config
        self._join = join
        self._engine = engine
        self._weights = weights
        self._command = command
        self._finished = finished
        self._say = say
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = Client(head, config.control_port, token, lambda: join, self)
        self.member = Member(config.node_timeout, config.drain or 0.0, time.monotonic())

    async def run(self) -> None:
        """Let time pass; ends when cancelled."""
        signs_at = 0.0
        while True:
            now = time.monotonic()
            if self.member.engine is EngineState.RUNNING and now >= signs_at:
                signs_at = now + SIGNS_EVERY_S
                if self._engine.signs():
                    self.handle(ev.EngineSigns(self.member.epoch))
            self.handle(ev.Tick())
            await asyncio.sleep(TICK_S)

    async def close(self) -> None:
        """End everything that `run` and the actions have begun, the engine apart."""
        self._weights.stop()
        for task in self._tasks:
            task.cancel()
        await self._close_listener()
        await self._client.close()

    # --- what the connection tells (client.Callbacks)

    def connected(self, head_instance: str) -> None:
        """The head has let this node in."""
        self.handle(ev.Connected(head_instance))

    def refused(self, reason: str) -> None:
        """The head has not."""
        self.handle(ev.Refused(reason))

    def received(self, message: ToNode) -> None:
        """The head said something."""
        self.handle(ev.FromHead(message))

    def disconnected(self, why: str) -> None:
        """There is no connection."""
        self.handle(ev.Disconnected(why))

    # --- actions

    def handle(self, event: ev.NodeEvent) -> None:
        """Take an event; on the control loop only."""
        for action in self.member.handle(event, time.monotonic()):
            self._do(action)

    def _do(self, action: ev.NodeAction) -> None:
        match action:
            case ev.Say(sentence):
                self._say(sentence)
            case ev.Tell(message):
                self._client.send(message)
            case ev.Connect():
                self._client.connect()
            case ev.Disconnect(why):
                self._client.drop(why)
            case ev.FetchWeights():
                self._weights.start()
            case ev.Exit():
                self._finished()
            case _:
                self._do_for_epoch(action)

    def _do_for_epoch(self, action: ev.NodeAction) -> None:
        match action:
            case ev.OpenListener(epoch):
                self._task(self._open_listener(epoch))
            case ev.TryPeers(epoch, peers):
                self._task(self._try_peers(epoch, peers))
            case ev.CloseListener():
                self._task(self._close_listener())
            case ev.StartEngine(epoch, master_port):
                self._engine.start(epoch, self._command(master_port))
            case ev.EndEngine(gently):
                if gently:
                    self._engine.terminate(EXIT_S)  # the drain is over: no request is left to wait for
                else:
                    self._engine.kill()
            case _:
                raise AssertionError(action)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open_listener(self, epoch: int) -> None:
        await self._close_listener()
        self._listener = Listener(self._config.group, epoch)
        try:
            port = await self._listener.open(self._join.address)
        except OSError as error:
            self._say(f"cannot listen for the other nodes at {self._join.address}: {error.strerror}")
            return
        self.handle(ev.ListenerOpen(epoch, port))

    async def _try_peers(self, epoch: int, peers: list[list[Any]]) -> None:
        failed = await try_all(self._config.group, epoch, self._join.rank, peers)
        self.handle(ev.PeersTried(epoch, failed))

    async def _close_listener(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                await listener.close()
