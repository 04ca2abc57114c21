"""The head's control port: nodes join at /control, people and Prometheus ask at the other paths.

A connection is a stranger's until it has proved the group token. Strangers have five seconds and a bounded number of
places, whatever they send or do not send; the places are counted from the TCP connection on, which is why this accepts
connections itself instead of leaving that to aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import logging
import socket
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, cast, get_args

from aiohttp import web

from .channel import MAX_FRAME, HeadHandshake, RefusedError, Session
from .messages import ToHead
from .sockets import HANDSHAKE_S, SEND_BUFFER, STUCK, Outbox, PeerError, next_message, next_text
from .strangers import Strangers

if TYPE_CHECKING:
    from collections.abc import Callable

    from .messages import Join, ToNode

MAX_STRANGERS = 256
SAY_AGAIN_S = 60.0
_BACKLOG = 1024
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NO_ROOM_S = 0.1
_CLOSE_S = 1.0  # for the peer's part of a WebSocket's end
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TO_HEAD = get_args(ToHead)

_silent = logging.getLogger(f"{__name__}.http")  # what aiohttp would say about garbage
_silent.disabled = True


class Callbacks(Protocol):
    """What the head's control port asks and tells; all on the loop's thread.

    Each link that joined is reported lost exactly once, also after `Server.drop`, and nothing of it is received after
    that. `joined` follows its `judge` at once, so that two nodes cannot both be found good for the same place.
    """

    def judge(self, join: Join, peer: str) -> str | None:
        """Why this node, which has proved the token and comes from the address `peer`, is refused; None: let it in."""

    def joined(self, link: int, join: Join) -> None:
        """A node is in; it is spoken to under this number."""

    def received(self, link: int, message: ToHead) -> None:
        """A node said something."""

    def lost(self, link: int, why: str) -> None:
        """A node's connection has ended."""

    def ready(self) -> tuple[bool, str]:
        """Whether the group is ready, and a sentence about it (which strangers do not see)."""

    def status(self) -> dict[str, Any]:
        """What /status answers."""

    def metrics(self) -> bytes:
        """What /metrics answers, in Prometheus' text format."""


@dataclass
class _Link:
    socket: web.WebSocketResponse
    transport: asyncio.Transport
    session: Session
    outbox: Outbox = field(default_factory=Outbox)
    end: str | None = None  # why it ends, once that is decided

    def drop(self, why: str) -> None:
        if self.end is None:
            self.end = why
        self.transport.abort()


