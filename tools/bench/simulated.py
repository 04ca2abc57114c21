"""Many members in one process: each is the real node's side of the group, with an engine that does nothing.

Two things are left out, because one process cannot do them for hundreds: the engines, and that everybody tries to
connect to everybody (who is asked to says that all could be reached; the real head does try all of them).

Commands come as lines, each answered with the monotonic time at which it was done: `die RANK` closes the member's
connection (it comes back by itself), `freeze RANK` makes it say and do nothing, `thaw RANK` lets it go on.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stack_node import __version__, config, host
from stack_node import events as ev
from stack_node.messages import PROTOCOL, Join
from stack_node.participant import Participant

if TYPE_CHECKING:
    from stack_node.argv import EngineCommand
    from stack_node.config import NodeConfig
    from stack_node.engine import Engine
    from stack_node.weights import Weights


class NoEngine:
    """Starts and ends at once."""

    def __init__(self) -> None:
        self.member: SimulatedMember | None = None
        self._epoch = 0

    def start(self, epoch: int, _command: EngineCommand) -> None:
        """Begin an epoch."""
        self._epoch = epoch

    def kill(self) -> None:
        """End it."""
        if self.member is not None:
            asyncio.get_running_loop().call_soon(self.member.handle, ev.EngineGone(self._epoch, []))

    def terminate(self, _seconds: float) -> None:
        """End it, too."""
        self.kill()

    def signs(self) -> bool:
        """It does nothing."""
        return False


class NoWeights:
    """Here from the start."""

    def __init__(self) -> None:
        self.member: SimulatedMember | None = None

    def start(self) -> None:
        """They are here."""
        if self.member is not None:
            asyncio.get_running_loop().call_soon(self.member.handle, ev.WeightsReady())

    def stop(self) -> None:
        """Nothing runs."""


class SimulatedMember(Participant):
    """A member that can be frozen."""

    def __init__(self, node: NodeConfig, head: str, token: bytes) -> None:
        engine, weights = NoEngine(), NoWeights()
        join = Join(
            protocol=PROTOCOL,
            group=node.group,
            nnodes=node.nnodes or 1,
            rank=node.node_rank,
            digest=node.digest,
            version=__version__,
            engine_version=host.engine_version(),
            devices=-1,
            address=node.node_addr or "",
            node=socket.gethostname(),
            instance=f"{node.node_rank:016x}",
        )
        super().__init__(
            node,
            join,
            head,
            token,
            cast("Engine", engine),
            cast("Weights", weights),
            lambda _: cast("EngineCommand", None),
            lambda: None,
            lambda _: None,
        )
        engine.member = weights.member = self
        self._missed: list[ev.NodeEvent] | None = None  # while frozen

    def handle(self, event: ev.NodeEvent) -> None:
        """Take an event, or keep it for the time after the thaw."""
        if self._missed is None:
            super().handle(event)
        elif not isinstance(event, ev.Tick):
            self._missed.append(event)

    def freeze(self) -> None:
        """Say and do nothing any more."""
        self._missed = self._missed or []

    def thaw(self) -> None:
        """Go on; what has come meanwhile is found first."""
        missed, self._missed = self._missed or [], None
        for event in missed:
            self.handle(event)

    def die(self) -> None:
        """Lose the connection, as a process that is killed does."""
        self._client.drop("killed")

    async def _try_peers(self, epoch: int, peers: list[list[Any]]) -> None:  # noqa: ARG002
        self.handle(ev.PeersTried(epoch, []))


def address_of(rank: int) -> str:
    """A loopback address of its own for each member."""
    return f"127.1.{rank // 256}.{rank % 256}"


def make(rank: int, nnodes: int, head: str, port: int, token: Path) -> SimulatedMember:
    """A member of that rank with the default time-outs."""
    variables = {
        "NNODES": str(nnodes),
        "NODE_RANK": str(rank),
        "NODE_ADDR": address_of(rank),
        "MASTER_ADDR": head,
        "GEN_STACK_CONTROL_PORT": str(port),
        "GEN_STACK_RDMA": "off",
    }
    node, problems = config.read(variables)
    if problems:
        raise ValueError("; ".join(problems))
    return SimulatedMember(node, head, token.read_bytes().strip())


async def live(members: dict[int, SimulatedMember]) -> None:
    """Let the members live and do what the lines say, until there are no more lines."""
    running = [asyncio.create_task(member.run()) for member in members.values()]
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := (await reader.readline()).decode():
            name, rank = line.split()
            member = members[int(rank)]
            {"die": member.die, "freeze": member.freeze, "thaw": member.thaw}[name]()
            print(time.monotonic(), flush=True)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*(member.close() for member in members.values()))


def main(words: list[str]) -> None:
    """HEAD PORT NNODES TOKEN_FILE: all ranks but the head's."""
    head, port, nnodes, token = words
    count = int(nnodes)

    async def body() -> None:
        await live({rank: make(rank, count, head, int(port), Path(token)) for rank in range(1, count)})

    asyncio.run(body())


if __name__ == "__main__":
    main(sys.argv[1:])
