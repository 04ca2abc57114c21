"""Runs a node of a group: signals in one thread, everything about the group on an asyncio loop in another.

So a heartbeat waits for nobody: not for a log that nobody reads, not for an engine that dies slowly, not for
a download.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stack_node import __version__, argv, devices, health, supervise
from stack_node import events as ev
from stack_node.engine import Engine
from stack_node.messages import PROTOCOL, Join
from stack_node.participant import Participant
from stack_node.probe import Api
from stack_node.roster import Settings
from stack_node.weights import Weights, with_path

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stack_node.argv import EngineCommand
    from stack_node.config import Network, NodeConfig
    from stack_node.coordinator import Coordinator
    from stack_node.logpump import Sink

HEALTH_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
DEVICES_S = 30.0  # below group.END_S
END_S = 8.0  # for the engine's tree to be gone when this node ends


@dataclass(frozen=True)
class Start:
    """Everything that one node of a group runs on; nothing of it changes any more."""

    config: NodeConfig
    args: Sequence[str]
    environ: dict[str, str]
    network: Network | None
    devices: int
    engine_version: str
    token: bytes
    api_key: str | None

    @property
    def address(self) -> str:
        """This node's address."""
        return self.network.node_addr if self.network else self.config.node_addr or self.head

    @property
    def head(self) -> str:
        """The address of the control port."""
        if self.network is not None:
            return self.network.master_addr
        return self.config.master_addr or self.config.node_addr or "127.0.0.1"

    def command(self, master_port: int, model_path: str | None) -> EngineCommand:
        """The engine's start in an epoch with that rendezvous port."""
        config = dataclasses.replace(self.config, master_port=master_port)
        args = with_path(self.args, model_path) if model_path else self.args
        return argv.command(config, args, self.environ, self.network, self.api_key)


