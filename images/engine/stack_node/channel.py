"""The control channel without its sockets: the handshake that proves the group token both ways, and sealed frames.

Text in, text out; docs/protocol.md has the format. Three texts make a handshake: the head's challenge, the node's
answer with its proof, the head's welcome or refusal with its own. Every proof is an HMAC-SHA256 under the group token
over who speaks (so that none can be sent back to where it came from), both nonces (so that none serves twice), the
head's instance and the whole join. Without a token the key is empty: the same texts, and no secret in them.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from dataclasses import asdict
from typing import Any, NoReturn

from .messages import PROTOCOL, Join, Message, decode, decode_join, encode

MAX_FRAME = 65536  # characters of a text on the wire; all of them are ASCII
_NONCE = re.compile(r"[0-9a-f]{32}\Z")


class RefusedError(Exception):
    """A handshake ended by a decision; its sentence is for people. `answer`, if any, is to be sent before closing."""

    def __init__(self, sentence: str, answer: str | None = None) -> None:
        super().__init__(sentence)
        self.answer = answer


class Session:
    """Seals what one side says and opens what the other says; each direction has its own key and its own count."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0

    def seal(self, message: Message) -> str:
        """The next frame; raises ValueError, and uses no number up, when the message is too long for a frame."""
        body = json.dumps(encode(message), separators=(",", ":"))
        frame = _text({"seq": self._sent, "body": body, "mac": _frame_mac(self._send_key, self._sent, body)})
        if len(frame) > MAX_FRAME:
            raise ValueError(f"a message of {len(frame)} characters; a frame has at most {MAX_FRAME}")
        self._sent += 1
        return frame

    def open(self, text: str) -> Message:
        """The message in the next frame.

        Raises ValueError when the frame is not the peer's next one, unchanged; the connection is then to be closed.
        """
        frame = _object(text, {"seq", "body", "mac"})
        seq, body, mac = frame["seq"], frame["body"], frame["mac"]
        if type(seq) is not int or not isinstance(body, str) or not isinstance(mac, str):
            raise ValueError("no frame of this protocol")
        if seq != self._received:
            raise ValueError(f"frame {self._received} was expected")
        if not _same(mac, _frame_mac(self._receive_key, seq, body)):
            raise ValueError("the frame was not made by the peer")
        self._received += 1
        return decode(_parse(body))


class HeadHandshake:
    """The head's side of one connection: send `challenge`, `receive` the answer, then send `welcome` or `refuse`."""

    def __init__(self, token: bytes, instance: str, here: str, there: str) -> None:
        """`here` and `there` are the addresses of head and node, for the sentences."""
        self._token = token
        self._instance = instance
        self._here = here
        self._there = there
        self._nonce = secrets.token_hex(16)
        self._proved: _Transcript | None = None
        self.challenge = _text({"protocol": PROTOCOL, "nonce": self._nonce, "instance": instance})

    def receive(self, text: str) -> Join:
        """Who the node is, once its answer has proved the token.

        Raises RefusedError for another token or protocol version, and ValueError for what is no answer at all.
        """
        answer = _object(text, {"join", "nonce", "mac"})
        theirs, who = _protocol(answer["join"]), self._who(answer["join"])
        if theirs != PROTOCOL:
            sentence = (
                f"{who} speaks version {theirs} of the control protocol and the head at {self._here} (rank 0) speaks "
                f"version {PROTOCOL}: all nodes need the same gen-stack"
            )
            raise RefusedError(sentence, _text({"refused": "protocol"}))
        join = decode_join(answer["join"])
        transcript = _Transcript(self._token, self._nonce, _nonce(answer["nonce"]), self._instance, join)
        if not isinstance(answer["mac"], str) or not _same(answer["mac"], transcript.mac("node")):
            sentence = f"{who} and the head at {self._here} (rank 0) do not have the same group token"
            raise RefusedError(sentence, _text({"refused": "token"}))
        self._proved = transcript
        return join

    def welcome(self) -> tuple[str, Session]:
        """The text that lets the node in, and the session it begins; only after `receive`."""
        transcript = self._transcript()
        session = Session(transcript.key("head to node"), transcript.key("node to head"))
        return _text({"mac": transcript.mac("head")}), session

    def refuse(self, reason: str) -> str:
        """The text that turns away a node that has proved the token; only after `receive`."""
        return _text({"refused": reason, "mac": self._transcript().mac("head refuses", reason)})

    def _transcript(self) -> _Transcript:
        if self._proved is None:
            raise RuntimeError("nothing is said to a node that has not proved the token")
        return self._proved

    def _who(self, join: dict[str, Any]) -> str:
        return f"the node at {self._there} (rank {_shown(join.get('rank'))})"


