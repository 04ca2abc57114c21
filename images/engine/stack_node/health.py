"""`stack-node health`: Docker's HEALTHCHECK, a process of its own.

The running entrypoint leaves a small status file; this reads it and looks for itself. Where the API is (the head, or a
node without a group) healthy means that GET /health of the API answers 200. A worker has no API in vLLM 0.32; it is
healthy while the engine's first process lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 5.0  # below the HEALTHCHECK's own timeout in the Dockerfile, so that there is always a sentence


@dataclass(frozen=True)
class Status:
    """What the entrypoint says about itself."""

    pid: int
    started: int  # clock ticks since boot, from /proc: tells this process from a later one with its number
    role: str  # plain, head or worker
    engine_pid: int
    engine_started: int
    api_url: str | None  # without a path


def status_path() -> Path:
    """Where the status file is: one for each user and temporary folder, so one for each container."""
    return Path(tempfile.gettempdir()) / f"gen-stack-node-{os.getuid()}.json"


def start_ticks(pid: int) -> int | None:
    """When a living process started, in clock ticks since boot; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def write(status: Status) -> None:
    """Replace the status file in one step."""
    path = status_path()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(status), file)
    Path(name).replace(path)


def remove() -> None:
    """Take the status file away, if it is this process's."""
    status = read()
    if status is not None and status.pid == os.getpid():
        status_path().unlink(missing_ok=True)


def read() -> Status | None:
    """The status file's content; None when there is none or it is no such file."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Status(**json.loads(status_path().read_text()))
    return None


def judge(status: Status | None) -> tuple[bool, str]:
    """Whether this node is healthy, and a sentence about it."""
    if status is None or start_ticks(status.pid) != status.started:
        return False, "no engine was started yet; the start checks are running, or the container's log says why not"
    if start_ticks(status.engine_pid) != status.engine_started:
        return False, "the engine has ended"
    if status.api_url is None:
        return True, f"{status.role}: the engine runs (process {status.engine_pid})"
    return ask(status.api_url)


def ask(api_url: str) -> tuple[bool, str]:
    """Whether the API answers its own health check."""
    import http.client  # here, because the rest needs no HTTP and the check runs every few seconds
    import ssl

    url = urlsplit(api_url)
    host = url.hostname or "localhost"
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        # The certificate is for the outside name; what is asked here is whether this host's own server lives.
        context = ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(host, url.port, timeout=TIMEOUT_S, context=context)
    else:
        connection = http.client.HTTPConnection(host, url.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return False, f"{api_url}/health does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
    return answer == 200, f"{api_url}/health answers {answer}"


def main() -> int:
    """Print one line; exit status 0 when healthy, 1 when not."""
    healthy, sentence = judge(read())
    print(f"{'healthy' if healthy else 'unhealthy'}: {sentence}")
    return 0 if healthy else 1
