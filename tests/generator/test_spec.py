from __future__ import annotations

from typing import Any

import pytest
import yaml

from gen_stack.spec import Spec, seconds, size_bytes
from tests.generator.helpers import HUB, ONE, TWO, error, errors, load

EVERYTHING = """\
version: 1
name: qwen-72b
model:
  id: Qwen/Qwen2.5-72B-Instruct
  revision: main
  served_name: [qwen-72b]
  config: ./config.json
  cache: /srv/huggingface
  offline: false
  token_file: ./hf_token
nodes:
  - name: gpu-a
    address: 10.0.0.11
    gpus: 8
    gpu: {memory: 80GiB}
    interface: ens1f0
    cache: /data/hf
    env: {NCCL_IB_HCA: mlx5_0}
    ssh: ops@gpu-a
  - {name: gpu-b, address: 10.0.0.12, gpus: 8}
gpu: {type: H100-80GB, memory: 80GiB}
parallelism: {tensor: 8, pipeline: 2, data: 1, expert: false}
engine:
  device: cuda
  version: 0.32.0
  image: build
  user: null
  args: {max-model-len: 32768, enable-prefix-caching: true}
  env: {NCCL_DEBUG: WARN}
api: {port: 8000, bind: null, key_file: ./api_key}
network: {rdma: auto, control_port: 29600, master_port: 29500, token_file: ./token}
recovery: {node_timeout: 10s, stall_timeout: 300s, max_restarts: 5, drain: 60s}
replicas: 1
groups: null
gateway:
  nodes: [gpu-a]
  port: 8080
  metrics_port: 8404
  bind: 0.0.0.0
  keys_file: ./keys
  tls: {cert_file: ./cert.pem, key_file: ./key.pem}
  max_body: 2MiB
  sticky_header: null
"""
FILES = dict.fromkeys(("hf_token", "api_key", "token", "keys", "cert.pem", "key.pem"), "text\n")
FILES["config.json"] = "{}"
FILES["cert.pem"] = "-----BEGIN CERTIFICATE-----"
FILES["key.pem"] = "-----BEGIN PRIVATE KEY-----"


def test_every_key_of_the_design_is_taken() -> None:
    spec = load(EVERYTHING, FILES).spec
    assert spec.nodes[0].interface == "ens1f0"
    assert spec.gateway is not None
    written = yaml.safe_load(EVERYTHING)
    assert spec.model_dump(exclude_unset=True) == written


def test_the_smallest_spec_is_complete() -> None:
    spec = load(ONE).spec
    assert (spec.version, spec.api.port, spec.network.control_port, spec.network.master_port) == (1, 8000, 29600, 29500)
    assert (spec.engine.device, spec.engine.image, spec.engine.user) == ("cuda", "build", None)
    assert spec.network.rdma == "auto"
    assert (spec.recovery.node_timeout, spec.recovery.max_restarts, spec.replicas) == ("10s", 5, 1)


def test_a_model_may_be_a_text_or_a_mapping() -> None:
    assert load(ONE).spec.model == load(ONE.replace("/models/m", "{id: /models/m}")).spec.model


def test_one_served_name_may_stand_without_a_list() -> None:
    assert load(ONE.replace("/models/m", "{id: /models/m, served_name: x}")).spec.model.served_name == ["x"]


@pytest.mark.parametrize("section", ["gpu", "parallelism", "engine", "api", "network", "recovery", "gateway"])
def test_a_section_of_which_nothing_is_left_means_its_defaults(section: str) -> None:
    assert load(f"{ONE}{section}:\n  # all of it is commented out\n").spec == load(ONE).spec


def test_arguments_and_variables_may_be_empty_too() -> None:
    assert load(f"{ONE}engine:\n  args:\n  env:\n").spec == load(ONE).spec
    assert load(ONE.replace("gpus: 8", "gpus: 8, env: ")).spec == load(ONE).spec


def test_device_ids_may_be_numbers_or_texts() -> None:
    assert load(ONE.replace("gpus: 8", "gpus: [0, '1']")).spec.nodes[0].gpus == ["0", "1"]
    assert load(ONE.replace("gpus: 8", "gpus: [GPU-1a-2b, MIG-3c]")).spec.nodes[0].gpus == ["GPU-1a-2b", "MIG-3c"]


