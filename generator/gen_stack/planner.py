"""From a valid spec to a plan: every decision, made here and nowhere else, without looking at disk or network."""

from __future__ import annotations

import dataclasses
import math
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from gen_stack.engine_flags import argument_text
from gen_stack.fit import better, memory_plan, unchecked
from gen_stack.owned import canonical_flag
from gen_stack.parallel import choose
from gen_stack.plan import (
    Choice,
    Devices,
    Gateway,
    GroupPlan,
    Image,
    Mount,
    NodePlan,
    Parallelism,
    Plan,
    Ports,
    Recovery,
    digest,
)
from gen_stack.release import LOCAL_REPOSITORY, image_tag, is_upstream_image, upstream_image
from gen_stack.rules import device_count, groups_of
from gen_stack.spec import seconds, size_bytes

if TYPE_CHECKING:
    from gen_stack.load import LoadedSpec
    from gen_stack.spec import Node, Spec

ROOT_HOME = "/root"
USER_HOME = "/tmp"  # noqa: S108 - the one folder that an image lets every user write
STATE_DIR = "/var/lib/gen-stack"
WEIGHTS_VOLUME = "gen-stack-huggingface"
STOP_S = 30
"""What stopping takes beyond the drain, in seconds: the engine's own end (up to 9 s on a headless node), and ours."""


def make_plan(loaded: LoadedSpec) -> Plan:
    """Decide everything about a stack."""
    spec = loaded.spec
    parallelism, choices = choose(spec, loaded.facts)
    memory = memory_plan(spec, loaded.facts, parallelism) if loaded.facts else None
    members = groups_of(spec)
    supervised = len(spec.nodes) > 1 or spec.gateway is not None
    image, image_choice = _image(loaded, supervised=supervised)
    plan = Plan(
        name=spec.name,
        spec_file=_plain(PurePath(loaded.file).name),
        model=spec.model.id,
        engine_version=spec.engine.version,
        image=image,
        parallelism=parallelism,
        command=_command(spec, parallelism, supervised=supervised),
        environment=tuple(spec.engine.env.items()),
        user=spec.engine.user,
        api_bind=spec.api.bind,
        api_tls="ssl-certfile" in {canonical_flag(name) for name in spec.engine.args},
        rdma="off" if spec.engine.device == "cpu" or max(map(len, members)) == 1 else spec.network.rdma,
        offline=spec.model.offline,
        recovery=Recovery(**dict(spec.recovery)),
        stop_grace_s=math.ceil(seconds(spec.recovery.drain)) + STOP_S,
        groups=tuple(
            GroupPlan(
                name=spec.name if len(members) == 1 else f"{spec.name}-{number}",
                nodes=tuple(
                    _node(loaded, spec.nodes[index], rank, supervised=supervised, layered=image.kind != "upstream")
                    for rank, index in enumerate(group)
                ),
                ports=Ports(spec.api.port, spec.network.control_port, spec.network.master_port),
                supervised=supervised,
            )
            for number, group in enumerate(members)
        ),
        choices=(*choices, image_choice),
        gateway=_gateway(loaded),
        memory=memory,
        unchecked=unchecked(spec, loaded.facts, memory),
        advice=tuple(better(spec, loaded.facts, parallelism)) if loaded.facts else (),
        forced=loaded.forced,
    )
    groups = tuple(dataclasses.replace(group, digest=digest(plan, group)) for group in plan.groups)
    return dataclasses.replace(plan, groups=groups)


def _plain(name: str) -> str:
    """Write a file's name so that it stays on one line of a comment."""
    return name if name.isprintable() else ascii(name)


def _image(loaded: LoadedSpec, *, supervised: bool) -> tuple[Image, Choice]:
    engine = loaded.spec.engine
    if engine.image != "build":
        # rules.py lets upstream's image stand only where it can do what is asked
        image = Image("upstream" if is_upstream_image(engine.image) else "reference", engine.image)
        return image, Choice("image", engine.image, "the spec says so")
    upstream = upstream_image(engine.device, engine.version)
    if not supervised and "api_key" not in loaded.secrets:
        return Image("upstream", upstream), Choice("image", upstream, "one node alone needs nothing of ours")
    why = "a group needs its entrypoint" if supervised else "upstream takes no key from a file"
    reference = f"{LOCAL_REPOSITORY}:{image_tag(engine.device, engine.version)}"
    return Image("build", reference, upstream), Choice("image", f"{upstream} and our layer", why)


