"""Rules that need more than one field of a spec: pure functions from a spec to its problems."""

from __future__ import annotations

import ipaddress
import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from gen_stack.engine_flags import argument_problems
from gen_stack.owned import SHORT_FLAGS, canonical_flag, why_flag_is_refused, why_variable_is_refused
from gen_stack.problems import KeyPath, Problem, listed, shown, suggestion
from gen_stack.release import is_upstream_image

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.spec import Node, Spec

RENDEZVOUS_PORTS = 16
"""How many ports from `network.master_port` on belong to the group: each new start of the engine takes another."""

DATA_PARALLEL_PORT = 29550
"""Where the head's engine meets its data parallel ranks: vLLM's default of `--data-parallel-rpc-port`."""

RESERVED_NODE_NAMES = {"secrets": "the folder of the group's tokens has that name; choose another name"}


def problems_of(spec: Spec) -> list[Problem]:
    """Find everything that is wrong between the fields of a spec."""
    return [
        *_node_names(spec),
        *_addresses(spec),
        *_devices(spec),
        *_groups(spec),
        *_world_size(spec),
        *_model(spec),
        *_ports(spec),
        *_bind(spec),
        *_image(spec),
        *_one_host(spec),
        *_rocm(spec),
        *_engine_args(spec),
        *_environments(spec),
        *_gateway(spec),
        *_rdma(spec),
    ]


def groups_of(spec: Spec) -> list[list[int]]:
    """List the groups of a spec that keeps the rules, as indexes of its nodes in the order of their ranks."""
    if spec.groups:
        index = {node.name: i for i, node in enumerate(spec.nodes)}
        return [[index[name] for name in group if name in index] for group in spec.groups]
    size = len(spec.nodes) // spec.replicas or 1
    return [list(range(start, min(start + size, len(spec.nodes)))) for start in range(0, len(spec.nodes), size)]


def device_count(node: Node) -> int:
    """Count the GPUs that a node gives."""
    return node.gpus if isinstance(node.gpus, int) else len(node.gpus)


def ranks_per_node(spec: Spec, node: Node) -> int:
    """Count the engine's ranks on a node: one a GPU, and exactly one on the CPU engine (its device count is 1)."""
    return 1 if spec.engine.device == "cpu" else device_count(node)


def _node_names(spec: Spec) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for index, node in enumerate(spec.nodes):
        if node.name in first:
            words = f"{shown(node.name)} is already the name of nodes[{first[node.name]}]; give every node its own name"
            yield Problem(("nodes", index, "name"), words)
        first.setdefault(node.name, index)
        if node.name in RESERVED_NODE_NAMES:
            yield Problem(("nodes", index, "name"), f"{shown(node.name)}: {RESERVED_NODE_NAMES[node.name]}")


def _addresses(spec: Spec) -> Iterator[Problem]:
    first: dict[str, Node] = {}
    loopback = [ipaddress.ip_address(node.address).is_loopback for node in spec.nodes]
    families = [ipaddress.ip_address(node.address).version for node in spec.nodes]
    for index, node in enumerate(spec.nodes):
        path: KeyPath = ("nodes", index, "address")
        if node.address in first:
            owner = first[node.address].name
            words = f"{shown(node.address)} is already the address of {owner}; every node needs its own"
            yield Problem(path, words)
        first.setdefault(node.address, node)
        if loopback[index] and not all(loopback):
            words = (
                f"{shown(node.address)} is a loopback address, which the other nodes cannot reach; write one they reach"
            )
            yield Problem(path, words)
        if families[index] != families[0]:
            words = f"{shown(node.address)} is IPv{families[index]}, but {spec.nodes[0].name} has IPv{families[0]}"
            yield Problem(path, f"{words}; use one family for all nodes")


def _devices(spec: Spec) -> Iterator[Problem]:
    on_cpu = spec.engine.device == "cpu"
    for index, node in enumerate(spec.nodes):
        path: KeyPath = ("nodes", index, "gpus")
        if on_cpu and node.gpus != 0:
            yield Problem(
                path, f"{shown(node.gpus)} with engine.device cpu; write 0, or choose the device that the GPUs are"
            )
        elif not on_cpu and device_count(node) == 0:
            words = f"{node.name} gives no GPU; write how many it has, such as 8, or set engine.device to cpu"
            yield Problem(path, words)


