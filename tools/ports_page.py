"""Makes `docs/ports.md`: what `gen-stack ports` says of a reference stack, and what to know before loading rules."""

from __future__ import annotations

from pathlib import Path

from gen_stack.load import load_spec
from gen_stack.planner import make_plan
from gen_stack.ports import SCHEMA, ports_table
from gen_stack.render.nft import PICKED_PORTS, nft_files

EXAMPLE = "compose/qwen-72b/spec.yaml"


def ports_page(mark: str) -> str:
    """Write the page; `mark` says that it is generated."""
    plan = make_plan(load_spec(Path(__file__).resolve().parent.parent / EXAMPLE, force=True))
    head = plan.nodes[0].name
    return PAGE.format(
        mark=mark,
        spec=EXAMPLE,
        table=ports_table(plan),
        head=head,
        rules=nft_files(plan)[head],
        schema=SCHEMA,
        stack=plan.name,
        picked=PICKED_PORTS,
        first=PICKED_PORTS.partition("-")[0],
    )


PAGE = """\
# Ports

{mark}

`gen-stack ports {spec}` says who connects to whom:

```text
{table}```

`--json` prints the same for programs, with every node by name and the schema `{schema}`.

The ports marked "any" are why no bridge network and no list of published ports can carry a group: every rank opens a
dozen that the system picks, and the others connect to them, both ways (`net.ipv4.ip_local_port_range`, by default
{picked}). Nothing on them is authenticated, and what they carry is unpickled. The control channel is: it proves the
group's token both ways, and `/status` and `/metrics` ask for it; only `/livez` and `/readyz` are open.

## Rules for nftables

`--nft --node {head}` prints the rules of one host; without `--node`, those of all, one after another, for reading.

```text
{rules}```

Load them on each host as root:

```console
$ gen-stack ports spec.yaml --nft --node {head} | ssh root@{head} nft -f -
```

- The rules are in a table of their own and only close: nothing that they do not name is touched, Docker's rules and the
  host's own firewall stay as they are. Where that firewall drops by default, open in it what the table above lists.
- Loading again replaces what was loaded before, in one step. After a change of the nodes, load on every host again.
- They are gone after a reboot. To keep them, put the file where the distribution's `nftables.service` loads it (an
  `include` in `/etc/nftables.conf`).
- The endpoint stays open to everybody: who may use it is for the API key, a gateway, or the host's firewall to say.
  With a gateway in the spec, the heads' endpoints are closed to everybody but the gateway.
- Monitoring that asks the control port from elsewhere, for `/readyz` or `/metrics`, needs a place in the set:
  `nft add element inet gen-stack-{stack} watchers {{ 10.0.0.99 }}`.
- On the node's address, TCP ports from {first} on are closed to strangers, whoever listens there: something else on the
  host that listens in that range and is used from outside needs another port or another address. Where
  `net.ipv4.ip_local_port_range` differs, change the range in the file with it.
- Two stacks that share a host but not all of their nodes: each one's table has to let in the nodes of the other,
  through the set `nodes`.
- One host for all nodes (loopback addresses) needs no rules; what stays inside the host passes.

`tests/e2e/test_firewall.py` loads these rules on two hosts with a third as the stranger, IPv4 and IPv6, and lets
nftables load those of every reference stack. It was nftables 1.0.6 on Linux 6.18 that took them.
"""
