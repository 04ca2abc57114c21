"""The gateway's service in the Compose file of a node that runs one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gen_stack.release import GATEWAY_IMAGE
from gen_stack.render.container import LOGGING
from gen_stack.render.haproxy import CONFIG_FOLDER, SECRETS_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.plan import Gateway, Plan


def gateway_service(plan: Plan, gateway: Gateway) -> Iterator[tuple[str, dict[str, Any]]]:
    """List the service's keys in the order that Compose linters expect, with what is worth saying about them."""
    yield "HAProxy, as its makers ship it; what it does is in gateway/haproxy.cfg.", {"image": GATEWAY_IMAGE}
    yield (
        "Folders, not files: what takes a file's place is seen after a reload (docker compose kill -s HUP gateway).",
        {"volumes": [_folder("./gateway", CONFIG_FOLDER), *_secrets(gateway)]},
    )
    yield "The users' own addresses are seen, and any port is free to choose.", {"network_mode": "host"}
    yield "", {"command": ["-f", f"{CONFIG_FOLDER}/haproxy.cfg"], "entrypoint": ["haproxy", "-W", "-db"]}
    yield "", {"restart": "unless-stopped", "healthcheck": _healthcheck(gateway)}
    yield "", {"logging": LOGGING}
    yield "", {"labels": {"gen-stack.stack": plan.name, "gen-stack.part": "gateway"}}
    yield from _rights(plan, gateway)
    yield "", {"read_only": True, "security_opt": ["no-new-privileges:true"]}
    yield (
        "New connections are refused at once; running answers have as long as in the engine.",
        {"stop_grace_period": f"{plan.stop_grace_s}s", "stop_signal": "SIGUSR1"},
    )


def _secrets(gateway: Gateway) -> list[dict[str, Any]]:
    needed = gateway.keyed or gateway.engine_key or gateway.tls
    return [_folder("./secrets/gateway", SECRETS_FOLDER)] if needed else []


def _folder(source: str, target: str) -> dict[str, Any]:
    bind = {"create_host_path": False}
    return {"type": "bind", "source": source, "target": target, "read_only": True, "bind": bind}


def _healthcheck(gateway: Gateway) -> dict[str, Any]:
    """Ask with what the image has: bash. HAProxy alone is asked; whether a group is ready is no fault of its own."""
    request = "printf 'GET /livez HTTP/1.0\\r\\n\\r\\n' >&3"
    script = f"exec 3<>/dev/tcp/127.0.0.1/{gateway.metrics_port}; {request}; grep -q ' 200 ' <&3"
    return {"test": ["CMD", "bash", "-c", script], "interval": "5s", "timeout": "5s", "start_period": "30s"}


def _rights(plan: Plan, gateway: Gateway) -> Iterator[tuple[str, dict[str, Any]]]:
    if plan.user:
        yield "No right at all is needed.", {"user": plan.user, "cap_drop": ["ALL"]}
        return
    added = {
        "DAC_READ_SEARCH": "root reads secrets of mode 0600 that an ordinary user owns",
        "KILL": "and ends old workers, which run as somebody else",
        "SETGID": "and starts workers as group haproxy",
        "SETUID": "and as user haproxy, without any of these",
    }
    if gateway.port < 1024:
        added["NET_BIND_SERVICE"] = "and listens on a port below 1024"
    comment = "No right but those that are needed:\n" + "\n".join(f"{name}: {why}." for name, why in added.items())
    yield comment, {"user": "root", "cap_add": list(added), "cap_drop": ["ALL"]}
