"""When an engine is taken for dead, and when not."""

from __future__ import annotations

from stack_node.pulse import QUIET_S, Pulse

STALL_S = 300.0


def started() -> Pulse:
    pulse = Pulse(0, STALL_S)
    pulse.api_answers(100)
    return pulse


def test_a_start_may_take_hours_as_long_as_some_rank_does_something() -> None:
    pulse = Pulse(0, STALL_S)
    for now in range(0, 36000, 250):
        pulse.sign(now)
        assert pulse.fault(now + 249) is None
    assert "no sign of life from any rank for 301 s" in str(pulse.fault(35750 + 301))


def test_rest_asks_for_a_probe_and_proves_nothing() -> None:
    pulse = started()
    for now in range(100, 500):
        pulse.looked(5.0, 0, now)
    assert not started().wants_probe(100 + QUIET_S - 1)
    assert pulse.wants_probe(500)
    assert pulse.fault(500) is None


def test_a_probe_unanswered_while_no_counter_moves_is_a_stall() -> None:
    pulse = started()
    pulse.probe_sent()
    for now in range(100, 500):
        pulse.looked(5.0, 1, now)
    assert "stalled: no counter moved for" in str(pulse.fault(500))
    pulse.probe_answered(500)
    assert pulse.fault(501) is None


def test_a_probe_that_waits_in_a_full_queue_while_counters_move_is_none() -> None:
    pulse = started()
    pulse.probe_sent()
    for now in range(100, 2000):
        pulse.looked(float(now), 300, now)
        assert pulse.fault(now) is None


def test_a_gauge_that_falls_is_a_movement() -> None:
    pulse = started()
    pulse.probe_sent()
    pulse.looked(0.9, 1, 110)
    pulse.looked(0.2, 1, 350)
    assert pulse.fault(600) is None


def test_metrics_that_cannot_be_had_are_a_fault_after_the_stall_timeout() -> None:
    pulse = started()
    for now in range(100, 402):
        pulse.looked(None, 0, now)
    assert "has not given its metrics for 301 s" in str(pulse.fault(401))


def test_a_short_stall_timeout_asks_sooner() -> None:
    pulse = Pulse(0, 8)
    pulse.api_answers(0)
    pulse.looked(1.0, 0, 4)
    assert not pulse.wants_probe(7)
    assert pulse.wants_probe(8)
