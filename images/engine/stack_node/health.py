"""`stack-node health`: Docker's HEALTHCHECK, a process of its own.

The running entrypoint leaves a small status file; this reads it. In a group the supervisor knows best and writes its
judgement there, again and again, so that a supervisor that hangs is told from one that works. Without a group the file
says where the API is, whose GET /health has to answer 200.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TIMEOUT_S = 5.0  # below the HEALTHCHECK's own timeout in the Dockerfile, so that there is always a sentence
STALE_S = 20.0  # a supervisor writes every 5 s


@dataclass(frozen=True)
class Status:
    """What the entrypoint says about itself where there is no group."""

    pid: int
    started: int  # clock ticks since boot, from /proc: tells this process from a later one with its number
    role: str  # plain
    engine_pid: int
    engine_started: int
    api_url: str | None  # without a path


@dataclass(frozen=True)
class NodeStatus:
    """What the supervisor of a node of a group says about itself."""

    pid: int
    started: int  # as above
    role: str  # head or worker
    healthy: bool
    sentence: str
    written: float  # seconds of the monotonic clock, which all processes of a host share


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


def write_group(healthy: bool, sentence: str, role: str) -> None:
    """Say how this node of a group is; at each change and at least every 5 s. Raises OSError."""
    write(NodeStatus(os.getpid(), start_ticks(os.getpid()) or 0, role, healthy, sentence, time.monotonic()))


def write(status: Status | NodeStatus) -> None:
    """Replace the status file in one step. Raises OSError, and leaves nothing behind then."""
    path = status_path()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(status), file)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def remove() -> None:
    """Take the status file away, if it is this process's."""
    status = read()
    if status is not None and status.pid == os.getpid():
        status_path().unlink(missing_ok=True)


def read() -> Status | NodeStatus | None:
    """The status file's content; None when there is none or it is no such file."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        data = json.loads(status_path().read_text())
        return NodeStatus(**data) if "written" in data else Status(**data)
    return None


def judge(status: Status | NodeStatus | None, now: float) -> tuple[bool, str]:
    """Whether this node is healthy at a time `now` of the monotonic clock, and a sentence about it."""
    if status is None or start_ticks(status.pid) != status.started:
        return False, "no engine was started yet; the start checks are running, or the container's log says why not"
    if isinstance(status, NodeStatus):
        age = now - status.written
        if age > STALE_S:
            return False, f"the supervisor hangs: it has said nothing for {age:.0f} s; restart this container"
        return status.healthy, f"{status.role}: {status.sentence}"
    if start_ticks(status.engine_pid) != status.engine_started:
        return False, "the engine has ended"
    if status.api_url is None:
        return True, f"{status.role}: the engine runs (process {status.engine_pid})"
    return ask(status.api_url)


def ask(api_url: str) -> tuple[bool, str]:
    """Whether the API answers its own health check."""
    import http.client  # here, because the rest needs no HTTP and the check runs every few seconds
    from urllib.parse import urlsplit

    url = urlsplit(api_url)
    host = url.hostname or "localhost"
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        import ssl

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
    healthy, sentence = judge(read(), time.monotonic())
    print(f"{'healthy' if healthy else 'unhealthy'}: {sentence}")
    return 0 if healthy else 1