def _groups(spec: Spec) -> Iterator[Problem]:
    if spec.groups is not None and spec.replicas != 1:
        yield Problem(("groups",), "replicas splits the nodes already; keep one of replicas and groups")
        return
    if spec.groups is not None:
        yield from _named_groups(spec, spec.groups)
    elif len(spec.nodes) % spec.replicas:
        words = (
            f"{len(spec.nodes)} nodes cannot be split into {spec.replicas} equal groups; change one of the two numbers"
        )
        yield Problem(("replicas",), words)


def _named_groups(spec: Spec, groups: list[list[str]]) -> Iterator[Problem]:
    known = [node.name for node in spec.nodes]
    seen: Counter[str] = Counter()
    for index, group in enumerate(groups):
        if not group:
            yield Problem(("groups", index), "this group is empty; name its nodes, the head first")
        for place, name in enumerate(group):
            seen[name] += 1
            if name not in known:
                words = f"{shown(name)} is no node of this spec{suggestion(name, known)}"
                yield Problem(("groups", index, place), words)
            elif seen[name] == 2:
                yield Problem(("groups", index, place), f"{shown(name)} is in a group already; name every node once")
    missing = [name for name in known if not seen[name]]
    if missing:
        words = f"{listed(missing)} {'are' if len(missing) > 1 else 'is'} in no group; name every node once"
        yield Problem(("groups",), words)


def _world_size(spec: Spec) -> Iterator[Problem]:
    if any(_groups(spec)):  # groups that are not right themselves have no size
        return
    first: tuple[int, list[Node]] | None = None
    for group in groups_of(spec):
        nodes = [spec.nodes[index] for index in group]
        counts = {ranks_per_node(spec, node) for node in nodes}
        if not nodes or 0 in counts:
            continue
        if len(counts) > 1:
            each = listed(f"{node.name} {device_count(node)}" for node in nodes)
            words = f"the engine needs the same number of GPUs on every node of a group, and here are {each}"
            yield Problem(
                ("nodes",), f"{words}; leave GPUs of the larger ones out by naming device ids or a smaller count"
            )
            continue
        world = counts.pop() * len(nodes)
        if first is None:
            first = world, nodes
            yield from _parallel_sizes(spec, nodes, world)
        elif world != first[0]:
            here, there = (listed(node.name for node in some) for some in (nodes, first[1]))
            what = "nodes" if spec.engine.device == "cpu" else "GPUs"
            words = f"every group has the same parallel sizes, but {there} make {first[0]} {what} and {here} {world}"
            key = "nodes" if spec.groups is None else "groups"
            yield Problem((key,), f"{words}; make groups of the same number of {what}")


def _parallel_sizes(spec: Spec, nodes: list[Node], world: int) -> Iterator[Problem]:
    parallel = spec.parallelism
    given = (parallel.tensor or 1) * (parallel.pipeline or 1) * parallel.data
    what = f"{world} {'nodes' if spec.engine.device == 'cpu' else 'GPUs'} in {listed(node.name for node in nodes)}"
    sizes = f"tensor {parallel.tensor or 'open'}, pipeline {parallel.pipeline or 'open'}, data {parallel.data}"
    complete = parallel.tensor is not None and parallel.pipeline is not None
    if complete and given != world:
        words = f"{sizes} make a world size of {given}, but there are {what}; choose sizes whose product is {world}"
        yield Problem(("parallelism",), words)
    elif world % given:
        yield Problem(("parallelism",), f"{sizes} do not divide the {what}; choose sizes whose product is {world}")


def _model(spec: Spec) -> Iterator[Problem]:
    for index, node in enumerate(spec.nodes):
        if node.model and not spec.model.is_local:
            words = (
                f"model.id {shown(spec.model.id)} comes from the hub, so no node has a path of its own; take this out"
            )
            yield Problem(("nodes", index, "model"), words)
    for index, name in enumerate(spec.model.served_name):
        if len(spec.model.served_name) > 1 and (wrong := _leading_dash(name)):
            yield Problem(("model", "served_name", index), wrong)
    if not spec.model.is_local:
        if spec.engine.user and not all(node.cache or spec.model.cache for node in spec.nodes):
            words = f"user {spec.engine.user} cannot write the default volume for weights, which belongs to root"
            yield Problem(("engine", "user"), f"{words}; set model.cache to a host folder that this user owns")
        return
    fetched = {"revision": spec.model.revision, "token_file": spec.model.token_file, "cache": spec.model.cache}
    for key, value in fetched.items():
        if value is not None:
            words = f"{shown(value)} says how to fetch from the hub, but the model is the local path {spec.model.id}"
            yield Problem(("model", key), f"{words}; take this out")


