"""A small model hub on loopback: what huggingface_hub asks of one, and the ways in which one can be slow or wrong."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 16 << 10


def safetensors(size: int, salt: int = 0) -> bytes:
    """A whole safetensors file with that many bytes of weights, different for each salt."""
    header = json.dumps({f"w{salt}": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    weights = (bytes((salt + i) % 251 for i in range(251)) * (size // 251 + 1))[:size]
    return struct.pack("<Q", len(header)) + header + weights


def sharded(count: int, size: int) -> dict[str, bytes]:
    """A model of so many shards."""
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    index = {"metadata": {"total_size": count * size}, "weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    return {
        "config.json": b'{"model_type": "fake"}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{name: safetensors(size, salt) for salt, name in enumerate(names)},
    }


@dataclass
class Model:
    """A model on the hub and how the hub behaves about it."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    branch: str = "main"
    gated: bool = False  # the list is public, the files want a token
    private: bool = False
    rate: float | None = None  # bytes a second
    cuts: dict[str, int] = field(default_factory=dict)  # file: after so many bytes the connection is cut, once
    sizes: dict[str, int] = field(default_factory=dict)  # what the hub says instead of the truth
    status: int | None = None  # it answers everything so

    def etag(self, name: str) -> str:
        content = self.files[name]
        if name.endswith((".safetensors", ".bin")):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def size(self, name: str) -> int:
        return self.sizes.get(name, len(self.files[name]))


@dataclass
class Get:
    """A request for a file's content."""

    name: str
    range: str | None


class Hub:
    """The hub; models by their ids."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.token: str | None = None  # that gated and private models want
        self.gets: list[Get] = []
        self.requests = 0

        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fetched(self, ending: str = "") -> list[str]:
        """Files that were asked for, in order."""
        return [get.name for get in self.gets if get.name.endswith(ending)]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    hub: Hub  # of the subclass that each hub makes

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.requests += 1
        with contextlib.suppress(ConnectionError):
            self._answer(unquote(urlsplit(self.path).path))

    def _answer(self, path: str) -> None:
        api = re.fullmatch(r"/api/models/(?P<id>.+?)(/(?P<what>revision|tree)/(?P<rev>[^/]+))?", path)
        if api:
            found = self._find(api["id"], api["rev"] or "main")
            if found:
                self._json(_tree(found) if api["what"] == "tree" else _info(api["id"], found))
            return
        file = re.fullmatch(r"/(?P<id>.+?)/resolve/(?P<rev>[^/]+)/(?P<name>.+)", path)
        found = self._find(file["id"], file["rev"]) if file else None
        if file and found:
            self._file(found, file["name"])
        elif not file:
            self._error(404, "EntryNotFound")

    def _find(self, name: str, revision: str) -> Model | None:
        hub = self.hub
        model = hub.models.get(name)
        allowed = hub.token is not None and self.headers.get("Authorization") == f"Bearer {hub.token}"
        if model is None or (model.private and not allowed):
            self._error(404 if allowed else 401, "RepoNotFound")
        elif model.status is not None:
            self._error(model.status, "")
        elif revision not in (model.commit, model.branch):
            self._error(404, "RevisionNotFound")
        elif model.gated and not allowed and "/resolve/" in self.path:
            self._error(403 if "Authorization" in self.headers else 401, "GatedRepo")
        else:
            return model
        return None

    def _file(self, model: Model, name: str) -> None:
        if name not in model.files:
            self._error(404, "EntryNotFound")
            return
        content = model.files[name]
        wanted = self.headers.get("Range")
        start = int(wanted.partition("=")[2].partition("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{model.etag(name)}"')
        self.send_header("X-Repo-Commit", model.commit)
        if self.command == "HEAD":
            self.send_header("X-Linked-Size", str(model.size(name)))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.gets.append(Get(name, wanted))
        cut = model.cuts.pop(name, None)
        end = len(content) if cut is None else cut
        for position in range(start, end, CHUNK):
            self.wfile.write(content[position : min(end, position + CHUNK)])
            if model.rate:
                time.sleep(CHUNK / model.rate)
        self.close_connection = self.close_connection or cut is not None

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _lfs(model: Model, name: str) -> dict[str, Any]:
    if not name.endswith((".safetensors", ".bin")):
        return {}
    return {"lfs": {"sha256": model.etag(name), "oid": model.etag(name), "size": model.size(name), "pointerSize": 134}}


def _info(name: str, model: Model) -> dict[str, Any]:
    siblings = [
        {"rfilename": file, "size": model.size(file), "blobId": model.etag(file), **_lfs(model, file)}
        for file in model.files
    ]
    return {"id": name, "modelId": name, "sha": model.commit, "siblings": siblings, "tags": [], "private": False}


def _tree(model: Model) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": file, "size": model.size(file), "oid": model.etag(file), **_lfs(model, file)}
        for file in model.files
    ]


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """A hub for as long as the block runs."""
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()
