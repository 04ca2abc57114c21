# ruff: noqa: E501 - one case is one line
from __future__ import annotations

from pathlib import Path

import pytest

from gen_stack.load import load_spec
from gen_stack.model_files import MAX_FILE_BYTES
from gen_stack.problems import SpecError
from tests.generator.helpers import HUB, ONE, TWO, error, errors, load, warnings

KEY = f"{ONE}api: {{key_file: ./key}}\n"


def test_all_problems_are_told_at_once_in_the_order_of_their_lines() -> None:
    text = """\
name: Big
model: /models/m
bananas: yes
nodes:
  - {name: a, address: nope, gpus: 8, colour: red}
  - {name: b, address: 10.0.0.12}
api: {port: 70000, key_file: ./nowhere}
engine: {env: {A: true, NCCL_SOCKET_IFNAME: eth0}}
"""
    assert [line.split(": ")[:2] for line in errors(text)] == [
        ["spec.yaml:1", "name"],
        ["spec.yaml:3", "bananas"],
        ["spec.yaml:5", "nodes[0].address"],
        ["spec.yaml:5", "nodes[0].colour"],
        ["spec.yaml:7", "api.key_file"],
        ["spec.yaml:7", "api.port"],
        ["spec.yaml:8", "engine.env.A"],
        ["spec.yaml:8", "engine.env.NCCL_SOCKET_IFNAME"],
    ]


def test_a_typo_does_not_hide_a_rule_between_fields() -> None:
    text = TWO.replace("10.0.0.12", "10.0.0.11").replace("gpus: 8", "gpus: 8, colour: red", 1)
    assert [line.split(": ")[1] for line in errors(f"{text}bananas: 1\n")] == [
        "nodes[0].colour",
        "nodes[1].address",
        "bananas",
    ]


@pytest.mark.parametrize(
    ("old", "new"), [("/models/m", "a b"), ("name: t", "name: T"), ("gpus: 8", "gpus: x"), ("gpus: 8", "gpus: -1")]
)
def test_a_broken_section_does_not_make_others_look_broken(old: str, new: str) -> None:
    text = f"{TWO}parallelism: {{tensor: 8, pipeline: 2}}\ngroups: [[a, b]]\n"
    assert len(errors(text.replace(old, new, 1))) == 1


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("parallelsim: {}", "parallelism"), ("node: []", "nodes"), ("Engine: {}", "engine"), ("replica: 2", "replicas")],
)
def test_an_unknown_key_gets_a_suggestion(typo: str, meant: str) -> None:
    assert error(f"{ONE}{typo}\n").endswith(f"; did you mean {meant}?")


def test_an_unknown_key_far_from_all_gets_the_list() -> None:
    assert error(f"{ONE}api: {{zzz: 1}}\n").endswith("unknown key 'zzz'; the keys here are port, bind and key_file")
    line = error(ONE.replace("gpus: 8", "gpus: 8, gpu: {zzz: 1}"))
    assert line.endswith("nodes[0].gpu.zzz: unknown key 'zzz'; the keys here are type and memory")
    assert "cert_file and key_file" in errors(f"{ONE}gateway: {{nodes: [a], tls: {{zzz: 1}}}}\n")[-1]


def test_secrets_are_read_without_their_line_end() -> None:
    assert load(KEY, {"key": "sk-1\r\n"}).secrets == {"api_key": "sk-1"}
    assert load(KEY, {"key": "\ufeffsk-1"}).secrets == {"api_key": "sk-1"}
    text = f"{HUB.replace('org/model', '{id: org/model, token_file: h}')}api: {{key_file: k}}\nnetwork: {{token_file: g}}\n"
    assert load(text, {"h": "1\n", "k": "2\n", "g": "3\n"}).secrets == {
        "api_key": "2",
        "hub_token": "1",
        "group_token": "3",
    }


