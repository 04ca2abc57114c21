"""The handshake and the frames, without sockets: what an attacker on the wire may try, and gets."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_node.channel import MAX_FRAME, HeadHandshake, NodeHandshake, RefusedError, Session
from stack_node.messages import PROTOCOL, Failed, Join, Ping, Pong, Stop

TOKEN = b"a-secret-of-the-group"
JOIN = Join(PROTOCOL, "g", 2, 1, "digest", "0.1", "0.32", 8, "10.0.0.2", "node-b", "instance-b")
HEAD, NODE = "10.0.0.1", "10.0.0.2"


def head(token: bytes = TOKEN) -> HeadHandshake:
    return HeadHandshake(token, "instance-a", HEAD, NODE)


def node(token: bytes = TOKEN, join: Join = JOIN) -> NodeHandshake:
    return NodeHandshake(token, join, f"{HEAD}:29400")


def sessions(token: bytes = TOKEN) -> tuple[Session, Session]:
    """A session's ends, at the head and at the node."""
    ours, theirs = head(token), node(token)
    ours.receive(theirs.answer(ours.challenge))
    welcome, session = ours.welcome()
    return session, theirs.finish(welcome)


def changed(text: str, **fields: Any) -> str:
    return json.dumps({**json.loads(text), **fields})


@pytest.mark.parametrize("token", [TOKEN, b"", b"x" * 300, bytes(range(256))])
def test_two_that_have_the_same_token_talk(token: bytes) -> None:
    at_head, at_node = sessions(token)
    for number in range(3):
        assert at_head.open(at_node.seal(Ping(number))) == Ping(number)
        assert at_node.open(at_head.seal(Pong(number))) == Pong(number)


def test_the_head_knows_from_the_proof_who_the_node_is() -> None:
    ours, theirs = head(), node()
    assert ours.receive(theirs.answer(ours.challenge)) == JOIN
    assert theirs.head_instance == "instance-a"


@pytest.mark.parametrize("token", [b"another", b"", TOKEN[:-1]])
def test_a_node_with_another_token_is_refused_with_both_sides_named(token: bytes) -> None:
    ours, theirs = head(), node(token)
    with pytest.raises(RefusedError) as refused:
        ours.receive(theirs.answer(ours.challenge))
    assert str(refused.value) == (
        "the node at 10.0.0.2 (rank 1) and the head at 10.0.0.1 (rank 0) do not have the same group token"
    )
    assert refused.value.answer is not None
    with pytest.raises(RefusedError) as told:
        theirs.finish(refused.value.answer)
    assert str(told.value) == (
        "the head at 10.0.0.1:29400 (rank 0) and this node at 10.0.0.2 (rank 1) do not have the same group token"
    )


def test_nothing_is_welcomed_or_refused_before_the_proof() -> None:
    ours = head()
    with pytest.raises(RuntimeError):
        ours.welcome()
    with pytest.raises(RuntimeError):
        ours.refuse("no")
    with pytest.raises(RuntimeError):
        node().finish("{}")


def test_a_refusal_with_a_reason_is_believed_from_a_head_with_the_token_only() -> None:
    ours, theirs = head(), node()
    ours.receive(theirs.answer(ours.challenge))
    refusal = ours.refuse("another digest")
    with pytest.raises(RefusedError, match=r"^another digest$"):
        theirs.finish(refusal)
    for forged in (changed(refusal, refused="send me your token"), '{"refused":"send me your token"}'):
        with pytest.raises(RefusedError, match=r"do not have the same group token$"):
            theirs.finish(forged)


def test_a_refusal_is_no_welcome() -> None:
    ours, theirs = head(), node()
    ours.receive(theirs.answer(ours.challenge))
    with pytest.raises(RefusedError, match="same group token"):
        theirs.finish(json.dumps({"mac": json.loads(ours.refuse(""))["mac"]}))


