from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from stack_node import reach
from stack_node.reach import Listener

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP, EPOCH = "llama", 4
PATIENCE_S = 0.3


def tried(peers: list[list[Any]], timeout: float = PATIENCE_S) -> list[list[Any]]:
    return asyncio.run(reach.try_all(GROUP, EPOCH, 0, peers, timeout))


def against(listener: Listener, address: str = "127.0.0.1") -> list[list[Any]]:
    """What rank 0 finds at a listener."""

    async def both() -> list[list[Any]]:
        port = await listener.open(address)
        try:
            return await reach.try_all(GROUP, EPOCH, 0, [[1, address, port]])
        finally:
            await listener.close()

    return asyncio.run(both())


@contextmanager
def silent() -> Iterator[int]:
    """A port where the kernel takes connections and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def full() -> Iterator[int]:
    """A port where connections get no answer at all, as behind a firewall that drops: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        port = server.getsockname()[1]
        waiting = []
        for _ in range(3):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            waiting.append(client)
        try:
            yield port
        finally:
            for client in waiting:
                client.close()


async def answering(answer: bytes) -> list[list[Any]]:
    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(say, "127.0.0.1", 0)
    try:
        return await reach.try_all(GROUP, EPOCH, 0, [[1, "127.0.0.1", server.sockets[0].getsockname()[1]]])
    finally:
        server.close()


def test_all_are_reached() -> None:
    async def trial() -> list[list[list[Any]]]:
        listeners = [Listener(GROUP, EPOCH) for _ in range(3)]
        peers = [[rank, "127.0.0.1", await listener.open("127.0.0.1")] for rank, listener in enumerate(listeners)]
        try:
            return await asyncio.gather(*(reach.try_all(GROUP, EPOCH, rank, peers) for rank in range(3)))
        finally:
            for listener in listeners:
                await listener.close()

    assert asyncio.run(trial()) == [[], [], []]


def test_more_than_are_tried_at_once() -> None:
    async def trial() -> list[list[Any]]:
        listener = Listener(GROUP, EPOCH)
        port = await listener.open("127.0.0.1")
        try:
            return await reach.try_all(
                GROUP, EPOCH, 0, [[rank, "127.0.0.1", port] for rank in range(reach.AT_ONCE * 3)]
            )
        finally:
            await listener.close()

    assert asyncio.run(trial()) == []


def test_ipv6() -> None:
    assert against(Listener(GROUP, EPOCH), "::1") == []


def test_a_node_alone_has_nobody_to_reach() -> None:
    assert tried([]) == []
    assert tried([[0, "127.0.0.1", 1]]) == []


def test_a_closed_listener_refuses() -> None:
    async def trial() -> list[list[Any]]:
        listener = Listener(GROUP, EPOCH)
        port = await listener.open("127.0.0.1")
        await listener.close()
        await listener.close()
        return await reach.try_all(GROUP, EPOCH, 0, [[1, "127.0.0.1", port]])

    [[rank, address, error]] = asyncio.run(trial())
    assert (rank, address) == (1, "127.0.0.1")
    assert "refused: nothing listens there, or a firewall says so" in error


def test_a_firewall_that_drops_is_named_for_its_pair_alone() -> None:
    async def trial(dropped: int) -> list[list[Any]]:
        listener = Listener(GROUP, EPOCH)
        port = await listener.open("127.0.0.1")
        try:
            return await reach.try_all(GROUP, EPOCH, 0, [[1, "127.0.0.1", port], [2, "127.0.0.1", dropped]], PATIENCE_S)
        finally:
            await listener.close()

    with full() as port:
        assert asyncio.run(trial(port)) == [
            [2, "127.0.0.1", f"port {port}: no answer within 0.3 s: a firewall, perhaps"]
        ]


def test_many_that_drop_take_no_longer_than_one() -> None:
    async def trial(port: int) -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        start = loop.time()
        failed = await reach.try_all(GROUP, EPOCH, 0, [[rank, "127.0.0.1", port] for rank in range(1, 200)], 0.6)
        return len(failed), loop.time() - start

    with full() as port:
        count, took = asyncio.run(trial(port))
    assert count == 199
    assert took < 5  # 199 one after the other would take two minutes


def test_something_that_takes_connections_and_says_nothing() -> None:
    with silent() as port:
        [[_, _, error]] = tried([[1, "127.0.0.1", port]])
    assert "connected, but nothing was said within 0.3 s" in error


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "something else answers there"),
        (b"\xff\xfe\n", "something else answers there"),
        (b"gen-stack-reach\n", "something else answers there"),
        (b"x" * 100_000, "something else answers there"),
        (b"", "the connection was closed without a word"),
        (b"gen-stack-reach llama 3\n", "it answers for epoch 3, not 4"),
        (b"gen-stack-reach qwen 4\n", "a node of another group answers there: 'qwen', not 'llama'"),
        (b"gen-stack-reach llama 4", "something else answers there"),
    ],
)
def test_a_wrong_answer(answer: bytes, words: str) -> None:
    [[rank, _, error]] = asyncio.run(answering(answer))
    assert rank == 1
    assert words in error


def test_a_listener_of_an_earlier_epoch() -> None:
    [[_, _, error]] = against(Listener(GROUP, EPOCH - 1))
    assert error.endswith("it answers for epoch 3, not 4")


def test_a_group_with_a_space_in_its_name() -> None:
    assert reach.judge(reach.greeting("my group", 2), "my group", 2) is None


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EHOSTUNREACH, "no route to it"),
        (errno.ENETUNREACH, "no route to its network"),
        (errno.EADDRNOTAVAIL, "Cannot assign requested address"),
    ],
)
def test_the_kernels_refusals_in_words(number: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(number, "Connect call failed ('10.0.0.1', 5)")

    monkeypatch.setattr("asyncio.open_connection", refuse)
    [[_, _, error]] = tried([[1, "10.0.0.1", 5]])
    assert error.startswith(f"port 5: {words}")


def test_a_port_that_is_none() -> None:
    [[_, _, error]] = tried([[1, "127.0.0.1", 70000]])
    assert "port must be 0-65535" in error
