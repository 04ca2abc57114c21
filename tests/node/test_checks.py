from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from stack_node import argv, checks, config, host, node
from stack_node.config import Network, NodeConfig
from stack_node.host import Facts, FileFact, Hca, Limit

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
NETWORK = Network("10.0.0.11", "10.0.0.12", "ens1f0")
FACTS = Facts(
    addresses=(("lo", "127.0.0.1"), ("ens1f0", "10.0.0.12")),
    engine="/usr/local/bin/vllm",
    platform="cuda",
    devices=8,
    shm_total=16 * GIB,
    shm_free=16 * GIB,
    nofile=Limit(65536, 1048576),
    memlock=Limit(None, None),
    hcas=(),
    rdma_devices=False,
    model=None,
    model_exists=None,
    key_file=None,
    token_file=None,
    uid=0,
)
TWO_BY_EIGHT = argv.Sizes(tensor=8, pipeline=2, prefill_context=1, data=1)


def group(rank: int = 1, nnodes: int = 2, **variables: str) -> NodeConfig:
    read, problems = config.read(
        {"NNODES": str(nnodes), "NODE_RANK": str(rank), "MASTER_ADDR": "10.0.0.11", **variables}
    )
    assert problems == []
    return read


def found(cfg: NodeConfig | None = None, sizes: argv.Sizes | None = TWO_BY_EIGHT, **changes: Any) -> list[str]:
    return checks.findings(cfg or group(), NETWORK, sizes, None, replace(FACTS, **changes))


def test_a_good_host_has_no_findings() -> None:
    assert found() == []


def test_small_shared_memory() -> None:
    assert found(shm_total=64 << 20, shm_free=64 << 20) == [
        "/dev/shm has 64 MiB, 64 MiB of them free; the engine's processes talk through it and need 1024 MiB, 512 MiB "
        "of them free; in the Compose file: `shm_size: 16gb`"
    ]
    assert found(shm_total=GIB, shm_free=GIB) == []
    assert len(found(shm_total=GIB, shm_free=1 << 20)) == 1


def test_few_open_files() -> None:
    assert found(nofile=Limit(4096, 4096)) == [
        "4096 open files are allowed (hard limit 4096) and the API server wants 65536, 8192 at least; in the Compose "
        "file: `ulimits: {nofile: 1048576}`"
    ]
    assert found(nofile=Limit(20000, 20000)) == []
    assert found(nofile=Limit(None, None)) == []


@pytest.mark.parametrize("devices", [0, 4, 16])
def test_devices_are_exactly_the_share(devices: int) -> None:
    assert found(devices=devices) == [
        f"{devices} devices are visible, but tensor 8 x pipeline 2 x prefill-context 1 x data 1 over 2 nodes is 8 on "
        "each, no more and no less; in the Compose file: `deploy: {resources: {reservations: {devices: [{driver: "
        "nvidia, count: 8, capabilities: [gpu]}]}}}`"
    ]


def test_devices_named_in_the_arguments() -> None:
    facts = replace(FACTS, devices=16)
    assert checks.devices(group(), TWO_BY_EIGHT, 8, facts) == []
    assert checks.devices(group(), TWO_BY_EIGHT, 4, facts)[0].startswith("4 devices are visible")


def test_a_group_of_one_may_see_more_devices() -> None:
    assert checks.devices(group(0, 1), argv.Sizes(4, 1, 1, 1), None, FACTS) == []
    assert len(checks.devices(group(0, 1), argv.Sizes(16, 1, 1, 1), None, FACTS)) == 1


def test_devices_that_cannot_be_told() -> None:
    assert found(platform="unknown", devices=None) == []
    assert found(sizes=None, devices=1) == []


def test_rocm_devices() -> None:
    assert found(platform="rocm", devices=2)[0].endswith(
        "`devices:` with /dev/kfd and exactly 8 of /dev/dri/renderD*, or HIP_VISIBLE_DEVICES"
    )


def test_the_cpu_engine_runs_one_process_a_node() -> None:
    assert found(platform="cpu", devices=None, sizes=argv.Sizes(2, 1, 1, 1)) == []
    assert found(platform="cpu", devices=None)[0].endswith(
        "is 8 on each, and the CPU engine runs exactly one process a node; set sizes whose product is NNODES"
    )


