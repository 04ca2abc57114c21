"""The plan: every decision that generated files need, as plain frozen data.

`planner.py` makes it, renderers read it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import json
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from gen_stack.memory import MemoryPlan


@dataclasses.dataclass(frozen=True)
class Choice:
    """A decision that the spec left open, or could have, with its reason."""

    key: str
    value: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Image:
    """The image of the engine.

    `build` adds our layer to `engine_image` on each node; `upstream` is that image as it is; `reference` is the user's.
    """

    kind: Literal["build", "upstream", "reference"]
    reference: str
    engine_image: str | None = None


@dataclasses.dataclass(frozen=True)
class Devices:
    """The GPUs of a node; `ids` empty means the first `count`."""

    kind: Literal["cuda", "rocm", "cpu"]
    count: int
    ids: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mount:
    """Something persistent in the container: a named volume, or a host folder that must exist."""

    kind: Literal["volume", "bind"]
    source: str
    target: str
    read_only: bool = False
    volume_name: str | None = None
    """The volume's name on the Docker engine, when several stacks share it."""


@dataclasses.dataclass(frozen=True)
class Parallelism:
    """How many ways the model is split; their product is the world size."""

    tensor: int
    pipeline: int
    data: int
    expert: bool


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The bounds of supervision, as the container's contract takes them."""

    node_timeout: str
    stall_timeout: str
    max_restarts: int
    drain: str


@dataclasses.dataclass(frozen=True)
class Gateway:
    """One address in front of the groups."""

    nodes: tuple[str, ...]
    bind: str
    port: int
    metrics_port: int
    """On the loopback address of the gateway's own host."""
    keyed: bool
    """Whether users need an API key."""
    engine_key: bool
    """Whether the engines need one, which the gateway then sends."""
    tls: bool
    max_body_bytes: int
    sticky_header: str | None


@dataclasses.dataclass(frozen=True)
class Ports:
    """The ports of a group, all on its head: the endpoint, the control channel, the first of the rendezvous range."""

    api: int
    control: int
    master: int


@dataclasses.dataclass(frozen=True)
class NodePlan:
    """What is decided for one node."""

    name: str
    rank: int
    address: str
    project: str
    devices: Devices
    interface: str | None
    environment: tuple[tuple[str, str], ...]
    mounts: tuple[Mount, ...]
    secrets: tuple[str, ...]
    ssh: str | None

    @property
    def is_head(self) -> bool:
        """Whether this node has rank 0, and so the endpoint."""
        return self.rank == 0


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """Nodes that hold one copy of the model together, and live and die together."""

    name: str
    nodes: tuple[NodePlan, ...]
    ports: Ports
    supervised: bool
    """False for a single node without replicas: that one behaves as upstream does, on a network of its own."""
    digest: str = ""
    """What `digest` says of the group; the planner fills it in when all else is decided."""

    @property
    def head(self) -> NodePlan:
        """The node of rank 0."""
        return self.nodes[0]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A whole stack."""

    name: str
    spec_file: str
    model: str
    engine_version: str
    image: Image
    parallelism: Parallelism
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    user: str | None
    api_bind: str | None
    api_tls: bool
    """Whether the engine itself serves HTTPS, by the user's flags."""
    offline: bool
    rdma: Literal["auto", "required", "off"]
    recovery: Recovery
    stop_grace_s: int
    """How long Docker waits between SIGTERM and SIGKILL, in seconds."""
    groups: tuple[GroupPlan, ...]
    choices: tuple[Choice, ...]
    gateway: Gateway | None
    memory: MemoryPlan | None
    """What each stage's ranks hold, when enough is known to tell."""
    unchecked: str | None
    """Why the fit was not checked, when it was not."""
    advice: tuple[str, ...]
    """What would serve better than what the spec says."""
    forced: tuple[str, ...]
    """What is wrong and was to be written anyway."""

    @property
    def nodes(self) -> tuple[NodePlan, ...]:
        """All nodes of all groups."""
        return tuple(node for group in self.groups for node in group.nodes)


def digest(plan: Plan, group: GroupPlan) -> str:
    """Digest what all nodes of a group must agree on, so that nodes of two different plans never join each other.

    Sixteen hexadecimal digits of a SHA-256. What concerns one host alone (mounts, own variables) is left out.
    """
    common = {
        "engine": [plan.engine_version, *dataclasses.astuple(plan.image)],
        "command": plan.command,
        "environment": plan.environment,
        "rdma": plan.rdma,
        "recovery": dataclasses.astuple(plan.recovery),
        "group": [group.name, dataclasses.astuple(group.ports)],
        "nodes": [[node.name, node.address, node.devices.count] for node in group.nodes],
    }
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()[:16]


def endpoint(plan: Plan, group: GroupPlan) -> str:
    """Write the URL of a group's endpoint as its users reach it."""
    return _url(plan.api_bind, group.head, group.ports.api, tls=plan.api_tls)


def gateway_endpoints(plan: Plan) -> tuple[tuple[NodePlan, str], ...]:
    """List the nodes that run the gateway, each with the URL that its users reach; none without a gateway."""
    gateway = plan.gateway
    if gateway is None:
        return ()
    nodes = (node for node in plan.nodes if node.name in gateway.nodes)
    return tuple((node, _url(gateway.bind, node, gateway.port, tls=gateway.tls)) for node in nodes)


def url_host(address: str) -> str:
    """Write a numeric address as it stands before a port."""
    return f"[{address}]" if ":" in address else address


def _url(bind: str | None, node: NodePlan, port: int, *, tls: bool) -> str:
    reached = node.address if bind is None or ipaddress.ip_address(bind).is_unspecified else bind
    return f"{'https' if tls else 'http'}://{url_host(reached)}:{port}"