@pytest.mark.parametrize(
    ("written", "address"),
    [("10.0.0.11", "10.0.0.11"), ("'FD00:0:0::0011'", "fd00::11"), ("'::1'", "::1"), ("169.254.1.2", "169.254.1.2")],
)
def test_an_address_has_one_spelling(written: str, address: str) -> None:
    assert load(ONE.replace("10.0.0.11", written)).spec.nodes[0].address == address


def test_variables_keep_the_text_that_was_written() -> None:
    text = f"{ONE}engine: {{env: {{A: 1, B: 1.10, C: 1e5, D: on, E: '', F: 0x10}}}}\n"
    assert load(text).spec.engine.env == {"A": "1", "B": "1.10", "C": "1e5", "D": "on", "E": "", "F": "16"}


@pytest.mark.parametrize(("text", "count"), [("80GiB", 80 * 2**30), ("1.5 TB", 15 * 10**11), ("512MiB", 2**29)])
def test_sizes(text: str, count: int) -> None:
    assert size_bytes(text) == count


@pytest.mark.parametrize(("text", "count"), [("10s", 10.0), ("1.5m", 90.0), ("2h", 7200.0), ("500ms", 0.5)])
def test_durations(text: str, count: float) -> None:
    assert seconds(text) == count


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("name: t\n", "", "spec.yaml:1: name: this key is required; add it"),
        ("name: t\n", "name:\n", "spec.yaml:1: name: there is no value here; write a text"),
        (
            "name: t\n",
            "name: 7\n",
            "spec.yaml:1: name: 7 is not allowed; it must be a text; put it into quotation marks",
        ),
        (
            "name: t\n",
            "name: Qwen\n",
            "spec.yaml:1: name: 'Qwen' is not allowed here; "
            "use small letters, digits, '.', '_' and '-', a letter or digit first",
        ),
        ("name: t\n", f"name: {'x' * 64}\n", "it must be a text of at most 63 characters"),
        (
            "/models/m",
            "7",
            "spec.yaml:2: model: 7 is not allowed; write a hub id, an absolute path, or a mapping with `id`",
        ),
        (
            "/models/m",
            "",
            "spec.yaml:2: model: there is no value here; write a hub id, an absolute path, or a mapping with `id`",
        ),
        ("/models/m", "{revision: main}", "spec.yaml:2: model.id: this key is required; add it"),
        (
            "/models/m",
            "./m",
            "spec.yaml:2: model: './m' is no model; "
            "a path is the same on every node, so write the whole of it, such as /srv/models/m",
        ),
        ("/models/m", "https://hub/org/m", "is no model; write the hub's name for it alone"),
        ("/models/m", "/models/../m", "has '..' or ':' in it, which a mount cannot take; write the plain path"),
        ("/models/m", "'/models:m'", "has '..' or ':' in it"),
        ("/models/m", '"/models/a\\nb"', "has a line break or a control character in it; write one line of plain text"),
        ("/models/m", "{id: /m, served_name: ['']}", "it must be a text that is not empty"),
        ("name: a,", "name: GPU-A,", "nodes[0].name: 'GPU-A' is not allowed here; use small letters, digits and '-'"),
        ("name: a,", "name: gpu.a,", "nodes[0].name: 'gpu.a' is not allowed here"),
        ("name: a,", "name: größe,", "nodes[0].name: 'größe' is not allowed here"),
        (
            "10.0.0.11",
            "gpu-a.lab",
            "spec.yaml:4: nodes[0].address: 'gpu-a.lab' is no numeric address; "
            "write the numeric IPv4 or IPv6 address that the other nodes reach, such as 10.0.0.11",
        ),
        ("10.0.0.11", "<HEAD_IP>", "nodes[0].address: '<HEAD_IP>' is no numeric address"),
        ("10.0.0.11", "10.0.0.11/24", "'10.0.0.11/24' is no numeric address"),
        ("10.0.0.11", "010.0.0.11", "'010.0.0.11' is no numeric address"),
        ("10.0.0.11", "10.1", "10.1 is not allowed; it must be a text"),
        ("10.0.0.11", "0.0.0.0", "'0.0.0.0' is not the address of one host; write the one that the other nodes reach"),
        ("10.0.0.11", "224.0.0.1", "'224.0.0.1' is not the address of one host"),
        ("10.0.0.11", "255.255.255.255", "'255.255.255.255' is not the address of one host"),
        ("10.0.0.11", "'fe80::1'", "'fe80::1' is a link-local address, which needs a zone; write a global or fd00::/8"),
        ("10.0.0.11", "'::ffff:10.0.0.11'", "is an IPv4 address in IPv6 form; write 10.0.0.11"),
        (
            "gpus: 8",
            "gpus: all",
            "nodes[0].gpus: 'all' is neither a count, such as 8, nor a list of device ids such as ['0', '1']",
        ),
        ("gpus: 8", "gpus: true", "nodes[0].gpus: true is neither"),
        ("gpus: 8", "gpus: 8.0", "nodes[0].gpus: 8.0 is neither"),
        ("gpus: 8", "gpus: -1", "-1 is no count of GPUs; write a number from 0 to 1024"),
        ("gpus: 8", "gpus: 1025", "1025 is no count of GPUs"),
        ("gpus: 8", "gpus: []", "[] must name each device once, and at least one; or write a count such as 8"),
        ("gpus: 8", "gpus: [0, '0']", "['0', '0'] must name each device once"),
        ("gpus: 8", "gpus: [gpu0]", "'gpu0' is no device id; write an index such as '0', or a GPU-… or MIG-… id"),
        ("gpus: 8", "gpus: [true]", "true is no device id"),
        ("gpus: 8", "gpus: 8, interface: 'eth0,eth1'", "write the name of one interface, such as ens1f0"),
        ("gpus: 8", 'gpus: 8, interface: "e\\0"', "write the name of one interface, such as ens1f0"),
        (
            "gpus: 8",
            "gpus: 8, cache: hf",
            "'hf' is not absolute; write the whole path on the node, such as /srv/models/m",
        ),
        ("gpus: 8", "gpus: 8, env: [A]", "nodes[0].env: ['A'] is no mapping; write variables as NAME: value"),
        (
            "gpus: 8",
            "gpus: 8, env: {A: true}",
            "nodes[0].env.A: true is not allowed; it must be a text; put it into quotation",
        ),
        ("gpus: 8", "gpus: 8, env: {A: }", "nodes[0].env.A: there is no value here; write a text"),
    ],
)
def test_a_wrong_field_is_named_with_the_rule_and_the_fix(old: str, new: str, expected: str) -> None:
    assert expected in error(ONE.replace(old, new, 1))


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("version: 2", "spec.yaml:6: version: 2 is not allowed here; write 1"),
        ("version: true", "spec.yaml:6: version: true is no version; write 1"),
        ("version: '1'", "spec.yaml:6: version: '1' is not allowed here; write 1"),
        ("tensor: 8", "spec.yaml:6: tensor: unknown key 'tensor'; the keys here are version, name, model, nodes,"),
        ("Replicas: 2", "spec.yaml:6: Replicas: unknown key 'Replicas'; did you mean replicas?"),
        ("ENGINE: {}", "spec.yaml:6: ENGINE: unknown key 'ENGINE'; did you mean engine?"),
        ("'': 1", "spec.yaml:6: ['']: unknown key ''"),
        ('"a\\nb": 1', "spec.yaml:6: ['a\\nb']: unknown key 'a\\nb'"),
        ("'two words': 1", "spec.yaml:6: ['two words']: unknown key 'two words'"),
        ("api: 8000", "spec.yaml:6: api: 8000 is not allowed; it must be a mapping; write 'key: value' below it"),
        ("api: {port: '8000'}", "api.port: '8000' is not allowed; it must be a whole number, without quotation marks"),
        ("api: {port: true}", "api.port: true is not allowed; it must be a whole number"),
        ("api: {port: 8000.0}", "api.port: 8000.0 is not allowed; it must be a whole number"),
        ("api: {port: }", "api.port: there is no value here; write a whole number, without quotation marks"),
        ("api: {port: 0}", "api.port: 0 is not allowed; it must be 1 or more"),
        ("api: {port: 70000}", "api.port: 70000 is not allowed; it must be 65535 or less"),
        (
            "api: {bind: localhost}",
            "'localhost' is no numeric address; write a numeric address of the head, 0.0.0.0 to",
        ),
        ("api: {bind: 224.0.0.1}", "'224.0.0.1' is not the address of one host"),
        ("api: {bind: '::ffff:127.0.0.1'}", "is an IPv4 address in IPv6 form; write 127.0.0.1"),
        ("engine: {device: gpu}", "engine.device: 'gpu' is not allowed here; write 'cuda', 'rocm' or 'cpu'"),
        (
            "engine: {version: latest}",
            "engine.version: 'latest' is not allowed here; write vLLM's version, such as 0.32",
        ),
        ("engine: {image: 'a b'}", "engine.image: 'a b' is not allowed here; write `build`, or a reference such as"),
        (
            "engine: {user: root}",
            "engine.user: 'root' is not allowed here; write a numeric user and group, such as 1000:",
        ),
        ("engine: {user: 1000}", "engine.user: 1000 is not allowed; it must be a text; put it into quotation marks"),
        ("engine: {args: [a]}", "engine.args: ['a'] is not allowed; it must be a mapping; write 'key: value' below it"),
        ("gpu: {memory: 80}", "gpu.memory: 80 has no unit; write it with one, such as 80GiB"),
        ("gpu: {memory: 80G}", "gpu.memory: '80G' is no size; write a number and a unit, such as 80GiB"),
        ("gpu: {memory: 0GiB}", "gpu.memory: '0GiB' is no size"),
        ("parallelism: {tensor: 0}", "parallelism.tensor: 0 is not allowed; it must be 1 or more"),
        (
            "parallelism: {expert: yes}",
            "parallelism.expert: 'yes' is not allowed; it must be true or false, without quot",
        ),
        ("network: {rdma: on}", "network.rdma: 'on' is not allowed here; write 'auto', 'required' or 'off'"),
        ("recovery: {drain: 60}", "recovery.drain: 60 has no unit; write it with one, such as 60s"),
        (
            "recovery: {drain: -1s}",
            "recovery.drain: '-1s' is no duration; write a number and a unit, such as 10s, 5m or",
        ),
        ("recovery: {node_timeout: 0s}", "recovery.node_timeout: '0s' is too short; write 1s or more"),
        ("recovery: {max_restarts: -1}", "recovery.max_restarts: -1 is not allowed; it must be 0 or more"),
        ("replicas: 0", "replicas: 0 is not allowed; it must be 1 or more"),
        ("groups: [a]", "groups[0]: 'a' is not allowed; it must be a list; write one '- item' a line, or [a, b]"),
        ("gateway: {nodes: []}", "gateway.nodes: [] is not allowed; it must be a list with at least one item"),
        ("gateway: {nodes: [a], max_body: big}", "gateway.max_body: 'big' is no size"),
        ("gateway: {nodes: [a], sticky_header: 'X Y'}", "write the name of a header, such as X-Session"),
    ],
)
def test_a_wrong_section_is_named_with_the_rule_and_the_fix(tail: str, expected: str) -> None:
    assert expected in error(f"{TWO}{tail}\n")


def test_a_stack_has_1_to_1024_nodes() -> None:
    many = "name: t\nmodel: /m\nnodes:\n" + "".join(
        f"  - {{name: n{i}, address: 10.0.{i // 250}.{i % 250 + 1}, gpus: 1}}\n" for i in range(1025)
    )
    assert error(many).endswith("it must be a list of at most 1024 items")
    none = error("name: t\nmodel: /m\nnodes: []\n")
    assert none == "spec.yaml:3: nodes: [] is not allowed; it must be a list with at least one item"


def test_a_long_value_is_shown_in_part() -> None:
    line = error(ONE.replace("name: t", f"name: {'x y' * 10_000}"))
    assert len(line) < 200


def test_an_error_of_the_short_form_of_a_model_has_the_key_that_was_written() -> None:
    assert error(HUB.replace("org/model", "org model")).startswith("spec.yaml:2: model: 'org model' is no model")
    assert errors(HUB.replace("org/model", "{id: org model}"))[0].startswith("spec.yaml:2: model.id: 'org model'")


def test_frozen() -> None:
    spec: Any = Spec.model_validate(yaml.safe_load(ONE))
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"
