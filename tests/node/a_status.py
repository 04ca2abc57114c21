"""The status of a group that has been through something, as `report.status` makes it."""

from __future__ import annotations

from typing import Any


def a_member(rank: int, **other: Any) -> dict[str, Any]:
    member = {
        "rank": rank,
        "node": f"gpu-{'abc'[rank]}",
        "address": f"10.0.0.{11 + rank}",
        "state": "running",
        "text": "",
        "done": 0,
        "total": 0,
    }
    return {**member, **other}


def a_status(**other: Any) -> dict[str, Any]:
    status = {
        "group": "qwen",
        "phase": "ready",
        "ready": True,
        "sentence": "ready",
        "epoch": 3,
        "instance": "0123456789abcdef",
        "failures": 1,
        "max_restarts": 5,
        "next_try_s": None,
        "restarts": {"engine": 1, "lost": 1},
        "last_fault": {
            "kind": "engine",
            "rank": 1,
            "node": "gpu-b",
            "reason": "rank 1 (gpu-b, 10.0.0.12): the engine was killed by SIGKILL",
            "log": ["CUDA error: an illegal memory access", "See the manual"],
            "epoch": 2,
        },
        "last_recovery_s": 61.7,
        "last_detection_s": 0.3,
        "api": {"running": 2, "waiting": 0},
        "members": [a_member(0), a_member(1)],
    }
    return {**status, **other}
