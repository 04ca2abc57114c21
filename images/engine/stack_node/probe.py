"""Asks the engine's API on this node: does it answer, do its counters move, does a real request go through.

For the control loop. Nothing here raises, except that a cancelled call is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stack_node.counters import Counters, Parser

if TYPE_CHECKING:
    import aiohttp

ALIVE_S = 2.0
COUNTERS_S = 5.0

# What the kinds of models answer to, in the order in which they are tried. /pooling serves all kinds of pooling models;
# /classify and /score exist only beside it (vLLM 0.32, entrypoints/pooling/factories.py).
KINDS = ("/v1/completions", "/v1/embeddings", "/pooling")

_NOT_THIS_KIND = (400, 404, 405, 422, 501)
_BUSY = (429, 503)  # vLLM: a queue is full, or that one request failed and may be repeated. Says nothing of the engine
_MOST_ANSWER = 1 << 20  # bytes that are read of an answer; the names of many adapters are the longest
_MOST_METRICS = 64 << 20
_MOST_DETAIL = 300  # characters

# The limit, because asyncio.TimeoutError became the built-in one only in Python 3.11.
_TIMEOUTS = (asyncio.TimeoutError, TimeoutError)

Outcome = Literal["answered", "refused", "failed", "unanswered"]


@dataclass(frozen=True)
class Proof:
    """What became of a real request.

    answered: it went through the engine. refused: the API says no to every kind of request that is known here, which
    is no fault. failed: an error of the server's own, or no connection. unanswered: nothing came in time, or the
    server is too busy to take it; whether the engine lives is for its counters to tell.
    """

    outcome: Outcome
    detail: str  # one line, without secrets


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes


class Api:
    """The API at a URL without a path, with the key that it wants."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._session: aiohttp.ClientSession | None = None
        self._model: str | None = None
        self._kind: str | None = None  # the one that was answered

    async def close(self) -> None:
        """Leave the connections; a later call opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def alive(self) -> bool:
        """Whether the API's own health check answers 200."""
        try:
            return (await asyncio.wait_for(self._ask("GET", "/health"), ALIVE_S)).status == 200
        except Exception:
            return False

    async def counters(self) -> Counters | None:
        """The engine's counters; None when they cannot be had."""
        try:
            return await asyncio.wait_for(self._counters(), COUNTERS_S)
        except Exception:
            return None

    async def _counters(self) -> Counters | None:
        parser, size = Parser(), 0
        async with self._request("GET", "/metrics") as answer:
            if answer.status != 200:
                return None
            async for piece in answer.content.iter_any():
                parser.feed(piece)
                size += len(piece)
                if size > _MOST_METRICS:
                    return None
        return parser.result()

    async def prove(self, timeout: float) -> Proof:
        """Send one real request of the kind that is served here and wait at most `timeout` seconds for the answer.

        The kind and the model's name are found at the first time and remembered until the API refuses.
        """
        try:
            proof = await asyncio.wait_for(self._prove(), timeout)
        except _TIMEOUTS:
            return Proof("unanswered", f"no answer within {timeout:g} s")
        except Exception as error:  # of the network, of HTTP, or of an answer that is none
            return Proof("failed", self._clean(str(error) or type(error).__name__))
        if proof.outcome == "refused":
            self._model = self._kind = None
        return proof

    async def _prove(self) -> Proof:
        if self._model is None:
            answer = await self._ask("GET", "/v1/models")
            if answer.status != 200:
                return self._verdict("/v1/models", answer)
            self._model = _first_name(answer.body)
            if self._model is None:
                return Proof("failed", "/v1/models names no model")
        refusals = []
        for kind in KINDS if self._kind is None else (self._kind,):
            answer = await self._ask("POST", kind, _request(kind, self._model))
            if answer.status not in _NOT_THIS_KIND:
                proof = self._verdict(kind, answer)
                if proof.outcome == "answered":
                    self._kind = kind
                return proof
            refusals.append((answer.status in (404, 405), self._sentence(kind, answer)))
        # The most telling first: a model that is served some other way says why, while the other paths are absent.
        return Proof("refused", min(refusals, key=lambda refusal: refusal[0])[1])

    def _verdict(self, path: str, answer: _Answer) -> Proof:
        sentence = self._sentence(path, answer)
        if answer.status in _BUSY:
            return Proof("unanswered", sentence)
        if 400 <= answer.status < 500:
            return Proof("refused", sentence)
        if not 200 <= answer.status < 300:
            return Proof("failed", sentence)
        if _was_dropped(answer.body):
            return Proof("unanswered", f"{path}: the engine dropped the request (finish reason abort)")
        return Proof("answered", f"{path} answers {answer.status}")

    def _sentence(self, path: str, answer: _Answer) -> str:
        return self._clean(f"{path} answers {answer.status}: {_message(answer.body)}")

    def _clean(self, text: str) -> str:
        """One short line; the key is taken out, since an API may repeat it."""
        if self._key:
            text = text.replace(self._key, "***")
        line = "".join(char if char.isprintable() else " " for char in " ".join(text.split()))
        return line if len(line) <= _MOST_DETAIL else line[: _MOST_DETAIL - 1] + "…"

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> _Answer:
        async with self._request(method, path, body) as answer:
            pieces, size = [], 0
            async for piece in answer.content.iter_any():
                pieces.append(piece[: _MOST_ANSWER - size])
                size += len(pieces[-1])
                if size >= _MOST_ANSWER:
                    break
            return _Answer(answer.status, b"".join(pieces))

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> aiohttp.client._RequestContextManager:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key and path.startswith("/v1/") else {}
        # A redirect could lead elsewhere, and the key with it.
        return self._opened().request(method, self._url + path, json=body, headers=headers, allow_redirects=False)

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp  # here, because only a node with an API needs it

        if self._session is None:
            self._session = aiohttp.ClientSession(
                # The certificate is for the outside name; what is asked here is this host's own server.
                # Connections are not kept: the server closes an idle one after some seconds, and a request sent at that
                # moment would look like a fault.
                connector=aiohttp.TCPConnector(ssl=False, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,  # no proxy between this process and its own host
            )
        return self._session


def _request(kind: str, model: str) -> dict[str, Any]:
    """The smallest request of a kind; random, so that no cache between here and the engine has the answer."""
    text = f"{secrets.token_hex(8)} Hi"
    if kind == "/v1/completions":
        return {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
    return {"model": model, "input": text}


def _first_name(body: bytes) -> str | None:
    found = _parsed(body)
    try:
        name = found["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _was_dropped(body: bytes) -> bool:
    """Whether a completion came back with nothing done: vLLM answers so to what arrives while it stops."""
    found = _parsed(body)
    try:
        return bool(found["choices"][0]["finish_reason"] == "abort")
    except (KeyError, IndexError, TypeError):
        return False


def _message(body: bytes) -> str:
    """The sentence in an error's body, wherever it is."""
    found = _parsed(body)
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return found if isinstance(found, str) else body.decode(errors="replace")


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None
