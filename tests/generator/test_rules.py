# ruff: noqa: E501 - one case is one line
from __future__ import annotations

import pytest

from gen_stack.rules import groups_of
from tests.generator.helpers import FOUR, HUB, ONE, TWO, error, errors, load


def test_a_good_spec_has_no_problem() -> None:
    assert [errors(text) for text in (ONE, TWO, FOUR, HUB)] == [[], [], [], []]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "name: b",
            "name: a",
            "spec.yaml:5: nodes[1].name: 'a' is already the name of nodes[0]; give every node its own name",
        ),
        (
            "name: b",
            "name: secrets",
            "spec.yaml:5: nodes[1].name: 'secrets': the folder of the group's tokens has that name; choose another name",
        ),
        (
            "10.0.0.12",
            "10.0.0.11",
            "spec.yaml:5: nodes[1].address: '10.0.0.11' is already the address of a; every node needs its own",
        ),
        (
            "10.0.0.12",
            "127.0.0.1",
            "spec.yaml:5: nodes[1].address: '127.0.0.1' is a loopback address, which the other nodes cannot reach; write one they reach",
        ),
        (
            "10.0.0.12",
            "'fd00::1'",
            "spec.yaml:5: nodes[1].address: 'fd00::1' is IPv6, but a has IPv4; use one family for all nodes",
        ),
        (
            ", gpus: 8}\n  - {name: b",
            "}\n  - {name: b",
            "spec.yaml:4: nodes[0].gpus: a gives no GPU; write how many it has, such as 8, or set engine.device to cpu",
        ),
        (
            "12, gpus: 8",
            "12, gpus: 4",
            "spec.yaml:3: nodes: the engine needs the same number of GPUs on every node of a group, and here are a 8 and b 4; leave GPUs of the larger ones out by naming device ids or a smaller count",
        ),
        ("12, gpus: 8", "12, gpus: [0, 1]", "here are a 8 and b 2; leave GPUs of the larger ones out"),
        (
            "/models/m",
            "{id: /models/m, revision: main}",
            "spec.yaml:2: model.revision: 'main' says how to fetch from the hub, but the model is the local path /models/m; take this out",
        ),
        ("/models/m", "{id: /models/m, cache: /hf}", "model.cache: '/hf' says how to fetch from the hub"),
        (
            "/models/m",
            "{id: /models/m, served_name: [a, --port]}",
            "spec.yaml:2: model.served_name[1]: '--port' in a list would be read as a flag of its own; take the dash away",
        ),
    ],
)
def test_nodes_and_model_that_do_not_go_together(old: str, new: str, expected: str) -> None:
    assert expected in error(TWO.replace(old, new, 1))


@pytest.mark.parametrize("name", ["image", "con", "nul", "0", "a-", "x" * 63])
def test_node_names_that_only_look_odd_are_fine(name: str) -> None:
    assert errors(TWO.replace("name: b", f"name: '{name}'")) == []


LOOPBACK = TWO.replace("10.0.0.11", "127.0.0.1").replace("10.0.0.12", "127.0.0.2")


def test_all_nodes_may_be_on_loopback_when_each_names_its_own_gpus() -> None:
    first, second = LOOPBACK.replace("gpus: 8", "gpus: [0, 1]", 1), "gpus: [2, 3]"
    assert errors(first.replace("gpus: 8", second)) == []
    assert "'1' is given to a already" in errors(first.replace("gpus: 8", "gpus: [1, 2]"))[0]
    assert "a count would give each the first ones; name device ids" in errors(LOOPBACK)[0]


