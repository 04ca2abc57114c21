"""What the accelerators' driver says of their memory, by a stand-in for its library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stack_node import devices


@pytest.mark.parametrize(
    ("now", "free"),
    [
        ([100 << 20, 0], True),
        ([611 << 20, 512 << 20], True),
        ([100 << 20, (512 << 20) + 1], False),
        ([100 << 20], False),
    ],
)
def test_freed_memory(now: list[int], free: bool) -> None:
    assert devices.freed([100 << 20, 0], now) is free


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(0x700000000000 + index);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory) {
    memory[0] = 1ULL << 40; memory[2] = ((unsigned long long)device - 0x700000000000 + 5) << 33;
    return FAIL;
}
"""


@pytest.mark.parametrize(("fail", "used"), [(0, [5 << 33, 6 << 33]), (3, None)])
def test_device_memory(fail: int, used: list[int] | None, tmp_path: Path) -> None:
    """Against a stand-in for NVIDIA's library, with numbers that do not fit 32 bits."""
    try:
        subprocess.run(
            ["cc", "-shared", "-fPIC", f"-DFAIL={fail}", "-xc", "-", "-o", tmp_path / "libnvidia-ml.so.1"],
            input=NVML.encode(),
            check=True,
        )
    except FileNotFoundError:
        pytest.skip("no C compiler")
    code = "from stack_node import devices; print(devices.device_memory_used())"
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(Path(devices.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{used}\n"
