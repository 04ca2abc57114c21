"""A node's view of itself, event by event; whole groups of them are in test_group.py."""

from __future__ import annotations

from stack_node import events as ev
from stack_node import messages as msg
from stack_node.member import CONNECT_AGAIN_S, LONGEST, REFUSED_AGAIN_S, REMIND_S, Member

TIMEOUT_S = 10.0


def fresh() -> Member:
    return Member(TIMEOUT_S, drain=60.0, now=0.0)


def joined() -> Member:
    member = fresh()
    for event in (ev.Tick(), ev.WeightsReady(), ev.Connected("h1")):
        member.handle(event, 0.0)
    return member


def attempts(member: Member, since: float, until: float) -> list[float]:
    """When it tries to connect, asked four times a second."""
    times = [since + step / 4 for step in range(int((until - since) * 4) + 1)]
    return [now for now in times if ev.Connect() in member.handle(ev.Tick(), now)]


def said(actions: list[ev.NodeAction]) -> list[str]:
    return [action.sentence for action in actions if isinstance(action, ev.Say)]


def test_weights_and_connection_are_wanted_at_once_and_side_by_side() -> None:
    assert fresh().handle(ev.Tick(), 0.0) == [ev.FetchWeights(), ev.Connect()]


def test_a_refused_node_says_why_at_first_and_once_a_minute_and_tries_again_slowly() -> None:
    member = fresh()
    member.handle(ev.Tick(), 0.0)
    sentences = []
    for now in range(0, 121, 10):
        sentences += said(member.handle(ev.Refused("another plan"), float(now)))
        assert attempts(member, now, now + 9) == [now + REFUSED_AGAIN_S]
        assert member.health == (False, "refused by the head: another plan")
    assert len(sentences) == 1 + 120 // REMIND_S


def test_a_head_that_is_not_there_is_tried_every_second() -> None:
    member = fresh()
    member.handle(ev.Tick(), 0.0)
    member.handle(ev.Disconnected("refused"), 1.0)
    assert attempts(member, 1.0, 3.0) == [1.0 + CONNECT_AGAIN_S]
    assert member.health == (False, "not connected to the head: refused")


def test_the_port_for_peers_is_closed_when_the_engine_starts_and_when_the_head_is_lost() -> None:
    member = joined()
    assert ev.OpenListener(1) in member.handle(ev.FromHead(msg.Listen(1)), 1.0)
    assert ev.CloseListener() in member.handle(ev.FromHead(msg.Start(1, 29500)), 2.0)
    assert ev.CloseListener() in member.handle(ev.Disconnected("gone"), 3.0)


def test_only_a_ping_that_was_answered_extends_the_lease() -> None:
    member = joined()
    member.handle(ev.FromHead(msg.Start(1, 29500)), 0.0)
    for now in range(1, 8):
        member.handle(ev.Tick(), float(now))
    member.handle(ev.FromHead(msg.Pong(3)), 8.0)  # the third, sent at 2 s
    member.handle(ev.FromHead(msg.Pong(999)), 8.0)
    assert ev.EndEngine(gently=False) not in member.handle(ev.Tick(), 2.0 + TIMEOUT_S)
    assert ev.EndEngine(gently=False) in member.handle(ev.Tick(), 2.1 + TIMEOUT_S)


def test_an_engine_is_not_started_beside_one_that_is_still_ending() -> None:
    member = joined()
    member.handle(ev.FromHead(msg.Start(1, 29500)), 0.0)
    member.handle(ev.FromHead(msg.Stop(1, "x", gently=False)), 1.0)
    assert not any(isinstance(a, ev.StartEngine) for a in member.handle(ev.FromHead(msg.Start(2, 29501)), 1.1))
    member.handle(ev.EngineGone(1, []), 1.2)
    assert ev.StartEngine(2, 29501) in member.handle(ev.FromHead(msg.Start(2, 29501)), 1.3)


def test_an_end_of_an_earlier_epochs_engine_is_no_news() -> None:
    member = joined()
    member.handle(ev.FromHead(msg.Start(2, 29500)), 0.0)
    assert member.handle(ev.EngineEnded(1, "late", []), 0.1) == []


def test_weights_do_not_make_an_engine_that_cannot_be_killed_good() -> None:
    member = joined()
    member.handle(ev.FromHead(msg.Start(1, 29500)), 0.0)
    member.handle(ev.FromHead(msg.Stop(1, "x", gently=False)), 1.0)
    member.handle(ev.EngineGone(1, [7]), 6.0)
    member.handle(ev.WeightsReady(), 7.0)
    assert "needs a reboot" in member.health[1]
    assert ev.Tell(msg.Prepared()) in member.handle(ev.EngineGone(1, []), 8.0)


def test_a_reason_of_any_length_fits_a_message() -> None:
    member = joined()
    actions = member.handle(ev.WeightsFailed("x" * 10**6, again=False), 1.0)
    [blocked] = [a.message for a in actions if isinstance(a, ev.Tell) and isinstance(a.message, msg.Blocked)]
    assert len(blocked.reason) == LONGEST


def test_a_node_that_was_asked_to_stop_does_not_wait_for_its_head_for_ever() -> None:
    member = joined()
    member.handle(ev.FromHead(msg.Start(1, 29500)), 0.0)
    assert ev.Tell(msg.Leaving()) in member.handle(ev.StopAsked(), 1.0)
    for now in range(2, 76):
        for action in member.handle(ev.Tick(), float(now)):
            if isinstance(action, ev.Tell) and isinstance(action.message, msg.Ping):
                member.handle(ev.FromHead(msg.Pong(action.message.number)), float(now))
    assert ev.EndEngine(gently=False) in member.handle(ev.Tick(), 76.5)
    assert ev.Exit() in member.handle(ev.EngineGone(1, []), 77.0)
