"""Docker and Compose for a demo, with what this machine has: used as it is, started, or installed, and left as it was.

    with docker_here() as docker:
        docker.compose(folder, "up", "-d")

1. An engine that answers (DOCKER_HOST, or the default socket) is used and never stopped.
2. An engine that is installed but not running is started, by systemd where that runs, and stopped again at the end.
3. No engine: on Debian, as root, it is installed from Debian's packages; elsewhere a sentence says what to install.

A missing Compose plugin comes from the cache, beside the user's own Docker settings, not instead of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tools import downloads, process
from tools.cache import cache_dir
from tools.process import ToolError, say, step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

_INSTALL = "https://docs.docker.com/engine/install/"
# A rule of Docker's names its chains or bridges, or lets a container reach its own published port (the last form).
_DOCKERS_RULE = re.compile(r"DOCKER|docker0|\bbr-[0-9a-f]{12}|-s (\S+) -d \1 .*-j MASQUERADE")


@dataclass(frozen=True)
class Docker:
    """How to call Docker and Compose on this machine."""

    client: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the client needs on top of the environment."""
    started: bool = False
    """Whether the engine runs only because of us, and stops with us."""

    def run(self, *args: str | Path, timeout: float | None = None) -> str:
        """Run `docker ARGS` and return what it printed; ToolError with its last lines otherwise."""
        return process.run([self.client, *args], self.env, timeout)

    def compose(self, folder: Path, *args: str, timeout: float | None = None) -> str:
        """Run `docker compose ARGS` for the stack in a folder."""
        return self.run(*self._stack(folder), *args, timeout=timeout)

    def show(self, *args: str | Path) -> None:
        """Run `docker ARGS` with its output on the terminal; ToolError when it fails."""
        status = subprocess.run([self.client, *args], env={**os.environ, **self.env}, check=False).returncode
        if status:
            raise ToolError(f"exit status {status}: docker {' '.join(map(str, args))}")

    @staticmethod
    def _stack(folder: Path) -> tuple[str | Path, ...]:
        return ("compose", "--project-directory", folder, "-f", folder / "compose.yaml")


@contextlib.contextmanager
def docker_here() -> Iterator[Docker]:
    """Yield a Docker that works, with Compose; at the end, stop and remove whatever was started for it."""
    with _interruptible(), contextlib.ExitStack() as undo:
        started = False
        if not answers():
            _must_be_ours_to_start()
            if shutil.which("dockerd") is None:
                _install(undo)
            if not answers():
                _start(undo)
            started = True
        env = undo.enter_context(_compose())
        yield Docker(_client(), env, started)


def answers() -> bool:
    """Tell whether a Docker engine answers where the environment says, or at the default place."""
    client = shutil.which("docker")
    return client is not None and _try(client, "version", "--format", "{{.Server.Version}}").returncode == 0


def _client() -> str:
    client = shutil.which("docker")
    if client is None:
        raise ToolError(f"there is a Docker engine but no `docker` command; install one: {_INSTALL}")
    return client


