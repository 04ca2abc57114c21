"""Where the weights come from, whether a folder is whole, and the thread and child that fetch them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stack_node
from stack_node import flags, modelfiles, processes
from stack_node.hubcache import Repository, SeveralSnapshotsError
from stack_node.modelfiles import check_directory
from stack_node.pace import Pace, duration, size
from stack_node.weights import Weights, fetch_arguments, source, with_path
from tests.node import hub as hubs
from tests.node.conftest import PATIENCE_S, wait_until
from tests.node.hub import Hub, Model, safetensors, sharded

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

MODEL = "org/model"
SHARD = "model-00002-of-00003.safetensors"


# --- what the arguments say


def test_the_arguments_tell_model_revision_and_what_is_loaded() -> None:
    args = f"{MODEL} --dtype auto --revision v1 --load-format=safetensors --download-dir /w --tokenizer org/words"
    found = source(args.split(), {})
    assert (found.model, found.revision, found.load_format) == (MODEL, "v1", "safetensors")
    assert (found.download_dir, found.tokenizer, found.left) == ("/w", "org/words", None)
    assert fetch_arguments(found) == [
        MODEL,
        "--revision=v1",
        "--cache=/w",
        "--load-format=safetensors",
        "--tokenizer=org/words",
        "--ignore=original/**/*",
    ]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("org/model --load-format dummy", "needs no files"),
        ("org/model-GGUF:Q4_K_M", "GGUF"),
        ("org/model/file.gguf", "GGUF"),
        ("s3://bucket/model", "object store"),
        ("--dtype auto", "do not tell the model"),
        ("a/b/c", "neither a path nor a hub id"),
    ],
)
def test_what_cannot_be_looked_after_here_is_left_to_the_engine(args: str, why: str) -> None:
    left = source(args.split(), {}).left
    assert left is not None
    assert why in left


def test_another_hub_than_the_usual_is_left_to_the_engine() -> None:
    assert source([MODEL], {"VLLM_USE_MODELSCOPE": "True"}).left == "VLLM_USE_MODELSCOPE is set"
    assert source([MODEL], {"VLLM_USE_MODELSCOPE": "0"}).left is None


def test_a_tokenizer_of_the_same_model_or_in_a_folder_is_nothing_to_fetch() -> None:
    assert source([MODEL, "--tokenizer", MODEL], {}).tokenizer is None
    assert source([MODEL, "--tokenizer", "/words"], {}).tokenizer is None


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ("org/m -tp 2", "/p -tp 2 --served-model-name=org/m"),
        ("--model org/m -tp 2", "--model=/p -tp 2 --served-model-name=org/m"),
        ("--model=org/m", "--model=/p --served-model-name=org/m"),
        ("org/m --served-model-name a b", "/p --served-model-name a b"),
        (
            "--enforce-eager=1 org/m --hf-config-path org/m",
            "--enforce-eager=1 /p --hf-config-path org/m --served-model-name=org/m",
        ),
        ("-tp 2 -- org/m", "-tp 2 --served-model-name=org/m -- /p"),
        ("--dtype auto", "--dtype auto"),
    ],
)
def test_a_path_takes_the_models_place_under_the_models_name(args: str, expected: str) -> None:
    assert with_path(args.split(), "/p") == expected.split()


def test_the_names_of_a_served_model_are_not_taken_for_the_model() -> None:
    assert flags.model(flags.split(["--served-model-name", "a", "b", "-tp", "2", "org/m"])) == "org/m"


# --- whether a folder is whole


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in sharded(3, 1000).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_whole_folder_is_fine(folder: Path) -> None:
    assert check_directory(folder) == []


def test_missing_shards_are_named(folder: Path) -> None:
    (folder / SHARD).unlink()
    [sentence] = check_directory(folder)
    assert "1 of 3 files with weights are missing" in sentence
    assert SHARD in sentence


def test_a_shard_cut_short_is_told_with_its_sizes(folder: Path) -> None:
    whole = (folder / SHARD).stat().st_size
    os.truncate(folder / SHARD, 500)
    [sentence] = check_directory(folder)
    assert f"{SHARD} has 500 bytes where its header wants {whole}" in sentence
    os.truncate(folder / SHARD, 20)
    [sentence] = check_directory(folder)
    assert "20 bytes where its header wants at least" in sentence


def test_pointers_of_git_lfs_are_recognised(folder: Path) -> None:
    (folder / SHARD).write_text("version https://git-lfs.example/spec/v1\noid sha256:00\nsize 1000\n")
    [sentence] = check_directory(folder)
    assert "pointer of Git LFS" in sentence
    (folder / modelfiles.INDEX).write_text("version https://git-lfs.example/spec/v1\n")
    [sentence] = check_directory(folder)
    assert modelfiles.INDEX in sentence
    assert "pointer of Git LFS" in sentence


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 100, b"\x08" + b"\0" * 7 + b"not json", b"[]" * 40])
def test_what_is_no_safetensors_file_is_said(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    [sentence] = check_directory(tmp_path)
    assert "model.safetensors" in sentence
    assert "copy it again" in sentence


def test_a_gap_in_numbered_files_is_found_without_an_index(folder: Path) -> None:
    (folder / modelfiles.INDEX).unlink()
    assert check_directory(folder) == []
    (folder / SHARD).unlink()
    [sentence] = check_directory(folder)
    assert SHARD in sentence


def test_an_index_without_any_shard_is_a_copy_that_has_not_begun(folder: Path) -> None:
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    [sentence] = check_directory(folder)
    assert "3 of 3 files with weights are missing" in sentence


def test_a_model_in_both_of_mistrals_forms_is_read_in_its_own(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(safetensors(100))
    (folder / SHARD).unlink()
    assert check_directory(folder) == []
    assert SHARD in check_directory(folder, "safetensors")[0]


def test_a_configuration_is_needed(folder: Path) -> None:
    (folder / "config.json").unlink()
    [sentence] = check_directory(folder)
    assert "has no config.json" in sentence


def test_folders_with_other_kinds_of_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert check_directory(tmp_path) == []
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert check_directory(tmp_path) == []
    assert check_directory(tmp_path, "tensorizer") == []


def test_a_folder_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    [sentence] = check_directory(tmp_path / "nothing")
    assert "cannot be read: No such file or directory" in sentence


# --- the cache


def test_the_cache_knows_what_the_engine_would_find(tmp_path: Path) -> None:
    repository = Repository(tmp_path, MODEL)
    assert repository.known_commit(None) is None
    assert repository.only_commit() is None
    one, two = "1" * 40, "2" * 40
    for commit in (one, two):
        repository.snapshot(commit).mkdir(parents=True)
    assert repository.only_commit() is None  # empty folders are no snapshots
    (repository.snapshot(one) / "config.json").touch()
    assert repository.only_commit() == one
    (repository.snapshot(two) / "config.json").touch()
    with pytest.raises(SeveralSnapshotsError):
        repository.only_commit()
    (repository.folder / "refs").mkdir()
    (repository.folder / "refs" / "main").write_text(two)
    assert repository.known_commit(None) == two
    assert repository.known_commit(one) == one
    assert repository.known_commit("3" * 40) is None


def test_partial_files_are_counted_by_what_they_become(tmp_path: Path) -> None:
    repository = Repository(tmp_path, MODEL)
    assert repository.partial() == {}
    blobs = repository.folder / "blobs"
    blobs.mkdir(parents=True)
    for name, length in (("aa.0123abcd.incomplete", 5000), ("aa.0123abce.incomplete", 9000), ("bb.incomplete", 70)):
        (blobs / name).write_bytes(b"x" * length)
    assert repository.partial() == {"aa": 9000, "bb": 70}
    assert repository.resumable() == {"bb": 70}


# --- words


def test_sizes_and_times_are_for_people() -> None:
    assert [size(count) for count in (0, 999, 12_345, 140e9, 1.5e12)] == [
        "0 bytes",
        "999 bytes",
        "12.3 kB",
        "140.0 GB",
        "1.5 TB",
    ]
    assert [duration(seconds) for seconds in (12, 600, 9000)] == ["12 s", "10 min", "2.5 h"]


def test_a_line_comes_every_ten_seconds_and_five_percent_or_every_five_minutes() -> None:
    pace = Pace(0.0)
    total = 140_000_000_000
    assert pace.text(0.0, 0, total) == "0 bytes of 140.0 GB (0 %)"
    assert not pace.due(0.0, 0, total)
    assert pace.text(10.0, 2_100_000_000, total) == "2.1 GB of 140.0 GB (1 %), 210.0 MB/s, 11 min left"
    assert not pace.due(10.0, 2_100_000_000, total)
    assert pace.due(34.0, 7_140_000_000, total)
    assert not pace.due(40.0, 7_200_000_000, total)
    assert pace.due(334.0, 7_200_000_001, total)


def test_a_resumed_download_does_not_count_what_was_there() -> None:
    pace = Pace(0.0)
    pace.text(0.0, 90, 100)
    assert not pace.due(20.0, 91, 100)
    assert pace.due(30.0, 95, 100)


# --- the thread and its child


@dataclass
class Watcher:
    """Weights at work, and what it tells."""

    environ: dict[str, str]
    args: list[str]
    events: queue.Queue[tuple[Any, ...]] = field(default_factory=queue.Queue)
    said: list[str] = field(default_factory=list)
    reports: list[tuple[int, int, str]] = field(default_factory=list)
    spare: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.weights = Weights(
            self.args,
            self.environ,
            self.said.append,
            progress=lambda *report: self.reports.append(report),
            done=lambda path: self.events.put(("done", path)),
            failed=lambda reason, again: self.events.put(("failed", reason, again)),
            spare=self.spare,
        )

    def next(self) -> tuple[Any, ...]:
        return self.events.get(timeout=PATIENCE_S)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hubs.running() as running:
        running.models[MODEL] = Model(sharded(3, 50_000))
        yield running


@pytest.fixture
def environ(hub: Hub, tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"}


def test_weights_are_fetched_with_lines_in_the_log_and_nothing_left_behind(environ: dict[str, str]) -> None:
    watcher = Watcher(environ, [MODEL])
    watcher.weights.start()
    assert watcher.next() == ("done", None)
    assert "fetching org/model" in watcher.said[0]
    assert "org/model is fetched" in watcher.said[-1]
    assert watcher.reports[-1][1] > 150_000
    wait_until(lambda: not watcher.spare, "the child is gone")


def test_a_second_look_finds_everything(environ: dict[str, str], hub: Hub) -> None:
    watcher = Watcher(environ, [MODEL])
    for _ in range(2):
        watcher.weights.start()
        assert watcher.next() == ("done", None)
        wait_until(lambda: not watcher.spare, "the child is gone")
        wait_until(lambda: watcher.weights._thread and not watcher.weights._thread.is_alive(), "the thread is gone")
    assert len(hub.fetched(".safetensors")) == 3


def test_a_snapshot_without_refs_is_told_by_its_path(environ: dict[str, str], tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / ("f" * 40)
    snapshot.mkdir(parents=True)
    for name, content in sharded(2, 100).items():
        (snapshot / name).write_bytes(content)
    watcher = Watcher(environ | {"HF_HUB_OFFLINE": "1"}, [MODEL])
    watcher.weights.start()
    assert watcher.next() == ("done", str(snapshot))


def test_a_failure_comes_with_its_sentence(environ: dict[str, str]) -> None:
    watcher = Watcher(environ, ["org/nothing"])
    watcher.weights.start()
    kind, reason, again = watcher.next()
    assert kind == "failed"
    assert "knows no model org/nothing" in reason
    assert not again


def test_while_the_hub_is_down_attempts_go_on_by_themselves(environ: dict[str, str], hub: Hub) -> None:
    hub.models[MODEL].status = 502
    watcher = Watcher(environ, [MODEL])
    watcher.weights.start()
    kind, _, again = watcher.next()
    assert (kind, again) == ("failed", True)
    hub.models[MODEL].status = None
    assert watcher.next() == ("done", None)


def test_a_child_that_dies_is_a_failure_and_can_be_begun_again(environ: dict[str, str], hub: Hub) -> None:
    hub.models[MODEL].rate = 20_000
    watcher = Watcher(environ, [MODEL])
    watcher.weights.start()
    wait_until(lambda: watcher.reports, "progress")
    [child] = watcher.spare
    os.kill(child, signal.SIGKILL)
    kind, reason, again = watcher.next()
    assert (kind, again) == ("failed", False)
    assert "ended with -9; out of memory, perhaps" in reason
    hub.models[MODEL].rate = None
    wait_until(lambda: watcher.weights._thread and not watcher.weights._thread.is_alive(), "the thread is gone")
    watcher.weights.start()
    assert watcher.next() == ("done", None)


def test_stop_ends_the_child_at_once_and_tells_nothing_more(environ: dict[str, str], hub: Hub) -> None:
    hub.models[MODEL].rate = 20_000
    watcher = Watcher(environ, [MODEL])
    watcher.weights.start()
    wait_until(lambda: watcher.reports, "progress")
    watcher.weights.stop()
    wait_until(lambda: not watcher.spare, "the child is gone")
    assert watcher.events.empty()
    watcher.weights.start()
    assert not watcher.spare


def test_the_child_does_not_outlive_a_supervisor_that_is_killed(environ: dict[str, str], hub: Hub) -> None:
    hub.models[MODEL].rate = 20_000
    code = """
