"""Whether the nodes can reach each other: each listens for a moment, and all connect to all, both ways.

What runs into a firewall or a wrong address here would do so in the engine's rendezvous half an hour later, without
the name of the pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

AT_ONCE = 64  # connections in the making
_LONGEST = 256  # bytes of a greeting
_WORD = "gen-stack-reach"

# The limit, because asyncio.TimeoutError became the built-in one only in Python 3.11.
_TIMEOUTS = (asyncio.TimeoutError, TimeoutError)

_WORDS = {
    errno.ECONNREFUSED: "refused: nothing listens there, or a firewall says so",
    errno.EHOSTUNREACH: "no route to it: the host is down or not in this network, or a firewall says so",
    errno.ENETUNREACH: "no route to its network",
    errno.ECONNRESET: "the connection was cut",
}


def greeting(group: str, epoch: int) -> bytes:
    """What a listener says to everyone who connects."""
    return f"{_WORD} {group} {epoch}\n".encode()


class Listener:
    """Greets everyone who connects to a port of this node."""

    def __init__(self, group: str, epoch: int) -> None:
        self._greeting = greeting(group, epoch)
        self._server: asyncio.AbstractServer | None = None

    async def open(self, address: str) -> int:
        """Listen at a numeric address of this node; returns the port, which the kernel chose. Raises OSError."""
        self._server = await asyncio.start_server(self._greet, address, 0, backlog=1024)
        return int(self._server.sockets[0].getsockname()[1])

    async def _greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._greeting)  # fits any socket's buffer, so there is nothing to wait for
        writer.close()

    async def close(self) -> None:
        """Listen no more; nothing happens when it does not listen."""
        if self._server is not None:
            self._server.close()
            self._server = None


async def try_all(
    group: str, epoch: int, own_rank: int, peers: Sequence[Sequence[Any]], timeout: float = 8.0
) -> list[list[Any]]:
    """Connect to every peer, each [rank, address, port]; returns [rank, address, error] of those that failed.

    Takes at most `timeout` seconds. Raises nothing.
    """
    others = [peer for peer in peers if peer[0] != own_rank]
    each = timeout / max(1, math.ceil(len(others) / AT_ONCE))
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(address: str, port: int) -> str | None:
        async with limit:
            return await _try(group, epoch, address, port, each)

    errors = await asyncio.gather(*(one(address, port) for _, address, port in others))
    return [[rank, address, error] for (rank, address, _), error in zip(others, errors, strict=True) if error]


async def _try(group: str, epoch: int, address: str, port: int, timeout: float) -> str | None:
    """None, or what went wrong."""
    end = asyncio.get_running_loop().time() + timeout
    where = f"port {port}"
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port, limit=_LONGEST), timeout)
    except _TIMEOUTS:
        return f"{where}: no answer within {timeout:g} s: a firewall, perhaps"
    except (OSError, OverflowError) as error:  # OverflowError: no port number
        return f"{where}: {_words(error)}"
    try:
        line = await asyncio.wait_for(reader.readline(), max(0.0, end - asyncio.get_running_loop().time()))
    except _TIMEOUTS:
        return f"{where}: connected, but nothing was said within {timeout:g} s: something else listens there, perhaps"
    except OSError as error:
        return f"{where}: {_words(error)}"
    except ValueError:  # longer than any greeting
        line = b"?"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    problem = judge(line, group, epoch)
    return None if problem is None else f"{where}: {problem}"


def judge(line: bytes, group: str, epoch: int) -> str | None:
    """What is wrong with a greeting; None when it is the expected one."""
    if line == greeting(group, epoch):
        return None
    word, _, rest = line.decode(errors="replace").rstrip("\n").partition(" ")
    other_group, _, other_epoch = rest.rpartition(" ")
    if not line:
        return "the connection was closed without a word: something else listens there, perhaps"
    if word != _WORD or not other_epoch.isdecimal() or not line.endswith(b"\n"):
        return "something else answers there"
    if other_group != group:
        return f"a node of another group answers there: {other_group!r}, not {group!r}"
    return f"it answers for epoch {other_epoch}, not {epoch}"


def _words(error: Exception) -> str:
    number = getattr(error, "errno", None) or 0
    if number in errno.errorcode:  # asyncio's own text would repeat the address
        return _WORDS.get(number) or os.strerror(number)
    return str(error)