@pytest.mark.parametrize("content", ["", "\n", "sk one\n", "sk-secret\nsk-two\n", "sk-secret\0", "sk-secret\x1b"])
def test_a_secret_that_is_none_is_refused_without_showing_it(content: str) -> None:
    line = error(KEY, {"key": content})
    assert line == "spec.yaml:5: api.key_file: the file './key' must hold one line without spaces: the secret itself"


def test_files_are_looked_for_beside_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stack").mkdir()
    (tmp_path / "stack" / "spec.yaml").write_text(KEY)
    (tmp_path / "stack" / "key").write_text("sk-1\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_spec(Path("../stack/spec.yaml")).secrets == {"api_key": "sk-1"}
    (tmp_path / "stack" / "spec.yaml").write_text(KEY.replace("./key", str(tmp_path / "stack" / "key")))
    assert load_spec(Path("../stack/spec.yaml")).secrets == {"api_key": "sk-1"}


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("api.key_file", "api: {key_file: nowhere}"),
        ("network.token_file", "network: {token_file: nowhere}"),
        ("gateway.keys_file", "gateway: {nodes: [a], keys_file: nowhere}"),
        ("gateway.tls.cert_file", "gateway: {nodes: [a], tls: {cert_file: nowhere, key_file: key}}"),
        ("gateway.tls.key_file", "gateway: {nodes: [a], tls: {cert_file: key, key_file: nowhere}}"),
    ],
)
def test_a_file_that_is_not_there(key: str, section: str) -> None:
    words = "there is no file 'nowhere' beside the spec; write its path from the spec's folder, or make the file"
    assert (
        error(f"{ONE}{section}\n", {"key": "-----BEGIN CERTIFICATE----- -----BEGIN PRIVATE KEY-----"})
        == f"spec.yaml:5: {key}: {words}"
    )


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert error(KEY.replace("./key", ".")) == "spec.yaml:5: api.key_file: the file '.' cannot be read: Is a directory"
    assert "cannot be read: File name too long" in error(KEY.replace("./key", "x" * 5000))
    assert f"has more than {MAX_FILE_BYTES} bytes; is it the right file?" in error(KEY.replace("./key", "/dev/zero"))
    assert errors(KEY.replace("./key", '"a\\0b"'))[-1] == (
        "spec.yaml:5: api.key_file: 'a\\x00b' is no name for a file; write its path from the spec's folder"
    )
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    assert "is not UTF-8 text; is it the right file?" in error(KEY.replace("./key", str(tmp_path / "key")))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "the file 'c.json' is not JSON: Expecting property name enclosed in double quotes"),
        ("[]", "the file 'c.json' is no JSON object; name the model's config.json"),
        ("[" * 100_000, "the file 'c.json' is not JSON: it is nested too deep"),
    ],
)
def test_a_config_that_is_none(content: str, words: str) -> None:
    line = error(ONE.replace("/models/m", "{id: /models/m, config: c.json}"), {"c.json": content})
    assert line.startswith(f"spec.yaml:2: model.config: {words}")


def test_what_is_taken_but_noteworthy_is_a_warning() -> None:
    text = (
        f"{TWO.replace('12, gpus: 8', '12, gpus: 8, env: {B: 1, A: 1}')}"
        "engine: {version: 0.31.0, env: {A: 2, B: 2}}\ngateway: {nodes: [a]}\n"
    )
    assert warnings(text) == (
        [
            "spec.yaml:6: engine.version: gen-stack is tested with vLLM 0.32.0, not with 0.31.0",
            "spec.yaml:7: gateway: has no API keys, so whoever reaches it may use the model; name a keys_file",
            "spec.yaml:5: nodes[1].env.A: overrides engine.env.A on this node",
            "spec.yaml:5: nodes[1].env.B: overrides engine.env.B on this node",
        ]
    )
    assert warnings(TWO) == []


def test_the_file_is_called_as_the_user_called_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my stack.yaml").write_text("")
    with pytest.raises(SpecError, match=r"\Amy stack\.yaml:1: the file is empty"):
        load_spec(Path("my stack.yaml"))
