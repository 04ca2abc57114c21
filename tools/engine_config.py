"""Runs inside the engine's image, on its Python: what the engine's own check of a model and its split says.

    python3 engine_config.py FILE    a JSON list of {config, tensor, pipeline, expert, length}; for each, null or words

It makes the two configurations that `vllm serve` makes and lets the engine verify them against each other. No weights
and no device are needed. It leans on vLLM and the standard library only.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def verdict(case: dict[str, Any], folder: Path) -> str | None:
    """Say why the engine refuses a case; None when it does not."""
    from vllm.config import ModelConfig, ParallelConfig  # type: ignore[import-not-found, unused-ignore]

    (folder / "config.json").write_text(json.dumps(case["config"]), "utf-8")
    try:
        model = ModelConfig(
            model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, max_model_len=case["length"]
        )
        parallel = ParallelConfig(
            tensor_parallel_size=case["tensor"],
            pipeline_parallel_size=case["pipeline"],
            enable_expert_parallel=case["expert"],
            nnodes=case["tensor"] * case["pipeline"],
            distributed_executor_backend="mp",
        )
        model.verify_with_parallel_config(parallel)
    except Exception as error:  # noqa: BLE001, RUF100 - whatever it says is the answer
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return None


def main() -> None:
    """Answer every case of the file, in its order, as one line of JSON; what the engine prints goes nowhere."""
    cases = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        answers = [verdict(case, Path(folder)) for case in cases]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
