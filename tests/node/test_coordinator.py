"""What the head's edge makes of the API's answers and of ports; the whole head is in test_control.py."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, cast

import pytest

from stack_node import config, coordinator
from stack_node import events as ev
from stack_node.coordinator import Coordinator
from stack_node.probe import Api, Proof
from tests.node.simulation import SETTINGS

if TYPE_CHECKING:
    from pathlib import Path


class AnsweringApi:
    """Answers as it is told, in turn."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes = list(outcomes)

    async def prove(self, timeout: float) -> Proof:
        return Proof(self.outcomes.pop(0), "words")  # type: ignore[arg-type]


def head(folder: Path, api: AnsweringApi, events: list[ev.HeadEvent], port: int = 8000) -> Coordinator:
    variables = {"NNODES": "1", "GEN_STACK_STATE_DIR": str(folder), "GEN_STACK_API_PORT": str(port)}
    read, problems = config.read(variables)
    assert problems == []
    made = Coordinator(
        read,
        SETTINGS,
        instance="h1",
        address="127.0.0.1",
        token=b"",
        api=cast("Api", api),
        api_address="127.0.0.1",
        world=None,
        kill_own_engine=lambda: None,
        finished=lambda: None,
        say=lambda _: None,
    )

    def note(event: ev.HeadEvent, _: float) -> list[ev.HeadAction]:
        events.append(event)
        return []

    made.group.handle = note  # type: ignore[assignment,method-assign]
    return made


@pytest.mark.parametrize(
    ("outcomes", "event"),
    [
        (["answered"], ev.Proved(3, "")),
        (["unanswered", "unanswered", "answered"], ev.Proved(3, "")),
        (["refused"], ev.Proved(3, " (a request of ours was refused, which proves less: words)")),
        (["unanswered", "failed"], ev.Disproved(3, "words")),
    ],
)
def test_a_request_that_a_full_queue_turned_away_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[str], event: ev.HeadEvent
) -> None:
    monkeypatch.setattr(coordinator, "PROBE_AGAIN_S", 0.0)
    events: list[ev.HeadEvent] = []
    asyncio.run(head(tmp_path, AnsweringApi(*outcomes), events)._probe(3))
    assert events == [event]


def test_an_api_port_that_something_else_has_is_said_with_what_to_do(tmp_path: Path) -> None:
    events: list[ev.HeadEvent] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        asyncio.run(head(tmp_path, AnsweringApi(), events, port)._pick_port(1))
    [picked] = events
    assert isinstance(picked, ev.PortPicked)
    assert f"the API's port {port} is taken" in picked.problem
    assert "set another GEN_STACK_API_PORT" in picked.problem


def test_each_epoch_has_another_rendezvous_port(tmp_path: Path) -> None:
    events: list[ev.HeadEvent] = []
    with socket.create_server(("127.0.0.1", 0)) as free_again:
        port = free_again.getsockname()[1]
    made = head(tmp_path, AnsweringApi(), events, port)

    async def three() -> None:
        for epoch in (1, 2, 3):
            await made._pick_port(epoch)

    asyncio.run(three())
    assert len({event.port for event in events if isinstance(event, ev.PortPicked)}) == 3
