from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stack_node import ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST, COUNT = 29500, 4
HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


@contextmanager
def listening(address: str = "127.0.0.1", *, reuse_port: bool = False) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind((address, 0))
        server.listen()
        yield server


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


@pytest.fixture
def only_free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_free(*wanted: int) -> None:
        monkeypatch.setattr(ports, "free", lambda address, port: address == ports.EVERYWHERE and port in wanted)

    return set_free


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_listening_server_takes_the_port_everywhere(address: str) -> None:
    with listening(address) as server:
        port = port_of(server)
        assert not ports.free(address, port)
        assert not ports.free(ports.EVERYWHERE, port)
    assert ports.free(address, port)
    assert ports.free(ports.EVERYWHERE, port)


def test_a_server_that_shares_its_port_has_it_all_the_same() -> None:
    with listening(reuse_port=True) as server:
        assert not ports.free("127.0.0.1", port_of(server))


def test_what_is_left_of_connections_is_no_obstacle() -> None:
    with listening() as server:
        port = port_of(server)
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # closed here first, so TIME_WAIT is at the server's port
        client.close()
    assert ports.free("127.0.0.1", port)
    assert ports.free(ports.EVERYWHERE, port)


def test_an_address_of_another_host_has_no_free_port() -> None:
    assert not ports.free("192.0.2.1", 0)


def test_the_first_epoch_takes_the_first_port(only_free: Callable[..., None]) -> None:
    only_free(*range(FIRST, FIRST + COUNT))
    assert ports.pick_master_port(FIRST, COUNT, []) == FIRST


def test_ports_come_in_turn(only_free: Callable[..., None]) -> None:
    only_free(*range(FIRST, FIRST + COUNT))
    used: list[int] = []
    for _ in range(2 * COUNT):
        port = ports.pick_master_port(FIRST, COUNT, used[-2:])
        assert port is not None
        used.append(port)
    assert used == 2 * [FIRST, FIRST + 1, FIRST + 2, FIRST + 3]


def test_a_taken_port_is_left_out(only_free: Callable[..., None]) -> None:
    only_free(FIRST, FIRST + 3)
    assert ports.pick_master_port(FIRST, COUNT, [FIRST]) == FIRST + 3


def test_a_used_port_comes_only_when_no_other_is_free(only_free: Callable[..., None]) -> None:
    used = [FIRST + 1, FIRST]
    only_free(FIRST, FIRST + 1, FIRST + 3)
    assert ports.pick_master_port(FIRST, COUNT, used) == FIRST + 3
    only_free(FIRST, FIRST + 1)
    assert ports.pick_master_port(FIRST, COUNT, used) == FIRST + 1


def test_all_ports_are_taken(only_free: Callable[..., None]) -> None:
    only_free()
    assert ports.pick_master_port(FIRST, COUNT, [FIRST]) is None


def test_a_last_port_from_other_settings_means_nothing(only_free: Callable[..., None]) -> None:
    only_free(*range(FIRST, FIRST + COUNT))
    assert ports.pick_master_port(FIRST, COUNT, [1234]) == FIRST


def test_there_is_no_port_above_the_last(only_free: Callable[..., None]) -> None:
    only_free(65535, 65536)
    assert ports.pick_master_port(65535, COUNT, [65535]) == 65535


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_connections_are_counted_at_the_server_only(address: str) -> None:
    with listening(address) as server:
        port = port_of(server)
        assert ports.established(port) == 0
        with socket.create_connection((address, port)), socket.create_connection((address, port)) as second:
            assert ports.established(port) == 2
            assert ports.established(int(second.getsockname()[1])) == 1


def test_a_ranks_closed_connection_counts_no_more() -> None:
    with listening() as server:
        port = port_of(server)
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
        with accepted:
            assert ports.established(port) == 0  # CLOSE_WAIT


def test_both_families_are_one_store(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    line = "   0: {}:733C {}:D431 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1 0 20 4 30 10 -1\n"
    four, six = "0100007F", "0000000000000000FFFF00000A4D000A"
    (tmp_path / "net" / "tcp").write_text(HEADER + line.format(four, four, "01", 7) + line.format(four, four, "0A", 8))
    (tmp_path / "net" / "tcp6").write_text(HEADER + line.format(six, six, "01", 9))
    assert ports.established(0x733C, tmp_path) == 2
    assert ports.established(0xD431, tmp_path) == 0
    (tmp_path / "net" / "tcp6").unlink()  # a kernel without IPv6
    assert ports.established(0x733C, tmp_path) == 1


def test_the_holder_of_a_port_is_named() -> None:
    with listening() as server:
        comm = Path("/proc/self/comm").read_text().strip()
        assert ports.holder(port_of(server)) == f"{comm} (process {os.getpid()})"


def test_a_holder_that_cannot_be_seen(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(f"{HEADER}   0: 00000000:733C 00000000:0000 0A 0:0 0:0 0 0 0 77 1\n")
    (tmp_path / "12").mkdir()  # its files are not shown
    assert ports.holder(0x733C, tmp_path) == "something else, outside this container or of another user"
    assert ports.holder(0x733D, tmp_path) == "something that does not listen yet or may not be shared"