def test_two_groups_cannot_share_a_loopback() -> None:
    text = f"{LOOPBACK.replace('gpus: 8', 'gpus: 0')}engine: {{device: cpu}}\nreplicas: 2\n"
    assert "replicas: all nodes are on one host" in errors(text)[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{TWO}engine: {{image: 'vllm/vllm-openai:v0.32.0'}}\n", "a group needs our entrypoint; write build"),
        (f"{TWO}parallelism: {{data: 2}}\napi: {{port: 29550}}\n", "api.port: 29550 is the port where data parallel"),
        (f"{ONE}network: {{rdma: required}}\n", "network.rdma: 'required' with one node"),
        (f"{TWO}engine: {{device: rocm, user: '1000:1000'}}\n", "'1000:1000' cannot open /dev/kfd"),
        (f"{TWO.replace('gpus: 8', 'gpus: [GPU-a]')}engine: {{device: rocm}}\n", "'GPU-a' is not an index"),
    ],
)
def test_what_would_fail_late_is_refused(text: str, expected: str) -> None:
    assert any(expected in line for line in errors(text)), errors(text)


def test_two_spellings_of_one_address_are_one() -> None:
    text = TWO.replace("10.0.0.11", "'fd00::1'").replace("10.0.0.12", "'FD00:0::0001'")
    assert "'fd00::1' is already the address of a" in error(text)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (
            "parallelism: {tensor: 8, pipeline: 4}",
            "spec.yaml:6: parallelism: tensor 8, pipeline 4, data 1 make a world size of 32, but there are 16 GPUs in a and b; choose sizes whose product is 16",
        ),
        ("parallelism: {tensor: 8, pipeline: 1}", "make a world size of 8, but there are 16 GPUs in a and b"),
        (
            "parallelism: {tensor: 3}",
            "spec.yaml:6: parallelism: tensor 3, pipeline open, data 1 do not divide the 16 GPUs in a and b; choose sizes whose product is 16",
        ),
        ("parallelism: {data: 32}", "tensor open, pipeline open, data 32 do not divide the 16 GPUs"),
        (
            "network: {control_port: 8000}",
            "spec.yaml:6: network.control_port: 8000 is also api.port; give the two ports of the head different numbers",
        ),
        (
            "network: {control_port: 29515}",
            "network.control_port: 29515 lies in the 16 ports from network.master_port 29500 on; choose another",
        ),
        (
            "api: {port: 29500}",
            "spec.yaml:6: api.port: 29500 lies in the 16 ports from network.master_port 29500 on; choose another",
        ),
        (
            "network: {master_port: 65530}",
            "network.master_port: 65530 is the first of 16 ports, up to 65545; write at most 65520",
        ),
        (
            "replicas: 3",
            "spec.yaml:6: replicas: 2 nodes cannot be split into 3 equal groups; change one of the two numbers",
        ),
        (
            "api: {bind: 10.0.0.9}\nreplicas: 2",
            "spec.yaml:6: api.bind: '10.0.0.9' is an address of one host, and every group has a head of its own; write 0.0.0.0",
        ),
        ("groups: [[a]]", "spec.yaml:6: groups: b is in no group; name every node once"),
        ("groups: []", "spec.yaml:6: groups: a and b are in no group; name every node once"),
        ("groups: [[a, b], []]", "spec.yaml:6: groups[1]: this group is empty; name its nodes, the head first"),
        ("groups: [[a, b], [b]]", "spec.yaml:6: groups[1][0]: 'b' is in a group already; name every node once"),
        ("groups: [[a, b, gpu-c]]", "spec.yaml:6: groups[0][2]: 'gpu-c' is no node of this spec"),
        ("gateway: {nodes: [c]}", "spec.yaml:6: gateway.nodes[0]: 'c' is no node of this spec"),
        (
            "gateway: {nodes: [a], port: 8000}",
            "spec.yaml:6: gateway.port: 8000 is also api.port; give the gateway a port of its own",
        ),
        (
            "gateway: {nodes: [a], port: 8404}",
            "spec.yaml:6: gateway.metrics_port: 8404 is also gateway.port; give the gateway a port of its own",
        ),
        ("gateway: {nodes: [a, a]}", "spec.yaml:6: gateway.nodes[1]: 'a' stands there twice; write it once"),
        (
            "api: {bind: 127.0.0.1}\ngateway: {nodes: [b]}",
            "spec.yaml:6: api.bind: '127.0.0.1' is reached on its own host only, so the gateway cannot reach a",
        ),
        (
            "engine: {device: cpu}",
            "spec.yaml:4: nodes[0].gpus: 8 with engine.device cpu; write 0, or choose the device that the GPUs are",
        ),
    ],
)
def test_sections_that_do_not_go_together(tail: str, expected: str) -> None:
    assert any(expected in line for line in errors(f"{TWO}{tail}\n"))


