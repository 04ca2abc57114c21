"""From a node's configuration and the user's arguments to the engine's command line and environment.

Pure: nothing here looks at the machine. The same arguments come on every node; what differs between ranks is exactly
what `_group_flags` and `engine_environment` say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stack_node import flags
from stack_node.config import DEFAULT_API_PORT, url_host

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stack_node.config import Network, NodeConfig

# torch's own limits (600 s NCCL, 1800 s gloo) end a group in which one node loads slowly. Who gives up, and when, is
# the supervisor's decision. A day is beyond any load, and below the 24.8 days at which milliseconds leave 32 bits.
DISTRIBUTED_TIMEOUT_S = 24 * 3600

# Time for the engine to end by itself after SIGTERM, on top of the head's drain. A headless node needs up to 9 s: 5 s
# for its workers to leave, 4 s after their SIGTERM (vllm/v1/executor/multiproc_executor.py).
EXIT_S = 10.0


_SIZE_NAMES = ("tensor", "pipeline", "prefill-context", "data")


@dataclass(frozen=True)
class Sizes:
    """How the model is spread, as the arguments say; 1 where they are silent."""

    tensor: int
    pipeline: int
    prefill_context: int
    data: int

    @property
    def world(self) -> int:
        """Number of processes, one device each, over all nodes."""
        return self.tensor * self.pipeline * self.prefill_context * self.data


@dataclass(frozen=True)
class EngineCommand:
    """What is started on this node and how it is looked after."""

    argv: tuple[str, ...]
    env: dict[str, str]
    notes: tuple[str, ...]  # decisions a reader of the log should know
    api_url: str | None  # where the API answers as seen from here; None: it cannot be asked
    stop_s: float  # from SIGTERM until the engine's tree is killed


def sizes(args: Sequence[str]) -> Sizes | None:
    """Parallel sizes in the arguments, or None where one is no number (the engine has the words for that)."""
    items = flags.split(args)
    texts = [flags.last_value(items, f"--{name}-parallel-size") or "1" for name in _SIZE_NAMES]
    if not all(text.isdecimal() and int(text) > 0 for text in texts):
        return None
    return Sizes(*(int(text) for text in texts))


def problems(config: NodeConfig, args: Sequence[str]) -> list[str]:
    """Sentences on what is wrong with the user's arguments; values are not repeated, they may be secret."""
    items = flags.split(args)
    if not config.in_group:
        return _plain_problems(config, items)
    found = [
        f"{item.tokens[0].partition('=')[0]} is decided by the group; leave it out and {flags.OWNED[item.flag]}"
        for item in items
        if item.flag in flags.OWNED
    ]
    backend = flags.last_value(items, "--distributed-executor-backend")
    if config.spans_nodes and backend not in (None, "mp"):
        found.append(f"--distributed-executor-backend={backend}: nodes are joined by 'mp'; leave it out")
    spread = sizes(args)
    if config.nnodes is not None and spread is not None and spread.world % config.nnodes:
        found.append(
            f"tensor {spread.tensor} x pipeline {spread.pipeline} x prefill-context {spread.prefill_context} x "
            f"data {spread.data} = {spread.world} processes cannot be spread evenly over NNODES={config.nnodes}; "
            "every node runs the same number, so make the product a multiple of NNODES"
        )
    return found


def _plain_problems(config: NodeConfig, items: Sequence[flags.Item]) -> list[str]:
    given = {
        "--host": ("GEN_STACK_API_BIND", config.api_bind),
        "--port": ("GEN_STACK_API_PORT", config.api_port),
        "--api-key": ("GEN_STACK_API_KEY_FILE", config.api_key_file),
        "--shutdown-timeout": ("GEN_STACK_DRAIN", config.drain),
    }
    return [
        f"{flag} and {variable} are both given; leave one out"
        for flag, (variable, value) in given.items()
        if value is not None and flags.has(items, flag)
    ]