class Server:
    """The control port."""

    def __init__(
        self,
        address: str,
        port: int,
        token: bytes,
        instance: str,
        callbacks: Callbacks,
        *,
        say: Callable[[str], None] = lambda _sentence: None,
    ) -> None:
        """`say` gets a sentence about nodes turned away for their token or version, once a minute for each address."""
        self._address = address
        self.port = port  # the real one once started, where 0 was asked for
        self._token = token
        self._instance = instance
        self._callbacks = callbacks
        self._say = say
        self._said: dict[str, float] = {}
        self._strangers = Strangers(MAX_STRANGERS, HANDSHAKE_S)
        self._links: dict[int, _Link] = {}
        self._numbers = count(1)
        self._http: web.Server | None = None
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; raises OSError when that cannot be done, now or ever (a later call tries again)."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(
            self._address, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
        family, kind, protocol, _name, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setblocking(False)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self.port = listener.getsockname()[1]
        self._http = web.Server(self._handle)
        self._accepting = asyncio.create_task(self._accept(listener, self._http))

    async def close(self) -> None:
        """End every connection and the listening."""
        if self._accepting is None or self._listener is None or self._http is None:
            return
        self._accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._accepting
        self._listener.close()
        self._strangers.end_all()
        for number in list(self._links):
            self.drop(number, "the head ends")
        await self._http.shutdown(_CLOSE_S)
        self._accepting = None

    def send(self, link: int, message: ToNode) -> None:
        """Say something to a node; never waits. A link that is gone is ignored, one that is stuck is dropped."""
        there = self._links.get(link)
        if there is None or there.end is not None:
            return
        try:
            if not there.outbox.put(there.session.seal(message)):
                there.drop(STUCK)
        except ValueError as error:
            there.drop(f"not sent: {error}")

    def drop(self, link: int, why: str) -> None:
        """End a node's connection; a link that is gone is ignored."""
        there = self._links.get(link)
        if there is not None:
            there.drop(why)

    async def _accept(self, listener: socket.socket, http: web.Server) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._strangers.end_all()
                    await asyncio.sleep(_NO_ROOM_S)
                continue
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                transport, _protocol = await loop.connect_accepted_socket(lambda: _Http(http, loop), connection)
            except OSError:  # it has gone already
                connection.close()
                continue
            self._strangers.add(transport, _plain(address[0]))

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        if request.method != "GET" or transport is None:
            return _answer(405, "method not allowed\n")
        match request.path:
            case "/livez":
                return _answer(200, "ok\n")
            case "/readyz":
                ready, _why = self._callbacks.ready()
                return _answer(200, "ready\n") if ready else _answer(503, "not ready\n")
            case "/status":
                return self._denied(request, transport) or _answer(
                    200, json.dumps(self._callbacks.status()), "application/json"
                )
            case "/metrics":
                return self._denied(request, transport) or _answer(200, self._callbacks.metrics(), _METRICS_TYPE)
            case "/control":
                return await self._control(request, transport)
        return _answer(404, "not found\n")

    def _denied(self, request: web.BaseRequest, transport: asyncio.Transport) -> web.Response | None:
        if not self._token:
            peer, own = _ends(transport)
            local = peer == own or ip_address(peer.partition("%")[0]).is_loopback
            return None if local else _answer(403, "without a group token this is for the head's own host\n")
        scheme, _space, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.encode(errors="surrogateescape"), self._token):
            return None
        answer = _answer(401, "the group token is needed\n")
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    async def _control(self, request: web.BaseRequest, transport: asyncio.Transport) -> web.StreamResponse:
        # No compression and no pings of its own: pings are messages, so that they prove more than an open socket.
        ws = web.WebSocketResponse(timeout=_CLOSE_S, autoping=False, compress=False, max_msg_size=MAX_FRAME + 1)
        if not ws.can_prepare(request):
            return _answer(426, "this is for nodes\n")
        ws.headers["Server"] = "stack-node"
        peer, own = _ends(transport)
        handshake = HeadHandshake(self._token, self._instance, own, peer)
        try:
            await ws.prepare(request)
            join = await self._proved(ws, handshake, peer)
        except (PeerError, ValueError, OSError, RuntimeError, web.HTTPException):
            transport.abort()  # a stranger that talks nonsense, or has gone
            return ws
        if join is not None:
            await self._decide(ws, transport, handshake, join, peer)
        return ws

    async def _proved(self, ws: web.WebSocketResponse, handshake: HeadHandshake, peer: str) -> Join | None:
        """Who is there, once that is proved; None when it was turned away."""
        await ws.send_str(handshake.challenge)
        try:
            return handshake.receive(await next_text(ws))
        except RefusedError as refused:
            self._say_sometimes(peer, str(refused))
            if refused.answer is not None:
                await ws.send_str(refused.answer)
            await ws.close()
        return None

    async def _decide(
        self, ws: web.WebSocketResponse, transport: asyncio.Transport, handshake: HeadHandshake, join: Join, peer: str
    ) -> None:
        reason = self._callbacks.judge(join, peer)
        if reason is not None:
            with contextlib.suppress(OSError, RuntimeError):  # it has gone
                await ws.send_str(handshake.refuse(reason))
                await ws.close()
            return
        self._strangers.admit(transport)
        welcome, session = handshake.welcome()
        link = _Link(ws, transport, session)
        link.outbox.put(welcome)
        await self._serve(link, join)

    async def _serve(self, link: _Link, join: Join) -> None:
        number = next(self._numbers)
        self._links[number] = link
        sending = asyncio.create_task(link.outbox.run(link.socket.send_str))
        try:
            self._callbacks.joined(number, join)
            while link.end is None:
                message = await next_message(link.socket, link.session, _TO_HEAD)
                if link.end is None:
                    self._callbacks.received(number, cast("ToHead", message))
        except PeerError as error:
            link.drop(str(error))
        except Exception as error:
            link.drop(f"a fault in the head: {error!r}")
            _report(error)
        finally:
            link.drop("the head ends")
            del self._links[number]
            sending.cancel()
            self._callbacks.lost(number, cast("str", link.end))

    def _say_sometimes(self, peer: str, sentence: str) -> None:
        now = asyncio.get_running_loop().time()
        self._said = {address: at for address, at in self._said.items() if now - at < SAY_AGAIN_S}
        if peer not in self._said and len(self._said) < MAX_STRANGERS:
            self._said[peer] = now
            self._say(sentence)


class _Http(web.RequestHandler):
    """One connection's HTTP: one request, and nothing about versions or exceptions in an error's answer."""

    __slots__ = ()

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server, loop=loop, access_log=None, logger=_silent, lingering_time=0)  # type: ignore[arg-type]

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002
    ) -> web.StreamResponse:
        """The answer to garbage, or to a fault of this program; the latter is reported to the loop."""
        if status == 500 and exc is not None and not isinstance(exc, ConnectionError):
            _report(exc)
        if request.writer.output_size > 0:
            raise ConnectionError("something was answered already")
        return _answer(status, "bad request\n" if status < 500 else "a fault in the head\n")


def _report(error: BaseException) -> None:
    asyncio.get_running_loop().call_exception_handler(
        {"message": "a fault in the head's control port", "exception": error}
    )


def _answer(status: int, body: str | bytes, content_type: str = "text/plain; charset=utf-8") -> web.Response:
    data = body if isinstance(body, bytes) else body.encode()
    headers = {"Content-Type": content_type, "Server": "stack-node", "Cache-Control": "no-store"}
    answer = web.Response(status=status, body=data, headers=headers)
    answer.force_close()
    return answer


def _ends(transport: asyncio.Transport) -> tuple[str, str]:
    """The addresses of peer and head on a connection; of a connection that has gone, nobody's."""
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    return _plain(peer[0]) if peer else "::", _plain(own[0]) if own else ""


def _plain(address: str) -> str:
    """An address as people write it: an IPv4 address that came through an IPv6 socket is an IPv4 address."""
    ip = ip_address(address)
    return str(ip.ipv4_mapped) if isinstance(ip, IPv6Address) and ip.ipv4_mapped else address
