from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from gen_stack.plan import endpoint
from gen_stack.planner import make_plan
from tests.generator.helpers import FOUR, HUB, ONE, TWO, load, plan_of

if TYPE_CHECKING:
    from gen_stack.plan import Plan

THREE = f"{TWO}  - {{name: c, address: 10.0.0.13, gpus: 8}}\n"
CPU = f"{TWO.replace(', gpus: 8', '')}engine: {{device: cpu}}\n"


def sizes(plan: Plan) -> tuple[int, int, int]:
    return plan.parallelism.tensor, plan.parallelism.pipeline, plan.parallelism.data


def choice(plan: Plan, key: str) -> tuple[str, str]:
    return next((one.value, one.reason) for one in plan.choices if one.key == key)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ONE, (8, 1, 1)),
        (TWO, (8, 2, 1)),
        (f"{FOUR}replicas: 2\n", (8, 2, 1)),
        (f"{FOUR}replicas: 4\n", (8, 1, 1)),
        (f"{TWO}parallelism: {{tensor: 16}}\n", (16, 1, 1)),
        (f"{TWO}parallelism: {{tensor: 4}}\n", (4, 4, 1)),
        (f"{TWO}parallelism: {{pipeline: 4}}\n", (4, 4, 1)),
        (f"{TWO}parallelism: {{data: 2}}\n", (8, 1, 2)),
        (f"{TWO}parallelism: {{data: 16}}\n", (1, 1, 16)),
        (f"{FOUR}parallelism: {{data: 8}}\n", (4, 1, 8)),
        (f"{THREE}parallelism: {{data: 2}}\n", (4, 3, 2)),
        (f"{TWO}parallelism: {{tensor: 2, pipeline: 2, data: 4}}\n", (2, 2, 4)),
        (CPU, (1, 2, 1)),
        (f"{CPU}parallelism: {{tensor: 2}}\n", (2, 1, 1)),
        (f"{CPU}parallelism: {{pipeline: 1}}\n", (2, 1, 1)),
    ],
)
def test_tensor_parallel_inside_a_node_pipeline_parallel_across(text: str, expected: tuple[int, int, int]) -> None:
    assert sizes(plan_of(text)) == expected


def test_tensor_parallel_stays_inside_the_smallest_node_of_all_groups() -> None:
    text = TWO.replace("12, gpus: 8", "12, gpus: 4") + "  - {name: c, address: 10.0.0.13, gpus: 4}\n"
    assert sizes(plan_of(f"{text}groups: [[a], [b, c]]\n")) == (4, 2, 1)


def test_every_choice_has_its_reason() -> None:
    plan = plan_of(TWO)
    assert choice(plan, "tensor parallel") == ("8", "one rank for each GPU of a node, where the links are fastest")
    assert choice(plan, "pipeline parallel") == ("2", "what tensor 8 leaves of 16 ranks")
    assert choice(plan_of(CPU), "tensor parallel") == ("1", "the CPU engine runs one rank on a node")
    assert choice(plan_of(f"{THREE}parallelism: {{data: 2}}\n"), "tensor parallel") == (
        "4",
        "what divides both the 8 GPUs of a node and the 12 ranks that data 2 leaves",
    )
    said = plan_of(f"{TWO}parallelism: {{tensor: 8}}\n")
    assert choice(said, "tensor parallel") == ("8", "the spec says so")


def test_one_node_alone_needs_nothing_of_ours() -> None:
    plan = plan_of(ONE)
    assert (plan.image.kind, plan.image.reference) == ("upstream", "vllm/vllm-openai:v0.32.0")
    assert not plan.groups[0].supervised


def test_a_key_in_a_file_needs_our_layer() -> None:
    plan = plan_of(f"{ONE}api: {{key_file: key}}\n", {"key": "x"})
    assert choice(plan, "image") == ("vllm/vllm-openai:v0.32.0 and our layer", "upstream takes no key from a file")


