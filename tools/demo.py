"""`make demo`: from a spec to the answer of a real model that three containers computed together, on this machine."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tools.chat import QUESTION, answer
from tools.docker_here import docker_here
from tools.engine_image import ensure_engine_image
from tools.model import ensure_model
from tools.process import ToolError, main, say, step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools.docker_here import Docker

SPEC = Path(__file__).resolve().parent.parent / "compose/demo/spec.yaml"
MODELS = Path("/var/tmp/gen-stack/models")  # noqa: S108 - a host path that the demo's spec can name on any machine
ENDPOINT = "http://127.0.0.1:18000"
MODEL = "smollm2"
WAIT_S = 600


def demo() -> None:
    """Do it, and leave nothing running. Raises `ToolError` when something outside fails."""
    with docker_here() as docker, tempfile.TemporaryDirectory(prefix="gen-stack-demo-") as room:
        ensure_engine_image()
        ensure_model(MODELS)
        stacks = Path(room) / "demo"
        command = [sys.executable, "-m", "gen_stack", str(SPEC), "-o", str(stacks)]
        say(f"$ gen-stack {SPEC.relative_to(SPEC.parents[2])}")
        if subprocess.run(command, check=False).returncode:
            raise ToolError("gen-stack refused the demo's spec")
        nodes = sorted(path for path in stacks.iterdir() if (path / "compose.yaml").exists())
        with running(docker, nodes):
            say(f"question: {QUESTION}")
            with step("asking"):
                text = answer(ENDPOINT, MODEL)
            for node in nodes:
                say(f"{node.name}: {place_in_group(docker, node)}")
            say(f"answer: {text}")


@contextlib.contextmanager
def running(docker: Docker, nodes: list[Path]) -> Iterator[None]:
    """Start the nodes' folders, the head last, and take them down at the end, also when something fails."""
    head, *workers = nodes
    try:
        with step("docker compose build"):
            for node in nodes:
                docker.compose(node, "build")
        with step("docker compose up: three engines load and meet, which takes a minute or two"):
            for node in reversed(workers):
                docker.compose(node, "up", "-d")
            try:
                docker.compose(head, "up", "-d", "--wait", "--wait-timeout", str(WAIT_S))
            except ToolError as error:
                raise ToolError(f"{error}\n{last_words(docker, nodes)}") from None
        yield
    finally:
        with step("docker compose down"), ThreadPoolExecutor() as pool:
            for done in [pool.submit(docker.compose, node, "down", "--volumes") for node in nodes]:
                done.result()


def place_in_group(docker: Docker, node: Path) -> str:
    """Read from a rank's log which part of the model it has computed with, in the engine's own words."""
    log = docker.compose(node, "logs", "--no-color", "--no-log-prefix")
    found = re.search(r"rank \d+ in world size \d+ is assigned as .*?PP rank \d+|$", log)
    share = re.search(r"(?<!E)TP rank \d+", log)
    if not found or not share:
        raise ToolError(f"{node.name}: its engine's log does not say which part of the model it has")
    return f"{found[0]}, {share[0]}"


def last_words(docker: Docker, nodes: list[Path]) -> str:
    """Gather the end of every rank's log."""
    return "\n".join(f"--- {node.name}\n{docker.compose(node, 'logs', '--no-color', '--tail', '25')}" for node in nodes)


if __name__ == "__main__":
    sys.exit(main(demo))
