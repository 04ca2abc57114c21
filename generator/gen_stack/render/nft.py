"""Firewall rules of a node for nftables: what `ports.py` lists stays open, and the same ports are closed to strangers.

The table is the stack's own and only takes away: it lets pass whatever it does not name. It looks at packets that open
a connection, so open connections cost one comparison, and connection tracking is not needed.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from gen_stack.ports import connections

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gen_stack.plan import GroupPlan, NodePlan, Plan
    from gen_stack.ports import Connection

PICKED_PORTS = "32768-60999"
"""Where Linux picks ports from unless `net.ipv4.ip_local_port_range` says otherwise."""

_HEAD = """\
# {node} ({address}) of {stack}: made by gen-stack from {spec}; load it on this host alone, as root.
#   load, as often as you like:  nft -f FILE
#   look, drops are counted:     nft list table inet {table}
#   remove:                      nft delete table inet {table}
# It closes ports to strangers and opens none: where a firewall of this host drops by default, open there what
# `gen-stack ports` lists.
table inet {table}
delete table inet {table}
"""

_NOTHING = "# Nothing is to be closed: a node alone has its endpoint only, on a network of its own.\n"

_BODY = """\
table inet {table} {{
    # The other nodes of the group: the engine needs every port between them. A host of another stack that has ranks
    # on this node, too, belongs in here as well.
    set nodes {{
        type {type}{nodes}
    }}
    # Whoever else may ask the control port, such as Prometheus.
    set watchers {{
        type {type}
    }}
    chain input {{
        type filter hook input priority -5; policy accept;
        iifname "lo" accept
        tcp flags & (fin | syn | rst | ack) != syn accept
        {ip} saddr @nodes accept
{rules}
    }}
}}
"""


def nft_files(plan: Plan) -> dict[str, str]:
    """Write the rules of every node, by the node's name."""
    to: dict[str, list[Connection]] = {node.name: [] for node in plan.nodes}
    for one in connections(plan):
        for name in one.targets:
            to[name].append(one)
    addresses = {node.name: node.address for node in plan.nodes}
    return {
        node.name: _file(plan, group, node, _rules(group, node, to[node.name], addresses))
        for group in plan.groups
        for node in group.nodes
    }


def _file(plan: Plan, group: GroupPlan, node: NodePlan, rules: Iterable[str]) -> str:
    table = f"gen-stack-{plan.name}"
    head = _HEAD.format(node=node.name, address=node.address, stack=plan.name, spec=plan.spec_file, table=table)
    if not group.supervised:
        return head + _NOTHING
    others = [one.address for one in group.nodes if one is not node]
    ip = _family(node)
    return head + _BODY.format(
        table=table,
        ip=ip,
        type="ipv6_addr" if ip == "ip6" else "ipv4_addr",
        nodes=f"\n        elements = {_set(others)}" if others else "",
        rules="\n".join(f"        {rule}" for rule in rules),
    )


def _family(node: NodePlan) -> str:
    return "ip6" if ipaddress.ip_address(node.address).version == 6 else "ip"


def _rules(group: GroupPlan, node: NodePlan, incoming: list[Connection], addresses: dict[str, str]) -> Iterator[str]:
    ip, peers, closed = _family(node), {one.name for one in group.nodes}, []
    for one in incoming:
        if one.sources is None or one.ports is None:
            continue
        first, last = one.ports
        ports = str(first) if first == last else f"{first}-{last}"
        if guests := [addresses[name] for name in one.sources if name not in peers]:
            yield f"{ip} saddr {_set(guests)} tcp dport {ports} accept  # {one.what}"
        closed.append(ports)
    if node.is_head:
        yield f"{ip} saddr @watchers tcp dport {group.ports.control} accept"
    if closed:
        yield f"tcp dport {_set(list(dict.fromkeys(closed)))} counter drop"
    yield f"{ip} daddr {node.address} tcp dport {PICKED_PORTS} counter drop  # net.ipv4.ip_local_port_range"


def _set(elements: list[str]) -> str:
    return f"{{ {', '.join(elements)} }}"
