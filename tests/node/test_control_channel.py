"""The control port and a node's connection to it, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from stack_node import client, server, sockets, strangers
from stack_node.channel import MAX_FRAME, HeadHandshake, NodeHandshake
from stack_node.client import Client
from stack_node.messages import PROTOCOL, Failed, Join, Ping, Pong, Start, Stop, ToHead, ToNode
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


@pytest.mark.parametrize(("token", "address"), [(TOKEN, "127.0.0.1"), (b"", "127.0.0.1"), (TOKEN, "::1")])
def test_a_node_joins_and_both_talk(token: bytes, address: str) -> None:
    async def test() -> None:
        async with serving(token, address) as (head, there), connecting(there.port, token, address) as (node, here):
            await until(lambda: node.heard)
            here.send(Ping(1))
            here.send(Ping(2))
            await until(lambda: len(head.heard) == 3)
            there.send(head.links[0], Pong(1))
            there.send(head.links[0], Start(1, 29500))
            await until(lambda: len(node.heard) == 3)
            assert head.judged == [(JOIN, address)]
            assert head.heard == [("joined", JOIN), ("received", Ping(1)), ("received", Ping(2))]
            assert node.heard == [("connected", "instance-a"), ("received", Pong(1)), ("received", Start(1, 29500))]
            await here.close()
            await until(lambda: len(head.heard) == 4)
            assert node.heard[3:] == [("disconnected", "this node ends")]
            assert head.heard[3][0] == "lost"

    run(test)


def test_a_refused_node_hears_the_heads_sentence_and_may_try_again() -> None:
    async def test() -> None:
        async with serving() as (head, there):
            head.refusal = "digest differs"
            async with connecting(there.port) as (node, here):
                assert await node.ending() == ("refused", "digest differs")
                head.refusal = None
                here.connect()
                here.connect()
                await until(lambda: node.heard[1:] == [("connected", "instance-a")])
                assert len(head.links) == 1

    run(test)


@pytest.mark.parametrize(("at_head", "at_node"), [(TOKEN, b"x"), (TOKEN, b""), (b"", TOKEN)])
def test_another_token_on_either_side_is_said_on_both_and_judged_by_nobody(at_head: bytes, at_node: bytes) -> None:
    async def test() -> None:
        async with serving(at_head) as (head, there):
            for _attempt in range(3):
                async with connecting(there.port, at_node) as (node, _here):
                    assert await node.ending() == (
                        "refused",
                        f"the head at 127.0.0.1:{there.port} (rank 0) and this node at 127.0.0.1 (rank 1) do not have "
                        "the same group token",
                    )
            assert head.said == [
                "the node at 127.0.0.1 (rank 1) and the head at 127.0.0.1 (rank 0) do not have the same group token"
            ]
            assert not head.judged

    run(test)


def test_a_node_of_another_version_is_refused_with_both_versions_named() -> None:
    async def test() -> None:
        async with serving() as (head, there):
            async with connecting(there.port, join=replace(JOIN, protocol=9)) as (node, _here):
                await node.ending()
            assert "speaks version 9" in head.said[0]
            assert f"speaks version {PROTOCOL}" in head.said[0]
            assert not head.judged

    run(test)


def test_a_head_of_another_version_is_named_at_the_node() -> None:
    async def test() -> None:
        def newer(name: str, text: str) -> list[str]:
            return ['{"protocol":9}'] if name == "head" and "instance" in text else [text]

        log: Says = []
        async with (
            serving() as (head, there),
            in_the_middle(there.port, newer, log) as port,
            connecting(port) as (node, _here),
        ):
            kind, sentence = await node.ending()
            assert kind == "refused"
            assert "speaks version 9" in sentence
            assert f"speaks version {PROTOCOL}" in sentence
            assert not head.judged

    run(test)


def test_no_token_and_no_key_is_seen_by_who_listens() -> None:
    async def test() -> None:
        log: Says = []
        async with (
            serving() as (head, there),
            in_the_middle(there.port, unchanged, log) as port,
            connecting(port) as (node, here),
        ):
            await until(lambda: node.heard)
            here.send(Ping(1))
            there.send(head.links[0], Pong(1))
            await until(lambda: len(node.heard) == 2 and len(head.heard) == 2)
            assert [name for name, _text in log[:3]] == ["head", "node", "head"]
            assert not [text for _name, text in log if TOKEN.decode() in text or TOKEN.hex() in text]

    run(test)


def test_a_replayed_handshake_lets_nobody_in() -> None:
    async def test() -> None:
        log: Says = []
        async with serving() as (head, there):
            async with in_the_middle(there.port, unchanged, log) as port, connecting(port) as (node, _here):
                await until(lambda: node.heard)
            recorded = next(text for name, text in log if name == "node")
            async with raw(there.port) as ws:
                await ws.receive()
                await ws.send_str(recorded)
                assert json.loads((await ws.receive()).data) == {"refused": "token"}
            assert len(head.judged) == 1

    run(test)


def test_a_head_that_reflects_the_proof_is_not_trusted() -> None:
    async def test() -> None:
        answers: list[str] = []

        def reflecting(name: str, text: str) -> list[str]:
            if name == "node":
                answers.append(text)
            elif answers:
                return [json.dumps({"mac": json.loads(answers[0])["mac"]})]
            return [text]

        log: Says = []
        async with (
            serving(b"a guess") as (_head, there),
            in_the_middle(there.port, reflecting, log) as port,
            connecting(port) as (node, _here),
        ):
            kind, sentence = await node.ending()
            assert kind == "refused"
            assert sentence.endswith("do not have the same group token")
            assert len(node.heard) == 1

    run(test)


def doubled(frames: list[str], text: str) -> list[str]:
    return [text, text]


def swapped(frames: list[str], text: str) -> list[str]:
    return [text, frames[-2]] if len(frames) == 2 else []


def forged(frames: list[str], text: str) -> list[str]:
    return [text.replace("pi", "po")]


@pytest.mark.parametrize("attack", [doubled, swapped, forged])
def test_frames_that_are_repeated_reordered_or_changed_end_the_connection(
    attack: Callable[[list[str], str], list[str]],
) -> None:
    async def test() -> None:
        frames: list[str] = []

        def change(name: str, text: str) -> list[str]:
            if "seq" not in text:
                return [text]
            frames.append(text)
            return attack(frames, text)

        log: Says = []
        async with (
            serving() as (head, there),
            in_the_middle(there.port, change, log) as port,
            connecting(port) as (node, here),
        ):
            await until(lambda: node.heard)
            here.send(Ping(0))
            here.send(Ping(1))
            await node.ending()
            await until(lambda: not head.links)
            assert len([entry for entry in head.heard if entry[0] == "received"]) <= 1
            assert "frame" in head.heard[-1][1]

    run(test)


def test_a_frame_of_another_session_ends_the_connection_it_is_spliced_into() -> None:
    async def test() -> None:
        log: Says = []
        async with serving() as (head, there):
            async with in_the_middle(there.port, unchanged, log) as port, connecting(port) as (node, here):
                await until(lambda: node.heard)
                here.send(Ping(0))
                await until(lambda: len(head.heard) == 2)
            recorded = log[3][1]
            async with raw(there.port) as ws:
                handshake = NodeHandshake(TOKEN, JOIN, "there")
                await ws.send_str(handshake.answer((await ws.receive()).data))
                handshake.finish((await ws.receive()).data)
                await ws.send_str(recorded)
                await until(lambda: head.heard[-1] == ("lost", "not understood: the frame was not made by the peer"))

    run(test)


def test_each_side_takes_only_what_the_other_may_say() -> None:
    async def test() -> None:
        async with serving() as (head, there), raw(there.port) as ws:
            handshake = NodeHandshake(TOKEN, JOIN, "there")
            await ws.send_str(handshake.answer((await ws.receive()).data))
            session = handshake.finish((await ws.receive()).data)
            await ws.send_str(session.seal(Stop(1, "mine", False)))
            await until(lambda: head.heard[-1] == ("lost", "not understood: a stop from this side"))

    run(test)


@pytest.mark.parametrize("frame", ["x" * (MAX_FRAME * 4), "[" * 60000, b"\x00\xff"], ids=["huge", "deep", "binary"])
def test_a_frame_that_is_none_ends_the_connection_before_and_after_the_proof(frame: str | bytes) -> None:
    async def send(ws: aiohttp.ClientWebSocketResponse[bool]) -> None:
        with contextlib.suppress(ConnectionError):
            await (ws.send_str(frame) if isinstance(frame, str) else ws.send_bytes(frame))
        while not ws.closed:
            await ws.receive()

    async def test() -> None:
        async with serving() as (head, there):
            async with raw(there.port) as ws:
                await send(ws)
            assert not head.judged
            async with raw(there.port) as ws:
                handshake = NodeHandshake(TOKEN, JOIN, "there")
                await ws.send_str(handshake.answer((await ws.receive()).data))
                await ws.receive()
                await send(ws)
                await until(lambda: head.heard[-1][0] == "lost")

    run(test)


def test_a_node_that_a_stranger_answers_says_so() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(os.urandom(4000))
        writer.close()

    async def test() -> None:
        there = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with there, connecting(there.sockets[0].getsockname()[1]) as (node, _here):
            kind, _why = await node.ending()
            assert kind == "disconnected"

    run(test)


def test_a_node_says_why_the_head_cannot_be_reached() -> None:
    async def test() -> None:
        with socket.socket() as taken:  # bound, and nobody listens
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            async with connecting(port) as (node, _here):
                why = f"the head at 127.0.0.1:{port} cannot be reached: Connection refused"
                assert await node.ending() == ("disconnected", why)

    run(test)


@pytest.mark.parametrize("says_first", [False, True])
def test_a_head_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, says_first: bool) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.2)
    monkeypatch.setattr(client, "HANDSHAKE_S", 0.2)

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            if says_first:
                _head, there = await stack.enter_async_context(serving())
                silent = in_the_middle(there.port, lambda _name, _text: [], [])
                port = await stack.enter_async_context(silent)
            else:
                deaf = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                port = deaf.getsockname()[1]
            async with connecting(port) as (node, _here):
                kind, why = await node.ending()
                assert kind == "disconnected"
                assert "does not answer within" in why

    run(test)


def test_an_attempt_that_is_dropped_at_any_point_ends_once() -> None:
    async def test() -> None:
        async with serving() as (_head, there):
            for steps in range(30):
                async with connecting(there.port) as (node, here):
                    for _step in range(steps):
                        await asyncio.sleep(0)
                    here.drop("enough")
                    here.drop("more than enough")
                    assert await node.ending() == ("disconnected", "enough")
                    assert [kind for kind, _what in node.heard] in (["disconnected"], ["connected", "disconnected"])

    run(test)


def test_nothing_is_received_of_a_link_that_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving() as (head, there):

            def received(link: int, message: ToHead) -> None:
                head.heard.append(("received", message))
                there.drop(link, "enough")

            monkeypatch.setattr(head, "received", received)
            async with connecting(there.port) as (node, here):
                await until(lambda: node.heard)
                for number in range(10):
                    here.send(Ping(number))
                await node.ending()
                await until(lambda: not head.links)
                assert head.heard == [("joined", JOIN), ("received", Ping(0)), ("lost", "enough")]
                there.send(1, Pong(1))
                there.send(77, Pong(1))
                there.drop(77, "who")
                here.send(Ping(1))

    run(test)


def test_a_message_that_comes_with_the_drop_is_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving() as (head, there):

            async def dropping(*args: Any) -> Any:
                message = await sockets.next_message(*args)
                there.drop(head.links[0], "enough")
                return message

            monkeypatch.setattr(server, "next_message", dropping)
            async with connecting(there.port) as (node, here):
                await until(lambda: node.heard)
                here.send(Ping(0))
                await until(lambda: not head.links)
                assert head.heard == [("joined", JOIN), ("lost", "enough")]

    run(test)


def test_what_was_sent_makes_room_for_more() -> None:
    async def test() -> None:
        async with serving() as (head, there), connecting(there.port) as (node, here):
            await until(lambda: node.heard)
            for number in range(2 * sockets.OUTBOX_LIMIT // 60000):
                here.send(Failed(number, "x" * 60000, []))
                await until(lambda number=number: len(head.heard) == number + 2)  # type: ignore[misc]
            assert len(node.heard) == 1

    run(test)


def test_a_log_too_long_for_a_frame_is_cut_at_its_beginning() -> None:
    async def test() -> None:
        async with serving() as (head, there), connecting(there.port) as (node, here):
            await until(lambda: node.heard)
            here.send(Failed(1, "exit code 1", [f"{number} " + "x" * 3000 for number in range(100)]))
            await until(lambda: len(head.heard) == 2)
            message = head.heard[1][1]
            assert message.log[-1].startswith("99 ")
            assert len(message.log) > 5

    run(test)


def test_a_head_never_waits_for_a_node_that_does_not_read() -> None:
    async def test() -> None:
        async with serving() as (head, there), raw(there.port) as ws:
            handshake = NodeHandshake(TOKEN, JOIN, "there")
            await ws.send_str(handshake.answer((await ws.receive()).data))
            await until(lambda: head.links)
            longest = 0.0
            for number in range(5000):
                before = time.monotonic()
                there.send(1, Stop(number, "x" * 1000, False))
                longest = max(longest, time.monotonic() - before)
                if number % 100 == 0:
                    await asyncio.sleep(0)
                if not head.links:
                    break
            assert longest < 0.5
            await until(lambda: not head.links)
            assert head.heard[-1] == ("lost", sockets.STUCK)

    run(test)


def test_a_node_never_waits_for_a_head_that_does_not_read() -> None:
    async def test() -> None:
        welcomed = asyncio.Event()

        async def head(request: aiohttp.web.BaseRequest) -> aiohttp.web.WebSocketResponse:
            ws = aiohttp.web.WebSocketResponse()
            await ws.prepare(request)
            handshake = HeadHandshake(TOKEN, "instance-a", "here", "there")
            await ws.send_str(handshake.challenge)
            handshake.receive(await ws.receive_str())
            await ws.send_str(handshake.welcome()[0])
            assert request.transport is not None
            request.transport.pause_reading()
            await welcomed.wait()
            return ws

        http = aiohttp.web.Server(head)
        listening = await asyncio.get_running_loop().create_server(http, "127.0.0.1", 0)
        before = open_files()
        async with listening, connecting(listening.sockets[0].getsockname()[1]) as (node, here):
            await until(lambda: node.heard)
            for number in range(200):
                here.send(Failed(number, "x" * 60000, []))
                await asyncio.sleep(0)
            assert await node.ending() == ("disconnected", sockets.STUCK)
            await until(lambda: open_files() <= before + 1)  # the head's end, which has noticed nothing
            welcomed.set()
            await until(lambda: open_files() <= before)
        await http.shutdown(1)

    run(test)


@pytest.mark.slow
def test_two_thousand_half_open_connections_are_bounded_and_gone_in_time_and_a_member_joins_meanwhile() -> None:
    request = b"GET /control HTTP/1.1\r\nHost: x\r\n"
    openings = [
        b"",
        b"GET",
        request,
        request + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n",
    ]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip(f"the hard limit of open files is {hard}; this test holds 2000 connections")

    async def test() -> None:
        async with serving() as (head, there), contextlib.AsyncExitStack() as stack:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            before = open_files()
            held = []
            loop = asyncio.get_running_loop()
            for number in range(2000):
                stranger = stack.enter_context(socket.socket())
                stranger.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    stranger.connect(("127.0.0.1", there.port))
                held.append((stranger, openings[number % len(openings)]))
                if number % 50 == 0:
                    await asyncio.sleep(0)
            for stranger, opening in held:
                with contextlib.suppress(OSError):
                    await loop.sock_sendall(stranger, opening)
            async with connecting(there.port) as (node, _here):
                await until(lambda: node.heard == [("connected", "instance-a")], 2)
                await asyncio.sleep(0.2)
                assert open_files() - before <= 2000 + server.MAX_STRANGERS + 10
                await until(lambda: open_files() - before <= 2000 + 4, sockets.HANDSHAKE_S + 2)
                assert head.links
                assert len(node.heard) == 1

    run(test)


def test_an_answer_ends_its_connection() -> None:
    async def test() -> None:
        async with serving() as (_head, there):
            reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(), sockets.HANDSHAKE_S / 2)).endswith(b"ok\n")
            writer.close()

    run(test)


def test_a_connection_that_trickles_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.5)

    async def test() -> None:
        async with serving() as (_head, there):
            _reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
            started = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() - started < 5:
                    writer.write(b"G")
                    await writer.drain()
                    await asyncio.sleep(0.05)
            assert time.monotonic() - started < 2
            writer.close()

    run(test)


def test_a_head_without_a_file_descriptor_left_gives_up_strangers_and_not_members() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def test() -> None:
        async with serving() as (head, there), connecting(there.port) as (node, here):
            await until(lambda: node.heard)
            with contextlib.ExitStack() as stack:
                held = [stack.enter_context(socket.socket()) for _number in range(60)]
                resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1].fileno() + 20, hard))
                for stranger in held:
                    stranger.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        stranger.connect(("127.0.0.1", there.port))
                await asyncio.sleep(0.3)
                here.send(Ping(1))
                await until(lambda: head.heard[-1] == ("received", Ping(1)))
            async with connecting(there.port) as (other, _here):
                await until(lambda: other.heard == [("connected", "instance-a")])

    try:
        run(test)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Connection:
    def __init__(self) -> None:
        self.closed = False

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_among_too_many_strangers_the_oldest_of_the_crowd_gives_way() -> None:
    async def test() -> None:
        waiting = strangers.Strangers(3, 60)
        member, admitted, *crowd = [Connection() for _number in range(7)]
        waiting.add(admitted, "10.0.0.3")
        waiting.admit(admitted)
        waiting.add(member, "10.0.0.2")
        for connection in crowd:
            waiting.add(connection, "10.0.0.66")
        assert [connection.closed for connection in [admitted, member, *crowd]] == [
            False,
            False,
            *[True] * 3,
            False,
            False,
        ]
        waiting.end_all()
        assert member.closed
        assert not admitted.closed

    run(test)


def test_a_stranger_sees_only_whether_it_lives_and_is_ready() -> None:
    async def test() -> None:
        async with serving() as (head, there):
            assert (await ask(there.port, "/livez"))[:2] == (200, "ok\n")
            assert (await ask(there.port, "/readyz"))[:2] == (503, "not ready\n")
            head.is_ready = True
            assert (await ask(there.port, "/readyz"))[:2] == (200, "ready\n")
            for path in ("/status", "/metrics"):
                for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": TOKEN.decode()}):
                    status, body, answer = await ask(there.port, path, **headers)
                    assert (status, body) == (401, "the group token is needed\n")
                    assert answer["Server"] == "stack-node"
            assert (await ask(there.port, "/control"))[0] == 426
            assert (await ask(there.port, "/"))[0] == 404

    run(test)


def test_who_has_the_token_sees_status_and_metrics() -> None:
    async def test() -> None:
        async with serving() as (_head, there):
            bearer = {"Authorization": f"Bearer {TOKEN.decode()}"}
            status, body, _headers = await ask(there.port, "/status", **bearer)
            assert (status, json.loads(body)) == (200, {"phase": "forming"})
            status, body, headers = await ask(there.port, "/metrics", **bearer)
            assert (status, body) == (200, "up 1\n")
            assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"

    run(test)


def test_without_a_token_only_the_heads_own_host_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with serving(b"") as (_head, there):
            assert (await ask(there.port, "/status"))[0] == 200
            monkeypatch.setattr(server, "_ends", lambda _transport: ("10.0.0.9", "10.0.0.1"))
            assert (await ask(there.port, "/status"))[0] == 403
            assert (await ask(there.port, "/metrics", Authorization="Bearer "))[0] == 403
            monkeypatch.setattr(server, "_ends", lambda _transport: ("10.0.0.1", "10.0.0.1"))
            assert (await ask(there.port, "/status"))[0] == 200

    run(test)


def test_garbage_is_answered_without_a_word_about_versions_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def test() -> None:
        async with serving() as (_head, there):
            for garbage in (b"\x16\x03\x01\x02\x00" * 20, b"GET / HTTP/9.9\r\n\r\n", b"A" * 20000 + b"\r\n\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
                writer.write(garbage)
                with contextlib.suppress(ConnectionError):
                    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
                    assert b"aiohttp" not in answer
                    assert answer.endswith(b"bad request\n")
                writer.close()

    run(test)
    assert capfd.readouterr() == ("", "")


def test_a_fault_in_a_callback_is_reported_to_the_loop_and_ends_only_that_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults: list[str] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: faults.append(str(context["exception"]))
        )
        async with serving() as (head, there):
            monkeypatch.setattr(head, "status", lambda: 1 / 0)
            monkeypatch.setattr(head, "received", lambda _link, _message: [1].remove(2))
            assert (await ask(there.port, "/status", Authorization=f"Bearer {TOKEN.decode()}"))[0] == 500
            async with connecting(there.port) as (node, here):
                await until(lambda: node.heard)
                here.send(Ping(1))
                await node.ending()
            await until(lambda: not head.links)
            assert head.heard[-1] == ("lost", "a fault in the head: ValueError('list.remove(x): x not in list')")
            async with connecting(there.port) as (node, _here):
                await until(lambda: node.heard)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(test(), 60))
    assert faults == ["division by zero", "list.remove(x): x not in list"]


def test_a_fault_in_a_nodes_callback_is_reported_to_the_loop_and_ends_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults: list[str] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _loop, context: faults.append(str(context["exception"]))
        )
        async with serving() as (head, there), connecting(there.port) as (node, _here):
            monkeypatch.setattr(node, "received", lambda _message: 1 / 0)
            await until(lambda: node.heard)
            there.send(head.links[0], Pong(1))
            assert await node.ending() == ("disconnected", f"the head at 127.0.0.1:{there.port}: division by zero")

    asyncio.run(asyncio.wait_for(test(), 60))
    assert faults == ["division by zero"]


def test_a_port_that_is_taken_is_an_error_at_once_and_free_after_the_close() -> None:
    async def test() -> None:
        async with serving() as (_head, there):
            again = Server("127.0.0.1", there.port, TOKEN, "instance-c", Head())
            with pytest.raises(OSError, match="Address already in use"):
                await again.start()
            await again.close()
        await again.start()
        await again.close()

    run(test)


def test_an_address_that_this_host_does_not_have_is_an_error() -> None:
    async def test() -> None:
        with pytest.raises(OSError, match="Cannot assign requested address"):
            await Server("192.0.2.1", 0, TOKEN, "instance-a", Head()).start()

    run(test)


def test_an_ipv4_address_is_written_as_one_whatever_socket_it_came_through() -> None:
    assert server._plain("::ffff:10.0.0.1") == "10.0.0.1"
    assert server._plain("10.0.0.1") == "10.0.0.1"
    assert server._plain("fe80::1%eth0") == "fe80::1%eth0"
