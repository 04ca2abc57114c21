"""What people really wrote wrong, or right, each named after its public report and standing for its kind."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from tests.generator.helpers import errors, output_texts

if TYPE_CHECKING:
    from pathlib import Path

GPUS = "name: t\nmodel: /models/m\nnodes:\n"
A = "  - {name: gpu-a, address: 10.0.0.11, gpus: 8}\n"
B = "  - {name: gpu-b, address: 10.0.0.12, gpus: 8}\n"
PAIR = f"{GPUS}{A}{B}"


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A spec that must be refused: by one line that starts like this and has these words in it."""

    report: str
    kind: str
    spec: str
    start: str
    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Right:
    """A spec that must be taken: some file has each of `there`, none outside `secrets/` has any of `absent`."""

    report: str
    kind: str
    spec: str
    there: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


WRONG = [
    Wrong(
        "vllm#7815",
        "two nodes with one address",
        f"{GPUS}{A}{B.replace('10.0.0.12', '10.0.0.11')}",
        "spec.yaml:5: nodes[1].address: ",
        ("'10.0.0.11' is already the address of gpu-a",),
    ),
    Wrong(
        "spark-vllm-docker tests",
        "two nodes with one name",
        f"{GPUS}{A}{B.replace('gpu-b', 'gpu-a')}",
        "spec.yaml:5: nodes[1].name: ",
        ("'gpu-a' is already the name of nodes[0]",),
    ),
    Wrong(
        "spark-vllm-docker tests",
        "a typo in a key",
        f"{PAIR}parallelism:\n  tensro: 8\n",
        "spec.yaml:7: parallelism.tensro: ",
        ("unknown key 'tensro'", "did you mean tensor?"),
    ),
    Wrong(
        "spark-vllm-docker tests",
        "a quotation mark that stays open",
        'name: t\nmodel: "/models/m\nnodes: []\n',
        "spec.yaml:2: not valid YAML: ",
        ("close the quotation mark that opens on this line",),
    ),
    Wrong("spark-vllm-docker tests", "an empty file", "", "spec.yaml:1: ", ("the file is empty",)),
    Wrong("spark-vllm-docker tests", "a list at the top", "- name: t\n", "spec.yaml:1: ", ("the file is a list",)),
    Wrong(
        "spark-vllm-docker tests",
        "a version of tomorrow",
        f"version: 99\n{PAIR}",
        "spec.yaml:1: version: ",
        ("99 is not allowed here; write 1",),
    ),
    Wrong(
        "sparkring",
        "a flag that the generator sets",
        f"{PAIR}engine:\n  args:\n    tensor-parallel-size: 8\n",
        "spec.yaml:8: engine.args.tensor-parallel-size: ",
        ("use parallelism.tensor instead",),
    ),
    Wrong(
        "gpustack#6019",
        "one host's address for all nodes",
        f"{PAIR}engine: {{env: {{VLLM_HOST_IP: 10.0.0.11}}}}\n",
        "spec.yaml:6: engine.env.VLLM_HOST_IP: ",
        ("gen-stack sets VLLM_HOST_IP itself; use nodes[].address instead",),
    ),
    Wrong(
        "gpustack#6019",
        "one port for all ranks",
        f'{PAIR}engine: {{env: {{VLLM_PORT: "40000"}}}}\n',
        "spec.yaml:6: engine.env.VLLM_PORT: ",
        ("VLLM_PORT is refused: one fixed port for all ranks collides",),
    ),
    Wrong(
        "vLLM arg_utils",
        "a world size that does not match",
        f"{PAIR}parallelism: {{tensor: 8, pipeline: 4}}\n",
        "spec.yaml:6: parallelism: ",
        ("a world size of 32", "16 GPUs"),
    ),
    Wrong(
        "vLLM arg_utils",
        "nodes with different numbers of GPUs",
        f"{GPUS}{A}{B.replace('gpus: 8', 'gpus: 4')}",
        "spec.yaml:3: nodes: ",
        ("gpu-a 8 and gpu-b 4", "the same number of GPUs"),
    ),
    Wrong(
        "spark-vllm-docker tests",
        "one port twice on the head",
        f"{PAIR}network: {{control_port: 8000}}\n",
        "spec.yaml:6: network.control_port: ",
        ("8000 is also api.port",),
    ),
    Wrong(
        "vllm#7074",
        "a host's name for its address",
        PAIR.replace("10.0.0.11", "gpu-a.lab"),
        "spec.yaml:4: nodes[0].address: ",
        ("'gpu-a.lab' is no numeric address",),
    ),
    Wrong(
        "vllm#7074",
        "a loopback address among others",
        PAIR.replace("10.0.0.11", "127.0.0.1"),
        "spec.yaml:4: nodes[0].address: ",
        ("'127.0.0.1' is a loopback address, which the other nodes cannot reach",),
    ),
    Wrong(
        "spark-vllm-docker tests",
        "a name with a space",
        PAIR.replace("name: t", "name: has space"),
        "spec.yaml:1: name: ",
        ("'has space' is not allowed here",),
    ),
    Wrong(
        "compose-farm",
        "a key file that is not there",
        f"{PAIR}api: {{key_file: ./nowhere}}\n",
        "spec.yaml:6: api.key_file: ",
        ("there is no file './nowhere' beside the spec",),
    ),
    Wrong(
        "sparkring",
        "a line break in a variable",
        f'{PAIR}engine: {{env: {{NCCL_DEBUG: "WARN\\nX"}}}}\n',
        "spec.yaml:6: engine.env.NCCL_DEBUG: ",
        ("has a line break in it",),
    ),
]

