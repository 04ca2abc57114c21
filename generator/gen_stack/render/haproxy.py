"""The gateway's configuration: HAProxy in front of the groups, explained line by line where a line has a reason.

Secrets are files that this text only names: the digests of the users' keys, the engines' key, certificate and key.
"""

from __future__ import annotations

import ipaddress
import json
from typing import TYPE_CHECKING

from gen_stack.plan import url_host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gen_stack.plan import Gateway, GroupPlan, Plan

CONFIG_FOLDER = "/usr/local/etc/haproxy"
"""Where a gateway's container has the folder `gateway/`."""

SECRETS_FOLDER = "/run/gateway"
"""Where a gateway's container has the folder `secrets/gateway/`."""

WORKER_UID = 99
"""The user and group `haproxy` of the official image, which the processes that meet the network run as."""

KIB, MIB = 2**10, 2**20
HEADER_ROOM = 64 * KIB
"""What a buffer holds beside the largest body: the request's line and headers."""

BUFFER_MEMORY = 2048 * MIB
"""What all buffers together may take, in bytes."""

MAX_CONNECTIONS = 2000

LISTED = ("/v1/models",)
ASKED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/tokenize",
    "/detokenize",
)
"""The routes of vLLM 0.32 that users need: `LISTED` with GET, `ASKED` with POST. All others stay inside."""

_LOG = {
    "time": "%[date,utime(%Y-%m-%dT%H:%M:%S)]Z",
    "client": "%ci",
    "method": "%HM",
    "path": "%[var(txn.path),json(utf8s)]",
    "status": "%ST",
    "group": "%s",
    "retries": "%rc",
    "received_bytes": "%U",
    "sent_bytes": "%B",
    "wait_ms": "%Tw",
    "connect_ms": "%Tc",
    "first_answer_ms": "%Tr",
    "total_ms": "%Ta",
    "end": "%tsc",
}
_NUMBERS = {"status", "received_bytes", "sent_bytes", "wait_ms", "connect_ms", "first_answer_ms", "total_ms"}


def buffer_bytes(gateway: Gateway) -> int:
    """Size one buffer, in bytes: a request is tried again only when it lies in one as a whole."""
    return gateway.max_body_bytes + HEADER_ROOM


def buffer_limit(gateway: Gateway) -> int:
    """Count the buffers that there may be at once. HAProxy keeps a few for itself and does not work with less."""
    return max(64, BUFFER_MEMORY // buffer_bytes(gateway))


def haproxy_config(plan: Plan, gateway: Gateway) -> str:
    """Write haproxy.cfg, the same on every node that runs the gateway."""
    sections = [_global(plan, gateway), _defaults(), _users(gateway), _groups(plan, gateway), _local(gateway)]
    head = f"# {plan.name}: the gateway, made by gen-stack from {plan.spec_file}. Do not edit: change the spec.\n"
    return head + "\n".join("\n".join(["", *lines]) for lines in sections) + "\n"


def _global(plan: Plan, gateway: Gateway) -> list[str]:
    size, limit = buffer_bytes(gateway), buffer_limit(gateway)
    lines = [
        "global",
        "    log stdout format raw local0",
        f"    maxconn {MAX_CONNECTIONS}",
        f"    # One buffer holds the largest request as a whole (max_body, {HEADER_ROOM // KIB} KiB of headers), or it",
        "    # could not be sent to another group. A request has one while it comes in, and a copy until its answer.",
        f"    # All buffers together are at most {limit} x {size / MIB:.2f} MiB = {limit * size / MIB:.0f} MiB.",
        f"    tune.bufsize {size}",
        f"    tune.buffers.limit {limit}",
        "    ssl-default-bind-options ssl-min-ver TLSv1.2",
    ]
    if plan.user is None:
        lines += [
            "    # Root reads the secrets and starts the workers; the workers have no right left.",
            f"    uid {WORKER_UID}",
            f"    gid {WORKER_UID}",
        ]
    return lines


def _defaults() -> list[str]:
    return [
        "defaults",
        "    mode http",
        "    option dontlognull",
        "    # Each piece of a stream goes out at once.",
        "    option http-no-delay",
        "    timeout connect 3s",
        "    timeout http-request 10s",
        "    timeout http-keep-alive 60s",
        "    timeout client 60s",
        "    # Between two bytes of an answer. An engine that stands still is for its group to notice.",
        "    timeout server 1h",
        *(_error(status, message) for status, message in _ERRORS.items()),
    ]


def _log_format() -> str:
    """Write a line of JSON for each request: no query, no header and no body, so neither keys nor prompts."""
    fields = [f'"{key}":{value}' if key in _NUMBERS else f'"{key}":"{value}"' for key, value in _LOG.items()]
    return "{" + ",".join(fields) + "}"


_ERRORS = {
    400: "this is no HTTP request that the gateway understands",
    408: "the request did not come in time",
    500: "the gateway failed",
    502: "the group that had the request failed before it answered",
    503: "no group is ready; try again in a few seconds",
    504: "the group did not answer in time",
}


def _error(status: int, message: str) -> str:
    again = " hdr Retry-After 5" if status in (502, 503) else ""
    return f"    http-error status {status} content-type application/json string '{_body(status, message)}'{again}"


def _body(status: int, message: str, code: str | None = None) -> str:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})


