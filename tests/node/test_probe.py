from __future__ import annotations

import asyncio
import io
import ssl
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from aiohttp import web

from stack_node.counters import Counters
from stack_node.probe import Api, Proof

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

T = TypeVar("T")
KEY = "secret-key-of-the-api"
METRICS = '# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total{engine="0"} 8.0\n'
COMPLETION = {"choices": [{"text": ",", "finish_reason": "length"}]}


@dataclass
class Fake:
    """An API like vLLM's: what each path answers, as (status, body); the rest is 404."""

    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    key: str | None = None
    delay_s: float = 0.0
    asked: list[tuple[str, Any]] = field(default_factory=list)  # (path, body)
    clients: set[Any] = field(default_factory=set)  # address and port of each connection

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    async def handle(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.clients.add(request.transport.get_extra_info("peername"))
        self.asked.append((request.path, await request.json() if request.can_read_body else None))
        await asyncio.sleep(self.delay_s)
        guarded = request.path.startswith("/v1")
        if guarded and self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if not guarded:
            assert "Authorization" not in request.headers
        status, body = self.answers.get(request.path, (404, {"detail": "Not Found"}))
        if status == 302:
            return web.Response(status=302, headers={"Location": body})
        if isinstance(body, bytes | str):
            return web.Response(status=status, body=io.BytesIO(body if isinstance(body, bytes) else body.encode()))
        return web.json_response(body, status=status)

    def ask(
        self, use: Callable[[Api], Awaitable[T]], key: str | None = None, context: ssl.SSLContext | None = None
    ) -> T:
        """What a use of the API gives."""

        async def run() -> T:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self.handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
            scheme = "https" if context else "http"
            api = Api(f"{scheme}://127.0.0.1:{runner.addresses[0][1]}", key)
            try:
                return await use(api)
            finally:
                await api.close()
                await runner.cleanup()

        return asyncio.run(run())


def models(*names: str) -> dict[str, tuple[int, Any]]:
    return {"/v1/models": (200, {"object": "list", "data": [{"id": name} for name in names]})}


def error(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "type": "some", "param": None, "code": status}}


def prove(api: Api) -> Awaitable[Proof]:
    return api.prove(5)


async def prove_twice(api: Api) -> list[Proof]:
    return [await api.prove(5), await api.prove(5)]


def alive(api: Api) -> Awaitable[bool]:
    return api.alive()


def counters(api: Api) -> Awaitable[Counters | None]:
    return api.counters()


@pytest.fixture
def closed() -> Api:
    """An API at a port where nobody listens."""
    return Api("http://127.0.0.1:1", None)


def test_alive_is_200() -> None:
    assert Fake({"/health": (200, "")}).ask(alive) is True
    assert Fake({"/health": (503, "")}).ask(alive) is False
    assert Fake().ask(alive) is False


def test_nobody_listens(closed: Api) -> None:
    async def run() -> tuple[bool, Counters | None, Proof]:
        try:
            return await closed.alive(), await closed.counters(), await closed.prove(5)
        finally:
            await closed.close()
            await closed.close()

    is_alive, found, proof = asyncio.run(run())
    assert is_alive is False
    assert found is None
    assert proof.outcome == "failed"
    assert "127.0.0.1:1" in proof.detail


def test_an_api_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stack_node.probe.ALIVE_S", 0.05)
    monkeypatch.setattr("stack_node.probe.COUNTERS_S", 0.05)
    fake = Fake({"/health": (200, ""), "/metrics": (200, METRICS)}, delay_s=30)
    assert fake.ask(alive) is False
    assert fake.ask(counters) is None
    assert fake.ask(lambda api: api.prove(0.05)) == Proof("unanswered", "no answer within 0.05 s")


def test_counters() -> None:
    assert Fake({"/metrics": (200, METRICS)}).ask(counters) == Counters(8, 0, 0)


@pytest.mark.parametrize("answer", [(404, METRICS), (200, "<html></html>"), (200, b"x" * 1_000_000), (200, b"\0")])
def test_what_are_no_counters(answer: tuple[int, Any]) -> None:
    assert Fake({"/metrics": answer}).ask(counters) is None


def test_a_completion_is_asked_of_the_first_served_name() -> None:
    fake = Fake({**models("llama", "adapter"), "/v1/completions": (200, COMPLETION)}, key=KEY)
    assert fake.ask(prove, KEY) == Proof("answered", "/v1/completions answers 200")
    assert fake.paths == ["/v1/models", "/v1/completions"]
    body = fake.asked[1][1]
    assert body.pop("prompt").endswith(" Hi")
    assert body == {"model": "llama", "max_tokens": 1, "temperature": 0}


def test_no_two_requests_are_the_same() -> None:
    fake = Fake({**models("llama"), "/v1/completions": (200, COMPLETION)})
    fake.ask(prove_twice)
    first, second = (body["prompt"] for path, body in fake.asked if path == "/v1/completions")
    assert first != second
    assert first[:8] != second[:8]  # different from the first token on, so that no cached prefix is of use


@pytest.mark.parametrize("status", [400, 404, 405, 501])
@pytest.mark.parametrize("kind", ["/v1/embeddings", "/pooling"])
def test_another_kind_is_found_and_remembered(kind: str, status: int) -> None:
    fake = Fake({**models("bge"), "/v1/completions": error(status, "no"), kind: (200, {"data": [[0.5] * 4096]})})
    assert [proof.outcome for proof in fake.ask(prove_twice)] == ["answered", "answered"]
    assert fake.paths[-2:] == [kind, kind]
    assert fake.paths.count("/v1/models") == fake.paths.count("/v1/completions") == 1
    assert fake.asked[-1][1]["model"] == "bge"
    assert fake.asked[-1][1]["input"].endswith(" Hi")


