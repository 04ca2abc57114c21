from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from gen_stack.load import load_spec
from gen_stack.local_facts import MAX_BYTES, local_warning
from tests.generator.helpers import ONE
from tests.generator.test_cli import run

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


class Host:
    """A host with a spec, perhaps with `model.config`, and perhaps with the model itself."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "models/m"
        self.model.mkdir(parents=True)
        self.given: dict[str, Any] | None = None
        self.id = str(self.model)
        self.environment = {"HOME": str(folder)}

    def has(self, config: Any, name: str = "config.json") -> None:
        """Give the model's folder a file: JSON, or bytes as they are."""
        (self.model / name).write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())

    def cache(self, model: str, revision: str = "main") -> None:
        """Move the model into the hub's cache."""
        self.id = model
        top = self.folder / f".cache/huggingface/hub/models--{model.replace('/', '--')}"
        (top / "refs").mkdir(parents=True)
        (top / "refs" / revision).write_text("abc")
        self.model = top / "snapshots/abc"
        self.model.mkdir(parents=True)

    def spec(self) -> Path:
        short = f"{{id: {self.id}, config: ./given.json}}" if self.given is not None else self.id
        if self.given is not None:
            (self.folder / "given.json").write_text(json.dumps(self.given))
        (self.folder / "spec.yaml").write_text(ONE.replace("/models/m", short))
        return self.folder / "spec.yaml"

    def says(self) -> str | None:
        warning = local_warning(load_spec(self.spec()), self.environment)
        return warning.replace(f"{self.folder}/", "") if warning else None


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_host_without_the_model_says_nothing(host: Host) -> None:
    assert host.says() is None
    host.given = CONFIG
    assert host.says() is None


def test_agreement_is_silent(host: Host) -> None:
    host.given = CONFIG
    host.has({**CONFIG, "bos_token_id": 1, "torch_dtype": "float16"})
    assert host.says() is None


def test_another_number_is_one_line(host: Host) -> None:
    host.given = CONFIG
    host.has({**CONFIG, "num_hidden_layers": 33})
    assert host.says() == (
        "spec.yaml:2: model.config: models/m/config.json on this host says num_hidden_layers 33, the plan used 32 "
        "(from ./given.json); run gen-stack facts spec.yaml"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_attention_heads": 64}, "num_attention_heads 64, the plan used 32"),
        ({"num_key_value_heads": 4}, "num_key_value_heads 4, the plan used 8"),
        ({"head_dim": 64}, "head size 64, the plan used 128"),
        ({"hidden_size": 8192}, "hidden_size 8192, the plan used 4096"),
        ({"vocab_size": 32000}, "vocab_size 32000, the plan used 128256"),
        ({"num_experts": 8}, "experts 8, the plan used none"),
        (FP8, "quantisation fp8 8-bit by 128x128, the plan used none"),
        ({"max_position_embeddings": 8192}, "context length 8192, the plan used 131072"),
    ],
)
def test_every_figure_that_matters(change: dict[str, Any], words: str, host: Host) -> None:
    host.given = CONFIG
    host.has({**CONFIG, **change})
    assert f"says {words} (from" in str(host.says())


def test_many_differences_stay_one_short_line(host: Host) -> None:
    host.given = CONFIG
    host.has({**CONFIG, **FP8, "vocab_size": 1, "hidden_size": 8192, "num_hidden_layers": 9, "head_dim": 64})
    assert str(host.says()).count("the plan used") == 3
    assert "; 2 more (from ./given.json)" in str(host.says())


def test_the_catalogue_against_the_cache_of_this_host(host: Host) -> None:
    host.cache(LLAMA)
    host.has(CONFIG)
    assert host.says() is None
    host.has({**CONFIG, "num_hidden_layers": 40})
    said = str(host.says())
    assert said.startswith("spec.yaml:2: model: .cache/huggingface/hub/models--meta-llama--")
    assert said.endswith(
        "says num_hidden_layers 40, the plan used 32 (from the catalogue); run gen-stack facts spec.yaml"
    )


def test_a_model_that_nothing_else_knows(host: Host) -> None:
    host.has(CONFIG)
    assert host.says() == (
        "spec.yaml:2: model: models/m/config.json on this host says what the model is; "
        "run gen-stack facts spec.yaml to plan from it"
    )


