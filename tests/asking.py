"""Asking over HTTP and waiting until something is so: what tests with real processes share."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def http(url: str, body: dict[str, Any] | None = None, *, token: str = "", timeout: float = 10) -> tuple[int, str]:
    """Status and text; 0 when nobody answers."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def soon(happened: Callable[[], bool], seconds: float = 15, every: float = 0.02) -> bool:
    """Wait until something is so; False when it is not within so many seconds."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            return False
        time.sleep(every)
    return True
