from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gen_stack.output import exports
from gen_stack.planner import make_plan
from gen_stack.problems import InputError
from gen_stack.targets import TARGETS, check_exportable, target_of
from tests.generator.helpers import FOUR, HUB, ONE, TWO, load
from tests.generator.regenerate import expected_exports, present_exports

if TYPE_CHECKING:
    from pathlib import Path

IMAGE = "engine: {image: registry.example/vllm:1}\n"


def refusal(text: str) -> str:
    loaded = load(text)
    with pytest.raises(InputError) as caught:
        check_exportable(loaded, make_plan(loaded))
    return str(caught.value).replace(f"{loaded.folder}/", "")


def test_golden_files() -> None:
    """`python -m tests.generator.regenerate` writes them again; read what it changed before it is committed."""
    assert expected_exports() == present_exports()


@pytest.mark.parametrize("target", TARGETS)
def test_no_target_writes_a_secret_outside_its_file(target: str, tmp_path: Path) -> None:
    text = HUB.replace("org/model", "{id: org/model, token_file: h}") + "api: {key_file: k}\n" + IMAGE
    loaded = load(text, {"h": "hf-very-secret", "k": "sk-very-secret"})
    files = exports(loaded, make_plan(loaded), TARGETS[target], tmp_path)
    token = files["t/secrets/group_token"].text.strip()
    assert {path for path, file in files.items() if file.secret} == {
        f"t/secrets/{name}" for name in ("group_token", "api_key", "hub_token")
    }
    for path, file in files.items():
        if not file.secret:
            assert not [word for word in ("hf-very-secret", "sk-very-secret", token) if word in file.text], path


@pytest.mark.parametrize("target", TARGETS)
def test_every_group_has_a_folder_and_a_token_of_its_own(target: str, tmp_path: Path) -> None:
    loaded = load(f"{FOUR}replicas: 2\n{IMAGE}")
    files = exports(loaded, make_plan(loaded), TARGETS[target], tmp_path)
    assert {path.split("/")[0] for path in files} == {"t-0", "t-1"}
    assert files["t-0/secrets/group_token"] != files["t-1/secrets/group_token"]


def test_a_token_is_made_once(tmp_path: Path) -> None:
    (tmp_path / "t/secrets").mkdir(parents=True)
    (tmp_path / "t/secrets/group_token").write_text("first\n")
    loaded = load(TWO + IMAGE)
    files = exports(loaded, make_plan(loaded), TARGETS["torchrun"], tmp_path)
    assert files["t/secrets/group_token"].text == "first\n"


def test_nodes_that_differ_are_no_launchers_business() -> None:
    spec = TWO.replace("gpus: 8}\n  - {name: b", "gpus: 8}\n  - {env: {A: b}, interface: ens1, name: b")
    assert refusal(spec) == (
        "spec.yaml:5: nodes[1].env: {'A': 'b'} differs from {} of a, and a launcher starts the same on every node of "
        "a group; make them equal\n"
        "spec.yaml:5: nodes[1].interface: 'ens1' differs from null of a, and a launcher starts the same on every node "
        "of a group; make them equal"
    )


def test_a_node_alone_needs_no_launcher() -> None:
    assert refusal(ONE) == (
        "spec.yaml:3: nodes: a single node is no group and needs no launcher; run `gen-stack` alone on it"
    )


def test_an_unknown_target_is_answered_with_those_there_are() -> None:
    with pytest.raises(InputError, match="torchrum: no such target; did you mean torchrun"):
        target_of("torchrum")
