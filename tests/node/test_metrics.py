from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from stack_node import metrics
from tests.node.a_status import a_member, a_status

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(**other: object) -> Samples:
    """What a Prometheus reads."""
    text = metrics.render(a_status(**other)).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((f"gen_stack_{name}", frozenset(labels.items())))


def test_a_ready_group() -> None:
    found = samples()
    assert value(found, "group_ready") == 1
    assert value(found, "epoch") == 3
    assert value(found, "failures") == 1
    assert value(found, "last_recovery_seconds") == 61.7
    assert value(found, "last_detection_seconds") == 0.3
    assert value(found, "engine_up", rank="1", node="gpu-b") == 1


def test_every_state_and_cause_is_there_from_the_beginning() -> None:
    found = samples(restarts={"engine": 2})
    states = {state: value(found, "members", state=state) for state in metrics.MEMBER_STATES}
    assert states == {**dict.fromkeys(metrics.MEMBER_STATES, 0.0), "running": 2}
    causes = {cause: value(found, "restarts_total", cause=cause) for cause in metrics.FAULT_KINDS}
    assert causes == {**dict.fromkeys(metrics.FAULT_KINDS, 0.0), "engine": 2}


def test_what_has_not_happened_yet_has_no_time() -> None:
    found = samples(ready=False, last_recovery_s=None, last_detection_s=None)
    assert value(found, "group_ready") == 0
    assert value(found, "last_recovery_seconds") is None
    assert value(found, "last_detection_seconds") is None


def test_a_node_that_fetches() -> None:
    found = samples(members=[a_member(0), a_member(1, state="fetching", done=5 << 30, total=70 << 30)])
    assert value(found, "members", state="fetching") == 1
    assert value(found, "engine_up", rank="1", node="gpu-b") == 0
    assert value(found, "weights_bytes", rank="1", kind="done") == 5 << 30
    assert value(found, "weights_bytes", rank="1", kind="total") == 70 << 30


def test_names_cannot_break_out_of_a_label() -> None:
    name = 'a"} 1\ngen_stack_epoch 7\\'
    found = samples(members=[a_member(0, node=name)])
    assert value(found, "engine_up", rank="0", node=name) == 1
    assert value(found, "epoch") == 3


def test_nothing_of_this_process_is_in_it() -> None:
    assert all(name.startswith("gen_stack_") for name, _ in samples())


def test_one_answer_leaves_nothing_for_the_next() -> None:
    assert metrics.render(a_status()) == metrics.render(a_status())