def test_rdma_required() -> None:
    finding = found(group(GEN_STACK_RDMA="required"), hcas=(Hca("mlx5_0", active=False),), rdma_devices=True)
    assert finding == [
        "GEN_STACK_RDMA=required, but transport between nodes: TCP; /sys/class/infiniband shows mlx5_0 (no link), "
        "/dev/infiniband is there; needed are an adapter with a link and its device files, in the Compose file: "
        "`devices: [/dev/infiniband:/dev/infiniband]`"
    ]


def test_rdma_locks_memory() -> None:
    there: dict[str, Any] = {"hcas": (Hca("mlx5_0", active=True),), "rdma_devices": True}
    assert found(**there) == []
    limited = found(**there, memlock=Limit(8 << 20, 8 << 20))
    assert limited == [
        "8192 KiB of memory may be locked, and RDMA registers whole buffers; in the Compose file: "
        "`ulimits: {memlock: -1}` (or GEN_STACK_RDMA=off to do without)"
    ]
    assert found(group(GEN_STACK_RDMA="off"), **there, memlock=Limit(8 << 20, 8 << 20)) == []


def test_warnings() -> None:
    assert checks.warnings(group(GEN_STACK_TOKEN_FILE="/t"), FACTS) == []
    few, token = checks.warnings(group(), replace(FACTS, nofile=Limit(20000, 20000)))
    assert few.startswith("20000 open files are allowed")
    assert token == "GEN_STACK_TOKEN_FILE is not set: the group cannot tell its members from strangers"


def test_transport_is_told() -> None:
    active = replace(FACTS, hcas=(Hca("mlx5_0", active=True),), rdma_devices=True)
    assert checks.transport(group(), active) == (
        "transport between nodes: RDMA; /sys/class/infiniband shows mlx5_0 (active), /dev/infiniband is there"
    )
    assert checks.transport(group(), FACTS) == (
        "transport between nodes: TCP; /sys/class/infiniband shows no adapter, /dev/infiniband is missing"
    )
    assert checks.transport(group(GEN_STACK_RDMA="off"), active) == "transport between nodes: TCP (GEN_STACK_RDMA=off)"
    assert checks.transport(group(), replace(FACTS, platform="cpu")).endswith("TCP, the CPU engine has no other")


def test_model_path() -> None:
    assert found(model="/models/qwen", model_exists=False) == [
        "the model's path /models/qwen does not exist in this container; in the Compose file: "
        "`volumes: [/models/qwen:/models/qwen:ro]`, and the files on this host"
    ]
    assert found(model="/models/qwen", model_exists=True) == []


def test_secrets() -> None:
    missing = FileFact("/run/secrets/t", None, "No such file or directory", None)
    assert found(token_file=missing) == [
        "GEN_STACK_TOKEN_FILE /run/secrets/t cannot be read (No such file or directory); in the Compose file give the "
        "service that secret: `secrets: [...]`"
    ]
    closed = FileFact("/run/secrets/k", None, "Permission denied", "uid 1000, mode 0600")
    assert found(group(0), key_file=closed) == [
        "GEN_STACK_API_KEY_FILE /run/secrets/k cannot be read (Permission denied): it is of uid 1000, mode 0600, and "
        "this container runs as uid 0. Docker mounts a secret with the modes of the host's file: give the file to that "
        "user, or run as its owner (`user:`), or as root with `cap_add: [DAC_OVERRIDE]`"
    ]
    assert found(token_file=FileFact("/t", " \n", None, "uid 0, mode 0600")) == [
        "GEN_STACK_TOKEN_FILE /t is empty; write the secret into it"
    ]
    two = found(group(0), key_file=FileFact("/k", "one\ntwo\n", None, "uid 0, mode 0600"))
    assert two == [
        "GEN_STACK_API_KEY_FILE /k must hold exactly one key, on one line and without spaces; "
        "for several keys put a gateway in front"
    ]


