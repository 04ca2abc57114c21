"""The group's behaviour, fault by fault, in simulated time; the same machines run in the product."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stack_node import events as ev
from stack_node import report
from stack_node.group import RENDEZVOUS_S
from stack_node.member import Engine
from stack_node.messages import PROTOCOL, Failed, Join, Leaving, Stopped
from stack_node.roster import ranks
from tests.node.simulation import LOAD_S, SETTINGS, Phase, Simulation, up

JOIN = Join(PROTOCOL, "g", 3, 1, "d", "1", "0.32.0", 1, "10.0.0.9", "other", "x")


def epoch(simulation: Simulation) -> int:
    assert simulation.group is not None
    return simulation.group.epoch


def phase(simulation: Simulation) -> Phase:
    assert simulation.group is not None
    return simulation.group.phase


def recovers(simulation: Simulation, within: float) -> bool:
    before = epoch(simulation)
    return simulation.run_until(lambda: simulation.ready and epoch(simulation) != before, within)


def engines(simulation: Simulation) -> list[int | None]:
    return [node.engine.epoch if node.engine else None for node in simulation.nodes]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_nodes_may_start_in_any_order_and_hours_apart(order: tuple[int, ...]) -> None:
    simulation = Simulation()
    for rank in (0, 1, 2):
        simulation.die(rank)
    for rank in order:
        simulation.run(4000)
        assert not simulation.ready
        simulation.boot(rank)
    assert simulation.run_until(lambda: simulation.ready, 20)
    assert simulation.saved == (0, 0, None)


def test_missing_ranks_are_named_at_first_and_then_once_a_minute() -> None:
    simulation = Simulation()
    simulation.die(2)
    simulation.run(185)
    waits = [line for line in simulation.said if line == "head: waiting for rank 2 to join"]
    assert len(waits) in (3, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_engine_process_ends_the_epoch_for_all_within_a_second(rank: int) -> None:
    simulation = up()
    simulation.kill_engine(rank)
    simulation.run(0.5)
    assert not simulation.ready
    assert engines(simulation) == [None, None, None] or epoch(simulation) == 2
    assert simulation.run_until(lambda: simulation.ready, LOAD_S + 2)
    assert epoch(simulation) == 2
    assert simulation.group is not None
    assert simulation.group.last_fault is not None
    assert simulation.group.last_fault["rank"] == rank
    assert simulation.group.last_fault["log"] == ["last line"]
    assert simulation.saved[0] == 1


def test_an_api_that_is_healthy_and_answers_nothing_is_not_ready() -> None:
    simulation = Simulation()
    simulation.answers = False
    simulation.run(SETTINGS.stall_timeout)
    assert phase(simulation) is Phase.STARTING
    simulation.run(15)
    assert any("a request of ours is unanswered" in line for line in simulation.said)
    simulation.answers = True
    assert simulation.run_until(lambda: simulation.ready, 30)


def test_the_first_thing_after_a_fault_is_the_end_of_the_api() -> None:
    simulation = up()
    group, worker = simulation.group, simulation.nodes[1]
    assert group is not None
    assert worker.link is not None
    actions = group.handle(ev.FromNode(worker.link, Failed(1, "killed", [])), simulation.now)
    assert actions[0] == ev.KillOwnEngine()
    assert {action.link for action in actions if isinstance(action, ev.Send)} == {n.link for n in simulation.nodes}


def test_a_group_does_not_start_again_with_a_node_that_is_about_to_go() -> None:
    simulation = up()
    group = simulation.group
    assert group is not None
    links = [node.link for node in simulation.nodes]
    assert None not in links
    for message in (Leaving(), Stopped(1)):
        for link in links[1:2] if isinstance(message, Leaving) else links:
            group.handle(ev.FromNode(link or 0, message), simulation.now)
        for _ in range(3):
            group.handle(ev.Gauges(1, 1.0, 0), simulation.now)
    assert group.phase is Phase.FORMING
    assert "rank 1 (n, 10.0.0.1) to come back, which is stopping" in report.sentence(group, simulation.now)


def test_a_cut_cable_of_three_seconds_is_nothing() -> None:
    simulation = up()
    simulation.cut(1)
    simulation.run(3)
    simulation.heal(1)
    simulation.run(60)
    assert epoch(simulation) == 1
    assert simulation.ready


@pytest.mark.parametrize(("incoming", "outgoing"), [(True, True), (True, False), (False, True)])
def test_a_longer_cut_in_any_direction_ends_the_epoch_on_both_sides(incoming: bool, outgoing: bool) -> None:
    simulation = up()
    simulation.cut(1, incoming=incoming, outgoing=outgoing)
    simulation.run(SETTINGS.node_timeout + 1.5)
    assert not simulation.ready
    assert simulation.nodes[1].engine is None
    simulation.run(30)
    simulation.heal(1)
    assert recovers(simulation, 30)
    assert simulation.saved[0] == 0, "a node lost while ready uses no budget"


def test_a_node_frozen_for_five_seconds_is_nothing() -> None:
    simulation = up()
    simulation.freeze(2)
    simulation.run(5)
    simulation.thaw(2)
    simulation.run(30)
    assert epoch(simulation) == 1
    assert simulation.ready


def test_a_node_that_thaws_late_kills_its_own_engine_before_it_joins_again() -> None:
    simulation = up()
    simulation.freeze(2)
    simulation.run(300)
    assert not simulation.ready
    simulation.thaw(2)
    simulation.run(0.5)
    assert simulation.nodes[2].engine is None
    assert recovers(simulation, 30)


def test_workers_outlive_their_head_and_form_anew_with_the_next() -> None:
    simulation = up()
    simulation.die(0)
    simulation.run(1)
    assert engines(simulation) == [None, None, None]
    simulation.run(600)
    simulation.boot(0)
    assert simulation.run_until(lambda: simulation.ready, 30)


def test_a_head_that_is_back_within_the_node_timeout_finds_no_old_engine() -> None:
    simulation = up()
    simulation.die(0)
    simulation.run(0.5)
    simulation.boot(0)
    assert simulation.run_until(lambda: simulation.ready, 30)
    assert {node.head_instance for node in simulation.nodes} == {"h2"}


def test_a_worker_that_starts_anew_takes_its_rank_back_at_once() -> None:
    simulation = up()
    simulation.boot(1)
    assert recovers(simulation, LOAD_S + 5)
    assert simulation.saved[0] == 0


def test_a_node_that_dies_while_starting_again_and_again_uses_the_budget_up() -> None:
    simulation = Simulation(replace(SETTINGS, max_restarts=2))
    for _ in range(3):
        assert simulation.run_until(lambda: phase(simulation) is Phase.STARTING, 30)
        simulation.boot(1)
        simulation.run(1)
    assert phase(simulation) is Phase.DOWN


def test_a_stall_is_found_by_a_request_of_our_own_even_when_nobody_asks() -> None:
    simulation = up()
    simulation.nodes[1].hangs = True
    simulation.run(SETTINGS.stall_timeout + 5)
    assert not simulation.ready
    assert any("a request of ours is unanswered" in line for line in simulation.said)
    simulation.nodes[1].hangs = False
    assert simulation.run_until(lambda: simulation.ready, 30)


def test_idle_hours_and_busy_hours_are_no_stall() -> None:
    simulation = up()
    simulation.run(7200)
    simulation.requests = 5
    simulation.run(7200)
    assert epoch(simulation) == 1
    assert simulation.ready


def test_an_engine_that_shows_no_sign_of_life_while_starting_is_a_stall() -> None:
    simulation = Simulation()
    simulation.nodes[1].hangs = True
    assert simulation.run_until(lambda: phase(simulation) is Phase.STARTING, 10)
    simulation.run(SETTINGS.stall_timeout + 2)
    assert any("no sign of life from any rank" in line for line in simulation.said)


def test_ranks_that_do_not_meet_are_a_fault_of_their_own() -> None:
    simulation = Simulation(replace(SETTINGS, stall_timeout=10**6))
    simulation.nodes[1].hangs = True
    simulation.run(RENDEZVOUS_S + 10)
    assert simulation.group is not None
    assert simulation.group.restarts == {"rendezvous": 1}


def test_a_head_that_is_asked_to_stop_lets_requests_finish() -> None:
    simulation = up()
    simulation.requests = 2
    simulation.run(3)
    simulation.stop(0)
    simulation.run(10)
    assert phase(simulation) is Phase.DRAINING
    assert not simulation.ready
    assert None not in engines(simulation)
    simulation.requests = 0
    simulation.run(3)
    assert simulation.exited == [0]
    assert engines(simulation) == [None, None, None]


def test_requests_that_do_not_finish_are_cut_off_when_the_drain_is_over() -> None:
    simulation = up()
    simulation.requests = 1
    simulation.run(3)
    simulation.stop(0)
    simulation.run(SETTINGS.drain + 2)
    assert simulation.exited == [0]


def test_a_worker_that_is_asked_to_stop_has_the_group_drained_first() -> None:
    simulation = up()
    simulation.requests = 1
    simulation.run(3)
    simulation.stop(1)
    simulation.run(5)
    assert simulation.exited == []
    assert phase(simulation) is Phase.DRAINING
    simulation.requests = 0
    simulation.run(3)
    assert simulation.exited == [1]
    assert phase(simulation) is Phase.FORMING
    simulation.boot(1)
    assert simulation.run_until(lambda: simulation.ready, 30)
    assert simulation.saved[0] == 0


def test_a_fault_while_draining_ends_the_drain() -> None:
    simulation = up()
    simulation.requests = 1
    simulation.run(3)
    simulation.stop(0)
    simulation.run(3)
    simulation.kill_engine(2)
    simulation.run(1)
    assert simulation.exited == [0]


def test_asking_twice_stops_at_once() -> None:
    simulation = up()
    simulation.requests = 1
    simulation.run(3)
    simulation.stop(0)
    simulation.run(1)
    simulation.stop(0)
    simulation.run(0.2)
    assert simulation.exited == [0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stop_while_starting_does_not_wait_for_the_start(rank: int) -> None:
    simulation = Simulation()
    assert simulation.run_until(lambda: phase(simulation) is Phase.STARTING, 10)
    simulation.stop(rank)
    simulation.run(1)
    assert simulation.exited == [rank]
    assert simulation.saved[0] == 0


@pytest.mark.parametrize(
    ("join", "words"),
    [
        (replace(JOIN, group="h"), "group h, the head has g"),
        (replace(JOIN, digest="e"), "plan e, the head has d"),
        (replace(JOIN, engine_version="0.31.0"), "engine version 0.31.0, the head has 0.32.0"),
        (replace(JOIN, version="2"), "stack-node version 2, the head has 1"),
        (replace(JOIN, protocol=2), "protocol 2, the head has 1"),
        (replace(JOIN, nnodes=4), "group size 4, the head has 3"),
        (replace(JOIN, rank=3), "outside of 0 to 2"),
        (JOIN, "wants a rank that n at 10.0.0.1 holds"),
    ],
)
def test_a_stranger_is_refused_with_a_sentence_that_names_both_sides(join: Join, words: str) -> None:
    simulation = up()
    assert simulation.group is not None
    reason = simulation.group.judge(join, simulation.now)
    assert reason is not None
    assert words in reason
    assert f"rank {join.rank} (other, 10.0.0.9)" in reason


def test_a_lost_nodes_rank_goes_to_another_address_only_when_its_engine_must_be_dead() -> None:
    simulation = up()
    assert simulation.group is not None
    simulation.cut(1)
    simulation.run(SETTINGS.node_timeout + 1)
    reason = simulation.group.judge(JOIN, simulation.now)
    assert reason is not None
    assert "10.0.0.1 had this rank and may still run its engine" in reason
    assert simulation.group.judge(JOIN, simulation.now + SETTINGS.node_timeout + 5) is None


def test_pairs_that_cannot_connect_are_named_and_nothing_is_started() -> None:
    simulation = Simulation()
    simulation.unreachable = {(1, 2)}
    simulation.run(15)
    assert phase(simulation) in (Phase.FORMING, Phase.CHECKING)
    assert any("rank 1 (n, 10.0.0.1) cannot connect to rank 2 at 10.0.0.2" in line for line in simulation.said)
    assert simulation.saved[0] == 0
    simulation.unreachable = set()
    assert simulation.run_until(lambda: simulation.ready, 30)


def test_an_engine_that_cannot_be_killed_keeps_the_group_from_starting_and_is_named() -> None:
    simulation = up()
    simulation.nodes[1].unkillable = True
    simulation.kill_engine(0)
    simulation.run(20)
    assert simulation.group is not None
    assert "needs a reboot" in report.sentence(simulation.group, simulation.now)
    member = simulation.nodes[1].member
    assert member is not None
    assert member.engine is Engine.STUCK
    assert member.health[0] is False
    simulation.nodes[1].unkillable = False
    assert simulation.run_until(lambda: simulation.ready, 30)


def test_weights_that_cannot_be_had_are_a_reason_to_wait_not_a_failure() -> None:
    simulation = Simulation()
    simulation.nodes[2].weights_problem = "no such model"
    simulation.boot(2)
    simulation.run(130)
    assert simulation.group is not None
    assert "no such model" in report.sentence(simulation.group, simulation.now)
    assert report.member(simulation.group, 2)["state"] == "blocked"
    simulation.nodes[2].weights_problem = ""
    assert simulation.run_until(lambda: simulation.ready, 90)
    assert simulation.saved[0] == 0


def test_ten_minutes_ready_make_the_budget_whole() -> None:
    simulation = up()
    simulation.kill_engine(1)
    assert recovers(simulation, 30)
    simulation.run(590)
    assert simulation.saved[0] == 1
    simulation.run(20)
    assert simulation.saved[0] == 0


def test_a_head_that_is_started_anew_remembers_a_used_up_budget() -> None:
    simulation = Simulation(replace(SETTINGS, max_restarts=1))
    simulation.nodes[1].fails_to_start = 2
    assert simulation.run_until(lambda: phase(simulation) is Phase.DOWN, 60)
    simulation.boot(0)
    simulation.run(50)
    assert phase(simulation) is Phase.DOWN
    assert simulation.run_until(lambda: simulation.ready, 60)


def test_the_status_tells_phase_ranks_and_the_last_fault() -> None:
    simulation = up()
    simulation.kill_engine(2)
    assert recovers(simulation, 30)
    assert simulation.group is not None
    status = report.status(simulation.group, simulation.now)
    assert status["ready"]
    assert status["phase"] == "ready"
    assert status["epoch"] == 2
    assert [member["state"] for member in status["members"]] == ["running"] * 3
    assert status["last_fault"]["reason"] == "rank 2 (n, 10.0.0.2): killed by SIGKILL"
    assert status["restarts"] == {"engine": 1}
    assert 5 < status["last_recovery_s"] < 7


@pytest.mark.parametrize(("numbers", "text"), [([2], "2"), ([1, 2], "1-2"), ([5, 1, 3, 4], "1, 3-5"), ([], "")])
def test_ranks_are_written_in_short(numbers: list[int], text: str) -> None:
    assert ranks(numbers) == text
