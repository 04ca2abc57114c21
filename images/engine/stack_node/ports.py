"""Ports of this host: whether one is free, which one is next, and who is connected to one.

Everything here answers at once, except `holder`, which looks through all processes.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

EVERYWHERE = ""  # as an address: all interfaces, both families, where torch's TCPStore listens

_LAST_PORT = 65535
_NO_SUCH_FAMILY = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.EADDRNOTAVAIL)
_ESTABLISHED = "01"  # states in /proc/net/tcp
_LISTEN = "0A"


def free(address: str, port: int) -> bool:
    """Whether a server can have the port at a numeric address, or EVERYWHERE.

    Asked with SO_REUSEADDR, as the engine's servers do: a connection's remains (TIME_WAIT) are then no obstacle, a
    listening socket is. Without SO_REUSEPORT, since a port shared with a stranger is not ours.
    """
    if address != EVERYWHERE:
        return _can_bind(address, port) is None
    return _can_bind("0.0.0.0", port) is None and _can_bind("::", port) in (None, *_NO_SUCH_FAMILY)  # noqa: S104


def _can_bind(address: str, port: int) -> int | None:
    """None, or the number of the error."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((address, port))
    except OSError as error:
        return error.errno or errno.EIO
    return None


def pick_master_port(first: int, count: int, last_used: Sequence[int]) -> int | None:
    """The next free one of `count` ports from `first` on; None when all are taken.

    `last_used` has the latest at its end. The turn goes on behind that one, and a port in it comes only when no other
    is free: what is left of an earlier epoch must not meet the new one.
    """
    ports = range(first, min(first + count, _LAST_PORT + 1))
    start = ports.index(last_used[-1]) + 1 if last_used and last_used[-1] in ports else 0
    turn = [*ports[start:], *ports[:start]]
    turn.sort(key=lambda port: port in last_used)  # stable: keeps the turn within both halves
    return next((port for port in turn if free(EVERYWHERE, port)), None)


def established(port: int, proc: Path = Path("/proc")) -> int:
    """How many connections to this port of this host are open, clients on this host included.

    Each rank keeps one connection to the engine's store as long as it lives. A stranger's connection counts too.
    """
    return sum(1 for _ in _sockets(port, _ESTABLISHED, proc))


def holder(port: int, proc: Path = Path("/proc")) -> str:
    """Who listens on the port, in words for the log. Slow on a host with many processes: not for an event loop."""
    wanted = {f"socket:[{inode}]" for inode in _sockets(port, _LISTEN, proc)}
    if not wanted:
        return "something that does not listen yet or may not be shared"
    names = []
    for folder in proc.glob("[0-9]*"):
        if wanted & _open_files(folder):
            with contextlib.suppress(OSError):
                names.append(f"{(folder / 'comm').read_text(errors='replace').strip()} (process {folder.name})")
    return ", ".join(sorted(names)) or "something else, outside this container or of another user"


def _open_files(folder: Path) -> set[str]:
    """Targets of a process's files; none of one that has ended or is another user's."""
    found = set()
    with contextlib.suppress(OSError):
        for entry in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(entry.readlink()))
    return found


def _sockets(port: int, state: str, proc: Path) -> Iterator[str]:
    """Inodes of the TCP sockets with this local port and state."""
    ending = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), (proc / "net" / name).open() as table:
            next(table, None)
            for line in table:
                fields = line.split()
                if fields[3] == state and fields[1].endswith(ending):
                    yield fields[9]
