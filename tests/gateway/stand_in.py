"""A stand-in for a group's head: its API and its control port, which do as they are told."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

DEATHS = ("before", "500", "middle")


@dataclass
class Head:
    """One head. `death`: how a request ends it: before the answer, with a 500, in the middle of the answer."""

    address: str
    api_port: int
    control_port: int
    ready: bool = True
    death: str = ""
    pause_s: float = 0.05
    seen: list[tuple[str, str]] = field(default_factory=list)
    """Path and Authorization of each request."""
    left: int = 0
    """Requests whose client went away."""

    def start(self) -> None:
        """Listen on both ports."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runners: dict[str, web.AppRunner] = {}
        api = web.Application(client_max_size=2**26)
        api.router.add_route("*", "/{path:.*}", self._answer)
        control = web.Application()
        control.router.add_get("/readyz", self._readyz)
        self._wait(self._listen("api", api, self.api_port))
        self._wait(self._listen("control", control, self.control_port))

    def stop(self) -> None:
        """End."""
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def close(self) -> None:
        """Close both ports, whatever runs."""
        for name in list(self._runners):
            self._wait(self._runners.pop(name).cleanup())

    def _wait(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self, name: str, app: web.Application, port: int) -> None:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, self.address, port).start()
        self._runners[name] = runner

    async def _readyz(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.path, request.headers.get("Authorization", "")))
        body = await request.read()
        assert request.transport is not None
        if self.death == "500":
            return web.json_response({"error": {"message": "EngineCore encountered an issue"}}, status=500)
        if self.death == "before":
            request.transport.abort()
            return web.Response()
        if request.headers.get("X-Stream"):
            return await self._stream(request, int(request.headers["X-Stream"]))
        try:
            await asyncio.sleep(float(request.headers.get("X-Wait", "0")))
        except asyncio.CancelledError:
            self.left += 1
            raise
        return web.json_response({"head": self.address, "bytes": len(body)})

    async def _stream(self, request: web.Request, chunks: int) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        answer.enable_chunked_encoding()
        await answer.prepare(request)
        for number in range(chunks):
            await answer.write(f"data: {number}\n\n".encode())
            await asyncio.sleep(self.pause_s)
            if self.death == "middle" and request.transport is not None:
                request.transport.abort()
                return answer
        await answer.write_eof()
        return answer


def free_port(*addresses: str) -> int:
    """A port that is free on all of these addresses."""
    while True:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        try:
            for address in addresses:
                socket.create_server((address, port)).close()
        except OSError:
            continue
        return port
