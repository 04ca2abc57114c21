from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gen_stack.picture import as_data, picture
from tests.generator.helpers import FOUR, TWO, plan_of
from tests.generator.test_cli import run

if TYPE_CHECKING:
    from pathlib import Path

QWEN = TWO.replace("/models/m", "Qwen/Qwen2.5-72B-Instruct") + "gpu: {type: H100-80GB}\n"


def test_the_picture_of_two_nodes() -> None:
    assert picture(plan_of(QWEN), ("a warning",)).splitlines() == [
        "t: Qwen/Qwen2.5-72B-Instruct on 2 nodes",
        "",
        "group t: endpoint http://10.0.0.11:8000; control 29600, rendezvous 29500 and up",
        "  a  10.0.0.11  8 GPUs  ranks 0-7, stage 0, layers 0-39, head",
        "  b  10.0.0.12  8 GPUs  ranks 8-15, stage 1, layers 40-79",
        "",
        "memory of each GPU: 79.18 GiB, of which the engine takes 0.92",
        "  stage 0  [WWWWACCCCCCCCCCCCCCCCCCCCCCCCCCCCCCCC...]  "
        "weights 8.47, activations 0.42, graphs 0.40, cache 63.56 GiB",
        "  stage 1  [WWWWAACCCCCCCCCCCCCCCCCCCCCCCCCCCCCCC...]  "
        "weights 8.47, activations 2.45, graphs 0.40, cache 61.54 GiB",
        "           W weights, A activations and graphs, C cache, . not the engine's",
        "  cache for 3226208 tokens: 98.46 sequences of 32768 tokens; margin 60.91 GiB",
        "",
        "choices",
        "  tensor parallel 8: one rank for each GPU of a node, where the links are fastest",
        "  pipeline parallel 2: what tensor 8 leaves of 16 ranks",
        "  image vllm/vllm-openai:v0.32.0 and our layer: a group needs its entrypoint",
        "",
        "to know",
        "  the model fits on one node; replicas: 2 would serve more, and no node would wait for another",
        "  a warning",
    ]


def test_what_is_not_known_is_said() -> None:
    shown = picture(plan_of(TWO))
    assert "memory: fit not checked: nothing says what the model is" in shown
    assert "ranks 0-7, stage 0, head" in shown


def test_groups_and_data_parallel_ranks() -> None:
    shown = picture(plan_of(f"{FOUR}replicas: 2\nparallelism: {{tensor: 4, pipeline: 2, data: 2}}\n"))
    assert shown.count("group t-") == 2
    assert "ranks 8-15, stages 0-1" in shown


def test_the_data_for_programs() -> None:
    data = as_data(plan_of(QWEN))
    assert data["schema"] == "gen-stack.plan/1"
    assert data["groups"][0]["nodes"][1]["stages"] == [1]
    assert data["memory"]["kv_tokens"] == 3226208
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(data, sort_keys=True))


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(QWEN)
    assert run(tmp_path, "plan", "spec.yaml").stdout.startswith("t: Qwen/Qwen2.5-72B-Instruct on 2 nodes\n")
    assert json.loads(run(tmp_path, "plan", "spec.yaml", "--json").stdout)["name"] == "t"
    assert run(tmp_path, "plan", "spec.yaml", "--max-context").stdout == "32768\n"
    assert run(tmp_path, "plan", "spec.yaml", "--fit").stdout == "it fits as it is\n"
    assert run(tmp_path, "plan", "spec.yaml", "--fit", "--json").returncode == 2
    assert not (tmp_path / "stacks").exists()


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    text = QWEN.replace("gpus: 8", "gpus: 2").replace("H100-80GB", "A100-40GB")
    (tmp_path / "spec.yaml").write_text(text)
    done = run(tmp_path, "plan", "spec.yaml")
    assert done.returncode == 2
    assert "one sequence of 32768 tokens needs" in done.stdout
    assert "use 4 nodes instead of 2" in run(tmp_path, "plan", "spec.yaml", "--fit").stdout
    (tmp_path / "spec.yaml").write_text(TWO)
    done = run(tmp_path, "plan", "spec.yaml", "--max-context")
    assert (done.returncode, done.stdout[:15]) == (1, "fit not checked")
