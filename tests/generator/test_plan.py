from __future__ import annotations

import pytest

from gen_stack.plan import digest, endpoint
from tests.generator.helpers import FOUR, TWO, plan_of

BASE = f"{TWO}engine: {{args: {{seed: 1}}, env: {{A: x}}}}\n"


def digest_of(text: str) -> str:
    plan = plan_of(text, {"key": "sk-1"})
    return digest(plan, plan.groups[0])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/models/m", "/models/n"),
        ("/models/m", "{id: /models/m, served_name: n}"),
        ("10.0.0.11", "10.0.0.21"),
        ("name: b", "name: c"),
        ("name: t", "name: u"),
        ("seed: 1", "seed: 2"),
        ("A: x", "A: y"),
        ("engine: {", "engine: {version: 0.31.0, "),
        ("engine: {", "engine: {device: rocm, "),
        ("engine: {", "engine: {image: other/image, "),
        ("engine: {", "network: {rdma: required}\nengine: {"),
        ("engine: {", "network: {master_port: 29501}\nengine: {"),
        ("engine: {", "network: {control_port: 29601}\nengine: {"),
        ("engine: {", "api: {port: 8001}\nengine: {"),
        ("engine: {", "recovery: {node_timeout: 11s}\nengine: {"),
        ("engine: {", "parallelism: {tensor: 16}\nengine: {"),
        ("gpus: 8}\n  - {name: b, address: 10.0.0.12, gpus: 8", "gpus: 4}\n  - {name: b, address: 10.0.0.12, gpus: 4"),
        (
            "- {name: a, address: 10.0.0.11, gpus: 8}\n  - {name: b, address: 10.0.0.12, gpus: 8}",
            "- {name: b, address: 10.0.0.12, gpus: 8}\n  - {name: a, address: 10.0.0.11, gpus: 8}",
        ),
    ],
)
def test_the_digest_changes_with_what_all_nodes_must_agree_on(old: str, new: str) -> None:
    assert old in BASE
    assert digest_of(BASE.replace(old, new)) != digest_of(BASE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("12, gpus: 8", "12, gpus: 8, env: {NCCL_IB_HCA: mlx5_1}"),
        ("12, gpus: 8", "12, gpus: 8, model: /other/m"),
        ("12, gpus: 8", "12, gpus: 8, interface: ens1f0"),
        ("12, gpus: 8", "12, gpus: 8, ssh: ops@b"),
        ("12, gpus: 8", "12, gpus: ['0', '1', '2', '3', '4', '5', '6', '7']"),
        ("engine: {", "api: {key_file: key}\nengine: {"),
        ("engine: {", "# a comment\nengine: {"),
    ],
)
def test_the_digest_does_not_change_with_what_concerns_one_host_alone(old: str, new: str) -> None:
    assert digest_of(BASE.replace(old, new)) == digest_of(BASE)


def test_the_digest_is_sixteen_hexadecimal_digits() -> None:
    assert len(digest_of(BASE)) == 16
    assert int(digest_of(BASE), 16) >= 0


def test_two_groups_have_two_digests() -> None:
    plan = plan_of(f"{FOUR}replicas: 2\n")
    assert len({digest(plan, group) for group in plan.groups}) == 2


@pytest.mark.parametrize(
    ("address", "api", "url"),
    [
        ("10.0.0.11", "{}", "http://10.0.0.11:8000"),
        ("10.0.0.11", "{bind: 0.0.0.0, port: 80}", "http://10.0.0.11:80"),
        ("10.0.0.11", "{bind: 127.0.0.1}", "http://127.0.0.1:8000"),
        ("'fd00::1'", "{}", "http://[fd00::1]:8000"),
        ("'fd00::1'", "{bind: '::'}", "http://[fd00::1]:8000"),
    ],
)
def test_the_endpoint_is_where_its_users_reach_it(address: str, api: str, url: str) -> None:
    text = TWO.replace("10.0.0.11", address)
    if "fd00" in address:
        text = text.replace("10.0.0.12", "'fd00::2'")
    plan = plan_of(f"{text}api: {api}\n")
    assert endpoint(plan, plan.groups[0]) == url