RIGHT = [
    Right(
        "spark-vllm-docker tests",
        "a name with dots",
        PAIR.replace("name: t", "name: qwen3.6-35b"),
        ("gen-stack.stack: qwen3.6-35b", "name: qwen3-6-35b-gpu-a"),
    ),
    Right(
        "MiaAI PR#30",
        "a secret stays out of every other file",
        f"{PAIR}api: {{key_file: ./key}}\n",
        ("sk-very-secret-value",),
        ("sk-very-secret-value",),
    ),
    Right(
        "spark-vllm-docker README",
        "one node stays simple",
        f"{GPUS}{A}",
        ("--tensor-parallel-size=8",),
        ("MASTER_ADDR", "NODE_RANK", "--nnodes", "network_mode"),
    ),
    Right(
        "Compose's interpolation",
        "a dollar is a dollar",
        f'{PAIR}engine: {{env: {{GREETING: "$HOME"}}}}\n',
        ("GREETING: $$HOME",),
    ),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case.report}: {case.kind}")
def test_a_spec_that_people_wrote_wrong(case: Wrong) -> None:
    lines = [line for line in errors(case.spec) if line.startswith(case.start)]
    assert len(lines) == 1, errors(case.spec)
    assert all(words in lines[0] for words in case.words), lines[0]
    assert errors(case.spec) == lines


def test_vllmops_all_errors_at_once() -> None:
    text = f"name: t\nmodel: /models/m\nbananas: yes\nnodes:\n{A.replace('10.0.0.11', 'nope')}api: {{port: 70000}}\n"
    assert [line.split(": ")[:2] for line in errors(text)] == [
        ["spec.yaml:3", "bananas"],
        ["spec.yaml:5", "nodes[0].address"],
        ["spec.yaml:6", "api.port"],
    ]


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: f"{case.report}: {case.kind}")
def test_a_spec_that_people_wrote_right(case: Right, tmp_path: Path) -> None:
    files = output_texts(case.spec, tmp_path, {"key": "sk-very-secret-value\n"})
    files = {path: text for path, text in files.items() if "/image/" not in path}
    for words in case.there:
        assert any(words in text for text in files.values()), words
    for words in case.absent:
        assert [path for path, text in files.items() if words in text and "secrets/" not in path] == []
