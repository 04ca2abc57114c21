"""The head's HTTP endpoint, with the answers of the real one."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import queue
import select
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from . import switches
from .common import Settings, log
from .wire import Link, Message, family

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 2048
    api: Api

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        self.socket.bind(self.server_address)  # no look-up of the host's name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class Api:
    """Requests in, tokens out; between them the engine core."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.core: Link | None = None
        self.serving = False
        self.is_dead = False
        self.is_stopping = False
        self.stats: dict[str, Any] = {}
        self._ids = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[tuple[str, str | None]]] = {}
        self._lock = threading.Lock()
        self._server = _server_class(settings)((settings.host, settings.port), _Handler, bind_and_activate=False)
        self._server.api = self
        self._server.server_bind()

    def start(self) -> None:
        """Begin to listen."""
        if self.settings.certfile:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.settings.certfile, self.settings.keyfile)
            self._server.socket = context.wrap_socket(self._server.socket, True)
        self._server.server_activate()
        self.serving = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def output(self, message: Message) -> None:
        """Hand the tokens of a step to those who wait for them."""
        self.stats = message["stats"]
        for number, text, reason in message["outputs"]:
            waiting = self._waiting.get(number)
            if waiting is not None:
                waiting.put((text, reason))

    def dead(self) -> None:
        """The engine is dead: whoever waits hears it."""
        self.is_dead = True
        for waiting in list(self._waiting.values()):
            waiting.put(("", "error"))

    def stop(self) -> None:
        """Stop listening, when those who still get an answer have it."""
        end = time.monotonic() + 1.0
        while self._waiting and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)
        self._server.shutdown()
        self._server.server_close()

    def submit(self, prompt_tokens: int, max_tokens: int) -> int:
        """Hand a request to the engine core; returns its number."""
        number = next(self._ids)
        self._waiting[number] = queue.SimpleQueue()
        request = {"id": number, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
        self._tell({"add": request})
        return number

    def next(self, number: int, client: socket.socket) -> tuple[str, str | None]:
        """The next token of a request and why it ended there; `gone` when the client has left."""
        waiting = self._waiting[number]
        while not _has_left(client):
            if (found := _get(waiting, 0.2)) is not None:
                return found
        self._tell({"abort": number})
        return "", "gone"

    def forget(self, number: int) -> None:
        """A request has its answer."""
        self._waiting.pop(number, None)

    def _tell(self, message: Message) -> None:
        with self._lock:
            if self.core is None or not self.core.send(message):
                self.dead()

    def metrics(self) -> str:
        """The counters, which move by steps only."""
        labels = f'engine="0",model_name="{self.settings.served[0]}"'
        stats = self.stats
        rows = [
            ("gauge", "num_requests_running", "", stats.get("running", 0)),
            ("gauge", "num_requests_waiting", "", stats.get("waiting", 0)),
            ("counter", "prompt_tokens_total", "", stats.get("prompt", 0)),
            ("counter", "generation_tokens_total", "", stats.get("generation", 0)),
            ("histogram", "iteration_tokens_total_count", "", stats.get("iterations", 0)),
        ]
        success = stats.get("success", {})
        rows += [
            ("counter", "request_success_total", f',finished_reason="{reason}"', success.get(reason, 0))
            for reason in ("stop", "length", "abort", "error")
        ]
        lines, typed = [], set()
        for kind, name, more, value in rows:
            base = name.removesuffix("_total").removesuffix("_count") if kind != "gauge" else name
            if base not in typed:
                lines.append(f"# TYPE vllm:{base} {kind}")
                typed.add(base)
            lines.append(f"vllm:{name}{{{labels}{more}}} {float(value)}")
        return "\n".join(lines) + "\n"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name in the base class)
        log("APIServer", f"{self.client_address[0]}:{self.client_address[1]} - {format % args}")

    def do_GET(self) -> None:
        switches.wait_while("mute")
        api, path = self.server.api, self.path.partition("?")[0]
        if not self._may(path):
            return
        if path in ("/health", "/ping"):
            self._answer(503 if api.is_dead else 200, b"")
        elif path == "/metrics":
            self._answer(200, api.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/version":
            self._json(200, {"version": "0.32.0"})
        elif path == "/v1/models":
            names = [{"id": name, "object": "model", "owned_by": "vllm"} for name in api.settings.served]
            self._json(200, {"object": "list", "data": names})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        switches.wait_while("mute")
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if not self._may(path):
            return
        kinds = {
            "/v1/completions": "text",
            "/v1/chat/completions": "chat",
            "/v1/embeddings": "vector",
            "/pooling": "vector",
        }
        if path not in kinds:
            self._json(404, {"detail": "Not Found"})
            return
        try:
            body = json.loads(data)
            tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        except (ValueError, AttributeError):
            self._json(400, {"error": {"message": "no JSON object", "type": "Bad Request", "code": 400}})
            return
        if body.get("model", self.server.api.settings.served[0]) not in self.server.api.settings.served:
            text = f"The model `{body['model']}` does not exist."
            self._json(404, {"error": {"message": text, "type": "NotFoundError", "code": 404}})
            return
        if kinds[path] == "vector":
            tokens = 1
        self._generate(body, kinds[path], tokens)

    def _generate(self, body: dict[str, Any], kind: str, tokens: int) -> None:
        api = self.server.api
        prompt = body.get("prompt") or body.get("messages") or body.get("input") or ""
        length = max(1, len(prompt) if isinstance(prompt, list) else len(str(prompt).split()))
        if api.is_dead:
            self._dead()
            return
        if api.is_stopping and isinstance(prompt, str):
            # AsyncLLM.shutdown ends the renderer's threads first: what is still to be tokenised fails
            self._error(500, "cannot schedule new futures after shutdown")
            return
        number = api.submit(length, tokens)
        try:
            if body.get("stream"):
                self._stream(number, kind)
            else:
                self._whole(number, kind, length)
        finally:
            api.forget(number)

    def _whole(self, number: int, kind: str, length: int) -> None:
        words: list[str] = []
        reason = None
        while reason is None:
            word, reason = self.server.api.next(number, self.connection)
            words.append(word)
        if reason == "gone":
            self.close_connection = True
        elif reason == "error":
            self._dead()
        else:
            done = len([word for word in words if word])
            usage = {"prompt_tokens": length, "completion_tokens": done, "total_tokens": length + done}
            choice = _choice(kind, "".join(words), reason)
            answer = {"id": f"cmpl-{number}", "object": "list", "model": self.server.api.settings.served[0]}
            key = "data" if kind == "vector" else "choices"
            self._json(200, {**answer, key: [choice], "usage": usage})

    def _stream(self, number: int, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        reason = None
        while reason is None:
            word, reason = self.server.api.next(number, self.connection)
            if reason == "gone":
                return
            if reason == "error":
                self._event({"error": {"message": "EngineCore encountered an issue.", "code": 500}})
                return
            self._event({"id": f"cmpl-{number}", "choices": [_choice(kind, word, reason)]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")

    def _may(self, path: str) -> bool:
        key = os.environ.get("VLLM_API_KEY")
        given = self.headers.get("Authorization") or ""
        if not key or not path.startswith(_GUARDED) or hmac.compare_digest(given, f"Bearer {key}"):
            return True
        self._json(401, {"error": "Unauthorized"})
        return False

    def _dead(self) -> None:
        self._error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")

    def _error(self, code: int, text: str) -> None:
        self._json(code, {"error": {"message": text, "type": "InternalServerError", "code": code}})

    def _json(self, status: int, data: object) -> None:
        self._answer(status, json.dumps(data).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _choice(kind: str, text: str, reason: str | None) -> dict[str, Any]:
    if kind == "vector":
        return {"index": 0, "object": "embedding", "embedding": [0.0, 1.0]}
    content = {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
    return {"index": 0, **content, "finish_reason": reason}


def _server_class(settings: Settings) -> type[_Server]:
    class Server(_Server):
        address_family = family(settings.host)

    return Server


def _get(waiting: queue.SimpleQueue[tuple[str, str | None]], seconds: float) -> tuple[str, str | None] | None:
    try:
        return waiting.get(timeout=seconds)
    except queue.Empty:
        return None


def _has_left(client: socket.socket) -> bool:
    try:
        readable = select.select([client], [], [], 0)[0]
        if isinstance(client, ssl.SSLSocket):
            return False
        return bool(readable) and client.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True
