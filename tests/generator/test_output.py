from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from gen_stack.output import OutputFile, outputs
from gen_stack.planner import make_plan
from gen_stack.problems import GenStackError
from tests.generator.helpers import FOUR, HUB, ONE, TWO, load, output_texts

if TYPE_CHECKING:
    from pathlib import Path


def test_the_group_token_is_everywhere_the_key_on_the_head_the_hub_token_where_something_is_fetched(
    tmp_path: Path,
) -> None:
    text = HUB.replace("org/model", "{id: org/model, token_file: h}") + "api: {key_file: k}\n"
    files = output_texts(text, tmp_path, {"h": "hf-1", "k": "sk-1"})
    secrets = {path: content for path, content in files.items() if "secrets/" in path}
    token = secrets["secrets/t.token"]
    assert secrets == {
        "secrets/t.token": token,
        "a/secrets/group_token": token,
        "a/secrets/api_key": "sk-1\n",
        "a/secrets/hub_token": "hf-1\n",
        "b/secrets/group_token": token,
        "b/secrets/hub_token": "hf-1\n",
    }


def test_a_token_has_256_random_bits(tmp_path: Path) -> None:
    tokens = {output_texts(TWO, tmp_path)["secrets/t.token"] for _ in range(3)}
    assert len(tokens) == 3
    assert all(len(bytes.fromhex(token.strip())) == 32 for token in tokens)


def test_a_token_of_the_users_own_is_copied(tmp_path: Path) -> None:
    files = output_texts(f"{TWO}network: {{token_file: g}}\n", tmp_path, {"g": "mine\n"})
    assert files["a/secrets/group_token"] == files["b/secrets/group_token"] == "mine\n"
    assert "secrets/t.token" not in files


def test_each_group_has_its_own_token(tmp_path: Path) -> None:
    files = output_texts(f"{FOUR}replicas: 2\n", tmp_path)
    assert files["secrets/t-0.token"] != files["secrets/t-1.token"]
    assert files["c/secrets/group_token"] == files["secrets/t-1.token"]


def test_one_node_alone_has_no_secret(tmp_path: Path) -> None:
    assert list(output_texts(ONE, tmp_path)) == ["a/compose.yaml"]


@pytest.mark.parametrize("path", ["secrets/t.token", "a/secrets/group_token", "b/secrets/group_token"])
def test_a_token_that_is_there_is_kept_the_copies_too(path: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("kept")
    files = output_texts(TWO, tmp_path)
    assert files["secrets/t.token"] == files["a/secrets/group_token"] == files["b/secrets/group_token"] == "kept\n"


def test_an_empty_token_is_none(tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "t.token").write_text("\n")
    assert len(output_texts(TWO, tmp_path)["secrets/t.token"]) == 65


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"two words", b"a\x00b", b"a\nb"])
def test_what_is_no_token_is_refused_without_showing_it(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "t.token").write_bytes(content)
    with pytest.raises(GenStackError) as caught:
        output_texts(TWO, tmp_path)
    words = "this is no token; it must be one line of letters and digits"
    assert str(caught.value) == f"{tmp_path}/secrets/t.token: {words}"


def test_no_secret_is_in_any_other_file(tmp_path: Path) -> None:
    text = HUB.replace("org/model", "{id: org/model, token_file: h}") + "api: {key_file: k}\nnetwork: {token_file: g}\n"
    loaded = load(text, {"h": "hf-secret", "k": "sk-secret", "g": "gt-secret"})
    for path, file in outputs(loaded, make_plan(loaded), tmp_path).items():
        assert file.secret == ("secrets/" in path)
        assert file.secret or not any(secret in file.text for secret in loaded.secrets.values())


def test_modes() -> None:
    assert OutputFile("x", secret=True).mode == stat.S_IRUSR | stat.S_IWUSR
    assert oct(OutputFile("#!/bin/sh\n").mode) == "0o755"
    assert oct(OutputFile("name: x\n").mode) == "0o644"
