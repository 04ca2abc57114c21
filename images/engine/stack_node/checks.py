"""Judges a host before the engine starts: what would otherwise fail late and without words.

Pure: facts in, sentences out. A sentence says what was seen, what is needed, and what to write (mostly a line of the
Compose file). All of them are reported, so that one start tells everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stack_node.config import is_loopback
from stack_node.host import NOFILE, SHM

if TYPE_CHECKING:
    from stack_node.argv import Sizes
    from stack_node.config import Network, NodeConfig
    from stack_node.host import Facts, FileFact

_MIB = 1 << 20

# Below this, libraries, sockets between ranks and a model's files alone can use a process's descriptors up. Between
# here and host.NOFILE the engine runs and refuses clients when it is busy: a warning, not every host may go higher.
NOFILE_MIN = 8192

# The head's ring buffer to its workers is 160 MiB (16 MiB x 10 chunks, vllm/v1/executor/multiproc_executor.py), queues
# between processes come on top, and NCCL's own segments with several GPUs.
SHM_MIN = 1024 * _MIB
SHM_FREE_MIN = 512 * _MIB  # of a shared one (`ipc: host`), others may hold a part


def findings(
    config: NodeConfig, network: Network | None, sizes: Sizes | None, device_ids: int | None, facts: Facts
) -> list[str]:
    """What stands in the way of a start in a group. `device_ids` is the length of `--device-ids`, where given."""
    found = [
        *engine(facts),
        *(addresses(network) if network is not None else ()),
        *shared_memory(facts),
        *open_files(facts),
        *rdma(config, facts),
        *devices(config, sizes, device_ids, facts),
        *model_path(facts),
    ]
    if facts.key_file is not None:
        found += api_key(facts.key_file, facts.uid)
    if facts.token_file is not None:
        found += secret("GEN_STACK_TOKEN_FILE", facts.token_file, facts.uid)
    return found


def engine(facts: Facts) -> list[str]:
    """The engine's command is there."""
    if facts.engine is not None:
        return []
    return ["there is no 'vllm' on the PATH; use an image that is built on vLLM's own (ENGINE_IMAGE in the Dockerfile)"]


def addresses(network: Network) -> list[str]:
    """Loopback addresses reach no other host, so it is all of the group or none."""
    if is_loopback(network.master_addr) == is_loopback(network.node_addr):
        return []
    return [
        f"MASTER_ADDR is {network.master_addr} and this node's address is {network.node_addr}: a loopback address "
        "reaches only its own host; use loopback for every node (a trial on one host) or for none. Set "
        f"{'MASTER_ADDR' if is_loopback(network.master_addr) else 'NODE_ADDR'} to an address that the others reach"
    ]


def not_local(variable: str, address: str, known: tuple[tuple[str, str], ...], waited_s: float) -> str:
    """An address that should be this host's and is not."""
    have = ", ".join(f"{candidate} ({interface})" for interface, candidate in known) or "none"
    return (
        f"{variable} {address} is not an address of this host after {waited_s:.0f} s; it has {have}. Correct {variable}"
        ", or give the container the host's network: `network_mode: host`"
    )


def not_head(address: str, known: tuple[tuple[str, str], ...], waited_s: float) -> str:
    """Rank 0 runs somewhere else than MASTER_ADDR says."""
    return (
        not_local("MASTER_ADDR", address, known, waited_s)
        + ". NODE_RANK=0 is the head and belongs on the host that has MASTER_ADDR"
    )


def unresolved(name: str, error: str) -> str:
    """A host name that no resolver knows."""
    return (
        f"MASTER_ADDR {name} cannot be resolved ({error}); use the head's numeric address, or correct the name service"
    )


def no_route(address: str, error: str) -> str:
    """The head cannot be reached by any route, so this node's own address cannot be told either."""
    return f"there is no route to MASTER_ADDR {address} ({error}); connect this host to that network, or set NODE_ADDR"


def no_interface(address: str) -> str:
    """An address that works but that no interface lists."""
    return (
        f"no interface of this host carries {address}, so GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME cannot be set; "
        "set NODE_ADDR to an address that an interface has"
    )


def shared_memory(facts: Facts) -> list[str]:
    """Shared memory has room for the engine's queues."""
    if facts.shm_total >= SHM_MIN and facts.shm_free >= SHM_FREE_MIN:
        return []
    return [
        f"{SHM} has {facts.shm_total // _MIB} MiB, {facts.shm_free // _MIB} MiB of them free; the engine's processes "
        f"talk through it and need {SHM_MIN // _MIB} MiB, {SHM_FREE_MIN // _MIB} MiB of them free; in the Compose "
        "file: `shm_size: 16gb`"
    ]


def open_files(facts: Facts) -> list[str]:
    """Enough file descriptors to run at all; the soft limit was already raised towards the hard one."""
    return _few_files(facts, NOFILE_MIN)


def warnings(config: NodeConfig, facts: Facts) -> list[str]:
    """What lets the engine start and will be missed later."""
    found = [] if open_files(facts) else _few_files(facts, NOFILE)
    if config.spans_nodes and config.token_file is None:
        found.append("GEN_STACK_TOKEN_FILE is not set: the group cannot tell its members from strangers")
    return found


