"""What a node's container is given, whatever starts it: the one source of all renderers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gen_stack.plan import GroupPlan, NodePlan, Plan

SHM_SIZES = {"cuda": "16gb", "rocm": "16gb", "cpu": "2gb"}
"""`/dev/shm` by device. The head alone needs 160 MiB for the engine's queue, NCCL and RCCL more for each GPU."""

LOGGING = {
    "driver": "json-file",
    "options": {"mode": "non-blocking", "max-buffer-size": "4m", "max-size": "50m", "max-file": "5"},
}
"""Docker's own logging, bounded, and dropping lines rather than waiting for a disk."""

SECRET_VARIABLES = {
    "group_token": "GEN_STACK_TOKEN_FILE",
    "api_key": "GEN_STACK_API_KEY_FILE",
    "hub_token": "HF_TOKEN_PATH",
}
"""Which variable names the file of a secret, by the secret's name."""


def environment(plan: Plan, group: GroupPlan, node: NodePlan) -> dict[str, str]:
    """List all variables of a node whose rank and addresses the plan knows, secrets below /run/secrets."""
    variables: dict[str, str] = {}
    if group.supervised:
        variables |= {
            "NNODES": str(len(group.nodes)),
            "NODE_RANK": str(node.rank),
            "NODE_ADDR": node.address,
            "MASTER_ADDR": group.head.address,
            **group_environment(plan, group),
        }
        if node.interface:
            variables |= {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": f"={node.interface}"}
    variables |= {
        variable: f"/run/secrets/{name}" for name, variable in SECRET_VARIABLES.items() if name in node.secrets
    }
    variables |= engine_environment(plan)
    if node.devices.kind == "rocm":
        ids = node.devices.ids or tuple(str(index) for index in range(node.devices.count))
        variables["HIP_VISIBLE_DEVICES"] = ",".join(ids)
    return {**variables, **dict(plan.environment), **dict(node.environment)}


def launched_environment(plan: Plan, group: GroupPlan) -> dict[str, str]:
    """List the variables of every node when a launcher assigns ranks and addresses, without those of secrets."""
    head, variables = group.head, {**group_environment(plan, group), **engine_environment(plan)}
    if head.interface:
        variables |= {"GLOO_SOCKET_IFNAME": head.interface, "NCCL_SOCKET_IFNAME": f"={head.interface}"}
    return {**variables, **dict(plan.environment), **dict(head.environment)}


def group_environment(plan: Plan, group: GroupPlan) -> dict[str, str]:
    """List the contract's variables that are the same on every node of a group, whoever assigns the ranks."""
    variables = {
        "MASTER_PORT": str(group.ports.master),
        "GEN_STACK_CONTROL_PORT": str(group.ports.control),
        "GEN_STACK_GROUP": group.name,
        "GEN_STACK_DIGEST": group.digest,
        "GEN_STACK_API_PORT": str(group.ports.api),
        "GEN_STACK_NODE_TIMEOUT": plan.recovery.node_timeout,
        "GEN_STACK_STALL_TIMEOUT": plan.recovery.stall_timeout,
        "GEN_STACK_MAX_RESTARTS": str(plan.recovery.max_restarts),
        "GEN_STACK_DRAIN": plan.recovery.drain,
        "GEN_STACK_RDMA": plan.rdma,
    }
    if plan.api_bind:
        variables["GEN_STACK_API_BIND"] = plan.api_bind
    return variables


def engine_environment(plan: Plan) -> dict[str, str]:
    """List what the engine needs on every node, without what the spec's `env` adds."""
    variables = {"HF_HUB_OFFLINE": "1"} if plan.offline else {}
    if plan.user:
        variables |= {"HOME": "/tmp", "USER": "engine"}  # noqa: S108 - see planner.USER_HOME
    return variables | {"DO_NOT_TRACK": "1"}