def test_loopback_is_for_all_nodes_or_none() -> None:
    assert checks.addresses(Network("127.0.0.1", "127.0.0.2", "lo")) == []
    assert checks.addresses(Network("127.0.0.1", "10.0.0.12", "eth0")) == [
        "MASTER_ADDR is 127.0.0.1 and this node's address is 10.0.0.12: a loopback address reaches only its own host; "
        "use loopback for every node (a trial on one host) or for none. Set MASTER_ADDR to an address that the others "
        "reach"
    ]
    assert checks.addresses(Network("10.0.0.11", "127.0.0.1", "lo"))[0].endswith(
        "Set NODE_ADDR to an address that the others reach"
    )


def test_everything_is_told_at_once() -> None:
    everything = found(
        engine=None, shm_total=0, shm_free=0, nofile=Limit(1, 1), devices=0, model="/m", model_exists=False
    )
    assert len(everything) == 5
    assert everything[0].startswith("there is no 'vllm' on the PATH")


def test_addresses_of_other_hosts_are_waited_for_and_told() -> None:
    said: list[str] = []
    finding = node.find_network(group(NODE_ADDR="198.51.100.7"), said.append, wait_s=0.01)
    assert isinstance(finding, str)
    assert finding.startswith("NODE_ADDR 198.51.100.7 is not an address of this host after 0 s; it has 127.0.0.1 (lo)")
    assert finding.endswith("Correct NODE_ADDR, or give the container the host's network: `network_mode: host`")
    assert said == ["waiting up to 0 s for the network; NODE_ADDR is 198.51.100.7 and MASTER_ADDR is 10.0.0.11"]


def test_the_head_has_the_heads_address() -> None:
    finding = node.find_network(group(0, MASTER_ADDR="198.51.100.7", NODE_ADDR="127.0.0.1"), print, wait_s=0)
    assert isinstance(finding, str)
    assert finding.startswith("MASTER_ADDR 198.51.100.7 is not an address of this host")
    assert finding.endswith("NODE_RANK=0 is the head and belongs on the host that has MASTER_ADDR")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.3"])
def test_loopback_network(address: str) -> None:
    cfg = group(NODE_ADDR=address, MASTER_ADDR="127.0.0.1")
    assert node.find_network(cfg, print, wait_s=0) == Network("127.0.0.1", address, "lo")


def test_own_address_is_found_by_the_route() -> None:
    assert node.find_network(group(MASTER_ADDR="localhost"), print, wait_s=0) in (
        Network("127.0.0.1", "127.0.0.1", "lo"),
        Network("::1", "::1", "lo"),
    )


@pytest.mark.parametrize(
    ("visible", "left"),
    [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("0,9,1", 1), ("GPU-aa, GPU-bb,GPU-cc", 3), ("MIG-x", 1), ("x", 0)],
)
def test_visible_devices_lists(visible: str | None, left: int) -> None:
    assert host.selected(4, visible) == left


def test_nvidia_devices_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_nvml_count", lambda: None)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert host.visible_devices("cuda", {}, tmp_path) == 2
    assert host.visible_devices("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert host.visible_devices("cpu", {}, tmp_path) is None


def test_amd_devices_are_those_of_this_container(tmp_path: Path) -> None:
    for number, (simd, minor) in enumerate([(0, 0), (304, 128), (304, 129), (304, 130)]):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\ndrm_render_minor {minor}\n")
    (tmp_path / "dev/dri").mkdir(parents=True)
    for minor in (128, 129):
        (tmp_path / f"dev/dri/renderD{minor}").touch()
    assert host.visible_devices("rocm", {}, tmp_path) == 2
    assert host.visible_devices("rocm", {"HIP_VISIBLE_DEVICES": "0"}, tmp_path) == 1


def test_adapters(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / f"sys/class/infiniband/{name}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert host.hcas(tmp_path) == [Hca("mlx5_0", active=True), Hca("mlx5_1", active=False)]
    assert not host.has_rdma_devices(tmp_path)


@pytest.mark.parametrize(
    ("version", "platform"),
    [
        ("0.32.0", "cuda"),
        ("0.32.0+cu129", "cuda"),
        ("0.32.0+rocm700", "rocm"),
        ("0.32.0+cpu", "cpu"),
        ("1+xpu", "unknown"),
    ],
)
def test_platform_is_that_of_the_installed_engine(version: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert host.engine_platform({}) == platform
    assert host.engine_platform({"VLLM_TARGET_DEVICE": "cpu"}) == "cpu"