import os, time
from stack_node.weights import Weights
spare = set()
nothing = lambda *_: None
Weights(["org/model"], os.environ, nothing, nothing, nothing, nothing, spare).start()
while not spare:
    time.sleep(0.01)
print(*spare, flush=True)
time.sleep(600)
"""
    package = str(Path(stack_node.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environ | {"PYTHONPATH": package},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_until(lambda: hub.gets, "the fetch runs")
        parent.kill()
        with contextlib.suppress(ValueError):
            parent.stdout.close()
    wait_until(lambda: (found := processes.read(child)) is None or not found.alive, "the child is gone")


def test_a_local_model_is_checked_without_a_child(tmp_path: Path, folder: Path) -> None:
    watcher = Watcher({}, [str(folder)])
    watcher.weights.start()
    assert watcher.next() == ("done", None)
    (folder / SHARD).unlink()
    watcher = Watcher({}, [str(folder)])
    watcher.weights.start()
    kind, reason, again = watcher.next()
    assert (kind, again) == ("failed", False)
    assert SHARD in reason


def test_what_is_left_to_the_engine_is_said_once(tmp_path: Path) -> None:
    watcher = Watcher({}, ["/", "--load-format=dummy"])
    for _ in range(2):
        watcher.weights.start()
        assert watcher.next() == ("done", None)
        wait_until(lambda: watcher.weights._thread and not watcher.weights._thread.is_alive(), "the thread is gone")
    assert watcher.said == ["weights: left to the engine: --load-format=dummy needs no files"]


def test_the_supervisor_does_not_load_the_hubs_library() -> None:
    code = "import sys, stack_node.weights; print([m for m in sys.modules if m.startswith(('huggingface', 'httpx'))])"
    environ = {"PYTHONPATH": str(Path(stack_node.__file__).parents[1])}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout.replace("'", '"')) == []