class Control:
    """The node."""

    def __init__(self, start: Start, output: Sink, errors: Sink, say: Callable[[str], None]) -> None:
        self._start = start
        self._say = say
        self._engine = Engine(say, self._engine_ended, self._engine_gone, output, errors)
        self._weights = Weights(
            start.args,
            start.environ,
            say,
            progress=lambda done, total, text: self._tell(ev.WeightsProgress(done, total, text)),
            done=self._weights_done,
            failed=lambda reason, again: self._tell(ev.WeightsFailed(reason, again)),
            spare=self._engine.spare,
        )
        self._model_path: str | None = None
        self._device_memory = devices.device_memory_used()  # before any engine of ours; None where it cannot be told
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()  # the loop runs
        self._finish = asyncio.Event()
        self._gone = threading.Event()
        self._participant: Participant | None = None
        self._coordinator: Coordinator | None = None
        self._failure: BaseException | None = None
        self._health: tuple[bool, str] = (False, "starts")

    def run(self) -> bool:
        """Be a node until a stop signal; False when it ended by a fault of this program."""
        thread = threading.Thread(target=self._run_loop, name="control")
        thread.start()
        threading.Thread(target=self._take_signals, daemon=True, name="signals").start()
        thread.join()
        health.remove()
        return self._failure is None

    def _take_signals(self) -> None:
        """Pass stop signals on, for ever; those that come before there is a loop wait for it.

        Not with sigtimedwait: after a freeze (SIGCONT, docker unpause) Python's makes up a signal that nobody sent.
        """
        self._begun.wait()
        while True:
            name = signal.Signals(signal.sigwait(supervise.STOP_SIGNALS)).name
            self._say(f"{name} received")
            loop = self._loop
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # it has just ended, and so does this node
                    loop.call_soon_threadsafe(self._stop_asked)

    # --- on the control loop

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._live())
        except Exception as error:
            self._failure = error
            self._say_fault(error, "this node ends")
        finally:
            self._end_engine()

    def _say_fault(self, error: BaseException | None, what: str) -> None:
        name = type(error).__name__ if error is not None else "fault"
        self._say(f"error: a fault of stack-node itself, please report it: {name}: {error}; {what}")

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun.set()
        self._loop.set_exception_handler(
            lambda _, context: self._say_fault(context.get("exception"), context["message"])
        )
        self._participant = self._make_participant()
        sides: list[Participant | Coordinator] = [self._participant]
        if self._start.config.serves_api:
            self._coordinator = self._make_coordinator()
            sides.append(self._coordinator)
        works = [asyncio.create_task(work) for work in (*(side.run() for side in sides), self._publish_health())]
        finish = asyncio.create_task(self._finish.wait())
        try:
            done, _ = await asyncio.wait([finish, *works], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (finish, *works):
                task.cancel()
            for side in sides:
                await side.close()

    def _make_participant(self) -> Participant:
        start, config = self._start, self._start.config
        join = Join(
            protocol=PROTOCOL,
            group=config.group,
            nnodes=config.nnodes or 1,
            rank=config.node_rank,
            digest=config.digest,
            version=__version__,
            engine_version=start.engine_version,
            devices=start.devices,
            address=start.address,
            node=socket.gethostname(),
            instance=secrets.token_hex(8),
        )
        return Participant(
            config,
            join,
            start.head,
            start.token,
            self._engine,
            self._weights,
            self._command,
            self._finish.set,
            self._say,
        )

    def _make_coordinator(self) -> Coordinator:
        from stack_node.coordinator import Coordinator  # only the head needs a server

        start, config = self._start, self._start.config
        settings = Settings(
            group=config.group,
            nnodes=config.nnodes or 1,
            digest=config.digest,
            version=__version__,
            engine_version=start.engine_version,
            node_timeout=config.node_timeout,
            stall_timeout=config.stall_timeout,
            max_restarts=config.max_restarts,
            drain=config.drain or 0.0,
        )
        command = start.command(config.master_port, None)
        if command.api_url is None:
            raise ValueError("the API has to be reached by HTTP, so that the group can be proved")
        sizes = argv.sizes(start.args)
        return Coordinator(
            config,
            settings,
            instance=secrets.token_hex(8),
            address=start.head,
            token=start.token,
            api=Api(command.api_url, start.api_key),
            api_address=config.api_bind or start.head,
            # With data parallelism each replica has a store of its own.
            world=sizes.world if sizes is not None and sizes.data == 1 and start.network is not None else None,
            kill_own_engine=self._engine.kill,
            finished=self._finish.set,
            say=self._say,
        )

    def _command(self, master_port: int) -> EngineCommand:
        return self._start.command(master_port, self._model_path)

    def _stop_asked(self) -> None:
        if self._coordinator is not None:
            self._coordinator.stop_asked()
        elif self._participant is not None:
            self._participant.handle(ev.StopAsked())

    async def _publish_health(self) -> None:
        role = "head" if self._coordinator is not None else "worker"
        written = 0.0
        while True:
            healthy = self._judge_health()
            if healthy != self._health or time.monotonic() - written >= HEALTH_EVERY_S:
                self._health, written = healthy, time.monotonic()
                try:
                    health.write_group(*healthy, role)
                except OSError as error:
                    self._say(f"warning: the health check will not work, its status file cannot be written: {error}")
            await asyncio.sleep(LOOK_EVERY_S)

    def _judge_health(self) -> tuple[bool, str]:
        if self._coordinator is not None:
            return self._coordinator.health
        return self._participant.member.health if self._participant is not None else (False, "starts")

    def _end_engine(self) -> None:
        """Kill what is left of the engine and wait for it; the loop has ended."""
        self._loop = None
        self._gone.clear()
        self._engine.kill()
        if not self._gone.wait(END_S):
            self._say("the engine's processes cannot be killed; this host may need a reboot")

    # --- from the engine's and the weights' threads

    def _engine_ended(self, epoch: int, reason: str, log: list[str]) -> None:
        self._tell(ev.EngineEnded(epoch, reason, log))

    def _engine_gone(self, epoch: int, left: list[int]) -> None:
        if left:
            self._tell(ev.EngineGone(epoch, left))
            return
        self._gone.set()
        if self._device_memory is None:
            self._tell(ev.EngineGone(epoch, []))
        else:
            threading.Thread(target=self._wait_for_devices, args=(epoch,), daemon=True, name="devices").start()

    def _wait_for_devices(self, epoch: int) -> None:
        """Tell that an engine is gone when its devices' memory is free, which the driver may take a while for."""
        deadline = time.monotonic() + DEVICES_S
        while not self._devices_free():
            if time.monotonic() > deadline:
                self._say(f"warning: the devices' memory is not free {DEVICES_S:.0f} s after the engine's end")
                break
            time.sleep(LOOK_EVERY_S)
        self._tell(ev.EngineGone(epoch, []))

    def _devices_free(self) -> bool:
        used = devices.device_memory_used()
        return used is None or self._device_memory is None or devices.freed(self._device_memory, used)

    def _weights_done(self, model_path: str | None) -> None:
        self._model_path = model_path
        self._tell(ev.WeightsReady())

    def _tell(self, event: ev.NodeEvent) -> None:
        loop, participant = self._loop, self._participant
        if loop is not None and participant is not None:
            try:
                loop.call_soon_threadsafe(participant.handle, event)
            except RuntimeError:  # the loop has just ended: nobody needs to know any more
                return