def test_another_revision_is_another_model(host: Host) -> None:
    host.cache("org/model", revision="v2")
    host.has(CONFIG)
    assert host.says() is None


def test_what_a_config_leaves_to_defaults_is_not_compared(host: Host) -> None:
    host.given = {**CONFIG, **FP8, "head_dim": 256, "num_experts": 8}
    left_out = ("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings")
    host.has({key: value for key, value in CONFIG.items() if key not in left_out})
    assert "says quantisation none, the plan used fp8" in str(host.says())
    host.has({}, "hf_quant_config.json")
    assert host.says() is None


def test_a_model_with_vision(host: Host) -> None:
    host.given = CONFIG
    host.has({"text_config": {**CONFIG, "num_hidden_layers": 33}, "vision_config": {}})
    assert "says num_hidden_layers 33, the plan used 32" in str(host.says())


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe{", b"{}", b'{"hidden_size": 1e999}', b"[" * 100_000, b"9" * 100_000),
        json.dumps({**CONFIG, "num_hidden_layers": 33, "pad": "x" * MAX_BYTES}).encode(),
        json.dumps({**CONFIG, "rope_scaling": {"factor": float("nan")}}).encode(),
        json.dumps({**CONFIG, "num_hidden_layers": "33"}).encode(),
    ],
)
def test_a_damaged_file_is_passed_over(damaged: bytes, host: Host) -> None:
    host.given = CONFIG
    host.has(damaged)
    assert host.says() is None


def test_what_is_no_file_is_passed_over(host: Host) -> None:
    (host.model / "config.json").mkdir()
    assert host.says() is None
    (host.model / "config.json").rmdir()
    os.mkfifo(host.model / "config.json")  # would wait for a writer for ever
    assert host.says() is None
    host.environment = {"HF_HOME": "a\0b"}
    host.id = "org/model"
    assert host.says() is None


def test_the_file_that_was_planned_from(host: Host) -> None:
    host.given = CONFIG
    host.spec()
    (host.model / "config.json").symlink_to(host.folder / "given.json")
    assert host.says() is None
    host.given = {"hidden_size": 1}  # nothing can be planned from it, and nothing else is here
    assert host.says() is None


def test_a_name_from_a_file_stays_on_its_line(host: Host) -> None:
    host.given = CONFIG
    host.has({**CONFIG, "quantization_config": {"quant_method": "a\nb\x1b[31m"}})
    assert r"'a\nb\x1b[31m'" in str(host.says())


def test_no_byte_of_the_output_depends_on_it(host: Host) -> None:
    host.given = CONFIG
    host.spec()
    variables = {"env": {**os.environ, "HOME": str(host.folder), "HF_ENDPOINT": "http://127.0.0.1:9"}}

    def made(folder: str) -> tuple[str, list[str], dict[str, bytes]]:
        runs = [
            run(host.folder, "spec.yaml", "-o", folder, **variables),
            *(run(host.folder, *arguments, "spec.yaml", **variables) for arguments in (["plan"], ["plan", "--json"])),
        ]
        assert [one.returncode for one in runs] == [0, 0, 0]
        top = host.folder / folder
        files = {str(file.relative_to(top)): file.read_bytes() for file in top.rglob("*") if file.is_file()}
        return runs[0].stderr, [one.stdout.replace(folder, "out") for one in runs], files

    silent, texts, files = made("out-1")
    host.has({**CONFIG, "num_hidden_layers": 33})
    said, texts_with, files_with = made("out-2")
    assert (silent, said.count("\n")) == ("", 1)
    assert said.startswith("warning: spec.yaml:2: model.config: ")
    assert texts == texts_with
    assert files == files_with
    assert run(host.folder, "plan", "spec.yaml", **variables).stderr == said


def test_it_costs_no_time(host: Host) -> None:
    host.given = CONFIG
    host.has({**CONFIG, "num_hidden_layers": 126, "ignored": [f"model.layers.{one}.mlp" for one in range(4000)]})
    loaded = load_spec(host.spec())
    spent = []
    for _ in range(5):
        start = time.process_time()
        assert local_warning(loaded, host.environment)
        spent.append(time.process_time() - start)
    assert min(spent) < 0.02