def _command(spec: Spec, parallelism: Parallelism, *, supervised: bool) -> tuple[str, ...]:
    """Write the engine's arguments: those of `vllm serve`, the same on every node.

    The model stands first, so that no flag that takes several values can swallow it.
    """
    sizes = {
        "tensor-parallel-size": parallelism.tensor,
        "pipeline-parallel-size": parallelism.pipeline,
        "data-parallel-size": parallelism.data,
    }
    names = spec.model.served_name
    flags: dict[str, Any] = {
        **({"revision": spec.model.revision} if spec.model.revision else {}),
        **({"served-model-name": names[0] if len(names) == 1 else names} if names else {}),
        **{name: size for name, size in sizes.items() if size > 1},
        **({"enable-expert-parallel": True} if parallelism.expert else {}),
        **({} if supervised else {"shutdown-timeout": math.ceil(seconds(spec.recovery.drain))}),
    }
    flags |= {canonical_flag(name): value for name, value in spec.engine.args.items()}
    return (spec.model.id, *(item for name, value in flags.items() for item in engine_flag(name, value)))


def engine_flag(name: str, value: Any) -> list[str]:
    """Write one flag with its value as words of the command line."""
    if "." not in name:  # a key inside a flag's mapping takes JSON
        if isinstance(value, bool):
            return [f"--{name}" if value else f"--no-{name}"]
        if isinstance(value, list):
            return [f"--{name}", *(str(one) for one in value)]
    return [f"--{name}={argument_text(value)}"]


def _gateway(loaded: LoadedSpec) -> Gateway | None:
    given = loaded.spec.gateway
    if given is None:
        return None
    return Gateway(
        nodes=tuple(given.nodes),
        bind=given.bind,
        port=given.port,
        metrics_port=given.metrics_port,
        keyed=bool(loaded.gateway_keys),
        engine_key="api_key" in loaded.secrets,
        tls=given.tls is not None,
        max_body_bytes=size_bytes(given.max_body),
        sticky_header=given.sticky_header,
    )


def _node(loaded: LoadedSpec, node: Node, rank: int, *, supervised: bool, layered: bool) -> NodePlan:
    spec = loaded.spec
    ids = tuple(node.gpus) if isinstance(node.gpus, list) else ()
    secrets = {
        "group_token": supervised,
        "api_key": rank == 0 and "api_key" in loaded.secrets,
        "hub_token": "hub_token" in loaded.secrets and not spec.model.offline,
    }
    return NodePlan(
        name=node.name,
        rank=rank,
        address=node.address,
        project=f"{spec.name}-{node.name}".replace(".", "-"),
        devices=Devices(spec.engine.device, device_count(node), ids),
        interface=node.interface,
        environment=tuple(node.env.items()),
        mounts=_mounts(spec, node, layered=layered),
        secrets=tuple(name for name, needed in secrets.items() if needed),
        ssh=node.ssh,
    )


def _mounts(spec: Spec, node: Node, *, layered: bool) -> tuple[Mount, ...]:
    """Decide what persists on a node: weights, compiled kernels, and the state of our layer.

    An ordinary user cannot write a fresh named volume, which belongs to root: for one, they are folders of the node.
    """
    if spec.engine.user is None:
        cache, state = Mount("volume", "cache", f"{ROOT_HOME}/.cache"), Mount("volume", "state", STATE_DIR)
    else:
        cache, state = Mount("bind", "./cache", f"{USER_HOME}/.cache"), Mount("bind", "./state", STATE_DIR)
    weights = f"{cache.target}/huggingface"
    if spec.model.is_local:
        mount = Mount("bind", node.model or spec.model.id, spec.model.id, read_only=True)
    elif folder := node.cache or spec.model.cache:
        mount = Mount("bind", folder, weights)
    else:
        mount = Mount("volume", "weights", weights, volume_name=WEIGHTS_VOLUME)
    return (mount, cache, state) if layered else (mount, cache)