def test_a_model_that_is_served_some_other_way_refuses() -> None:
    """The sentence comes from the path that knows the model, not from those that do not exist."""
    fake = Fake({**models("whisper"), "/pooling": error(400, "This model transcribes")})
    assert fake.ask(prove) == Proof("refused", "/pooling answers 400: This model transcribes")


def test_nothing_exists_that_is_known() -> None:
    assert Fake(models("x")).ask(prove) == Proof("refused", "/v1/completions answers 404: Not Found")


def test_a_refusal_makes_it_look_again() -> None:
    fake = Fake({**models("old"), "/v1/completions": (200, COMPLETION)})

    async def change(api: Api) -> list[str]:
        outcomes: list[str] = [(await api.prove(5)).outcome]
        fake.answers = {**models("new"), "/v1/completions": error(404, "no model old")}
        outcomes.append((await api.prove(5)).outcome)
        fake.answers["/v1/completions"] = (200, COMPLETION)
        outcomes.append((await api.prove(5)).outcome)
        return outcomes

    assert fake.ask(change) == ["answered", "refused", "answered"]
    assert fake.asked[-1][1]["model"] == "new"


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_wrong_key_is_a_refusal_and_is_not_repeated(key: str | None) -> None:
    fake = Fake({**models("llama"), "/v1/completions": (200, COMPLETION)}, key=KEY)
    assert fake.ask(prove, key) == Proof("refused", "/v1/models answers 401: Unauthorized")
    assert fake.paths == ["/v1/models"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_an_error_of_the_server_is_a_failure(path: str) -> None:
    fake = Fake({**models("llama"), path: error(500, "EngineCore encountered an issue.")})
    assert fake.ask(prove) == Proof("failed", f"{path} answers 500: EngineCore encountered an issue.")


@pytest.mark.parametrize("status", [429, 503])
def test_a_full_queue_says_nothing_of_the_engine(status: int) -> None:
    fake = Fake({**models("llama"), "/v1/completions": error(status, "The engine is currently busy")})
    assert fake.ask(prove) == Proof("unanswered", f"/v1/completions answers {status}: The engine is currently busy")


def test_a_dropped_request_is_no_answer() -> None:
    dropped = {"choices": [{"text": "", "finish_reason": "abort"}]}
    proof = Fake({**models("llama"), "/v1/completions": (200, dropped)}).ask(prove)
    assert proof == Proof("unanswered", "/v1/completions: the engine dropped the request (finish reason abort)")


@pytest.mark.parametrize("body", ["", "<html>", "[]", "{}", '{"data": []}', '{"data": [{"id": 5}]}', "[" * 100_000])
def test_something_else_serves_there(body: str) -> None:
    assert Fake({"/v1/models": (200, body)}).ask(prove) == Proof("failed", "/v1/models names no model")


def test_no_connection_is_used_twice() -> None:
    """The server closes an idle one, and a request sent at that moment would look like a fault."""
    fake = Fake({**models("llama"), "/v1/completions": (200, COMPLETION)})
    fake.ask(prove_twice)
    assert len(fake.clients) == len(fake.asked) == 3


def test_a_redirect_is_not_followed() -> None:
    fake = Fake({**models("llama"), "/v1/completions": (302, "/elsewhere")})
    assert fake.ask(prove).outcome == "failed"
    assert "/elsewhere" not in fake.paths


def test_the_detail_is_one_short_line_without_the_key() -> None:
    text = f"Bad key {KEY}\r\n\x1b[31mdetails\x00" + " and more" * 10_000
    for body in (text, 20 * text, error(500, text)[1]):
        proof = Fake({**models("llama"), "/v1/completions": (500, body)}).ask(prove, KEY)
        assert proof.outcome == "failed"
        assert proof.detail.startswith("/v1/completions answers 500: Bad key *** ")
        assert proof.detail.isprintable()
        assert len(proof.detail) <= 300


def test_an_answer_that_is_cut_off_is_a_failure() -> None:
    async def run() -> Proof:
        async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
            writer.close()

        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        api = Api(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        try:
            return await api.prove(5)
        finally:
            await api.close()
            server.close()

    assert asyncio.run(run()).outcome == "failed"


def test_something_that_speaks_no_http_is_a_failure() -> None:
    async def run() -> tuple[bool, Counters | None, Proof]:
        async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
            writer.close()

        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        api = Api(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
        try:
            return await api.alive(), await api.counters(), await api.prove(5)
        finally:
            await api.close()
            server.close()

    is_alive, found, proof = asyncio.run(run())
    assert (is_alive, found, proof.outcome) == (False, None, "failed")


def test_a_certificate_for_another_name_will_do(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(
        ["openssl", "req", "-x509", *curve, "-nodes", "-subj", "/CN=api.example.com", "-days", "1", *files],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    fake = Fake({"/health": (200, ""), **models("llama"), "/v1/completions": (200, COMPLETION)})

    async def use(api: Api) -> tuple[bool, str]:
        return await api.alive(), (await api.prove(5)).outcome

    assert fake.ask(use, context=context) == (True, "answered")


def test_no_proxy_stands_between(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert Fake({"/health": (200, "")}).ask(alive) is True


def test_a_cancelled_call_is_cancelled() -> None:
    async def cancel(api: Api) -> bool:
        call = asyncio.ensure_future(api.prove(60))
        await asyncio.sleep(0.05)
        call.cancel()
        await asyncio.wait([call])
        return call.cancelled()

    assert Fake(delay_s=30).ask(cancel) is True