class NodeHandshake:
    """A node's side of one connection: `answer` the challenge, then `finish` with what the head says to that."""

    def __init__(self, token: bytes, join: Join, there: str) -> None:
        """`there` is the address of the head, for the sentences."""
        self._token = token
        self._join = join
        self._head = f"the head at {there} (rank 0)"
        self._me = f"this node at {join.address} (rank {join.rank})"
        self._transcript: _Transcript | None = None
        self.head_instance = ""

    def answer(self, challenge: str) -> str:
        """This node's proof; raises RefusedError for another version and ValueError for what is no challenge."""
        fields = _object(challenge)
        theirs = _protocol(fields)
        if theirs != PROTOCOL:
            # Without a proof, but so that the head, where people look, can say it too.
            answer = _text({"join": asdict(self._join), "nonce": "", "mac": ""})
            sentence = (
                f"{self._head} speaks version {theirs} of the control protocol and {self._me} speaks version "
                f"{PROTOCOL}: all nodes need the same gen-stack"
            )
            raise RefusedError(sentence, answer)
        if set(fields) != {"protocol", "nonce", "instance"} or not isinstance(fields["instance"], str):
            raise ValueError("no challenge of this protocol")
        nonce = secrets.token_hex(16)
        self.head_instance = fields["instance"]
        self._transcript = _Transcript(self._token, _nonce(fields["nonce"]), nonce, self.head_instance, self._join)
        return _text({"join": asdict(self._join), "nonce": nonce, "mac": self._transcript.mac("node")})

    def finish(self, text: str) -> Session:
        """The session, once the head has proved the token too.

        Raises RefusedError when the head refuses this node or does not prove the token, ValueError for anything else.
        """
        transcript = self._transcript
        if transcript is None:
            raise RuntimeError("the challenge has not been answered")
        fields = _object(text)
        mac, reason = fields.get("mac", ""), fields.get("refused")
        if not isinstance(mac, str):
            raise ValueError("neither a welcome nor a refusal")
        if set(fields) == {"mac"}:
            if not _same(mac, transcript.mac("head")):
                raise self._not_proved()
            return Session(transcript.key("node to head"), transcript.key("head to node"))
        if not isinstance(reason, str) or not set(fields) <= {"refused", "mac"}:
            raise ValueError("neither a welcome nor a refusal")
        raise RefusedError(reason) if _same(mac, transcript.mac("head refuses", reason)) else self._not_proved()

    def _not_proved(self) -> RefusedError:
        # Whatever a head says that has not proved the token, the words are this node's own.
        return RefusedError(f"{self._head} and {self._me} do not have the same group token")


class _Transcript:
    """What both sides of one handshake have agreed on, under the token."""

    def __init__(self, token: bytes, head_nonce: str, node_nonce: str, instance: str, join: Join) -> None:
        self._token = token
        self._agreed = [head_nonce, node_nonce, instance, asdict(join)]

    def mac(self, role: str, reason: str = "") -> str:
        return self._hmac("proof", role, reason).hex()

    def key(self, direction: str) -> bytes:
        return self._hmac("key", direction, "")

    def _hmac(self, *use: str) -> bytes:
        # Canonical JSON says where each part ends, so no two transcripts have the same bytes.
        return hmac.digest(self._token, _text([f"gen-stack {PROTOCOL}", *use, *self._agreed]).encode(), hashlib.sha256)


def _frame_mac(key: bytes, seq: int, body: str) -> str:
    return hmac.new(key, f"{seq}:{body}".encode(), hashlib.sha256).hexdigest()


def _same(theirs: str, ours: str) -> bool:
    return hmac.compare_digest(theirs.encode(errors="replace"), ours.encode())


def _text(value: object) -> str:
    """Canonical JSON: sorted, compact, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _object(text: str, names: set[str] | None = None) -> dict[str, Any]:
    """A JSON object, with exactly these names where they are given; raises ValueError for anything else."""
    value = _parse(text)
    if not isinstance(value, dict) or (names is not None and set(value) != names):
        raise ValueError("nothing of this protocol")
    return value


def _parse(text: str) -> object:
    if len(text) > MAX_FRAME:
        raise ValueError(f"more than {MAX_FRAME} characters")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:  # thousands of brackets
        raise ValueError("nothing of this protocol") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _protocol(fields: object) -> int:
    """The protocol number of a challenge or a join, the one field that every version has."""
    if not isinstance(fields, dict) or type(fields.get("protocol")) is not int or not 0 < fields["protocol"] < 10**6:
        raise ValueError("no protocol version")
    number: int = fields["protocol"]
    return number


def _nonce(value: object) -> str:
    if not isinstance(value, str) or not _NONCE.match(value):
        raise ValueError("no nonce")
    return value


def _shown(value: object) -> str:
    """A rank from a peer that has proved nothing, safe to print."""
    return str(value) if type(value) is int and -1 <= value < 10**6 else "unknown"