@pytest.mark.parametrize(
    ("device", "upstream", "tag"),
    [
        ("cuda", "vllm/vllm-openai:v0.31.1", "0.31.1-0.1.0"),
        ("rocm", "vllm/vllm-openai-rocm:v0.31.1", "0.31.1-0.1.0-rocm"),
        ("cpu", "vllm/vllm-openai-cpu:v0.31.1", "0.31.1-0.1.0-cpu"),
    ],
)
def test_the_image_follows_device_and_version(device: str, upstream: str, tag: str) -> None:
    text = TWO.replace(", gpus: 8", "") if device == "cpu" else TWO
    image = plan_of(f"{text}engine: {{device: {device}, version: 0.31.1}}\n").image
    assert (image.kind, image.engine_image, image.reference) == ("build", upstream, f"gen-stack/vllm:{tag}")


def test_a_reference_is_used_as_it_is() -> None:
    image = plan_of(f"{TWO}engine: {{image: 'repo.example:5000/x@sha256:00'}}\n").image
    assert (image.kind, image.reference, image.engine_image) == ("reference", "repo.example:5000/x@sha256:00", None)


def test_the_command_is_the_one_that_users_of_vllm_know() -> None:
    text = TWO.replace("/models/m", "{id: org/m, revision: v1, served_name: [m, n]}") + (
        "engine: {args: {max_model_len: 32768, seed: -1, enable-prefix-caching: true, enforce-eager: false,"
        " cudagraph-capture-sizes: [1, 2], hf-overrides: {a_b: [1, 2.50]}, tokenizer: '',"
        " compilation_config.backend: z, gpu-memory-utilization: 0.90}}\n"
        "parallelism: {tensor: 2, pipeline: 2, data: 4, expert: true}\n"
    )
    assert plan_of(text).command == (
        "org/m",
        "--revision=v1",
        *("--served-model-name", "m", "n"),
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=2",
        "--data-parallel-size=4",
        "--enable-expert-parallel",
        "--max-model-len=32768",
        "--seed=-1",
        "--enable-prefix-caching",
        "--no-enforce-eager",
        *("--cudagraph-capture-sizes", "1", "2"),
        '--hf-overrides={"a_b":[1,2.5]}',
        "--tokenizer=",
        "--compilation-config.backend=z",
        "--gpu-memory-utilization=0.90",
    )


def test_sizes_of_one_are_not_said() -> None:
    assert plan_of(ONE.replace("gpus: 8", "gpus: 1")).command == ("/models/m", "--shutdown-timeout=60")


def test_a_node_alone_drains_by_its_command_and_a_group_by_its_entrypoint() -> None:
    assert "--shutdown-timeout=600" in plan_of(f"{ONE}recovery: {{drain: 10m}}\n").command
    assert not any("shutdown" in item for item in plan_of(f"{TWO}recovery: {{drain: 10m}}\n").command)


def test_upstreams_image_by_reference_is_upstreams_image() -> None:
    image = plan_of(f"{ONE}engine: {{image: 'docker.io/vllm/vllm-openai:v0.32.0@sha256:{'0' * 64}'}}\n").image
    assert image.kind == "upstream"
    assert plan_of(f"{ONE}engine: {{image: 'registry.lab:5000/vllm:1'}}\n").image.kind == "reference"


def test_a_gateway_is_carried_whole() -> None:
    gateway = plan_of(f"{TWO}gateway: {{nodes: [a], max_body: 1MiB, sticky_header: X-Session}}\n").gateway
    assert gateway is not None
    assert (gateway.nodes, gateway.port, gateway.max_body_bytes, gateway.sticky_header) == (
        ("a",),
        8080,
        2**20,
        "X-Session",
    )


def test_https_of_the_engine_is_https_of_the_endpoint() -> None:
    plan = plan_of(f"{ONE}engine: {{args: {{ssl_certfile: /c, ssl_keyfile: /k}}}}\n")
    assert endpoint(plan, plan.groups[0]) == "https://10.0.0.11:8000"


