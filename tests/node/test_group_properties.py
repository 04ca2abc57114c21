"""Random faults by the hundred: never two epochs side by side, never ready with a rank missing, always ready again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.node.simulation import SETTINGS, Phase, Simulation, up

# Long enough never to be exhausted: the budget has properties of its own below.
ENDLESS = replace(SETTINGS, max_restarts=10**6)

ranks = st.integers(0, 2)
pauses = st.sampled_from([0.0, 0.1, 1.0, 3.0, 9.0, 11.0, 30.0, 90.0])
faults = st.one_of(
    st.tuples(st.sampled_from(["kill_engine", "die", "boot", "freeze", "thaw", "heal", "stop"]), ranks),
    st.tuples(st.just("cut"), ranks, st.sampled_from(["both", "in", "out"])),
    st.tuples(st.just("hang"), ranks),
    st.tuples(st.just("fail"), ranks, st.integers(1, 3)),
    st.tuples(st.just("requests"), st.integers(0, 3)),
)
stories = st.lists(st.tuples(faults, pauses), min_size=1, max_size=300)


def apply(simulation: Simulation, fault: tuple[object, ...]) -> None:
    match fault:
        case ("cut", int(rank), way):
            simulation.cut(rank, incoming=way in ("both", "in"), outgoing=way in ("both", "out"))
        case ("hang", int(rank)):
            simulation.nodes[rank].hangs = True
        case ("fail", int(rank), int(times)):
            simulation.nodes[rank].fails_to_start = times
        case ("requests", int(number)):
            simulation.requests = number
        case (str(name), int(rank)):
            getattr(simulation, name)(rank)


def live_through(simulation: Simulation, story: list[tuple[tuple[object, ...], float]]) -> None:
    for fault, pause in story:
        apply(simulation, fault)
        simulation.run(pause)
    simulation.requests = 0
    simulation.clear()
    simulation.run(60)  # stops that were asked for come to their end
    simulation.clear()
    simulation.run(15)  # and what happened last is noticed


@given(stories)
@settings(max_examples=20, deadline=None)
def test_whatever_happens_the_group_is_ready_again_soon_after_it_stops_happening(story) -> None:  # type: ignore[no-untyped-def]
    simulation = up(ENDLESS)
    live_through(simulation, story)
    assert simulation.run_until(lambda: simulation.ready, 400), simulation.said[-20:]
    assert simulation.whole
    simulation.run(30)
    assert simulation.ready, simulation.said[-20:]


@given(stories)
@settings(max_examples=10, deadline=None)
def test_a_group_that_used_its_budget_up_comes_back_by_itself_within_its_rare_attempts(story) -> None:  # type: ignore[no-untyped-def]
    simulation = up()
    live_through(simulation, story)
    assert simulation.run_until(lambda: simulation.ready, 2 * 3600), simulation.said[-20:]


@pytest.mark.parametrize(("budget", "rank"), [(0, 2), (3, 0)])
def test_an_engine_that_always_fails_is_tried_max_restarts_times_and_then_rarely(budget: int, rank: int) -> None:
    simulation = Simulation(replace(SETTINGS, max_restarts=budget))
    simulation.nodes[rank].fails_to_start = 10**6
    assert simulation.run_until(lambda: simulation.group is not None and simulation.group.phase is Phase.DOWN, 400)
    starts = sum("all 3 nodes start the engine" in line for line in simulation.said)
    assert starts == budget + 1
    simulation.said.clear()
    simulation.run(280)
    assert simulation.said == []
    simulation.run(2 * 3600)
    starts = sum("all 3 nodes start the engine" in line for line in simulation.said)
    assert 3 <= starts <= 5  # after 5, 15, 35 and 75 minutes
    simulation.nodes[rank].fails_to_start = 0
    assert simulation.run_until(lambda: simulation.ready, 3700)
    simulation.run(700)
    assert simulation.saved[:2] == (0, 0)