def command(
    config: NodeConfig,
    args: Sequence[str],
    environ: Mapping[str, str],
    network: Network | None,
    api_key: str | None,
) -> EngineCommand:
    """The engine's start on this node. `network` is needed when the group spans nodes, `api_key` where the API is."""
    items = flags.split(args)
    notes = []
    if not config.serves_api:
        dropped = [item for item in items if item.flag in flags.API_ONLY]
        items = [item for item in items if item.flag not in flags.API_ONLY]
        if dropped:
            names = dict.fromkeys(item.tokens[0].partition("=")[0] for item in dropped)
            notes.append(f"left out here, since only the head runs an API server: {', '.join(names)}")
    host = config.api_bind
    if host is None and config.in_group:
        host = network.master_addr if network else (config.node_addr or config.master_addr)
    added = _group_flags(config, items, network, host)
    if added:
        notes.append(f"added to the engine's flags: {' '.join(added)}")
    env, env_notes = engine_environment(config, environ, network, api_key)
    words = [token for item in items for token in item.tokens]
    end = words.index("--") if "--" in words else len(words)  # behind `--` everything would be positional
    return EngineCommand(
        argv=("vllm", "serve", *words[:end], *added, *words[end:]),
        env=env,
        notes=(*notes, *env_notes),
        api_url=_api_url(config, items, host) if config.serves_api else None,
        stop_s=(_drain_seconds(config, items) if config.serves_api else 0) + EXIT_S,
    )


def _group_flags(
    config: NodeConfig, items: Sequence[flags.Item], network: Network | None, host: str | None
) -> list[str]:
    """Flags added to the user's; they come last, because vLLM wants the model to stay first.

    Addresses are written without brackets: vLLM puts them round IPv6 itself (utils/network_utils.py, get_tcp_uri).
    """
    added = []
    if network is not None:
        added += [
            f"--nnodes={config.nnodes}",
            f"--node-rank={config.node_rank}",
            f"--master-addr={network.master_addr}",
            f"--master-port={config.master_port}",
            "--distributed-executor-backend=mp",
        ]
        for flag in ("--distributed-timeout-seconds", "--cpu-distributed-timeout-seconds"):
            if not flags.has(items, flag):
                added.append(f"{flag}={DISTRIBUTED_TIMEOUT_S}")
    if not config.serves_api:
        return [*added, "--headless"]
    if host is not None:
        added.append(f"--host={host}")
    if config.api_port is not None:
        added.append(f"--port={config.api_port}")
    if config.in_group and not flags.has(items, "--disable-access-log-for-endpoints"):
        added.append("--disable-access-log-for-endpoints=/health,/metrics,/ping")  # asked every second or two
    if config.drain is not None:
        # After SIGTERM the head finishes running requests for so long; 0, vLLM's default, cuts them off.
        added.append(f"--shutdown-timeout={math.ceil(config.drain)}")
    return added


def engine_environment(
    config: NodeConfig, environ: Mapping[str, str], network: Network | None, api_key: str | None
) -> tuple[dict[str, str], list[str]]:
    """Environment of the engine and what to say about it.

    The interface names are set from the node's address unless the user set them: a host with a network of its own for
    NCCL is common, and only the user knows it. That is said in the log, because a stale one hangs a group.
    NCCL reads `=name` as that interface alone; without `=` it is a prefix and eth1 would match eth10.
    """
    env = dict(environ)
    notes = []
    if config.in_group and not config.serves_api:
        env.pop("VLLM_API_KEY", None)
    if api_key is not None:
        env["VLLM_API_KEY"] = api_key
    if config.rdma == "off":
        env["NCCL_IB_DISABLE"] = "1"
    if network is not None:
        env["VLLM_HOST_IP"] = network.node_addr
        names = {"GLOO_SOCKET_IFNAME": network.interface, "NCCL_SOCKET_IFNAME": f"={network.interface}"}
        for name, value in names.items():
            if env.get(name) and env[name] != value:
                notes.append(f"{name}={env[name]} is kept as it was set; by NODE_ADDR it would be {value}")
            else:
                env[name] = value
    return env, notes


def _drain_seconds(config: NodeConfig, items: Sequence[flags.Item]) -> float:
    if config.drain is not None:
        return config.drain
    text = flags.last_value(items, "--shutdown-timeout") or "0"
    return float(text) if text.isdecimal() else 0.0


def _api_url(config: NodeConfig, items: Sequence[flags.Item], host: str | None) -> str | None:
    """URL of the API as reached from this host; None when the arguments put it where HTTP does not reach."""
    port = config.api_port or flags.last_value(items, "--port")
    elsewhere = any(flags.has(items, flag) for flag in ("--uds", "--grpc", "--headless"))
    in_file = flags.has(items, "--config") and port is None
    if elsewhere or in_file:
        return None
    scheme = "https" if flags.has(items, "--ssl-certfile") else "http"
    name = host or flags.last_value(items, "--host") or "0.0.0.0"  # noqa: S104
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return f"{scheme}://{url_host(loopback.get(name, name))}:{port or DEFAULT_API_PORT}"
