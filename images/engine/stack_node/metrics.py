"""What `/metrics` answers on the head's control port, in Prometheus' text format (docs/operations.md has the table)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

MEMBER_STATES = ("missing", "fetching", "blocked", "waiting", "starting", "running", "stopping")
FAULT_KINDS = ("engine", "lost", "stall", "start", "rendezvous")


def render(status: dict[str, Any]) -> bytes:
    """The metrics of a group in a certain status (`report.status`)."""
    # Here, because only a head that is asked needs it; and a registry of our own has nothing else in it.
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(status))
    return generate_latest(registry)


class _Collector:
    """Gives the registry what a status says."""

    def __init__(self, status: dict[str, Any]) -> None:
        self._status = status

    def describe(self) -> Iterable[Metric]:
        return ()  # without this the registry would collect once more to learn the names

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status
        yield GaugeMetricFamily("gen_stack_group_ready", "1 when requests are welcome", value=float(status["ready"]))
        yield GaugeMetricFamily("gen_stack_epoch", "Number of the last common start of all engines", status["epoch"])
        yield GaugeMetricFamily("gen_stack_failures", "Failures that count against the budget", status["failures"])
        restarts = CounterMetricFamily(
            "gen_stack_restarts", "Ends of an epoch by a fault, since the head started", labels=["cause"]
        )
        for cause in [*FAULT_KINDS, *sorted(status["restarts"].keys() - set(FAULT_KINDS))]:
            restarts.add_metric([cause], status["restarts"].get(cause, 0))
        yield restarts
        for what, text in (
            ("recovery", "From the last fault until the group was ready again"),
            ("detection", "From the last sign of life of what failed until the fault was noticed"),
        ):
            seconds = GaugeMetricFamily(f"gen_stack_last_{what}_seconds", text)
            if status[f"last_{what}_s"] is not None:
                seconds.add_metric([], status[f"last_{what}_s"])
            yield seconds
        yield from _members(status["members"])


def _members(members: list[dict[str, Any]]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    states = [member["state"] for member in members]
    counted = GaugeMetricFamily("gen_stack_members", "Nodes of the group by their state", labels=["state"])
    for state in [*MEMBER_STATES, *sorted(set(states) - set(MEMBER_STATES))]:
        counted.add_metric([state], states.count(state))
    yield counted
    engines = GaugeMetricFamily(
        "gen_stack_engine_up", "1 when the rank's engine is part of a ready group", labels=["rank", "node"]
    )
    weights = GaugeMetricFamily("gen_stack_weights_bytes", "Weights on the node", labels=["rank", "kind"])
    for member in members:
        engines.add_metric([str(member["rank"]), member["node"]], float(member["state"] == "running"))
        for kind in ("done", "total"):
            weights.add_metric([str(member["rank"]), kind], member[kind])
    yield engines
    yield weights
