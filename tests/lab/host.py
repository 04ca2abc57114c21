"""One host of the lab: its namespaces, its Docker engine, and what a person at its prompt can do."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shlex
import shutil
import socket
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from tests.lab import capped_runc, system
from tests.lab.system import LabError, run, wait_until
from tools import downloads

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence

    from tests.lab.network import Network

_T = TypeVar("_T")

OPERATOR = 1000
"""Uid and gid of the ordinary user, `ops`, who owns the folders and runs Docker."""
DOCKER_GROUP = 1001
HOME = PurePosixPath("/home/ops")
_HOOK = "nvidia-container-runtime-hook"


@dataclass(frozen=True)
class Software:
    """What a host runs; a host that runs anything else is rebuilt."""

    engine: str = "26.1"
    compose: str | None = None
    """None: the one that belongs to the engine's generation."""
    buildx: bool = False
    """Without the plugin, Compose builds with what it carries itself; the one there is is too old for Compose 2.40."""
    gpu_hook: bool = True
    """A stub that makes the engine accept GPU reservations; there is no GPU behind it."""

    def describe(self) -> dict[str, object]:
        """Return everything with its defaults filled in."""
        generation = downloads.GENERATIONS[self.engine]
        return {
            "engine": self.engine,
            "compose": self.compose or generation.compose,
            "buildx": self.buildx,
            "gpu_hook": self.gpu_hook,
        }


