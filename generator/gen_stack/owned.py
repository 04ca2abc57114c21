"""What the generator decides itself, as data: engine flags and environment variables a spec may not set by hand.

Sources: vLLM 0.32.0's `engine/arg_utils.py` and `entrypoints/launchers/cli_args.py` for flags and their short forms,
its `envs.py`, and the documentation of NCCL and gloo for variables.
"""

from __future__ import annotations

import re

FLAGS = {
    "model": "model.id",
    "revision": "model.revision",
    "served-model-name": "model.served_name",
    "download-dir": "model.cache",
    "hf-token": "model.token_file",
    "tensor-parallel-size": "parallelism.tensor",
    "pipeline-parallel-size": "parallelism.pipeline",
    "data-parallel-size": "parallelism.data",
    "enable-expert-parallel": "parallelism.expert",
    "data-parallel-size-local": "parallelism.data",
    "data-parallel-start-rank": "parallelism.data",
    "data-parallel-rank": "parallelism.data",
    "data-parallel-address": "nodes[0].address",
    "data-parallel-backend": "parallelism.data",
    "data-parallel-hybrid-lb": "replicas",
    "data-parallel-external-lb": "replicas",
    "data-parallel-multi-port-external-lb": "replicas",
    "nnodes": "nodes",
    "node-rank": "the order of nodes",
    "master-addr": "nodes[0].address",
    "master-port": "network.master_port",
    "headless": "the order of nodes",
    "device-ids": "nodes[].gpus",
    "distributed-executor-backend": "nodes",
    "distributed-timeout-seconds": "recovery.stall_timeout",
    "cpu-distributed-timeout-seconds": "recovery.stall_timeout",
    "shutdown-timeout": "recovery.drain",
    "host": "api.bind",
    "port": "api.port",
    "uds": "api.bind",
    "api-key": "api.key_file",
    "config": "engine.args",
}
"""Flags with the spec key to use instead."""

FLAGS_WITHOUT_KEY = {
    "data-parallel-rpc-port": "the engine's default, 29550, is kept free for it; leave it out",
    "disable-log-stats": "the engine's counters are how a stall is noticed; leave it out",
    "prefill-context-parallel-size": "it changes the world size, for which the spec has no key; leave it out",
    "grpc": "the endpoint is HTTP, and its health is checked there; leave it out",
    "grpc-port": "the endpoint is HTTP, and its health is checked there; leave it out",
}
"""Flags that no spec key replaces, with the reason."""

SHORT_FLAGS = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpl": "data-parallel-size-local",
    "dpr": "data-parallel-start-rank",
    "dpn": "data-parallel-rank",
    "dpa": "data-parallel-address",
    "dpp": "data-parallel-rpc-port",
    "dpb": "data-parallel-backend",
    "dph": "data-parallel-hybrid-lb",
    "dpe": "data-parallel-external-lb",
    "dpm": "data-parallel-multi-port-external-lb",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "r": "node-rank",
    "asc": "api-server-count",
    "q": "quantization",
    "cc": "compilation-config",
    "ac": "attention-config",
    "sc": "speculative-config",
    "dc": "diffusion-config",
}
"""vLLM's short forms with the long name that a spec uses."""

VARIABLES = {
    "NNODES": "nodes",
    "NODE_RANK": "the order of nodes",
    "NODE_ADDR": "nodes[].address",
    "MASTER_ADDR": "nodes[0].address",
    "MASTER_PORT": "network.master_port",
    "RANK": "the order of nodes",
    "LOCAL_RANK": "the order of nodes",
    "WORLD_SIZE": "parallelism",
    "VLLM_HOST_IP": "nodes[].address",
    "NCCL_SOCKET_IFNAME": "nodes[].interface",
    "GLOO_SOCKET_IFNAME": "nodes[].interface",
    "NCCL_IB_DISABLE": "network.rdma",
    "VLLM_API_KEY": "api.key_file",
    "HF_TOKEN": "model.token_file",
    "HF_TOKEN_PATH": "model.token_file",
    "HUGGING_FACE_HUB_TOKEN": "model.token_file",
    "HF_HOME": "model.cache",
    "HF_HUB_CACHE": "model.cache",
    "HUGGINGFACE_HUB_CACHE": "model.cache",
    "HF_HUB_OFFLINE": "model.offline",
    "TRANSFORMERS_OFFLINE": "model.offline",
    "CUDA_VISIBLE_DEVICES": "nodes[].gpus",
    "NVIDIA_VISIBLE_DEVICES": "nodes[].gpus",
    "HIP_VISIBLE_DEVICES": "nodes[].gpus",
    "ROCR_VISIBLE_DEVICES": "nodes[].gpus",
}
"""Variables with the spec key to use instead."""

VARIABLES_WITHOUT_KEY = {
    "VLLM_PORT": "one fixed port for all ranks collides (gpustack#6019), and the engine finds free ones; leave it out",
    "PATH": "the image's own is needed to find the engine; leave it out",
    "PYTHONPATH": "the image's own packages are needed to find the engine; leave it out",
}
"""Variables that no spec key replaces, with the reason."""

_OWNED_PREFIXES = {
    "GEN_STACK_": "the spec's api, network and recovery sections",
    "VLLM_DP_": "parallelism.data",
}

FREE_VARIABLES = frozenset({"GEN_STACK_LOG_FORMAT"})
"""Variables that have such a prefix and are the user's all the same: the spec has no key for them."""


def canonical_flag(name: str) -> str:
    """Spell a flag the way vLLM's help does: dashes, no dashes in front, long form.

    What follows a point is a key inside the flag's JSON value, and keeps its spelling.
    """
    bare, *keys = name.lstrip("-").split(".")
    bare = bare.replace("_", "-")
    return ".".join([SHORT_FLAGS.get(bare, bare), *keys])


def why_flag_is_refused(name: str) -> str | None:
    """Say why a flag, in any spelling, may not stand in `engine.args`; `None` when it may."""
    flag = canonical_flag(name)
    base = flag.split(".")[0].removeprefix("no-")
    if base in FLAGS:
        return f"gen-stack sets --{base} itself; use {FLAGS[base]} instead"
    if base in FLAGS_WITHOUT_KEY:
        return f"--{base} is refused: {FLAGS_WITHOUT_KEY[base]}"
    owned = [one for one in {**FLAGS, **FLAGS_WITHOUT_KEY} if one.startswith(base)]
    if owned:  # argparse takes any unambiguous beginning of a flag for the flag
        return (
            f"vLLM takes {name} as short for --{owned[0]}, which gen-stack sets itself; write the flag you mean in full"
        )
    return None


def why_variable_is_refused(name: str) -> str | None:
    """Say why a variable may not stand in an `env` section; `None` when it may."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "this is no name for a variable; use letters, digits and '_'"
    if name in VARIABLES:
        return f"gen-stack sets {name} itself; use {VARIABLES[name]} instead"
    if name in VARIABLES_WITHOUT_KEY:
        return f"{name} is refused: {VARIABLES_WITHOUT_KEY[name]}"
    for prefix, key in _OWNED_PREFIXES.items():
        if name.startswith(prefix) and name not in FREE_VARIABLES:
            return f"gen-stack sets {name} itself; use {key} instead"
    return None