def test_replicas_and_groups_exclude_each_other() -> None:
    words = "spec.yaml:7: groups: replicas splits the nodes already; keep one of replicas and groups"
    assert error(f"{TWO}replicas: 2\ngroups: [[a], [b]]\n") == words


def test_rdma_cannot_be_required_of_the_cpu_engine() -> None:
    words = "spec.yaml:7: network.rdma: 'required' with engine.device cpu, whose transport is TCP only; write auto"
    assert error(f"{TWO.replace(', gpus: 8', '')}engine: {{device: cpu}}\nnetwork: {{rdma: required}}\n") == words


@pytest.mark.parametrize(
    ("parallelism", "fine"),
    [("{tensor: 1, pipeline: 2}", True), ("{tensor: 2}", True), ("{pipeline: 2}", True), ("{tensor: 3}", False)],
)
def test_the_cpu_engine_has_one_rank_on_a_node(parallelism: str, fine: bool) -> None:
    text = f"{TWO.replace(', gpus: 8', '')}engine: {{device: cpu}}\nparallelism: {parallelism}\n"
    assert errors(text) == (
        []
        if fine
        else [
            "spec.yaml:7: parallelism: tensor 3, pipeline open, data 1 do not divide the 2 nodes in a and b; choose sizes whose product is 2"
        ]
    )


def test_every_group_must_fit_the_parallel_sizes() -> None:
    """Not the first alone: the second would wait for ranks that do not exist."""
    uneven = f"{FOUR}groups: [[a, b, c], [d]]\n"
    assert (
        error(uneven)
        == "spec.yaml:8: groups: every group has the same parallel sizes, but a, b and c make 24 GPUs and d 8; make groups of the same number of GPUs"
    )
    split = f"{FOUR.replace('13, gpus: 8', '13, gpus: 4').replace('14, gpus: 8', '14, gpus: 4')}replicas: 2\n"
    assert (
        error(split)
        == "spec.yaml:3: nodes: every group has the same parallel sizes, but a and b make 16 GPUs and c and d 8; make groups of the same number of GPUs"
    )


def test_groups_may_have_their_gpus_on_different_numbers_of_nodes() -> None:
    text = f"{TWO.replace('12, gpus: 8', '12, gpus: 4')}  - {{name: c, address: 10.0.0.13, gpus: 4}}\ngroups: [[a], [b, c]]\n"
    assert errors(text) == []


def test_replicas_split_the_nodes_in_their_order() -> None:
    assert groups_of(load(f"{FOUR}replicas: 2\n").spec) == [[0, 1], [2, 3]]
    assert groups_of(load(f"{FOUR}groups: [[d, a], [c, b]]\n").spec) == [[3, 0], [2, 1]]


def test_an_ordinary_user_needs_a_folder_for_weights() -> None:
    text = f'{HUB}engine: {{user: "1000:1000"}}\n'
    assert (
        error(text)
        == "spec.yaml:6: engine.user: user 1000:1000 cannot write the default volume for weights, which belongs to root; set model.cache to a host folder that this user owns"
    )
    assert errors(text.replace("org/model", "{id: org/model, cache: /srv/hf}")) == []
    assert errors(text.replace("gpus: 8", "gpus: 8, cache: /srv/hf")) == []