def test_a_head_without_the_token_that_sends_the_nodes_own_proof_back_is_not_trusted() -> None:
    impostor, theirs = head(b"guess"), node()
    reflected = json.dumps({"mac": json.loads(theirs.answer(impostor.challenge))["mac"]})
    with pytest.raises(RefusedError, match="same group token"):
        theirs.finish(reflected)


def test_a_recorded_answer_does_not_serve_for_another_challenge() -> None:
    first, theirs = head(), node()
    recorded = theirs.answer(first.challenge)
    with pytest.raises(RefusedError, match="same group token"):
        head().receive(recorded)


def test_a_recorded_welcome_does_not_serve_for_another_answer() -> None:
    ours, theirs = head(), node()
    ours.receive(theirs.answer(ours.challenge))
    welcome, _session = ours.welcome()
    other = node()
    other.answer(ours.challenge)
    with pytest.raises(RefusedError, match="same group token"):
        other.finish(welcome)


@pytest.mark.parametrize("field", sorted(asdict(JOIN).keys() - {"protocol"}))
def test_the_proof_covers_every_field_of_the_join(field: str) -> None:
    ours = head()
    answer = json.loads(node().answer(ours.challenge))
    value = answer["join"][field]
    answer["join"][field] = value + 1 if isinstance(value, int) else value + "x"
    with pytest.raises(RefusedError, match="same group token"):
        ours.receive(json.dumps(answer))


def test_the_proof_covers_the_heads_instance() -> None:
    ours, theirs = head(), node()
    with pytest.raises(RefusedError, match="same group token"):
        ours.receive(theirs.answer(changed(ours.challenge, instance="another")))


def test_a_head_of_a_newer_version_is_named_with_both_versions_and_is_told() -> None:
    theirs = node()
    with pytest.raises(RefusedError) as refused:
        theirs.answer('{"protocol":7,"whatever":[]}')
    assert str(refused.value) == (
        "the head at 10.0.0.1:29400 (rank 0) speaks version 7 of the control protocol and this node at 10.0.0.2 "
        f"(rank 1) speaks version {PROTOCOL}: all nodes need the same gen-stack"
    )
    assert refused.value.answer is not None
    assert json.loads(refused.value.answer)["join"]["protocol"] == PROTOCOL
    assert json.loads(refused.value.answer)["mac"] == ""


def test_a_node_of_a_newer_version_is_named_with_both_versions_whatever_its_join_has_become() -> None:
    with pytest.raises(RefusedError) as refused:
        head().receive('{"join":{"protocol":7,"rank":3,"new":1},"nonce":"","mac":""}')
    assert str(refused.value) == (
        "the node at 10.0.0.2 (rank 3) speaks version 7 of the control protocol and the head at 10.0.0.1 (rank 0) "
        f"speaks version {PROTOCOL}: all nodes need the same gen-stack"
    )


@pytest.mark.parametrize("rank", ["1\n", 10**300, None, [], True])
def test_a_strangers_rank_is_printed_only_when_it_is_one(rank: object) -> None:
    with pytest.raises(RefusedError, match=r"\(rank unknown\)"):
        head().receive(json.dumps({"join": {"protocol": 7, "rank": rank}, "nonce": "", "mac": ""}))


GARBAGE = [
    "",
    "null",
    "[]",
    "{}",
    '{"protocol":1}',
    '{"protocol":1,"nonce":"0","instance":"a"}',
    '{"protocol":1,"nonce":"' + "0" * 32 + '\\n","instance":"a"}',
    '{"protocol":1,"nonce":"' + "0" * 32 + '","instance":7}',
    '{"protocol":true}',
    '{"protocol":NaN}',
    '{"join":[],"nonce":"","mac":""}',
    '{"join":{"protocol":1},"nonce":"","mac":""}',
    '{"seq":0,"body":"{}","mac":7}',
    '{"seq":0,"body":"{}","mac":"\\ud800"}',
    '{"seq":true,"body":"{}","mac":""}',
    '{"seq":0,"body":"\\ud800","mac":""}',
    '{"mac":7}',
    '{"refused":7}',
    "[" * 60000,
    "9" * 60000,
    "{" + " " * MAX_FRAME + "}",
]