def test_projects_have_no_dots() -> None:
    assert [node.project for node in plan_of(TWO.replace("name: t", "name: qwen3.6-35b")).nodes] == [
        "qwen3-6-35b-a",
        "qwen3-6-35b-b",
    ]


def test_groups_have_ranks_heads_and_names_of_their_own() -> None:
    plan = plan_of(f"{FOUR}groups: [[d, a], [c, b]]\n")
    assert [(group.name, [(node.name, node.rank, node.is_head) for node in group.nodes]) for group in plan.groups] == [
        ("t-0", [("d", 0, True), ("a", 1, False)]),
        ("t-1", [("c", 0, True), ("b", 1, False)]),
    ]
    assert [group.head.address for group in plan.groups] == ["10.0.0.14", "10.0.0.13"]


def test_a_group_of_one_among_several_is_supervised() -> None:
    assert [group.supervised for group in plan_of(f"{TWO}replicas: 2\n").groups] == [True, True]


def test_secrets_go_where_they_are_needed() -> None:
    text = HUB.replace("org/model", "{id: org/model, token_file: h}") + "api: {key_file: k}\n"
    files = {"h": "1", "k": "2"}
    assert [node.secrets for node in plan_of(text, files).nodes] == [
        ("group_token", "api_key", "hub_token"),
        ("group_token", "hub_token"),
    ]
    offline = text.replace("token_file: h", "token_file: h, offline: true")
    assert [node.secrets for node in plan_of(offline, files).nodes] == [("group_token", "api_key"), ("group_token",)]


def test_each_head_has_the_key() -> None:
    nodes = plan_of(f"{FOUR}replicas: 2\napi: {{key_file: k}}\n", {"k": "x"}).nodes
    assert [node.name for node in nodes if "api_key" in node.secrets] == ["a", "c"]


def mounts(text: str) -> list[list[tuple[str, str, str, bool]]]:
    return [[(one.kind, one.source, one.target, one.read_only) for one in node.mounts] for node in plan_of(text).nodes]


def test_a_local_model_is_mounted_where_the_command_says_it_is() -> None:
    text = TWO.replace("12, gpus: 8", "12, gpus: 8, model: /mnt/other disk/m")
    first, second = mounts(text)
    assert first[0] == ("bind", "/models/m", "/models/m", True)
    assert second[0] == ("bind", "/mnt/other disk/m", "/models/m", True)


def test_weights_of_the_hub_are_kept_in_a_volume_or_in_a_folder_of_the_host() -> None:
    assert mounts(HUB)[0][0] == ("volume", "weights", "/root/.cache/huggingface", False)
    text = HUB.replace("org/model", "{id: org/model, cache: /srv/hf}").replace("12, gpus: 8", "12, gpus: 8, cache: /hf")
    assert [node[0][1] for node in mounts(text)] == ["/srv/hf", "/hf"]


def test_an_ordinary_user_has_folders_instead_of_volumes() -> None:
    text = f'{HUB.replace("org/model", "{id: org/model, cache: /srv/hf}")}engine: {{user: "1000:1000"}}\n'
    assert mounts(text)[0] == [
        ("bind", "/srv/hf", "/tmp/.cache/huggingface", False),
        ("bind", "./cache", "/tmp/.cache", False),
        ("bind", "./state", "/var/lib/gen-stack", False),
    ]


def test_the_grace_is_above_the_drain() -> None:
    assert plan_of(f"{TWO}recovery: {{drain: 90.5s}}\n").stop_grace_s == 121


def test_rdma_is_off_on_the_cpu_engine() -> None:
    assert (plan_of(CPU).rdma, plan_of(TWO).rdma) == ("off", "auto")


@pytest.mark.parametrize(("name", "shown"), [("a\nb.yaml", r"'a\nb.yaml'"), ("my stack.yaml", "my stack.yaml")])
def test_the_specs_name_stays_on_its_line(name: str, shown: str) -> None:
    loaded = load(ONE)
    document = dataclasses.replace(loaded.document, file=f"folder/{name}")
    assert make_plan(dataclasses.replace(loaded, document=document)).spec_file == shown