def _ports(spec: Spec) -> Iterator[Problem]:
    first, last = spec.network.master_port, spec.network.master_port + RENDEZVOUS_PORTS - 1
    if last > 65535:
        words = (
            f"{first} is the first of {RENDEZVOUS_PORTS} ports, up to {last}; write at most {65536 - RENDEZVOUS_PORTS}"
        )
        yield Problem(("network", "master_port"), words)
    for key, port in (("api.port", spec.api.port), ("network.control_port", spec.network.control_port)):
        if spec.parallelism.data > 1 and port == DATA_PARALLEL_PORT:
            section, name = key.split(".")
            yield Problem((section, name), f"{port} is the port where data parallel ranks meet; choose another")
    if spec.network.control_port == spec.api.port:
        words = f"{spec.network.control_port} is also api.port; give the two ports of the head different numbers"
        yield Problem(("network", "control_port"), words)
    for path, port in ((("network", "control_port"), spec.network.control_port), (("api", "port"), spec.api.port)):
        if first <= port <= last:
            words = f"{port} lies in the {RENDEZVOUS_PORTS} ports from network.master_port {first} on; choose another"
            yield Problem(path, words)


def _bind(spec: Spec) -> Iterator[Problem]:
    if spec.api.bind is None or len(groups_of(spec)) == 1:
        return
    address = ipaddress.ip_address(spec.api.bind)
    if not address.is_unspecified and not address.is_loopback:
        words = f"{shown(spec.api.bind)} is an address of one host, and every group has a head of its own"
        yield Problem(("api", "bind"), f"{words}; write 0.0.0.0 or ::, or leave it out")


def _image(spec: Spec) -> Iterator[Problem]:
    """Refuse upstream's own image where our layer has something to do that it cannot."""
    if not is_upstream_image(spec.engine.image):
        return
    needs = "a group needs our entrypoint" if len(spec.nodes) > 1 or spec.gateway else ""
    if spec.api.key_file:
        needs = needs or "the API key comes from a file"
    if needs:
        words = f"{shown(spec.engine.image)} is upstream's image as it is, and {needs}"
        yield Problem(("engine", "image"), f"{words}; write build, which adds it, or an image that has it")


def _one_host(spec: Spec) -> Iterator[Problem]:
    """Keep the nodes of a trial on one host from taking each other's devices and ports."""
    if len(spec.nodes) == 1 or not all(ipaddress.ip_address(node.address).is_loopback for node in spec.nodes):
        return
    if len(groups_of(spec)) > 1:
        key = "groups" if spec.groups else "replicas"
        yield Problem(
            (key,), "all nodes are on one host, where two groups would take the same ports; make it one group"
        )
    taken: dict[str, str] = {}
    for index, node in enumerate(spec.nodes if spec.engine.device != "cpu" else []):
        if isinstance(node.gpus, int):
            words = "the nodes share this host's GPUs, and a count would give each the first ones; name device ids"
            yield Problem(("nodes", index, "gpus"), words)
            continue
        for one in node.gpus:
            if one in taken:
                words = f"{shown(one)} is given to {taken[one]} already, on the same host; give each GPU to one node"
                yield Problem(("nodes", index, "gpus"), words)
            taken.setdefault(one, node.name)


def _rocm(spec: Spec) -> Iterator[Problem]:
    if spec.engine.device != "rocm":
        return
    if spec.engine.user is not None:
        words = f"{shown(spec.engine.user)} cannot open /dev/kfd, whose group has another number on every distribution"
        yield Problem(("engine", "user"), f"{words}; leave it out with engine.device rocm")
    for index, node in enumerate(spec.nodes):
        ids = node.gpus if isinstance(node.gpus, list) else []
        if wrong := [one for one in ids if not one.isdecimal()]:
            words = f"{shown(wrong[0])} is not an index, and HIP_VISIBLE_DEVICES takes nothing else; write such as '0'"
            yield Problem(("nodes", index, "gpus"), words)


