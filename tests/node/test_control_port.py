"""The control port towards strangers: what they see, how many there may be, and what one in between cannot do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
from typing import TYPE_CHECKING

import pytest

from stack_node import server, sockets, strangers
from stack_node.channel import NodeHandshake
from stack_node.messages import Ping, Pong
from stack_node.server import Server
from tests.node.channel_stage import (
    JOIN,
    PATIENCE_S,
    TOKEN,
    Head,
    Says,
    ask,
    connecting,
    in_the_middle,
    open_files,
    raw,
    run,
    serving,
    unchanged,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable


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