def _try(*argv: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, **(env or {})}
    return subprocess.run(argv, env=full, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


# -- an engine ------------------------------------------------------------------------------------------------------


def _must_be_ours_to_start() -> None:
    """Raise, with what to do instead, unless this process may start an engine here."""
    if host := os.environ.get("DOCKER_HOST"):
        raise ToolError(f"no Docker engine answers at DOCKER_HOST={host}; start it, or unset DOCKER_HOST")
    client = shutil.which("docker")
    if client and "permission denied" in _try(client, "version").stderr.lower():
        raise ToolError("the Docker engine does not let this user in; add it to the group docker, or run this as root")
    if not sys.platform.startswith("linux"):
        raise ToolError(f"no Docker engine answers; start Docker Desktop, or install it: {_INSTALL}")
    if shutil.which("dockerd") and os.geteuid() != 0:
        raise ToolError("Docker is installed but does not run; start it (sudo systemctl start docker)")
    if shutil.which("dockerd") is None and not (os.geteuid() == 0 and Path("/etc/debian_version").exists()):
        raise ToolError(
            "there is no Docker engine on this machine; install Docker Engine and the Compose plugin "
            f"({_INSTALL}), or run this as root on Debian, where it installs Debian's packages itself"
        )


def _install(undo: contextlib.ExitStack) -> None:
    with step("installing Docker from Debian's packages"):
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        process.run(["apt-get", "-q", "update"], quiet)
        packages = ["docker.io", "iptables"]
        # Newer releases have the client in a package of its own.
        if shutil.which("docker") is None and _try("apt-cache", "show", "docker-cli").returncode == 0:
            packages.append("docker-cli")
        process.run(["apt-get", "install", "-qy", "--no-install-recommends", *packages], quiet)
    if answers():  # the package started it; it would not run without us
        undo.callback(_stop_service)


def _start(undo: contextlib.ExitStack) -> None:
    with step("starting the Docker engine"):
        if Path("/run/systemd/system").is_dir():
            undo.callback(_stop_service)
            process.run(["systemctl", "start", "docker"])
        else:
            undo.enter_context(_own_engine())


def _stop_service() -> None:
    # The socket first: it would start the engine again at the next look.
    if Path("/run/systemd/system").is_dir():
        _try("systemctl", "stop", "docker.socket", "docker.service", "containerd.service")
    else:
        _try("service", "docker", "stop")


@contextlib.contextmanager
def _own_engine() -> Iterator[None]:
    """Run `dockerd` as a child, for machines without a service manager; leave no process, link or rule of it."""
    before = _Machine.look()
    log = cache_dir() / "dockerd.log"
    with log.open("w") as output:
        # A session of its own: Ctrl-C at the terminal is for us, and the engine is stopped in order.
        engine = subprocess.Popen(
            ["dockerd"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        end = time.monotonic() + 60
        while not answers():
            if engine.poll() is not None or time.monotonic() > end:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
                raise ToolError(f"the Docker engine did not start; the end of {log}:\n{last}")
            time.sleep(0.1)
        yield
    finally:
        with _undisturbed():
            engine.terminate()  # stops the containers, then containerd, then itself
            try:
                engine.wait(timeout=40)
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()
            _kill_leftovers()
            before.restore()


def _kill_leftovers() -> None:
    """Kill what an engine that died hard leaves: what was started with its containerd's own socket, and the containers.

    A shim's death does not end its container, so children are killed with their parents.
    """
    doomed: set[int] = set()
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"/var/run/docker/containerd/containerd.sock" in words and _same_mounts(entry):
                doomed.add(int(entry.name))
    while grown := {pid for pid, parent in parents.items() if parent in doomed} - doomed:
        doomed |= grown
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _same_mounts(entry: Path) -> bool:
    # Engines of others, in mount namespaces of their own, use the same path for another socket.
    return (entry / "ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()


@dataclass(frozen=True)
class _Machine:
    """What an engine changes on the machine: mounts, links, packet filter rules, forwarding."""

    mounts: frozenset[str]
    links: frozenset[str]
    rules: Mapping[str, tuple[str, ...]]
    forwarding: Mapping[Path, str]

    @staticmethod
    def look() -> _Machine:
        forwarding = {}
        for path in (Path("/proc/sys/net/ipv4/ip_forward"), Path("/proc/sys/net/ipv6/conf/all/forwarding")):
            with contextlib.suppress(OSError):
                forwarding[path] = path.read_text().strip()
        return _Machine(_mounts(), _bridges(), {tool: _rules(tool) for tool in ("iptables", "ip6tables")}, forwarding)

    def restore(self) -> None:
        """Take back what came since `look` and is Docker's; rules that others made meanwhile stay."""
        for where in sorted(_mounts() - self.mounts, reverse=True):
            _try("umount", "--lazy", where)
        for tool, old in self.rules.items():
            new = [line for line in _rules(tool) if line not in old]
            for command in undo_rules(new, old):
                _try(tool, "--wait", *command)
        for name in _bridges() - self.links:
            _try("ip", "link", "delete", name)
        for path, value in self.forwarding.items():
            with contextlib.suppress(OSError):
                if path.read_text().strip() != value:
                    path.write_text(value)


def _mounts() -> frozenset[str]:
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return frozenset(point for point in points if re.match(r"/(var/lib|run)/docker(/|$)", point))


def _bridges() -> frozenset[str]:
    found = Path("/sys/class/net").glob("*/bridge")
    return frozenset(path.parent.name for path in found if re.match(r"docker0$|br-[0-9a-f]{12}$", path.parent.name))


def _rules(tool: str) -> tuple[str, ...]:
    """Return the rules as `TABLE RULE` lines, as `iptables -S` writes rules."""
    if shutil.which(tool) is None:
        return ()
    found = []
    for table in ("filter", "nat"):
        listed = _try(tool, "--wait", "-t", table, "-S").stdout.splitlines()
        found += [f"{table} {line}" for line in listed]
    return tuple(found)


def undo_rules(new: list[str], old: tuple[str, ...]) -> list[list[str]]:
    """Return the commands that take back Docker's part of `new` rules: jumps, then chains, then policies."""
    rules = [shlex.split(line) for line in new]
    commands = []
    for table, kind, chain, *rest in rules:
        if kind == "-A" and not chain.startswith("DOCKER") and _DOCKERS_RULE.search(" ".join(rest)):
            commands.append(["-t", table, "-D", chain, *rest])
    chains = [(table, chain) for table, kind, chain, *_ in rules if kind == "-N" and chain.startswith("DOCKER")]
    commands += [["-t", table, "-F", chain] for table, chain in chains]
    commands += [["-t", table, "-X", chain] for table, chain in chains]
    for table, kind, chain, *_ in rules:
        before = [line.split()[3] for line in old if line.split()[:3] == [table, "-P", chain]]
        if kind == "-P" and chain == "FORWARD" and before:
            commands.append(["-t", table, "-P", chain, before[0]])
    return commands


# -- Compose --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _compose() -> Iterator[Mapping[str, str]]:
    """Yield the variables with which the client has a Compose that is new enough."""
    found = _try(_client(), "compose", "version", "--short").stdout
    if version_of(found) >= version_of(downloads.OLDEST_COMPOSE):
        yield {}
        return
    say(f"Docker Compose {'is missing' if not found.strip() else found.strip() + ' is too old'}; fetching one")
    # Debian's first: it builds without buildx, and without a warning about that.
    from_debian = shutil.which("apt-get") is not None
    plugin = downloads.compose(downloads.OLDEST_COMPOSE if from_debian else downloads.NEWEST_COMPOSE)
    with tempfile.TemporaryDirectory(prefix="gen-stack-docker-config-") as folder:
        own = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
        merge_config(own, plugin, Path(folder))
        yield {"DOCKER_CONFIG": folder}


def merge_config(own: Path, plugin: Path, folder: Path) -> None:
    """Make `folder` a Docker configuration that is the user's own one (by links), with that Compose plugin."""
    plugins = folder / "cli-plugins"
    plugins.mkdir()
    (plugins / "docker-compose").symlink_to(plugin)
    for source, target in ((own, folder), (own / "cli-plugins", plugins)):
        if not source.is_dir():
            continue
        for entry in source.iterdir():
            if entry.name not in ("cli-plugins", "docker-compose"):
                (target / entry.name).symlink_to(entry.absolute())


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers of a version ("v2.26.1-4" is 2, 26, 1); nothing where there is none."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that what was started is stopped then, too."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let nobody interrupt the cleaning up: an impatient second Ctrl-C would leave an engine behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _body() -> None:
    with docker_here() as docker:
        said = docker.run("version", "--format", "Engine {{.Server.Version}}, client {{.Client.Version}}").strip()
        compose = docker.run("compose", "version", "--short").strip()
        print(f"{said}, Compose {compose}; {'started for this' if docker.started else 'was running'}")


def main() -> int:
    """Say which Docker a demo would use, starting (and stopping) it where it has to."""
    return process.main(_body)


if __name__ == "__main__":
    sys.exit(main())