def _engine_args(spec: Spec) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    sound: dict[str, object] = {}
    for name, value in spec.engine.args.items():
        path: KeyPath = ("engine", "args", name)
        flag = canonical_flag(name)
        refused = why_flag_is_refused(name)
        if not flag:
            yield Problem(path, "a flag needs a name; write it as vLLM's help does, such as max-model-len")
        elif refused:
            yield Problem(path, refused)
        elif name != name.lstrip("-"):
            yield Problem(path, f"write the flag without dashes in front: {flag}")
        elif name in SHORT_FLAGS:
            yield Problem(path, f"{shown(name)} is a short form; write {flag}")
        elif flag.startswith("no-"):
            yield Problem(path, f"write {flag[3:]}: false")
        elif flag in seen:
            yield Problem(path, f"this is the same flag as {seen[flag]}; keep one of the two")
        elif not re.fullmatch(r"[A-Za-z0-9-]+(\.[A-Za-z0-9_-]+)*", flag):
            yield Problem(path, "this is no name for a flag; write it as vLLM's help does, such as max-model-len")
        elif problems := list(_argument(value)):
            yield from (Problem(path, words) for words in problems)
        else:
            sound[name] = value
        seen.setdefault(flag, name)
    yield from argument_problems(spec.engine, sound)


def _argument(value: object) -> Iterator[str]:
    """Say what is wrong with a flag's value."""
    if value is None or value == []:
        yield f"{shown(value)} is no value for a flag; write true, false, a number, a text, a list or a mapping"
    elif not isinstance(value, list):
        yield from _leaves(value)
    elif not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in value):
        yield f"{shown(value)}: a list may hold texts and numbers only; write anything else as one text of JSON"
    else:
        yield from (words for one in value for words in (_leading_dash(one), *_leaves(one)) if words)


def _leading_dash(value: object) -> str | None:
    if isinstance(value, str) and value.startswith("-") and not re.fullmatch(r"-[0-9.]+", value):
        return f"{shown(value)} in a list would be read as a flag of its own; take the dash away"
    return None


def _leaves(value: object) -> Iterator[str]:
    """Find texts and numbers that no command line can carry, at any depth."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif isinstance(value, str) and "\0" in value:
        yield f"{shown(value)} has a zero character in it, which ends a text for the engine; take it out"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{shown(value)} is no number that the engine can use; write a finite one"


def _environments(spec: Spec) -> Iterator[Problem]:
    yield from _environment(("engine", "env"), spec.engine.env)
    for index, node in enumerate(spec.nodes):
        yield from _environment(("nodes", index, "env"), node.env)


def _environment(where: KeyPath, variables: dict[str, str]) -> Iterator[Problem]:
    for name, value in variables.items():
        refused = why_variable_is_refused(name)
        if refused:
            yield Problem((*where, name), refused)
        elif "\n" in value or "\r" in value or "\0" in value:
            words = (
                f"the value of {name} has a line break in it, which not every launcher carries; write it in one line"
            )
            yield Problem((*where, name), words)


def _gateway(spec: Spec) -> Iterator[Problem]:
    if spec.gateway is None:
        return
    known = [node.name for node in spec.nodes]
    for index, name in enumerate(spec.gateway.nodes):
        if name not in known:
            yield Problem(
                ("gateway", "nodes", index), f"{shown(name)} is no node of this spec{suggestion(name, known)}"
            )
        elif name in spec.gateway.nodes[:index]:
            yield Problem(("gateway", "nodes", index), f"{shown(name)} stands there twice; write it once")
    taken = {spec.api.port: "api.port", spec.network.control_port: "network.control_port"}
    for key, port in (("port", spec.gateway.port), ("metrics_port", spec.gateway.metrics_port)):
        if port in taken:
            yield Problem(("gateway", key), f"{port} is also {taken[port]}; give the gateway a port of its own")
        taken.setdefault(port, f"gateway.{key}")
    heads = [spec.nodes[group[0]] for group in groups_of(spec) if group]
    apart = [head.name for head in heads if spec.gateway.nodes != [head.name]]
    loopback = spec.api.bind is not None and ipaddress.ip_address(spec.api.bind).is_loopback
    if loopback and apart and not all(ipaddress.ip_address(node.address).is_loopback for node in spec.nodes):
        words = f"{shown(spec.api.bind)} is reached on its own host only, so the gateway cannot reach {apart[0]}"
        yield Problem(("api", "bind"), f"{words}; leave it out, and close the heads with `gen-stack ports --nft`")


def _rdma(spec: Spec) -> Iterator[Problem]:
    if spec.network.rdma == "required" and spec.engine.device == "cpu":
        yield Problem(("network", "rdma"), "'required' with engine.device cpu, whose transport is TCP only; write auto")
    elif spec.network.rdma == "required" and max(len(group) for group in groups_of(spec)) == 1:
        yield Problem(("network", "rdma"), "'required' with one node, which has nobody to send to; write auto")
