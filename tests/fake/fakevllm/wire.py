"""JSON messages, one a line, over stream sockets."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

Message = dict[str, Any]


class Link:
    """One connection. Messages are small, so that sending does not block, also towards a process that is frozen."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._buffer = b""

    def fileno(self) -> int:
        """For poll and select."""
        return self.sock.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; False when nobody is there any more."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Wait for the next message; None at the end of the connection."""
        while b"\n" not in self._buffer:
            if not self._fill():
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: Message = json.loads(line)
        return found

    def arrived(self) -> list[Message] | None:
        """All messages that one read brings (call it when the socket is readable); None at the end."""
        if not self._fill():
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the connection."""
        self.sock.close()

    def _fill(self) -> bool:
        try:
            data = self.sock.recv(1 << 16)
        except OSError:
            return False
        self._buffer += data
        return bool(data)


def family(address: str) -> socket.AddressFamily:
    """The address family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on an address; raises OSError when the port is taken."""
    listener = socket.socket(family(address), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(64)
    return listener


def connect(address: str, port: int, give_up_s: float = 3600.0) -> Link:
    """Connect, trying again until somebody listens, as the real rendezvous does; raises OSError after `give_up_s`."""
    end = time.monotonic() + give_up_s
    while True:
        sock = socket.socket(family(address), socket.SOCK_STREAM)
        sock.settimeout(10)
        try:
            sock.connect((address, port))
        except OSError:
            sock.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Link(sock)
