"""What both ends of the control channel do with their WebSocket: wait for a text, and send without ever waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import WSMsgType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .channel import Session
    from .messages import Message

OUTBOX_LIMIT = 1 << 20  # characters that wait for a peer that does not read
SEND_BUFFER = 65536  # bytes, of the socket: what waits is better counted here than hidden in the kernel
HANDSHAKE_S = 5.0
STUCK = f"the peer does not read: more than {OUTBOX_LIMIT >> 20} MiB wait for it"


class Receiver(Protocol):
    """A WebSocket of aiohttp's server or client."""

    async def receive(self) -> Any:
        """The next message, a `WSMessage`."""


class PeerError(Exception):
    """The connection has ended or the peer broke the protocol; a sentence that says which."""


async def next_text(socket: Receiver) -> str:
    """The next text; raises PeerError when there is none."""
    message = await socket.receive()
    if message.type is WSMsgType.TEXT:
        text: str = message.data
        return text
    if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
        raise PeerError("the peer closed the connection")
    if message.type is WSMsgType.ERROR:
        raise PeerError(f"the connection broke: {message.data or type(message.data).__name__}")
    raise PeerError("the peer sent something that is no text")


async def next_message(socket: Receiver, session: Session, kinds: tuple[type[Message], ...]) -> Message:
    """The next message; raises PeerError when there is none, or none of these kinds."""
    try:
        message = session.open(await next_text(socket))
    except ValueError as error:
        raise PeerError(f"not understood: {error}") from None
    if not isinstance(message, kinds):
        raise PeerError(f"not understood: a {type(message).__name__.lower()} from this side")
    return message


class Outbox:
    """Texts on their way to a peer, bounded."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque()
        self._size = 0
        self._filled = asyncio.Event()

    def put(self, text: str) -> bool:
        """Take a text; False, and nothing taken, when too much waits already."""
        if self._size + len(text) > OUTBOX_LIMIT:
            return False
        self._texts.append(text)
        self._size += len(text)
        self._filled.set()
        return True

    async def run(self, send: Callable[[str], Awaitable[None]]) -> None:
        """Send one after another, until cancelled or the connection is gone (which its reader notices and tells)."""
        with contextlib.suppress(OSError, RuntimeError):
            while True:
                await self._filled.wait()
                while self._texts:
                    text = self._texts.popleft()
                    await send(text)
                    self._size -= len(text)
                self._filled.clear()