def _few_files(facts: Facts, least: int) -> list[str]:
    if facts.nofile.soft is None or facts.nofile.soft >= least:
        return []
    return [
        f"{facts.nofile.soft} open files are allowed (hard limit {facts.nofile.hard}) and the API server wants "
        f"{NOFILE}, {NOFILE_MIN} at least; in the Compose file: `ulimits: {{nofile: 1048576}}`"
    ]


def uses_rdma(config: NodeConfig, facts: Facts) -> bool:
    """Whether NCCL will find RDMA adapters that it can open."""
    if config.rdma == "off" or not config.spans_nodes or facts.platform == "cpu":
        return False
    return facts.rdma_devices and any(hca.active for hca in facts.hcas)


def transport(config: NodeConfig, facts: Facts) -> str:
    """Which way the data between the nodes takes, for the log."""
    if facts.platform == "cpu":
        return "transport between nodes: TCP, the CPU engine has no other"
    if config.rdma == "off":
        return "transport between nodes: TCP (GEN_STACK_RDMA=off)"
    seen = ", ".join(f"{hca.name} ({'active' if hca.active else 'no link'})" for hca in facts.hcas) or "no adapter"
    files = "there" if facts.rdma_devices else "missing"
    kind = "RDMA" if uses_rdma(config, facts) else "TCP"
    return f"transport between nodes: {kind}; /sys/class/infiniband shows {seen}, /dev/infiniband is {files}"


def rdma(config: NodeConfig, facts: Facts) -> list[str]:
    """RDMA is there when it is required, and may lock memory when it is used."""
    if config.rdma == "required" and config.spans_nodes and not uses_rdma(config, facts):
        return [
            f"GEN_STACK_RDMA=required, but {transport(config, facts)}; needed are an adapter with a link and its "
            "device files, in the Compose file: `devices: [/dev/infiniband:/dev/infiniband]`"
        ]
    if uses_rdma(config, facts) and facts.memlock.soft is not None:
        return [
            f"{facts.memlock.soft // 1024} KiB of memory may be locked, and RDMA registers whole buffers; in the "
            "Compose file: `ulimits: {memlock: -1}` (or GEN_STACK_RDMA=off to do without)"
        ]
    return []


def devices(config: NodeConfig, sizes: Sizes | None, device_ids: int | None, facts: Facts) -> list[str]:
    """The engine sees exactly its share of devices.

    It takes the number of visible devices for the number of ranks on a node (vLLM 0.32, shm_broadcast.py:1038), so one
    too many fails as badly as one too few. A group of one may see more than it uses.
    """
    if sizes is None or config.nnodes is None:
        return []
    share, rest = divmod(sizes.world, config.nnodes)
    if rest:
        return []  # refused as an argument already
    reason = (
        f"tensor {sizes.tensor} x pipeline {sizes.pipeline} x prefill-context {sizes.prefill_context} x "
        f"data {sizes.data} over {config.nnodes} node{'s' if config.nnodes > 1 else ''} is {share} on each"
    )
    if facts.platform == "cpu":
        if share == 1 or not config.spans_nodes:
            return []
        return [f"{reason}, and the CPU engine runs exactly one process a node; set sizes whose product is NNODES"]
    if facts.devices is None:
        return []
    seen = facts.devices if device_ids is None else min(device_ids, facts.devices)
    if seen == share or (seen > share and not config.spans_nodes):
        return []
    fix = (
        "`deploy: {resources: {reservations: {devices: [{driver: nvidia, count: "
        f"{share}, capabilities: [gpu]}}]}}}}}}`"
        if facts.platform == "cuda"
        else f"`devices:` with /dev/kfd and exactly {share} of /dev/dri/renderD*, or HIP_VISIBLE_DEVICES"
    )
    return [f"{seen} devices are visible, but {reason}, no more and no less; in the Compose file: {fix}"]


def model_path(facts: Facts) -> list[str]:
    """A model given as a path is there."""
    if facts.model is None or facts.model_exists is not False:
        return []
    return [
        f"the model's path {facts.model} does not exist in this container; in the Compose file: "
        f"`volumes: [{facts.model}:{facts.model}:ro]`, and the files on this host"
    ]


def api_key(fact: FileFact, uid: int) -> list[str]:
    """The API key's file can be read and holds one key."""
    found = secret("GEN_STACK_API_KEY_FILE", fact, uid)
    if not found and len((fact.text or "").split()) != 1:
        return [
            f"GEN_STACK_API_KEY_FILE {fact.path} must hold exactly one key, on one line and without spaces; "
            "for several keys put a gateway in front"
        ]
    return found


def secret(variable: str, fact: FileFact, uid: int) -> list[str]:
    """A secret's file can be read and is not empty."""
    if fact.text is not None:
        return [] if fact.text.strip() else [f"{variable} {fact.path} is empty; write the secret into it"]
    if fact.owner is None:
        return [
            f"{variable} {fact.path} cannot be read ({fact.error}); in the Compose file give the service that secret: "
            "`secrets: [...]`"
        ]
    return [
        f"{variable} {fact.path} cannot be read ({fact.error}): it is of {fact.owner}, and this container runs as uid "
        f"{uid}. Docker mounts a secret with the modes of the host's file: give the file to that user, or run as its "
        "owner (`user:`), or as root with `cap_add: [DAC_OVERRIDE]`"
    ]
