"""`make images`: the CPU engine image and our layer on it, on the Docker engine that is there or can be started."""

from __future__ import annotations

import sys
from pathlib import Path

from gen_stack.release import ENGINE_VERSION, RELEASE_REPOSITORY, image_tag
from tools.docker_here import docker_here
from tools.engine_image import TAG, ensure_engine_image
from tools.process import main, say

CONTEXT = Path(__file__).resolve().parent.parent / "images/engine"


def images() -> None:
    """Build them, and name the layer as it is released. Raises `ToolError` when something outside fails."""
    tag = f"{RELEASE_REPOSITORY}:{image_tag('cpu', ENGINE_VERSION)}"
    with docker_here() as docker:
        ensure_engine_image()
        docker.show("build", "--build-arg", f"ENGINE_IMAGE={TAG}", "--tag", tag, CONTEXT)
    say(f"{tag}: built on {TAG}; the other variants: docker buildx bake, in images/engine")


if __name__ == "__main__":
    sys.exit(main(images))
