"""What this host is: addresses, limits, devices, files. Reads only; `checks` decides what is good enough."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import re
import resource
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stack_node.config import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stack_node.config import NodeConfig

SHM = "/dev/shm"  # noqa: S108

# vLLM's API server wants 65535 open files (vllm/utils/system_utils.py); every request in flight holds one.
NOFILE = 65536

UNKNOWN = "unknown"

Platform = Literal["cuda", "rocm", "cpu", "unknown"]


@dataclass(frozen=True)
class Hca:
    """An RDMA adapter."""

    name: str
    active: bool  # a port of it has a link


@dataclass(frozen=True)
class FileFact:
    """A file that has to be read, and what came of trying."""

    path: str
    text: str | None  # content, when it was readable
    error: str | None  # words of the operating system
    owner: str | None  # `uid 1000, mode 0600`, when the file exists


@dataclass(frozen=True)
class Limit:
    """Soft and hard limit of a resource; None is unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True)
class Facts:
    """Everything that the start checks judge; sizes in bytes."""

    addresses: tuple[tuple[str, str], ...]  # (interface, address)
    engine: str | None  # path of the vllm command
    platform: Platform
    devices: int | None  # visible to the engine; None where it cannot be told
    shm_total: int
    shm_free: int
    nofile: Limit
    memlock: Limit
    hcas: tuple[Hca, ...]
    rdma_devices: bool  # /dev/infiniband is there to open them
    model: str | None  # the model, where it is a path
    model_exists: bool | None  # None: it is no path
    key_file: FileFact | None
    token_file: FileFact | None
    uid: int


def gather(config: NodeConfig, model: str | None, environ: Mapping[str, str]) -> Facts:
    """Look at everything once. Raises the soft limit of open files on the way, as far as that is allowed."""
    raise_nofile(NOFILE)
    platform = engine_platform(environ)
    shm_total, shm_free = shm_bytes()
    path = model if model is not None and model.startswith("/") else None
    return Facts(
        addresses=tuple(addresses()),
        engine=shutil.which("vllm", path=environ.get("PATH")),
        platform=platform,
        devices=visible_devices(platform, environ),
        shm_total=shm_total,
        shm_free=shm_free,
        nofile=limit(resource.RLIMIT_NOFILE),
        memlock=limit(resource.RLIMIT_MEMLOCK),
        hcas=tuple(hcas()),
        rdma_devices=has_rdma_devices(),
        model=path,
        model_exists=Path(path).exists() if path is not None else None,
        key_file=read_file(config.api_key_file) if config.api_key_file and config.serves_api else None,
        token_file=read_file(config.token_file) if config.token_file else None,
        uid=os.geteuid(),
    )


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("addr", ctypes.POINTER(_SockAddr)),
]


def addresses() -> list[tuple[str, str]]:
    """Interfaces and their numeric addresses, by getifaddrs(3): the standard library lists only names."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    # sockaddr_in has its address 2 bytes behind the port, sockaddr_in6 6 bytes behind.
    layout = {socket.AF_INET: (2, 4), socket.AF_INET6: (6, 16)}
    found = []
    try:
        entry = first
        while entry:
            item = entry.contents
            if item.addr and item.addr.contents.family in layout:
                start, length = layout[item.addr.contents.family]
                packed = bytes(item.addr.contents.data)[start : start + length]
                found.append((item.name.decode(), socket.inet_ntop(item.addr.contents.family, packed)))
            entry = item.next
    finally:
        libc.freeifaddrs(first)
    return found


def is_local(address: str) -> bool:
    """Whether a numeric address can be used here: bound, not only listed (IPv6 is listed before it is usable)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def interface_of(address: str, known: Iterable[tuple[str, str]]) -> str | None:
    """Name of the interface that carries an address; all of 127.0.0.0/8 is on the loopback interface."""
    for interface, candidate in known:
        if candidate == address:
            return interface
    if is_loopback(address):
        return next((interface for interface, candidate in known if is_loopback(candidate)), None)
    return None


