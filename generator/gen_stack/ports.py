"""Who connects to whom on what: read off a plan, as data, as a table for people and as JSON for programs.

What listens where is measured in `docs/contracts.md` and said by vLLM 0.32.0's source: beside the fixed ports, every
rank of a group of several nodes opens ports that the system picks, and every other rank connects to them.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
from typing import TYPE_CHECKING

from gen_stack.problems import listed
from gen_stack.rules import DATA_PARALLEL_PORT, RENDEZVOUS_PORTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.plan import Gateway, GroupPlan, NodePlan, Plan

SCHEMA = "gen-stack/ports/1"
_FEW = 3
"""How many nodes a line of the table names; more are counted."""


@dataclasses.dataclass(frozen=True)
class Connection:
    """TCP connections that nodes open; a node never needs one to itself."""

    sources: tuple[str, ...] | None
    """Nodes that connect; `None` when it is whoever uses the endpoint."""
    targets: tuple[str, ...]
    ports: tuple[int, int] | None
    """First and last; `None` for ports that the system picks when they are opened."""
    what: str


def connections(plan: Plan) -> tuple[Connection, ...]:
    """List every connection of a stack."""
    between = tuple(one for group in plan.groups for one in _of_group(plan, group))
    return (*_of_gateway(plan.gateway), *between) if plan.gateway else between


def _of_gateway(gateway: Gateway) -> Iterator[Connection]:
    yield Connection(None, gateway.nodes, (gateway.port, gateway.port), "the endpoint, at the gateway")


def _of_group(plan: Plan, group: GroupPlan) -> Iterator[Connection]:
    head, names = (group.head.name,), tuple(node.name for node in group.nodes)
    ports, workers = group.ports, tuple(node.name for node in group.nodes[1:])
    api, control = (ports.api, ports.api), (ports.control, ports.control)
    if plan.gateway:
        yield Connection(plan.gateway.nodes, head, api, "requests that the gateway hands on")
        yield Connection(plan.gateway.nodes, head, control, "whether the group is ready")
    else:
        yield Connection(None, head, api, "the endpoint")
    if workers:
        master = (ports.master, ports.master + RENDEZVOUS_PORTS - 1)
        yield Connection(workers, head, control, "the group's control channel")
        yield Connection(workers, head, master, "the engine's rendezvous: each start takes another of these")
        if plan.parallelism.data > 1:
            meeting = (DATA_PARALLEL_PORT, DATA_PARALLEL_PORT)
            yield Connection(workers, head, meeting, "where data parallel ranks meet")
        yield Connection(names, names, None, "the engine's queues and collectives")


def ports_json(plan: Plan) -> str:
    """Write the connections for programs."""
    nodes = [
        {"name": node.name, "address": node.address, "group": group.name}
        for group in plan.groups
        for node in group.nodes
    ]
    every = [
        {"from": one.sources, "to": one.targets, "protocol": "tcp", "ports": one.ports, "what": one.what}
        for one in connections(plan)
    ]
    content = {"schema": SCHEMA, "stack": plan.name, "nodes": nodes, "connections": every}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def ports_table(plan: Plan) -> str:
    """Write the connections for people."""
    nodes = {node.name: node for node in plan.nodes}
    rows = [("from", "to", "port", "what"), *(_row(plan, one, nodes) for one in connections(plan))]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows
    ]
    return (
        "\n".join(
            [f"{plan.name}: who connects to whom, all of it TCP", *(f"  {line}" for line in lines), *_notes(plan)]
        )
        + "\n"
    )


def _row(plan: Plan, one: Connection, nodes: dict[str, NodePlan]) -> tuple[str, str, str, str]:
    bind = (plan.gateway.bind if plan.gateway else plan.api_bind) if one.sources is None else None
    address = ipaddress.ip_address(bind or nodes[one.targets[0]].address)
    if one.sources is None:
        sources = f"{one.targets[0]} itself" if address.is_loopback else "clients"
    else:
        sources = _names(one.sources)
    if one.sources == one.targets:
        targets = "each other" if len(one.targets) > 1 else "itself"
    elif len(one.targets) > 1:
        targets = _names(one.targets)
    else:
        targets = f"{one.targets[0]} ({nodes[one.targets[0]].address if address.is_unspecified else address})"
    if one.ports is None:
        return sources, targets, "any", one.what
    first, last = one.ports
    return sources, targets, str(first) if first == last else f"{first}-{last}", one.what


def _names(names: tuple[str, ...]) -> str:
    return listed(names) if len(names) <= _FEW else f"{len(names)} nodes, {names[0]} to {names[-1]}"


def _notes(plan: Plan) -> Iterator[str]:
    several = any(len(group.nodes) > 1 for group in plan.groups)
    if several:
        yield "Whoever reaches the engine's own ports can run programs on the nodes: they belong on a private network."
        yield "`--nft` writes rules that close them, and the control channel, to everybody but the nodes."
    if several and plan.rdma != "off":
        yield "With RDMA, data also goes past the kernel (RoCE v2: UDP 4791), where no firewall of a host sees it."
