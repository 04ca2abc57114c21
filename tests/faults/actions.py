"""What the rows of faults.yaml can do: one function a word. Each returns how to take it back, where that is needed."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from tests.faults.harness import API, CONTROL, DOCKERD, MASTER

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.faults.harness import Group

    Undo = Callable[[], object] | None
    Action = Callable[[Group, int, Any], Undo]


def kill(group: Group, rank: int, title: str) -> Undo:
    """SIGKILL to the processes with that title."""
    group.kill(rank, title)
    return None


def freeze(group: Group, rank: int, title: str) -> Undo:
    """Processes stop without ending."""
    group.freeze(rank, title)
    return lambda: group.freeze(rank, title, thaw=True)


def switch(group: Group, rank: int, names: dict[str, Any]) -> Undo:
    """Switches of the fake engine."""
    for name, text in names.items():
        group.switch(rank, name, text)
    return lambda: group.clear(rank, *names)


def docker(group: Group, rank: int, command: str) -> Undo:
    """A command of `docker` on the rank's container: kill, pause, restart, stop."""
    group.host(rank).docker(*command.split(), group.container(rank))
    undo = {"pause": "unpause", "kill": "start", "stop": "start"}.get(command.split()[0])
    if undo is None:
        return None
    return lambda: group.host(rank).docker(undo, group.container(rank))


def compose(group: Group, rank: int, command: str) -> Undo:
    """A command of `docker compose` in the rank's folder."""
    group.nodes[rank].compose(*command.split())
    return None if command == "restart" else lambda: group.nodes[rank].up()


def reboot(group: Group, rank: int, _: Any) -> Undo:
    """The host loses its power and comes back."""
    group.host(rank).reboot()
    return None


def power_off(group: Group, rank: int, _: Any) -> Undo:
    """The host loses its power."""
    group.host(rank).power_off()
    return group.host(rank).boot


def dockerd(group: Group, rank: int, _: Any) -> Undo:
    """The Docker engine is stopped, and its containers with it."""
    group.host(rank).stop_engine()
    return group.host(rank).start_engine


def cut(group: Group, rank: int, _: Any) -> Undo:
    """The cable is cut where neither side sees its link go down."""
    group.host(rank).cut(silent=True)
    return group.host(rank).heal


def unplug(group: Group, rank: int, _: Any) -> Undo:
    """The cable is pulled: both sides see it."""
    group.host(rank).cut()
    return group.host(rank).heal


def deaf(group: Group, rank: int, to: list[int]) -> Undo:
    """The rank's host hears nothing from the others; what it says still arrives."""
    for other in to:
        group.block(rank, "-s", group.host(other).address)
    return lambda: group.unblock(rank)


def lossy(group: Group, rank: int, percent: int) -> Undo:
    """So many of a hundred packets that come to the rank's host are lost."""
    group.block(rank, "-i", "eth0", "-m", "statistic", "--mode", "random", "--probability", str(percent / 100))
    return lambda: group.unblock(rank)


def unread_logs(group: Group, rank: int, _: Any) -> Undo:
    """The engine logs megabytes a second, and Docker's engine, which reads its log, stands still."""
    group.switch(rank, "flood")
    group.freeze(rank, DOCKERD)

    def undo() -> None:
        group.clear(rank, "flood")
        group.freeze(rank, DOCKERD, thaw=True)

    return undo


def full_disk(group: Group, rank: int, folder: str) -> Undo:
    """A folder of the rank's container is on a disk without space, until the container is made anew."""
    pid = group.host(rank).docker("inspect", "-f", "{{.State.Pid}}", group.container(rank)).strip()
    enter = ["nsenter", "-t", pid, "-m", "--"]
    group.host(rank).sh([*enter, "mount", "-t", "tmpfs", "-o", "size=4k", "full", folder], user=None)
    group.host(rank).sh([*enter, "sh", "-c", f"head -c 4096 /dev/zero > {folder}/full"], user=None)
    return None


def terminate(group: Group, rank: int, title: str) -> Undo:
    """SIGTERM to the processes with that title."""
    group.kill(rank, title, signal.SIGTERM)
    return None


def take_port(group: Group, rank: int, which: str) -> Undo:
    """Something else listens on a port that the group needs."""
    port = {"control": CONTROL, "api": API, "master": MASTER}[which]
    pid = group.take_port(rank, port)
    return lambda: group.host(rank).sh(["kill", str(pid)], user=None)


def nothing(_group: Group, _rank: int, _: Any) -> Undo:
    """Nothing: the load is the fault."""
    return None


ACTIONS: dict[str, Action] = {
    action.__name__: action
    for action in (
        kill,
        freeze,
        switch,
        docker,
        compose,
        reboot,
        power_off,
        dockerd,
        cut,
        unplug,
        deaf,
        lossy,
        unread_logs,
        full_disk,
        terminate,
        take_port,
        nothing,
    )
}
