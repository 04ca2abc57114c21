"""Messages go through JSON and come back the same; anything else is refused."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_node import messages as msg

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(2**40), 2**40),
    "str": st.text(),
    "bool": st.booleans(),
    "list[str]": st.lists(st.text(), max_size=4),
    "list[list[Any]]": st.lists(st.tuples(st.integers(0, 9), st.text(), st.integers(0, 9)).map(list), max_size=4),
}


def any_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: VALUES[hint] for name, hint in kind.__annotations__.items()})


@given(st.one_of([any_of(kind) for union in (msg.ToHead, msg.ToNode) for kind in get_args(union)]))
def test_every_message_survives_json(message: msg.Message) -> None:
    assert msg.decode(json.loads(json.dumps(msg.encode(message)))) == message


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "ping",
        {},
        {"kind": "pong!"},
        {"kind": ["ping"]},
        {"kind": "join"},
        {"kind": "ping"},
        {"kind": "ping", "number": 1, "more": 2},
        {"kind": "ping", "number": "1"},
        {"kind": "ping", "number": True},
        {"kind": "ping", "number": 1.5},
        {"kind": "stop", "epoch": 1, "reason": "x", "gently": 1},
        {"kind": "reach", "epoch": 1, "peers": {}},
    ],
)
def test_what_is_no_message_is_refused(data: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        msg.decode(data)
