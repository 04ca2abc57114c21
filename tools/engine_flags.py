"""Writes the snapshot of the engine's flags that gen-stack ships: `python -m tools.engine_flags`.

It asks the argument parser of the engine in the CPU image, whatever Docker engine is there or can be started. For a new
version of the engine: change `release.ENGINE_VERSION` and images/cpu, run this, and keep the older snapshots that are
still supported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen_stack.engine_flags import DATA
from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image
from tools.process import main, say

if TYPE_CHECKING:
    from tools.docker_here import Docker

PARSER = Path(__file__).with_name("engine_parser.py")


def ask(docker: Docker, question: str, file: Path | None = None) -> Any:
    """Run `engine_parser.py QUESTION [FILE]` in the engine's image and return its answer."""
    mounts = [f"--volume={PARSER}:/engine_parser.py:ro", *([f"--volume={file}:/file.json:ro"] if file else [])]
    words = ["/engine_parser.py", question, *(["/file.json"] if file else [])]
    said = docker.run("run", "--rm", "--network=none", *mounts, "--entrypoint=python3", TAG, *words)
    return json.loads(said.splitlines()[-1])


def snapshot(answer: dict[str, Any]) -> str:
    """Write the engine's answer as the file that is shipped: one flag a line, in the order of the names."""
    lines = [f'  "{name}": {json.dumps(described)}' for name, described in sorted(answer["flags"].items())]
    source = f"vllm serve of vLLM {version(answer)}, made by tools/engine_flags.py"
    return "\n".join(["{", f' "source": {json.dumps(source)},', ' "flags": {', ",\n".join(lines), " }", "}", ""])


def version(answer: dict[str, Any]) -> str:
    """Name the engine's version without the name of its build (`+cpu`)."""
    return str(answer["version"]).partition("+")[0]


def engine_flags() -> None:
    """Write the snapshot of the engine in the image."""
    with docker_here() as docker:
        ensure_engine_image()
        answer = ask(docker, "flags")
    path = DATA / f"engine-flags-{version(answer)}.json"
    path.write_text(snapshot(answer), "utf-8")
    say(f"{path}: {len(answer['flags'])} flags")


if __name__ == "__main__":
    sys.exit(main(engine_flags))
