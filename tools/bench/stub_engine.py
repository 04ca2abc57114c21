#!/usr/bin/env python3
"""A `vllm` for a head with many simulated members: one process that answers the head's questions at once.

It holds as many connections to its own rendezvous port as a group of that size would have, so that the head sees what
it would see.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMPLETION = {"object": "text_completion", "choices": [{"index": 0, "text": " yes", "finish_reason": "length"}]}


class Api(BaseHTTPRequestHandler):
    """The few paths that the head asks for."""

    protocol_version = "HTTP/1.1"
    generated = 0

    def log_message(self, *_: object) -> None:
        """Nothing: the log is not what is measured."""

    def do_GET(self) -> None:
        """Health, counters and the model's name."""
        if self.path == "/metrics":
            rows = ["# TYPE vllm:generation_tokens_total counter", f"vllm:generation_tokens_total {Api.generated}"]
            rows += ["vllm:num_requests_running 0", "vllm:num_requests_waiting 0", ""]
            self._answer("\n".join(rows).encode())
        else:
            self._answer(json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode())

    def do_POST(self) -> None:
        """A completion, at once."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        Api.generated += 1
        self._answer(json.dumps(COMPLETION).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    """At an address, without looking up its name."""

    daemon_threads = True
    request_queue_size = 128


def meet(address: str, port: int, count: int) -> list[socket.socket]:
    """Connect to a port of this process so many times; both ends."""
    listener = socket.create_server((address, port), backlog=count)
    ends = []
    for _ in range(count):
        ends += [socket.create_connection((address, port)), listener.accept()[0]]
    return [listener, *ends]


def main(words: list[str]) -> int:
    """Serve until SIGTERM."""
    flags = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    address = flags["master-addr"]
    held = meet(address, int(flags["master-port"]), int(flags["nnodes"]))
    server = Server((flags["host"], int(flags["port"])), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    for end in held:
        end.close()
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    sys.exit(main(sys.argv[1:]))