def test_a_node_has_its_own_path_of_a_local_model_only() -> None:
    assert errors(TWO.replace("12, gpus: 8", "12, gpus: 8, model: /other/m")) == []
    assert (
        error(HUB.replace("12, gpus: 8", "12, gpus: 8, model: /other/m"))
        == "spec.yaml:5: nodes[1].model: model.id 'org/model' comes from the hub, so no node has a path of its own; take this out"
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            "{a b: 1}",
            "engine.args['a b']: this is no name for a flag; write it as vLLM's help does, such as max-model-len",
        ),
        ("{größe: 1}", "engine.args.größe: this is no name for a flag"),
        ("{'': 1}", "engine.args['']: a flag needs a name; write it as vLLM's help does, such as max-model-len"),
        ("{--: 1}", "engine.args.--: a flag needs a name"),
        ("{--max-model-len: 1}", "engine.args.--max-model-len: write the flag without dashes in front: max-model-len"),
        ("{q: awq}", "engine.args.q: 'q' is a short form; write quantization"),
        ("{no-async-scheduling: true}", "engine.args.no-async-scheduling: write async-scheduling: false"),
        (
            "{max-model-len: 1, max_model_len: 2}",
            "engine.args.max_model_len: this is the same flag as max-model-len; keep one of the two",
        ),
        ("{max-model-len: }", "null is no value for a flag; write true, false, a number, a text, a list or a mapping"),
        ("{lora-modules: []}", "[] is no value for a flag"),
        (
            "{lora-modules: [a=b, --port=1]}",
            "'--port=1' in a list would be read as a flag of its own; take the dash away",
        ),
        (
            "{lora-modules: [[a]]}",
            "[['a']]: a list may hold texts and numbers only; write anything else as one text of JSON",
        ),
        ("{lora-modules: [true]}", "[True]: a list may hold texts and numbers only"),
        ('{chat-template: "a\\0b"}', "has a zero character in it, which ends a text for the engine; take it out"),
        ('{lora-modules: ["a\\0b"]}', "has a zero character in it"),
        ("{rope-scale: .nan}", ".nan is no number that the engine can use; write a finite one"),
        ("{hf-overrides: {a: [.inf]}}", ".inf is no number that the engine can use"),
    ],
)
def test_engine_arguments_that_cannot_be_right(args: str, expected: str) -> None:
    line = error(f"{ONE}engine: {{args: {args}}}\n")
    assert line.startswith("spec.yaml:5: engine.args")
    assert expected in line


@pytest.mark.parametrize(
    "args",
    [
        "{seed: -1, cudagraph-capture-sizes: [-1, '-3']}",
        "{compilation-config.pass_config: {fuse_norm_quant: true}, compilation-config.mode: 3}",
        '{chat-template: "line\\nline \\U0001F600"}',
        f"{{chat-template: {'x' * 5000}}}",
        "{chat-template: ''}",
    ],
)
def test_engine_arguments_that_only_look_odd(args: str) -> None:
    assert errors(f"{ONE}engine: {{args: {args}}}\n") == []


@pytest.mark.parametrize("where", ["engine: {env: {%s}}\n", "node"])
@pytest.mark.parametrize(
    ("variable", "key", "words"),
    [
        (
            'NCCL_DEBUG: "WARN\\nX"',
            "NCCL_DEBUG",
            "the value of NCCL_DEBUG has a line break in it, which not every launcher carries; write it in one line",
        ),
        ('A: "x\\r"', "A", "the value of A has a line break in it"),
        ('A: "x\\0"', "A", "write it in one line"),
        ("MY-VAR: x", "MY-VAR", "this is no name for a variable; use letters, digits and '_'"),
        ("'A=B': x", "['A=B']", "this is no name for a variable"),
        ("1A: x", "1A", "this is no name for a variable"),
        ("'': x", "['']", "this is no name for a variable"),
    ],
)
def test_variables_that_cannot_be_right(where: str, variable: str, key: str, words: str) -> None:
    text = ONE.replace("gpus: 8", f"gpus: 8, env: {{{variable}}}") if where == "node" else f"{ONE}{where % variable}"
    line = error(text)
    assert f"env{'' if key.startswith('[') else '.'}{key}: " in line
    assert words in line


def test_values_of_variables_may_be_anything_on_one_line() -> None:
    value = "a=b 'c' \\\" d \\\\ ${X:-y} $$ # : \\t \\e é 😀"
    assert errors(f'{ONE}engine: {{env: {{A: "{value}"}}}}\n') == []