def resolve(name: str, like: str | None) -> str:
    """Numeric address of a host name, of the family of `like` where given; raises OSError."""
    family = socket.AF_UNSPEC if like is None else socket.AF_INET6 if ":" in like else socket.AF_INET
    found = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    return str(found[0][4][0])


def route_source(address: str) -> str:
    """Address from which this host reaches another one; raises OSError without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def engine_platform(environ: Mapping[str, str]) -> Platform:
    """Kind of device that the installed vLLM was built for, read from its version as vLLM itself does."""
    if environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return "cpu"
    version = engine_version()
    if version == UNKNOWN:
        return "unknown"
    local = version.partition("+")[2]
    if "cpu" in local:
        return "cpu"
    if "rocm" in local:
        return "rocm"
    if "xpu" in local or "tpu" in local:
        return "unknown"
    return "cuda"


def engine_version() -> str:
    """Version of the installed vLLM, such as `0.32.0+cpu`, or `unknown`."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN


def visible_devices(platform: Platform, environ: Mapping[str, str], root: Path = Path("/")) -> int | None:
    """Number of accelerators that the engine will see, or None where that cannot be told without torch."""
    if platform == "cuda":
        count = _nvml_count()
        if count is None:
            count = sum(1 for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
        return selected(count, environ.get("CUDA_VISIBLE_DEVICES"))
    if platform == "rocm":
        count = selected(_amd_count(root), environ.get("ROCR_VISIBLE_DEVICES"))
        return selected(count, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))
    return None


def selected(count: int, visible: str | None) -> int:
    """How many of `count` devices a CUDA_VISIBLE_DEVICES-like list leaves; it ends at the first entry that is none."""
    if visible is None:
        return count
    kept = 0
    for entry in visible.split(","):
        name = entry.strip()
        if name.isdecimal() and int(name) >= count:
            break
        if not name.isdecimal() and not name.upper().startswith(("GPU-", "MIG-")):
            break
        kept += 1
    return kept


def _nvml_count() -> int | None:
    """Devices by NVIDIA's management library, which knows what this container may open; None without it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        count = ctypes.c_uint()
        failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return None if failed else count.value


def _amd_count(root: Path) -> int:
    """GPUs whose render node is in this container; the kernel's topology itself shows all of the host."""
    count = 0
    for properties in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
        try:
            values = dict(line.split(" ", 1) for line in properties.read_text().splitlines() if " " in line)
        except OSError:  # a device of another container may be closed to this one
            continue
        minor = values.get("drm_render_minor", "0").strip()
        if int(values.get("simd_count", "0")) > 0 and (root / f"dev/dri/renderD{minor}").exists():
            count += 1
    return count


def hcas(root: Path = Path("/")) -> list[Hca]:
    """RDMA adapters that the kernel shows here."""
    found = []
    for adapter in sorted(root.glob("sys/class/infiniband/*")):
        states = []
        for path in adapter.glob("ports/*/state"):
            with contextlib.suppress(OSError):  # an adapter that is just going away
                states.append(path.read_text())
        found.append(Hca(adapter.name, any("ACTIVE" in state for state in states)))
    return found


def has_rdma_devices(root: Path = Path("/")) -> bool:
    """Whether the device files that user programs open for RDMA are here."""
    return any(root.glob("dev/infiniband/uverbs*"))


def read_file(path: str) -> FileFact:
    """Try to read a small text file."""
    try:
        status = Path(path).stat()
        owner = f"uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
    except OSError:
        owner = None
    try:
        return FileFact(path, Path(path).read_text(encoding="utf-8"), None, owner)
    except OSError as error:
        return FileFact(path, None, error.strerror, owner)
    except UnicodeDecodeError:
        return FileFact(path, None, "it is no text", owner)


def limit(which: int) -> Limit:
    """A resource limit of this process."""
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return Limit(soft, hard)


def raise_nofile(wanted: int) -> None:
    """Raise the soft limit of open files towards `wanted`, as far as the hard one allows; the engine inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def shm_bytes(path: str = SHM) -> tuple[int, int]:
    """Total and free bytes of shared memory; zeros where there is none."""
    try:
        status = os.statvfs(path)
    except OSError:
        return 0, 0
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
