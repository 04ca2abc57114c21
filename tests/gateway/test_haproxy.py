"""The generated configuration in the real HAProxy, between clients and two stand-in heads on loopback."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from gen_stack.render.haproxy import ASKED
from tests.asking import http as ask_http
from tests.asking import soon
from tests.gateway.local import ENGINE_KEY, LocalGateway, certificate, local_gateway
from tools.downloads import haproxy

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow
MIB = 2**20


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[LocalGateway]:
    with local_gateway(tmp_path) as made:
        yield made


def kinds(gateway: LocalGateway) -> set[str]:
    """Which heads have had requests."""
    return {head.address for head in gateway.heads if head.seen}


def test_haproxy_finds_nothing_wrong_with_it(gateway: LocalGateway) -> None:
    done = subprocess.run(
        [haproxy() / "bin/haproxy", "-c", "-V", "-f", gateway.config], capture_output=True, text=True, check=False
    )
    assert (done.returncode, re.findall(r"ALERT|WARNING", done.stderr)) == (0, [])


def test_a_request_with_a_key_is_answered_by_a_group_that_gets_the_engines_key(gateway: LocalGateway) -> None:
    assert gateway.ask(key="sk-bob").status == 200
    assert [one for head in gateway.heads for one in head.seen] == [("/v1/completions", f"Bearer {ENGINE_KEY}")]


@pytest.mark.parametrize("key", [None, "sk-an", "SK-ANN", ENGINE_KEY, "# Ann"])
def test_a_wrong_key_ends_at_the_gateway(gateway: LocalGateway, key: str | None) -> None:
    answer = gateway.ask(key=key)
    assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
    assert (answer.headers["www-authenticate"], kinds(gateway)) == ("Bearer", set())


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/load",
        "/pause",
        "/v1/load_lora_adapter",
        "/v1/../metrics",
        "//v1/models",
        "/v1/models/",
        "/V1/models",
        "/docs",
    ],
)
def test_the_engines_other_routes_stay_inside(gateway: LocalGateway, path: str) -> None:
    for body in (None, b"{}"):
        answer = gateway.ask(path, body)
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
    assert kinds(gateway) == set()


def test_the_routes_of_users_are_there_with_their_own_method_alone(gateway: LocalGateway) -> None:
    assert gateway.ask("/v1/models?x=1", body=None).status == 200
    assert gateway.ask("/v1/models", body=b"{}").status == 404
    for path in ASKED:
        assert (path, gateway.ask(path).status, gateway.ask(path, body=None).status) == (path, 200, 404)


def test_requests_up_to_the_limit_pass_whole_and_larger_ones_do_not(gateway: LocalGateway) -> None:
    assert gateway.ask(body=b"x" * 2 * MIB).json["bytes"] == 2 * MIB
    answer = gateway.ask(body=b"x" * (2 * MIB + 1))
    assert (answer.status, answer.json["error"]["code"]) == (413, "request_too_large")


def test_a_body_of_unknown_length_has_the_same_limit(gateway: LocalGateway) -> None:
    def chunked(size: int) -> int:
        connection = gateway.connection()
        chunks = (b"x" * 65536 for _ in range(size // 65536))
        with contextlib.closing(connection):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it answers before it has all
                connection.request("POST", "/v1/completions", chunks, {"Authorization": "Bearer sk-ann"})
            return connection.getresponse().status

    assert [chunked(MIB), chunked(3 * MIB)] == [200, 413]


@pytest.mark.parametrize("death", ["before", "500"])
@pytest.mark.parametrize("size", [20, 2 * MIB - 20])
def test_a_request_that_its_group_did_not_begin_to_answer_goes_to_another(
    gateway: LocalGateway, death: str, size: int
) -> None:
    gateway.heads[0].death = death
    answers = [gateway.ask(body=b"x" * size) for _ in range(4)]
    assert [(one.status, one.json["head"], one.json["bytes"]) for one in answers] == [(200, "127.0.0.3", size)] * 4
    assert gateway.heads[0].seen, "nobody asked the one that dies"


def test_a_group_that_refuses_connections_costs_no_request(gateway: LocalGateway) -> None:
    gateway.heads[0].close()
    assert [gateway.ask().status for _ in range(6)] == [200] * 6
    assert soon(lambda: gateway.ready(1), 3)


def test_a_request_that_ends_every_engine_is_tried_twice_and_no_more(gateway: LocalGateway) -> None:
    for head in gateway.heads:
        head.death = "before"
    answer = gateway.ask()
    assert (answer.status, answer.json["error"]["type"]) == (502, "server_error")
    assert sum(len(head.seen) for head in gateway.heads) == 2


def test_no_ready_group_is_a_503_that_says_when_to_come_back(gateway: LocalGateway) -> None:
    assert ask_http(f"http://127.0.0.1:{gateway.port}/readyz")[0] == 200
    for head in gateway.heads:
        head.ready = False
    assert soon(lambda: gateway.ready(0), 4)
    answer = gateway.ask()
    assert (answer.status, answer.headers["retry-after"], answer.headers["content-type"]) == (
        503,
        "5",
        "application/json",
    )
    assert answer.json["error"]["type"] == "server_error"
    assert [ask_http(f"http://127.0.0.1:{gateway.port}{path}")[0] for path in ("/readyz", "/livez")] == [503, 200]
    gateway.heads[1].ready = True
    assert soon(lambda: gateway.ask().status == 200, 3)


def test_a_group_leaves_within_two_seconds_of_its_readyz(gateway: LocalGateway) -> None:
    gateway.heads[0].ready = False
    began = time.monotonic()
    assert soon(lambda: gateway.ready(1), 4)
    assert time.monotonic() - began < 2.0
    assert {gateway.ask().json["head"] for _ in range(6)} == {"127.0.0.3"}


def test_new_requests_go_where_fewer_run(gateway: LocalGateway) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: gateway.ask(headers={"X-Wait": "0.5"}), range(8)))
    found = [one.json["head"] for one in answers]
    assert [found.count(head.address) for head in gateway.heads] == [4, 4]


def test_a_stream_arrives_piece_by_piece(gateway: LocalGateway) -> None:
    gateway.heads[0].pause_s = gateway.heads[1].pause_s = 0.2
    arrived = [time.monotonic() for _ in gateway.stream(5)]
    assert len(arrived) == 5
    assert all(later - earlier > 0.1 for earlier, later in itertools.pairwise(arrived))


def test_a_stream_that_is_cut_raises_at_the_client(gateway: LocalGateway) -> None:
    for head in gateway.heads:
        head.death = "middle"
    pieces = gateway.stream(5)
    assert next(pieces) == b"data: 0\n\n"
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        list(pieces)


def test_a_client_that_leaves_takes_its_request_along(gateway: LocalGateway) -> None:
    connection = gateway.connection()
    connection.request("POST", "/v1/completions", b"{}", {"Authorization": "Bearer sk-ann", "X-Wait": "20"})
    assert soon(lambda: bool(kinds(gateway)), 3)
    connection.close()
    assert soon(lambda: sum(head.left for head in gateway.heads) == 1, 3)


def test_keys_change_on_reload_while_a_stream_goes_on(gateway: LocalGateway) -> None:
    pieces = gateway.stream(40)
    next(pieces)
    gateway.files["keys"] = "sk-bob\nsk-eve\n"
    gateway.write()
    assert [gateway.ask(key=key).status for key in ("sk-ann", "sk-eve")] == [200, 401]
    gateway.reload()
    assert [gateway.ask(key=key).status for key in ("sk-ann", "sk-bob", "sk-eve")] == [401, 200, 200]
    assert len(list(pieces)) == 39


def test_a_renewed_certificate_is_served_after_a_reload(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "old")
    tls = "  tls: {cert_file: cert, key_file: key}\n"
    with local_gateway(tmp_path, tls, cert=cert, key=key) as gateway:
        assert gateway.ask().status == 200
        pieces = gateway.stream(40)
        next(pieces)
        gateway.files["cert"], gateway.files["key"] = certificate(tmp_path, "new")
        gateway.write()
        gateway.reload()
        assert len(list(pieces)) == 39
        assert gateway.ssl is not None
        gateway.ssl.load_verify_locations(cadata=gateway.files["cert"])
        assert gateway.ask().status == 200
        with (
            socket.create_connection(("127.0.0.1", gateway.port)) as raw,
            gateway.ssl.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
        ):
            assert common_name(wrapped) == "new"


def common_name(wrapped: ssl.SSLSocket) -> str:
    subject = (wrapped.getpeercert() or {})["subject"]
    return str(dict(pair for part in subject for pair in part)["commonName"])  # type: ignore[misc]


def test_the_same_value_of_the_header_goes_to_the_same_group_while_it_is_ready(tmp_path: Path) -> None:
    with local_gateway(tmp_path, "  sticky_header: X-Session\n") as gateway:

        def head_of(session: str) -> str:
            return str(gateway.ask(headers={"X-Session": session}).json["head"])

        first = {str(number): head_of(str(number)) for number in range(12)}
        assert set(first.values()) == {"127.0.0.2", "127.0.0.3"}
        assert {session: head_of(session) for session in first} == first
        gateway.heads[0].ready = False
        assert soon(lambda: gateway.ready(1), 4)
        assert {head_of(session) for session in first} == {"127.0.0.3"}
        gateway.heads[0].ready = True
        assert soon(lambda: gateway.ready(2), 4)
        assert {session: head_of(session) for session in first} == first


def test_metrics_are_for_the_host_alone(gateway: LocalGateway) -> None:
    gateway.ask()
    assert 'haproxy_server_status{proxy="groups",server="q-0",state="UP"} 1' in gateway.metrics()
    assert gateway.ask("/metrics", body=None).status == 404
    assert ask_http(f"http://127.0.0.2:{gateway.metrics_port}/metrics")[0] == 0


def test_the_log_has_neither_keys_nor_prompts(gateway: LocalGateway) -> None:
    gateway.ask("/v1/completions?api_key=in-the-query", body=b'{"prompt": "a-secret-prompt"}')
    gateway.ask('/v1/"odd', key="sk-wrong")
    assert soon(lambda: len(gateway.lines()) == 2)
    bad, good = sorted(gateway.lines(), key=lambda line: str(line["path"]))
    assert (good["path"], good["status"], good["group"][:2], good["method"]) == ("/v1/completions", 200, "q-", "POST")
    assert (bad["path"], bad["status"]) == ('/v1/"odd', 404)
    for secret in ("sk-", "secret-prompt", "in-the-query", "Bearer"):
        assert secret not in gateway.log()


def test_a_client_that_never_ends_its_headers_is_sent_away(gateway: LocalGateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port)) as slow:
        slow.settimeout(20)
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        began = time.monotonic()
        answer = slow.recv(1000)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert 8 < time.monotonic() - began < 15


def test_running_answers_are_finished_when_the_gateway_stops(gateway: LocalGateway) -> None:
    pieces = gateway.stream(30)
    next(pieces)
    assert gateway.process is not None
    assert soon(gateway.listens_to_signals)
    gateway.process.send_signal(signal.SIGUSR1)
    assert len(list(pieces)) == 29
    assert gateway.process.wait(5) == 0
