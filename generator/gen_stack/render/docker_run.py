"""Command lines for a person with a terminal on each node: what a node's Compose file says, as one `docker run`.

It translates the Compose service and decides nothing, so the two cannot come apart.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from gen_stack.render.compose import engine_service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gen_stack.plan import GroupPlan, NodePlan, Plan

HERE = "$PWD"
"""Stands for the node's folder; a shell fills it in, which `docker run` itself does not do with `./` everywhere."""


def run_line(plan: Plan, group: GroupPlan, node: NodePlan) -> str:
    """Write the `docker run` of a node for a POSIX shell that is in the node's folder."""
    service = engine_service(plan, group, node)
    volumes = {one.source: one.volume_name or f"{node.project}_{one.source}" for one in node.mounts}
    for mount in service["volumes"]:
        mount["source"] = volumes[mount["source"]] if mount["type"] == "volume" else mount["source"]
    options = [word for key, value in service.items() for word in OPTIONS[key](value)]
    words = ["docker", "run", f"--name={node.project}", *options, service["image"], *service["command"]]
    return " ".join(map(_quoted, words))


def build_line(plan: Plan) -> str | None:
    """Write the line that makes the image, to be run first in the same folder; None when the image is pulled."""
    if plan.image.kind != "build":
        return None
    argument = f"--build-arg=ENGINE_IMAGE={plan.image.engine_image}"
    return shlex.join(["docker", "build", f"--tag={plan.image.reference}", argument, "./image"])


def _quoted(word: str) -> str:
    """Quote a word of the command line; the node's folder alone is left to the shell."""
    before, here, after = word.partition(f"={HERE}/")
    if not here or not word.startswith(("--mount=source=", "--volume=")):
        return shlex.quote(word)
    return f'{before}="{HERE}"/{shlex.quote(after)}'


def _path(source: str) -> str:
    return f"{HERE}/{source.removeprefix('./')}" if source.startswith("./") else source


def _mounts(entries: list[dict[str, Any]]) -> Iterator[str]:
    for one in entries:
        if one.get("bind", {}).get("create_host_path"):  # which --mount does not do
            yield f"--volume={_path(one['source'])}:{one['target']}"
            continue
        # The source comes first, behind a `=`, where the shell fills in the folder.
        fields = [f"source={_path(one['source'])}", f"target={one['target']}", f"type={one['type']}"]
        yield f"--mount={','.join(map(_field, fields))}{',readonly' if one.get('read_only') else ''}"


def _field(text: str) -> str:
    """Write one field of a mount as CSV, which Docker reads."""
    return '"' + text.replace('"', '""') + '"' if any(one in text for one in ',"') else text


def _secrets(names: list[str]) -> Iterator[str]:
    for name in names:
        yield f"--volume={HERE}/secrets/{name}:/run/secrets/{name}:ro"


def _ports(entries: list[dict[str, Any]]) -> Iterator[str]:
    for one in entries:
        host = f"[{one['host_ip']}]" if ":" in one["host_ip"] else one["host_ip"]
        yield f"--publish={host}:{one['published']}:{one['target']}"


def _health(check: dict[str, Any]) -> Iterator[str]:
    yield f"--health-cmd={shlex.join(check['test'][1:])}"
    for key in ("interval", "timeout", "start_period"):
        yield f"--health-{key.replace('_', '-')}={check[key]}"


def _logging(value: dict[str, Any]) -> Iterator[str]:
    yield f"--log-driver={value['driver']}"
    yield from (f"--log-opt={name}={text}" for name, text in value["options"].items())


def _gpus(value: dict[str, Any]) -> Iterator[str]:
    for one in value["resources"]["reservations"]["devices"]:
        which = f'"device={",".join(one["device_ids"])}"' if "device_ids" in one else str(one["count"])
        yield f"--gpus={which}"


def _limits(value: dict[str, Any]) -> Iterator[str]:
    for name, limit in value.items():
        soft, hard = (limit["soft"], limit["hard"]) if isinstance(limit, dict) else (limit, limit)
        yield f"--ulimit={name}={soft}:{hard}"


def _each(option: str) -> Callable[[Any], list[str]]:
    """Write an option once for each item, or for the one value that there is."""
    return lambda value: [f"--{option}={one}" for one in (value if isinstance(value, list) else [value])]


def _pairs(option: str) -> Callable[[dict[str, Any]], list[str]]:
    return lambda value: [f"--{option}={name}={text}" for name, text in value.items()]


def _nothing(value: Any) -> list[str]:  # noqa: ARG001 - one form for all keys
    return []


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "image": _nothing,
    "pull_policy": _nothing,
    "build": _nothing,
    "command": _nothing,
    "volumes": _mounts,
    "secrets": _secrets,
    "environment": _pairs("env"),
    "network_mode": _each("network"),
    "ports": _ports,
    "restart": _each("restart"),
    "healthcheck": _health,
    "logging": _logging,
    "labels": _pairs("label"),
    "user": _each("user"),
    "cap_add": _each("cap-add"),
    "cap_drop": _each("cap-drop"),
    "deploy": _gpus,
    "devices": _each("device"),
    "group_add": _each("group-add"),
    "device_cgroup_rules": _each("device-cgroup-rule"),
    "security_opt": _each("security-opt"),
    "shm_size": _each("shm-size"),
    "stop_grace_period": lambda value: [f"--stop-timeout={value.removesuffix('s')}"],
    "ulimits": _limits,
}
"""How each key of the Compose service is said to `docker run`; one that is missing here fails every test."""
