"""A head and its nodes on loopback, in one loop, with somebody in between where a test wants it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from stack_node.client import Client
from stack_node.messages import PROTOCOL, Join, ToHead, ToNode
from stack_node.server import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

TOKEN = b"a-secret-of-the-group"
JOIN = Join(PROTOCOL, "g", 2, 1, "digest", "0.1", "0.32", 8, "127.0.0.1", "node-b", "instance-b")
PATIENCE_S = 20.0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run one test's coroutine; whatever reaches the loop's exception handler fails it."""

    async def watched() -> None:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
        await asyncio.wait_for(test(), 60)
        assert not faults

    asyncio.run(watched())


async def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        await asyncio.sleep(0.01)


class Head:
    """A server's other half, which writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.judged: list[tuple[Join, str]] = []
        self.said: list[str] = []
        self.refusal: str | None = None
        self.is_ready = False
        self.links: list[int] = []

    def judge(self, join: Join, peer: str) -> str | None:
        self.judged.append((join, peer))
        return self.refusal

    def joined(self, link: int, join: Join) -> None:
        self.links.append(link)
        self.heard.append(("joined", join))

    def received(self, link: int, message: ToHead) -> None:
        self.heard.append(("received", message))

    def lost(self, link: int, why: str) -> None:
        self.links.remove(link)
        self.heard.append(("lost", why))

    def ready(self) -> tuple[bool, str]:
        return self.is_ready, "rank 3 is missing"

    def status(self) -> dict[str, Any]:
        return {"phase": "forming"}

    def metrics(self) -> bytes:
        return b"up 1\n"


class Node:
    """A client's other half, likewise."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def connected(self, head_instance: str) -> None:
        self.heard.append(("connected", head_instance))

    def refused(self, reason: str) -> None:
        self.heard.append(("refused", reason))

    def received(self, message: ToNode) -> None:
        self.heard.append(("received", message))

    def disconnected(self, why: str) -> None:
        self.heard.append(("disconnected", why))

    async def ending(self) -> tuple[Any, ...]:
        await until(lambda: self.heard and self.heard[-1][0] in {"refused", "disconnected"})
        return self.heard[-1]


@contextlib.asynccontextmanager
async def serving(token: bytes = TOKEN, address: str = "127.0.0.1") -> AsyncIterator[tuple[Head, Server]]:
    head = Head()
    there = Server(address, 0, token, "instance-a", head, say=head.said.append)
    await there.start()
    try:
        yield head, there
    finally:
        await there.close()
    assert head.links == [], "a link was not reported lost"


@contextlib.asynccontextmanager
async def connecting(
    port: int, token: bytes = TOKEN, address: str = "127.0.0.1", join: Join = JOIN
) -> AsyncIterator[tuple[Node, Client]]:
    node = Node()
    here = Client(address, port, token, lambda: join, node)
    here.connect()
    try:
        yield node, here
    finally:
        await here.close()


Says = list[tuple[str, str]]


@contextlib.asynccontextmanager
async def in_the_middle(port: int, change: Callable[[str, str], list[str]], log: Says) -> AsyncIterator[int]:
    """Somebody between node and head who reads everything, and passes on what `change(from, text)` makes of it."""

    async def handle(request: aiohttp.web.BaseRequest) -> aiohttp.web.WebSocketResponse:
        at_node = aiohttp.web.WebSocketResponse()
        await at_node.prepare(request)
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(f"http://127.0.0.1:{port}/control") as at_head,
        ):

            async def passing(name: str, source: Any, target: Any) -> None:
                async for message in source:
                    log.append((name, message.data))
                    for text in change(name, message.data):
                        await target.send_str(text)
                await target.close()

            with contextlib.suppress(ConnectionError):
                await asyncio.gather(passing("head", at_head, at_node), passing("node", at_node, at_head))
        return at_node

    http = aiohttp.web.Server(handle)
    listening = await asyncio.get_running_loop().create_server(http, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()
        await http.shutdown(1)


def unchanged(_name: str, text: str) -> list[str]:
    return [text]


async def ask(port: int, path: str, **headers: str) -> tuple[int, str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer,
    ):
        return answer.status, await answer.text(), answer.headers


@contextlib.asynccontextmanager
async def raw(port: int) -> AsyncIterator[aiohttp.ClientWebSocketResponse[bool]]:
    """A WebSocket to the control port in the hands of somebody who does as he likes."""
    async with aiohttp.ClientSession() as session, session.ws_connect(f"http://127.0.0.1:{port}/control") as ws:
        yield ws


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
