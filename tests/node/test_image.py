"""Dockerfile, bake file and both packages name the same versions; the layer stays small."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gen_stack
import stack_node

IMAGE = Path(stack_node.__file__).parent.parent
DOCKERFILE = (IMAGE / "Dockerfile").read_text()
BAKE = (IMAGE / "docker-bake.hcl").read_text()


def variable(name: str) -> str:
    found = re.search(rf'variable "{name}" {{\s+default = "([^"]+)"', BAKE)
    assert found
    return found[1]


def test_versions_agree() -> None:
    assert stack_node.__version__ == gen_stack.__version__ == variable("VERSION")
    assert variable("VLLM_VERSION") == stack_node.ENGINE_VERSION
    assert f"ARG ENGINE_IMAGE=vllm/vllm-openai:v{stack_node.ENGINE_VERSION}\n" in DOCKERFILE
    assert f'image.version="{stack_node.ENGINE_VERSION}-{stack_node.__version__}"' in DOCKERFILE
    assert variable("REPOSITORY") == "ghcr.io/gen-stack/vllm"


def test_variants() -> None:
    rows = re.findall(r'\{ name = "(\w+)", image = "([^"]+)", suffix = "([^"]*)", platforms = \[([^]]+)\] \}', BAKE)
    both, one = '"linux/amd64", "linux/arm64"', '"linux/amd64"'
    assert rows == [
        ("cuda", "vllm/vllm-openai", "", both),
        ("rocm", "vllm/vllm-openai-rocm", "-rocm", one),
        ("cpu", "vllm/vllm-openai-cpu", "-cpu", both),
    ]


def test_dockerfile_installs_nothing() -> None:
    instructions = [line.split()[0] for line in DOCKERFILE.splitlines() if re.match(r"[A-Z]+ ", line)]
    assert instructions == ["ARG", "FROM", "LABEL", "COPY", "ENV", "ENTRYPOINT", "HEALTHCHECK"]
    assert "syntax=" not in DOCKERFILE  # would pull a frontend image


def test_hadolint() -> None:
    # Installed beside the interpreter that runs the tests, which need not be on the PATH.
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint
    subprocess.run([hadolint, IMAGE / "Dockerfile"], check=True)


def test_copied_files_are_small_and_the_command_is_executable() -> None:
    files = [path for path in (IMAGE / "stack_node").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    assert os.access(IMAGE / "stack_node" / "stack-node", os.X_OK)
