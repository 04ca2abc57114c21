"""What the gateway adds and takes by itself: before a stand-in that is as fast as itself, since it is HAProxy too."""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import time
from multiprocessing import get_context
from typing import TYPE_CHECKING

import pytest

from tests.asking import http, soon
from tests.gateway.local import ADDRESSES, LocalGateway
from tests.gateway.stand_in import Head, free_port
from tests.gateway.table import note
from tools.downloads import haproxy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.gateway]
ROUNDS, ROUND_S, CLIENTS = 3, 2.0, 4
BODY = b'{"prompt": "' + b"x" * 2000 + b'"}'
STAND_IN = """\
defaults
    mode http
    timeout client 60s
    timeout server 60s
    timeout connect 3s
frontend head
    bind {binds}
    http-request return status 200 content-type application/json string '{{"choices": []}}'
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[LocalGateway]:
    """The gateway before heads that answer at once."""
    api, control = free_port(*ADDRESSES), free_port(*ADDRESSES)
    heads = [Head(address, api, control) for address in ADDRESSES]
    made = LocalGateway(tmp_path, heads, free_port("127.0.0.1"), free_port("127.0.0.1"), {"keys": "sk-ann\n"})
    binds = ",".join(f"{address}:{port}" for address in ADDRESSES for port in (api, control))
    (tmp_path / "heads.cfg").write_text(STAND_IN.format(binds=binds))
    with contextlib.ExitStack() as undo:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        stand_in = subprocess.Popen([haproxy() / "bin/haproxy", "-db", "-f", tmp_path / "heads.cfg"], **quiet)  # type: ignore[call-overload]
        undo.callback(stand_in.wait)
        undo.callback(stand_in.terminate)
        assert soon(lambda: http(f"http://{ADDRESSES[0]}:{control}/readyz")[0] == 200)
        made.write()
        undo.callback(made.stop)
        made.start()
        yield made


def asked(address: str, port: int, seconds: float) -> list[float]:
    """Seconds of each request of one client that asks for so long, on one connection."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-ann\r\nContent-Length: {len(BODY)}"
    request, taken = f"{head}\r\n\r\n".encode() + BODY, []
    with socket.create_connection((address, port)) as connection:
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            connection.sendall(request)
            answer = b""
            while not answer.endswith(b'{"choices": []}'):
                piece = connection.recv(65536)
                assert piece, answer
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200 ")
            taken.append(time.perf_counter() - began)
    return taken


def test_what_a_request_costs_in_the_gateway(gateway: LocalGateway) -> None:
    bare, through = (ADDRESSES[0], gateway.heads[0].api_port), ("127.0.0.1", gateway.port)
    times: dict[tuple[str, int], list[float]] = {bare: [], through: []}
    rates: dict[tuple[str, int], list[float]] = {bare: [], through: []}
    with get_context("spawn").Pool(CLIENTS) as pool:
        for _ in range(ROUNDS):
            for where in (bare, through):
                times[where] += asked(*where, ROUND_S)
                many = pool.starmap(asked, [(*where, ROUND_S)] * CLIENTS)
                rates[where].append(sum(map(len, many)) / ROUND_S)
    alone, behind = (statistics.median(times[where]) * 1000 for where in (bare, through))
    note(
        "fast stand-in, one client, 2 kB",
        f"{alone:.2f} ms bare, {behind:.2f} ms through, {behind - alone:+.2f} ms (medians)",
    )
    most, least = (statistics.median(rates[where]) for where in (bare, through))
    note(f"fast stand-in, {CLIENTS} clients, 2 kB", f"{most:.0f} requests/s bare, {least:.0f} through")
    assert behind - alone < 1.0
