"""How much of the accelerators' memory is taken, to know that a killed engine gave its own back."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLERANCE_BYTES = 512 << 20  # a monitoring tool's own context, for one


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def device_memory_used() -> list[int] | None:
    """Bytes in use on each NVIDIA device of this container, whoever uses them; None where that cannot be told.

    None, too, for devices that do not tell (MIG slices without rights, systems whose memory is the host's). A driver
    in trouble may take seconds to answer: call it from a thread that may wait. Run against a stand-in library only,
    not yet on a GPU.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            return _used(nvml)
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None


def _used(nvml: ctypes.CDLL) -> list[int] | None:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return None
    used = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        memory = _Memory()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
            return None
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
            return None
        used.append(int(memory.used))
    return used


def freed(baseline: Sequence[int], now: Sequence[int]) -> bool:
    """Whether no device has more memory in use than before the engine, by a tolerance; in bytes, in devices' order.

    A device that has gone is none that is free: then it is False.
    """
    return len(baseline) == len(now) and all(
        after <= before + TOLERANCE_BYTES for before, after in zip(baseline, now, strict=True)
    )
