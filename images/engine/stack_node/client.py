"""A node's connection to the head's control port; rank 0 has one too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast, get_args

import aiohttp
from yarl import URL

from .channel import MAX_FRAME, NodeHandshake, RefusedError, Session
from .messages import Failed, ToNode
from .sockets import HANDSHAKE_S, SEND_BUFFER, STUCK, Outbox, PeerError, next_message, next_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from .messages import Join, ToHead

CONNECT_S = 5.0
_CLOSE_S = 1.0
_TO_NODE = get_args(ToNode)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing throws away what the peer does not take


class Callbacks(Protocol):
    """What a node hears of its connection; all on the loop's thread.

    Every attempt ends with exactly one of: connected and later disconnected, refused, disconnected. By then the attempt
    is over and `Client.connect` may be called.
    """

    def connected(self, head_instance: str) -> None:
        """The head has proved the token and let this node in."""

    def refused(self, reason: str) -> None:
        """The head, or this node, decided against it; a sentence for people."""

    def received(self, message: ToNode) -> None:
        """The head said something."""

    def disconnected(self, why: str) -> None:
        """The head cannot be reached, or the connection has ended."""


class Client:
    """The connection, tried once for each call of `connect`."""

    def __init__(
        self, address: str, port: int, token: bytes, make_join: Callable[[], Join], callbacks: Callbacks
    ) -> None:
        self._url = URL.build(scheme="http", host=address, port=port, path="/control")
        self._head = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        self._token = token
        self._make_join = make_join
        self._callbacks = callbacks
        self._attempt: asyncio.Task[None] | None = None
        self._end: str | None = None  # why this side ends the attempt
        self._session: Session | None = None  # while connected
        self._outbox = Outbox()

    def connect(self) -> None:
        """Start an attempt, unless one is running."""
        if self._attempt is None:
            self._end = None
            self._outbox = Outbox()
            self._attempt = asyncio.create_task(self._run())
            self._attempt.add_done_callback(self._over)

    def send(self, message: ToHead) -> None:
        """Say something to the head; never waits. Without a connection it is ignored, a stuck one is dropped."""
        if self._session is None or self._end is not None:
            return
        try:
            if not self._outbox.put(_seal(self._session, message)):
                self.drop(STUCK)
        except ValueError as error:
            self.drop(f"not sent: {error}")

    def drop(self, why: str) -> None:
        """End the attempt, at whatever point it is; ignored when there is none."""
        if self._attempt is not None and self._end is None:
            self._end = why
            self._attempt.cancel()

    async def close(self) -> None:
        """End the attempt and wait for its end."""
        attempt = self._attempt
        if attempt is not None:
            self.drop("this node ends")
            await asyncio.wait([attempt])

    async def _run(self) -> None:
        connector = aiohttp.TCPConnector(use_dns_cache=False, force_close=True)
        session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, raise_for_status=False
        )
        try:
            connecting = session.ws_connect(self._url, autoping=False, compress=0, max_msg_size=MAX_FRAME + 1)
            ws = await asyncio.wait_for(connecting, CONNECT_S)
            try:
                await self._talk(ws)
            finally:
                _reset(ws)
                await ws.close()
        finally:
            await session.close()

    async def _talk(self, ws: aiohttp.ClientWebSocketResponse[bool]) -> None:
        own = ws.get_extra_info("socket")
        if own is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        handshake = NodeHandshake(self._token, self._make_join(), self._head)
        session = await asyncio.wait_for(_shake_hands(ws, handshake), HANDSHAKE_S)
        if self._end is not None:  # before Python 3.12 wait_for may lose a cancellation that comes just at its end
            return
        self._session = session
        sending = asyncio.create_task(self._outbox.run(ws.send_str))
        try:
            self._callbacks.connected(handshake.head_instance)
            while self._end is None:
                message = await next_message(ws, session, _TO_NODE)
                if self._end is None:
                    self._callbacks.received(cast("ToNode", message))
        finally:
            self._session = None
            sending.cancel()

    def _over(self, attempt: asyncio.Task[None]) -> None:
        self._attempt = None
        error = None if attempt.cancelled() else attempt.exception()
        if self._end is not None or error is None:
            self._callbacks.disconnected(self._end or "this node ends")
        elif isinstance(error, RefusedError):
            self._callbacks.refused(str(error))
        else:
            self._callbacks.disconnected(self._sentence(error))

    def _sentence(self, error: BaseException) -> str:
        if isinstance(error, aiohttp.ClientConnectorError):
            number = error.os_error.errno
            reason = os.strerror(number) if number is not None and number > 0 else str(error.os_error)
            return f"the head at {self._head} cannot be reached: {reason}"
        if isinstance(error, aiohttp.WSServerHandshakeError):
            return f"what answers at {self._head} is no head (HTTP status {error.status})"
        if isinstance(error, asyncio.TimeoutError):
            return f"the head at {self._head} does not answer within {CONNECT_S:.0f} s"
        if not isinstance(error, (PeerError, ConnectionError, aiohttp.ClientError)):
            asyncio.get_running_loop().call_exception_handler(
                {"message": "a fault in the node's connection to the head", "exception": error}
            )
        return f"the head at {self._head}: {str(error) or type(error).__name__}"


async def _shake_hands(ws: aiohttp.ClientWebSocketResponse[bool], handshake: NodeHandshake) -> Session:
    try:
        answer = handshake.answer(await next_text(ws))
    except RefusedError as refused:
        if refused.answer is not None:
            await ws.send_str(refused.answer)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ws.close(), _CLOSE_S)  # a reset might overtake the answer
        raise
    except ValueError as error:
        raise PeerError(f"not understood: {error}") from None
    await ws.send_str(answer)
    try:
        return handshake.finish(await next_text(ws))
    except ValueError as error:
        raise PeerError(f"not understood: {error}") from None


def _reset(ws: aiohttp.ClientWebSocketResponse[bool]) -> None:
    """End the socket now, also when the peer does not take what was sent; asyncio would wait for that."""
    own = ws.get_extra_info("socket")
    if own is not None:
        with contextlib.suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            own.shutdown(socket.SHUT_RDWR)


def _seal(session: Session, message: ToHead) -> str:
    """The frame; of a log that does not fit, the end, which tells most."""
    try:
        return session.seal(message)
    except ValueError:
        if not isinstance(message, Failed) or not message.log:
            raise
    return _seal(session, replace(message, log=message.log[len(message.log) // 2 + 1 :]))