def _refusal(status: int, message: str, condition: str, code: str | None = None, header: str = "") -> str:
    body = _body(status, message, code)
    answer = f"http-request return status {status} content-type application/json string '{body}'"
    return f"    {answer}{f' hdr {header}' if header else ''} {condition}"


def _users(gateway: Gateway) -> list[str]:
    size = gateway.max_body_bytes
    too_large = f"the request is larger than {size} bytes"
    lines = [
        "frontend users",
        f"    bind {_bind(gateway)}",
        "    log global",
        f"    log-format '{_log_format()}'",
        "    http-request set-var(txn.path) path",
        "    # For a balancer in front of several gateways.",
        "    http-request return status 200 content-type text/plain string ok if { path /livez }",
        "    http-request return status 200 content-type text/plain string ready if { path /readyz }"
        " { nbsrv(groups) gt 0 }",
        "    http-request return status 503 content-type text/plain string 'not ready' if { path /readyz }",
        "    # What users need, and nothing else of the engine's.",
        f"    acl listed path {' '.join(LISTED)}",
        f"    acl asked path {' '.join(ASKED)}",
        _refusal(404, "there is no such route here", "unless METH_GET listed or METH_POST asked", "not_found"),
    ]
    if gateway.keyed:
        lines += [
            "    # The file has the SHA-256 of each key, so nobody learns one from it.",
            f"    acl known http_auth_bearer,sha2(256),hex -m str -f {SECRETS_FOLDER}/keys",
            _refusal(
                401,
                "the API key is missing or not known",
                "unless known",
                "invalid_api_key",
                "WWW-Authenticate Bearer",
            ),
        ]
    lines += [
        _refusal(413, too_large, f"if {{ req.body_size gt {size} }}", "request_too_large"),
        "    # The whole request, or it could not be sent again.",
        "    http-request wait-for-body time 60s",
        _refusal(413, too_large, f"if {{ req.body_size gt {size} }}", "request_too_large"),
    ]
    if gateway.engine_key:
        engines = f"%[str(engines),map({SECRETS_FOLDER}/engine_key)]"
        lines += [
            "    # The users' keys stay here; the engines have one of their own.",
            f'    http-request set-header Authorization "Bearer {engines}"',
        ]
    else:
        lines.append("    http-request del-header Authorization")
    return [*lines, "    default_backend groups"]


def _bind(gateway: Gateway) -> str:
    both = " v4v6" if gateway.bind == "::" else ""
    tls = f" ssl crt {SECRETS_FOLDER}/tls.pem alpn h2,http/1.1" if gateway.tls else ""
    return f"{url_host(gateway.bind)}:{gateway.port}{both}{tls}"


def _groups(plan: Plan, gateway: Gateway) -> list[str]:
    if gateway.sticky_header:
        balance = [
            "    # Without the header: in turn. When its group is not ready, a value goes to another one.",
            f"    balance hdr({gateway.sticky_header})",
            "    hash-type consistent",
        ]
    else:
        balance = ["    balance leastconn"]
    return [
        "backend groups",
        "    log global",
        *balance,
        "    # A client that leaves takes its request along, also out of the engine.",
        "    option abortonclose",
        "    # A request that nobody has begun to answer goes to another group, once: one that kills engines must not",
        "    # go around. vLLM answers 500 in the moment between the end of its engine and its own.",
        "    retries 1",
        "    option redispatch 1",
        "    retry-on conn-failure empty-response junk-response 500",
        "    # The engine closes idle connections after 5 s; one that is about to be closed is not used.",
        "    http-reuse safe",
        "    option httpchk GET /readyz",
        "    http-check expect status 200",
        "    # Out after two failed checks, 1.25 s at most; in after one that succeeds.",
        "    default-server check inter 1s fastinter 250ms downinter 1s fall 2 rise 1 pool-purge-delay 2s",
        *(_server(plan, group) for group in plan.groups),
    ]


def _server(plan: Plan, group: GroupPlan) -> str:
    """Write a group as a server: traffic to its API, checks to its head's control port, which speaks plain HTTP."""
    bind = plan.api_bind
    address = group.head.address if bind is None or ipaddress.ip_address(bind).is_unspecified else bind
    # The certificate of an engine with TLS of its own is for an outside name.
    tls = " ssl verify none" if plan.api_tls else ""
    check = f"addr {url_host(group.head.address)} port {group.ports.control}"
    return f"    server {group.name} {url_host(address)}:{group.ports.api} {check}{tls}"


def _local(gateway: Gateway) -> Iterator[str]:
    yield "# For this host alone: metrics for Prometheus, and the container's health check."
    yield "frontend local"
    yield f"    bind 127.0.0.1:{gateway.metrics_port}"
    yield "    http-request use-service prometheus-exporter if { path /metrics }"
    yield "    http-request return status 200 content-type text/plain string ok if { path /livez }"
    yield "    http-request return status 404"
