"""Connections that have proved nothing yet: how many there may be, how long, and who gives way."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Protocol


class Connection(Protocol):
    """What is needed of an asyncio transport."""

    def abort(self) -> None:
        """Close at once."""

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""


class Strangers:
    """Ends each connection that is not admitted in time, and the crowd's oldest when there are too many."""

    def __init__(self, limit: int, patience_s: float) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._waiting: dict[Connection, tuple[str, asyncio.TimerHandle]] = {}  # oldest first

    def add(self, connection: Connection, address: str) -> None:
        """A new connection; one that waits may have to give way to it."""
        if len(self._waiting) >= self._limit:
            self._make_room()
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._end, connection)
        self._waiting[connection] = (address, timer)

    def admit(self, connection: Connection) -> None:
        """The connection is no stranger any more."""
        self._forget(connection)

    def end_all(self) -> None:
        """Close every one of them."""
        for connection in list(self._waiting):
            self._end(connection)

    def _make_room(self) -> None:
        for connection in [connection for connection in self._waiting if connection.is_closing()]:
            self._forget(connection)
        if len(self._waiting) < self._limit:
            return
        # Of the address with the most: a flood from one place must not push out a member that is just joining.
        crowd = Counter(address for address, _timer in self._waiting.values()).most_common(1)[0][0]
        self._end(next(connection for connection, (address, _timer) in self._waiting.items() if address == crowd))

    def _end(self, connection: Connection) -> None:
        self._forget(connection)
        connection.abort()

    def _forget(self, connection: Connection) -> None:
        entry = self._waiting.pop(connection, None)
        if entry is not None:
            entry[1].cancel()