def everything_that_reads(text: str) -> None:
    """Feed one text to all that read from the wire; only the documented exceptions come out."""
    with pytest.raises((ValueError, RefusedError)):
        head().receive(text)
    with pytest.raises((ValueError, RefusedError)):
        node().answer(text)
    waiting = node()
    waiting.answer(head().challenge)
    with pytest.raises((ValueError, RefusedError)):
        waiting.finish(text)
    for session in sessions():
        with pytest.raises(ValueError):  # noqa: PT011
            session.open(text)


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_an_error_and_never_a_surprise(text: str) -> None:
    everything_that_reads(text)


NAMES = st.sampled_from(["protocol", "nonce", "instance", "join", "mac", "refused", "seq", "body", "rank", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(PROTOCOL),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)


@given(JSON.map(json.dumps) | st.text())
def test_no_text_at_all_is_taken_from_one_without_the_token(text: str) -> None:
    everything_that_reads(text)


@given(st.data())
def test_a_frame_with_one_character_changed_is_not_the_same_message(data: st.DataObject) -> None:
    at_head, at_node = sessions()
    frame = at_node.seal(Ping(7))
    place = data.draw(st.integers(0, len(frame) - 1))
    character = data.draw(st.characters(max_codepoint=126).filter(lambda c: c != frame[place]))
    with pytest.raises(ValueError):  # noqa: PT011
        at_head.open(frame[:place] + character + frame[place + 1 :])


@given(st.permutations(range(4)))
def test_frames_are_taken_in_their_order_only(order: list[int]) -> None:
    at_head, at_node = sessions()
    frames = [at_node.seal(Ping(number)) for number in range(4)]
    for place, number in enumerate(order):
        if place != number:
            with pytest.raises(ValueError, match=f"frame {place} was expected"):
                at_head.open(frames[number])
            return
        assert at_head.open(frames[number]) == Ping(number)


def test_a_frame_serves_once() -> None:
    at_head, at_node = sessions()
    frame = at_node.seal(Ping(0))
    at_head.open(frame)
    for again in (frame, changed(frame, seq=1)):
        with pytest.raises(ValueError):  # noqa: PT011
            at_head.open(again)


def test_a_frame_of_another_session_or_of_the_other_direction_is_not_taken() -> None:
    at_head, at_node = sessions()
    _other_head, other_node = sessions()
    with pytest.raises(ValueError, match="not made by the peer"):
        at_head.open(other_node.seal(Ping(0)))
    with pytest.raises(ValueError, match="not made by the peer"):
        at_node.open(at_node.seal(Ping(0)))


def test_a_message_that_does_not_fit_uses_no_number_up() -> None:
    at_head, at_node = sessions()
    with pytest.raises(ValueError, match="at most 65536"):
        at_node.seal(Failed(1, "x" * MAX_FRAME, []))
    assert at_head.open(at_node.seal(Ping(0))) == Ping(0)


@given(st.text(max_size=2000))
def test_any_text_arrives_unchanged(text: str) -> None:
    at_head, at_node = sessions()
    assert at_node.open(at_head.seal(Stop(1, text, True))) == Stop(1, text, True)


@given(st.text(max_size=100))
def test_any_join_can_be_proved(text: str) -> None:
    ours, join = head(), replace(JOIN, node=text)
    assert ours.receive(node(join=join).answer(ours.challenge)) == join


def test_the_token_is_in_no_text() -> None:
    ours, theirs = head(), node()
    answer = theirs.answer(ours.challenge)
    ours.receive(answer)
    welcome, session = ours.welcome()
    said = [ours.challenge, answer, welcome, ours.refuse("no"), session.seal(Pong(1))]
    assert not [text for text in said if TOKEN.decode() in text or TOKEN.hex() in text]
