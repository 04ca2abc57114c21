"""The control port and a node's connection to it, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from stack_node import client, server, sockets
from stack_node.channel import MAX_FRAME, HeadHandshake, NodeHandshake
from stack_node.messages import PROTOCOL, Failed, Ping, Pong, Start, Stop, ToHead
from tests.node.channel_stage import (
    JOIN,
    TOKEN,
    Says,
    connecting,
    in_the_middle,
    open_files,
    raw,
    run,
    serving,
    until,
)


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
