"""The lab as a whole: hosts made, healed and removed; images brought into all of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import images, system
from tests.lab.host import Host, Software
from tests.lab.network import Network
from tests.lab.system import LabError, run
from tools import downloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEFAULT_ROOT = Path("/var/lib/gen-stack-lab")
_NEEDED = ("ip", "nsenter", "unshare", "setpriv", "mount", "cp", "tc")


class Lab:
    """Hosts on this machine, numbered from 1. Every method can be called in any state, also after a crash."""

    def __init__(self, root: Path | None = None, number: int | None = None, software: Software | None = None):
        self.root = root or Path(os.environ.get("GEN_STACK_LAB") or DEFAULT_ROOT)
        self.network = Network(number or int(os.environ.get("GEN_STACK_LAB_NUMBER") or 77))
        self.software = software or Software()
        for hidden in ("/srv", "/home", "/run", "/var/run"):
            if self.root.is_relative_to(hidden):
                raise LabError(f"{self.root}: the lab cannot lie in {hidden}, which every host has its own of")

    # -- hosts --------------------------------------------------------------------------------------------------

    def host(self, number: int) -> Host:
        """Return host `number` (1, 2, ...), up or not."""
        return Host(self.root, self.network, number, self.software)

    def up(self, count: int) -> list[Host]:
        """Bring hosts 1 to `count` up; those that are, with the software asked for, are left as they are."""
        self.root.mkdir(parents=True, exist_ok=True)
        downloads.engine(self.software.engine)  # once, before the hosts ask for it side by side
        self.network.make_switch()
        hosts = [self.host(number) for number in range(1, count + 1)]
        side_by_side(Host.up, hosts)
        return hosts

    def down(self) -> None:
        """Remove everything but the seed's images, from any state, also a half-made one."""
        side_by_side(Host.remove, [self.host(number) for number in self.numbers()])
        self._seed().remove()
        system.kill_cgroup(f"gen-stack-lab-{self.network.number}")
        self.network.remove_switch()
        system.unmount_below(self.root)
        with contextlib.suppress(FileNotFoundError):
            for path in self.root.iterdir():
                if path.name not in ("images", "lock"):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def forget_images(self) -> None:
        """Remove the seed's images, too: what `down` keeps."""
        self._seed().remove()
        shutil.rmtree(self.root / "images", ignore_errors=True)

    def numbers(self) -> list[int]:
        """Return the hosts of which there is any trace: a folder, a namespace, a cgroup."""
        folders = [path.name for path in self.root.glob("host*")]
        wires = [name.replace(f"{self.network.prefix}-h", "host") for name in self.network.namespaces()]
        names = [*folders, *wires, *system.cgroup_children(f"gen-stack-lab-{self.network.number}")]
        return sorted({int(found[1]) for name in names if (found := re.fullmatch(r"host([1-9]\d*)", name))})

    @contextlib.contextmanager
    def held(self, wait: float = 0) -> Iterator[Lab]:
        """Hold the lab for this process: two at once would take each other's hosts away."""
        _check_machine()
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("a+") as lock:
            end = time.monotonic() + wait
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        lock.seek(0)
                        raise LabError(f"the lab in {self.root} is in use by process {lock.read() or '?'}") from None
                    time.sleep(0.2)
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            yield self

    # -- images -------------------------------------------------------------------------------------------------

    def load_image(self, tag: str, archive: Path | None = None, source: Sequence[str] = ("docker",)) -> None:
        """Bring an image into every host that is up: from an archive (`docker save`), or from another engine.

        `source` is the command of a Docker client for that engine. The image is unpacked once, in the seed, which is
        kept from run to run; hosts then share the files of its layers. A host with containers cannot be stopped for
        that: it loads the image the plain way.
        """
        if archive:
            wanted = images.archive_id(archive, tag)
        else:
            wanted = run([*source, "image", "inspect", "--format", "{{.Id}}", tag]).stdout.strip()
        if images.image_id(self._seed().data_root, tag) != wanted:
            self._fill_seed(tag, archive, source)
        self.share_image(tag)

    def import_image(self, tag: str, tar: Path, *changes: str) -> None:
        """Make a one-layer image from a tar of a file system, in every host that is up."""
        options = [word for change in changes for word in ("--change", change)]
        with self._running() as seed:
            pipe(["cat", str(tar)], seed.command(["docker", "import", *options, "-", tag]))
        self.share_image(tag)

    def share_image(self, tag: str) -> None:
        """Give every host that is up an image that the seed has."""
        hosts = [host for host in map(self.host, self.numbers()) if host.healthy()]
        side_by_side(lambda host: self._share(host, tag), hosts)

    def _share(self, host: Host, tag: str) -> None:
        seed = self._seed()
        if images.image_id(host.data_root, tag) == images.image_id(seed.data_root, tag):
            return
        if host.containers():
            self._load_plainly(host, tag)
            return
        host.stop_engine()
        try:
            images.graft(seed.data_root, host.data_root, tag)
        finally:
            host.start_engine()

    def _load_plainly(self, host: Host, tag: str) -> None:
        with self._running() as seed:
            pipe(seed.command(["docker", "save", tag]), host.command(["docker", "load", "-q"]))

    def _seed(self) -> Host:
        # One seed for all generations, kept by the oldest engine: a newer one can read what an older one wrote.
        oldest = Software(next(iter(downloads.GENERATIONS)))
        return Host(self.root, self.network, 0, oldest, self.root / "images/docker")

    @contextlib.contextmanager
    def _running(self) -> Iterator[Host]:
        """Yield the seed with its engine up, one user at a time."""
        seed = self._seed()
        seed.data_root.mkdir(parents=True, exist_ok=True)
        with (self.root / "images/lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.network.make_switch()
            seed.up()
            try:
                yield seed
            finally:
                seed.stop_engine()
                seed.remove()

    def _fill_seed(self, tag: str, archive: Path | None, source: Sequence[str]) -> None:
        with self._running() as seed:
            load = seed.command(["docker", "load", "-q"])
            pipe(["cat", str(archive)] if archive else [*source, "save", tag], load)
            seed.docker("image", "prune", "-f")  # what had the name before
            if images.image_id(seed.data_root, tag) is None:
                raise LabError(f"{archive or ' '.join(source)} has no image {tag}")


def side_by_side(work: Callable[[Host], object], hosts: Sequence[Host]) -> None:
    """Do the same on every host at once; the first error is raised when all have ended."""
    if not hosts:
        return
    with ThreadPoolExecutor(len(hosts)) as pool:
        for done in [pool.submit(work, host) for host in hosts]:
            done.result()


def pipe(source: Sequence[str], target: Sequence[str]) -> None:
    """Run `source | target`; both must end well."""
    with subprocess.Popen(source, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as giver:
        taker = subprocess.run(target, stdin=giver.stdout, capture_output=True, text=True, check=False)
        if giver.stdout:
            giver.stdout.close()
    for command, status in ((target, taker.returncode), (source, giver.returncode)):
        if status != 0:
            raise LabError(f"`{' '.join(command)}` ended with {status}: {taker.stderr.strip()[-2000:]}")


def _check_machine() -> None:
    if not Path("/proc/self/ns/net").exists() or os.geteuid() != 0:
        raise LabError("the lab needs Linux and root: it makes namespaces, mounts and Docker engines")
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise LabError(f"not found: {', '.join(missing)}; on Debian: apt-get install iproute2 util-linux coreutils")