class Host:
    """A host of the lab; number 0 is the seed, which has no cable and only keeps images.

    Methods that take paths of the host (`/srv/...`, `/home/ops/...`) say so; `path` gives the machine's path for one.
    """

    def __init__(self, root: Path, network: Network, number: int, software: Software, storage: Path | None = None):
        self.number = number
        self.name = f"host{number}" if number else "seed"
        self.folder = root / self.name
        self.network = network
        self.software = software
        self.data_root = storage or self.folder / "docker"
        self.cgroup = f"gen-stack-lab-{network.number}/{self.name}"
        self.socket = self.folder / "run/docker.sock"

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"

    @property
    def address(self) -> str:
        """The host's IPv4 address, which the other hosts reach."""
        return self.network.address(self.number)

    @property
    def address6(self) -> str:
        """The host's IPv6 address, which the other hosts reach."""
        return self.network.address6(self.number)

    # -- power --------------------------------------------------------------------------------------------------

    def up(self) -> bool:
        """Bring the host up unless it is; return whether anything had to be done."""
        if self.healthy():
            return False
        self.remove()
        self._install()
        self.boot()
        return True

    def boot(self) -> None:
        """Start the host's namespaces and its engine on the disk that is there."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        (self.folder / "run").mkdir(mode=0o755)
        if not self.network.connected(self.number):
            self.network.disconnect(self.number)
            self.network.connect(self.number)
        self._start_init()
        self.start_engine()

    def power_off(self) -> None:
        """Kill everything at once, containers included, as a power cut does; the disk stays."""
        system.kill_cgroup(self.cgroup)
        system.unmount_below(self.folder)

    def reboot(self) -> None:
        """Power cut and start; the engine then restarts the containers whose restart policy says so."""
        self.power_off()
        self.boot()

    def remove(self) -> None:
        """Remove every trace of the host, whatever state it is in."""
        self.power_off()
        self.network.disconnect(self.number)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def healthy(self) -> bool:
        """Tell whether the host is up, as asked for, connected, and its engine answers."""
        asked_for = self.installed() == self.software.describe()
        return asked_for and self.network.connected(self.number) and self.init_pid() is not None and self.answers()

    def installed(self) -> dict[str, object] | None:
        """Return what the host was made with, None where there is no host."""
        try:
            found: dict[str, object] = json.loads((self.folder / "software.json").read_text())
        except (OSError, ValueError):
            return None
        return found

    def init_pid(self) -> int | None:
        """Return the process (its id on the machine) that holds the host's namespaces."""
        for pid in system.processes(f"{self.cgroup}/init"):
            if system.pid_inside(pid) == 1:
                return pid
        return None

    # -- the engine ---------------------------------------------------------------------------------------------

    def start_engine(self) -> None:
        """Start the host's Docker engine and wait until it answers."""
        (self.folder / "run/docker.pid").unlink(missing_ok=True)
        config = ["dockerd", "--config-file", str(self.folder / "daemon.json")]
        self._spawn("engine", [*self._enter(), "env", *_assignments(self._engine_environment()), *config])
        log = self.folder / "engine.log"
        wait_until(lambda: self._alive("engine") and self.answers(), f"Docker engine of {self.name}", 60, log)

    def stop_engine(self) -> None:
        """Stop the engine as a service manager would, and with it the containers."""
        self.sh(["sh", "-c", "kill -TERM $(cat /run/docker.pid)"], user=None)
        wait_until(lambda: not system.processes(f"{self.cgroup}/engine"), f"engine of {self.name} to stop", 60)

    def answers(self) -> bool:
        """Tell whether the engine answers on its socket."""
        connection = _UnixConnection(self.socket)
        try:
            connection.request("GET", "/_ping")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    # -- what a person at the prompt does -----------------------------------------------------------------------

    def sh(
        self,
        argv: Sequence[str | Path],
        *,
        user: int | None = OPERATOR,
        cwd: str | PurePosixPath = HOME,
        check: bool = True,
        timeout: float | None = 300,
        stdin: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host, as the ordinary user (`user=None`: as root)."""
        return run(self.command(argv, user=user, cwd=cwd, env=env), check=check, timeout=timeout, stdin=stdin)

    def command(
        self,
        argv: Sequence[str | Path],
        *,
        user: int | None = OPERATOR,
        cwd: str | PurePosixPath = HOME,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return the command line that runs `argv` on the host, for callers with a way of their own to run it."""
        become = ["setpriv", "--pdeathsig", "KILL"]
        if user is not None:
            become += [f"--reuid={user}", f"--regid={user}", f"--groups={DOCKER_GROUP}"]
        home = str(HOME) if user is not None else "/root"
        paths = f"{self.folder}/tools/usr/bin:{self.folder}/tools/usr/sbin:{os.defpath}:/usr/sbin:/sbin"
        basic = {"HOME": home, "USER": "ops", "PATH": paths, "LANG": "C.UTF-8", **(env or {})}
        return [*self._enter(), *become, "env", "-i", "-C", str(cwd), *_assignments(basic), *map(str, argv)]

    def docker(
        self, *args: str | Path, check: bool = True, timeout: float | None = 300, stdin: str | None = None
    ) -> str:
        """Run `docker ARGS` on the host as the ordinary user and return what it printed, both streams."""
        done = self.sh(["docker", *args], check=check, timeout=timeout, stdin=stdin)
        return done.stdout + done.stderr

    def compose(
        self, folder: str | PurePosixPath, *args: str, check: bool = True, timeout: float | None = 600
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGS` in a folder of the host, as the ordinary user."""
        return self.sh(["docker", "compose", *args], cwd=folder, check=check, timeout=timeout)

    def put(self, local: Path, name: str) -> str:
        """Copy a folder into the ordinary user's home, replacing what was there; return its path on the host."""
        return self.place(local, HOME / name)

    def place(self, local: Path, inside: str | PurePosixPath, owner: int = OPERATOR) -> str:
        """Copy a file or folder to a path of the host, modes kept, owned by `owner`; return that path."""
        target = self.path(inside)
        self.mkdir(PurePosixPath(inside).parent, owner)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        run(["cp", "-a", "--reflink=auto", "-T", local, target])
        run(["chown", "-R", "-h", f"{owner}:{owner}", target])
        return str(inside)

    def mkdir(self, inside: str | PurePosixPath, owner: int = OPERATOR) -> Path:
        """Make a folder of the host and its parents, owned by `owner` where new; return the machine's path."""
        target = self.path(inside)
        missing = [folder for folder in (target, *target.parents) if not folder.exists()]
        for folder in reversed(missing):
            folder.mkdir()
            os.chown(folder, owner, owner)
        return target

    def path(self, inside: str | PurePosixPath) -> Path:
        """Return the machine's path for a path of the host below /srv, /home or /run."""
        parts = PurePosixPath(inside).parts
        if len(parts) < 2 or parts[0] != "/" or parts[1] not in ("srv", "home", "run") or ".." in parts:
            raise LabError(f"{inside} is not the host's own: only /srv, /home and /run are")
        return self.folder.joinpath(*parts[1:])

    def engine_log(self, container: str, lines: int | str = "all") -> str:
        """Return a container's log."""
        return self.docker("logs", "--tail", str(lines), container, check=False)

    def containers(self) -> list[str]:
        """Return the names of all containers, stopped ones too."""
        return self.sh(["docker", "ps", "-a", "--format", "{{.Names}}"]).stdout.split()

    def http_get(self, url: str, timeout: float = 5, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """GET a URL from this host (its network, as another host would) and return status and body."""

        def get() -> tuple[int, str]:
            request = urllib.request.Request(url, headers=dict(headers or {}))
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _KeepErrors)
            with opener.open(request, timeout=timeout) as response:
                return response.status, response.read().decode(errors="replace")

        return self.inside(get)

    def inside(self, work: Callable[[], _T]) -> _T:
        """Call `work` with this host's network: sockets that it opens are the host's."""
        result: list[_T] = []
        failure: list[BaseException] = []

        def enter_and_work() -> None:
            try:
                with Path(f"/run/netns/{self.network.namespace(self.number)}").open() as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
                        raise LabError(f"cannot enter {self.name}: {os.strerror(ctypes.get_errno())}")
                result.append(work())
            except BaseException as error:  # handed to the caller's thread
                failure.append(error)

        # A namespace belongs to a thread, so a thread of its own enters it and the caller stays where it is.
        thread = threading.Thread(target=enter_and_work, daemon=True)
        thread.start()
        thread.join()
        if failure:
            raise failure[0]
        return result[0]

    def cut(self, *, silent: bool = False) -> None:
        """Cut the host's cable (see `Network.cut`)."""
        self.network.cut(self.number, silent=silent)

    def heal(self) -> None:
        """Plug the cable in again and end what `degrade` began."""
        self.network.heal(self.number)

    def degrade(self, *netem: str) -> None:
        """Make the way to the host slow or lossy, in tc-netem's words: `degrade("delay", "100ms")`."""
        self.network.degrade(self.number, *netem)

    # -- how it is made -----------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Lay out the host's disk: tools, the ordinary user's home, /srv, the engine's configuration."""
        described = self.software.describe()
        for name in ("tools", "plugins", "bin", "srv", "home", "run"):
            (self.folder / name).mkdir(parents=True)
        self.data_root.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        self.mkdir(HOME / ".docker")
        (self.path(HOME) / ".docker/cli-plugins").symlink_to(self.folder / "plugins/cli-plugins")
        self.mkdir("/srv/models")
        hook = self.folder / "bin" / _HOOK
        if self.software.gpu_hook:
            hook.write_text(
                "#!/bin/sh\n# Accepts a GPU reservation where no GPU is: proves the file, not the device.\nexit 0\n"
            )
            hook.chmod(0o755)
        if capped_runc.needed():
            runc = self.folder / "bin/runc"
            real = shlex.quote(str(self.folder / "tools/usr/sbin/runc"))
            runc.write_text(f'#!/bin/sh\nexec python3 {shlex.quote(capped_runc.__file__)} {real} "$@"\n')
            runc.chmod(0o755)
        config = {
            "hosts": ["unix:///run/docker.sock"],
            "data-root": str(self.data_root),
            "pidfile": "/run/docker.pid",
            "group": str(DOCKER_GROUP),
            "cgroup-parent": f"/{self.cgroup}",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
        }
        (self.folder / "daemon.json").write_text(json.dumps(config, indent=2) + "\n")
        (self.folder / "software.json").write_text(json.dumps(described))

    def _start_init(self) -> None:
        """Start the process that is the host's number 1 and holds its namespaces."""
        folder = shlex.quote(str(self.folder))
        described = self.software.describe()
        plugins = downloads.docker_config(str(described["compose"]), with_buildx=bool(described["buildx"]))
        # The host's own /srv, /home and /run lie over the machine's, inside only. Tools are mounted first: the cache
        # they come from may lie in /home, and its way may be closed to the ordinary user.
        boot = f"""
            hostname {self.name}
            mount --bind {shlex.quote(str(downloads.engine(self.software.engine)))} {folder}/tools
            mount --bind {shlex.quote(str(plugins))} {folder}/plugins
            for name in srv home run; do mount --bind {folder}/$name /$name; done
            cd /
            exec {folder}/tools/usr/bin/tini-static -- sleep infinity
        """
        network = f"--net=/run/netns/{self.network.namespace(self.number)}"
        fresh = [
            "--mount",
            "--propagation",
            "slave",
            "--uts",
            "--ipc",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
        ]
        self._spawn("init", ["nsenter", network, "unshare", *fresh, "sh", "-ec", boot])
        wait_until(self._booted, f"{self.name} to start", 20, self.folder / "init.log")

    def _booted(self) -> bool:
        if not self._alive("init"):
            raise LabError(f"{self.name} did not start:\n{system.tail(self.folder / 'init.log', 20)}")
        pid = self.init_pid()
        return pid is not None and "tini" in Path(f"/proc/{pid}/comm").read_text()

    def _alive(self, part: str) -> bool:
        if system.processes(f"{self.cgroup}/{part}"):
            return True
        raise LabError(f"{part} of {self.name} ended:\n{system.tail(self.folder / f'{part}.log', 20)}")

    def _spawn(self, part: str, argv: Sequence[str]) -> None:
        """Start a process that outlives us, in a cgroup by which it is found again."""
        group = shlex.quote(str(system.make_cgroup(f"{self.cgroup}/{part}")))
        log = shlex.quote(str(self.folder / f"{part}.log"))
        # The outer shell ends at once, so that the machine's own number 1 is the parent and reaps.
        start = f"echo $$ > {group}; exec setsid {shlex.join(argv)} < /dev/null >> {log} 2>&1 &"
        run(["sh", "-ec", start])

    def _enter(self) -> list[str]:
        pid = self.init_pid()
        if pid is None:
            raise LabError(f"{self.name} is not up")
        return ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", "--"]

    def _engine_environment(self) -> dict[str, str]:
        found = downloads.engine_env(self.folder / "tools", downloads.engine(self.software.engine))
        return {**found, "PATH": f"{self.folder}/bin:{found['PATH']}"}


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path):
        super().__init__("docker", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class _KeepErrors(urllib.request.HTTPErrorProcessor):
    """A status of 400 and above is an answer, too."""

    def http_response(
        self, request: urllib.request.Request, response: http.client.HTTPResponse
    ) -> http.client.HTTPResponse:
        return response


def _assignments(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in env.items()]
