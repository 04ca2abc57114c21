"""fetch.py against a hub on loopback."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stack_node
from stack_node import huberrors
from tests.node import hub as hubs
from tests.node.hub import Hub, Model, sharded

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

MODEL = "org/model"
TOKEN = "hub-secret-token"
SHARD = "model-00002-of-00003.safetensors"
BEGIN = "import sys; from stack_node import fetch; fetch._BACKOFF_S = (0.1,); "
END = "; sys.exit(fetch.main(sys.argv[1:]))"


@dataclass
class Place:
    """A hub and a node's cache."""

    hub: Hub
    home: Path
    variables: dict[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()  # of the command

    @property
    def folder(self) -> Path:
        return self.home / "hub" / "models--org--model"

    def snapshot(self, commit: str = "c" * 40) -> Path:
        return self.folder / "snapshots" / commit

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(stack_node.__file__).parents[1]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.home),
            "HF_HOME": str(self.home),
            "HF_ENDPOINT": self.hub.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            **self.variables,
        }

    def open(self, *args: str, change: str = "pass") -> subprocess.Popen[str]:
        command = [*self.prefix, sys.executable, "-c", BEGIN + change + END, *(args or (MODEL,))]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def fetch(self, *args: str, change: str = "pass") -> list[dict[str, Any]]:
        """Everything it said."""
        with self.open(*args, change=change) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            output, errors = process.stdout.read(), process.stderr.read()
        assert TOKEN not in output
        assert "Traceback" not in errors, errors
        messages = [json.loads(line) for line in output.splitlines()]
        assert process.returncode == (0 if "path" in messages[-1] else 1)
        return messages

    def offline(self) -> None:
        self.variables["HF_HUB_OFFLINE"] = "1"

    def unreachable(self) -> None:
        self.variables["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nothing listens there


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with hubs.running() as hub:
        yield Place(hub, tmp_path)


def serve(place: Place, size: int = 5000, **behaviour: Any) -> Model:
    model = place.hub.models[MODEL] = Model(sharded(3, size), **behaviour)
    return model


def errors(messages: list[dict[str, Any]]) -> list[str]:
    return [message["error"] for message in messages if "error" in message]


def test_a_model_is_fetched_once_and_the_engine_finds_it_offline(place: Place) -> None:
    model = serve(place)
    first = place.fetch()
    assert first[-1]["path"] == str(place.snapshot())
    assert not first[-1]["replace"]
    assert {name: (place.snapshot() / name).read_bytes() for name in model.files} == model.files
    place.hub.gets.clear()
    assert place.fetch()[-1]["path"] == str(place.snapshot())
    assert place.hub.gets == []
    code = f"import huggingface_hub as h; print(h.snapshot_download('{MODEL}', ignore_patterns='*'))"
    resolved = subprocess.run(
        [sys.executable, "-c", code],
        env=place.environment | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert resolved.stdout.strip() == str(place.snapshot())


def test_only_what_the_engine_reads_is_fetched(place: Place) -> None:
    model = serve(place)
    model.files |= {
        "pytorch_model-00001-of-00001.bin": b"old",
        "onnx/model.onnx": b"other",
        "original/consolidated.pth": b"raw",
        "extra.safetensors": hubs.safetensors(10),
        "modeling_fake.py": b"code",
        "chat_template.jinja": b"{{ x }}",
    }
    place.fetch()
    unwanted = {"pytorch_model-00001-of-00001.bin", "onnx/model.onnx", "original/consolidated.pth", "extra.safetensors"}
    assert set(place.hub.fetched()) == set(model.files) - unwanted


def test_a_model_without_safetensors_comes_as_it_is(place: Place) -> None:
    place.hub.models[MODEL] = Model({"config.json": b"{}", "pytorch_model.bin": b"weights", "flax_model.msgpack": b"x"})
    place.fetch()
    assert set(place.hub.fetched()) == {"config.json", "pytorch_model.bin"}


def test_progress_is_told_while_a_slow_hub_sends(place: Place) -> None:
    serve(place, size=60_000, rate=60_000)
    messages = place.fetch(change="fetch.PROGRESS_S = 0.05")
    total = sum(path.stat().st_size for path in place.snapshot().iterdir())
    reports = [message for message in messages if "done" in message]
    assert {message["total"] for message in reports} == {total}
    done = [message["done"] for message in reports]
    assert len(done) > 3
    assert done == sorted(done)
    assert "are missing" in messages[0]["note"]


def test_a_connection_that_is_cut_goes_on_where_it_was(place: Place) -> None:
    model = serve(place, size=25 << 20)
    model.cuts[SHARD] = 24 << 20
    assert "path" in place.fetch()[-1]
    assert (place.snapshot() / SHARD).read_bytes() == model.files[SHARD]
    ranges = [get.range for get in place.hub.gets if get.name == SHARD]
    assert ranges[0] is None
    assert len(ranges) == 2
    assert int(str(ranges[1]).removeprefix("bytes=").removesuffix("-")) >= 10 << 20


def test_a_fetch_that_is_ended_leaves_nothing_half_and_keeps_what_is_whole(place: Place) -> None:
    model = serve(place, size=100_000)
    model.rate = 100_000
    process = place.open(change="fetch.PROGRESS_S = 0.05")
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            if json.loads(line).get("done", 0) >= 1000 or list(place.folder.glob("blobs/*.incomplete")):
                break
        process.stdin.close()
        process.stdout.read()
    # Older versions of the hub's library give a half file its final name's, and go on with it.
    assert list(place.folder.glob(f"blobs/*.{'[0-9a-f]' * 8}.incomplete")) == []
    model.rate = None
    small = {"config.json", "model.safetensors.index.json"}
    kept = {name for name in small if (place.snapshot() / name).exists()}
    place.hub.gets.clear()
    assert "path" in place.fetch()[-1]
    assert not kept & set(place.hub.fetched())


def test_what_a_killed_fetch_left_is_removed(place: Place) -> None:
    serve(place)
    blobs = place.folder / "blobs"
    blobs.mkdir(parents=True)
    for name, age in (("old.0123abcd.incomplete", 1000.0), ("young.0123abcd.incomplete", 0.0)):
        (blobs / name).write_bytes(b"half")
        then = (blobs / name).stat().st_mtime - age
        os.utime(blobs / name, (then, then))
    place.fetch()
    assert [path.name for path in blobs.glob("*.incomplete")] == ["young.0123abcd.incomplete"]


def test_a_file_of_another_size_than_listed_is_tried_again_and_said(place: Place) -> None:
    model = serve(place)
    model.sizes[SHARD] = 9999
    with place.open() as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            message = json.loads(line)
            if "error" in message:
                break
        process.stdin.close()
    assert message["retry"]
    assert "another size than the hub lists" in message["error"]


def test_a_file_that_was_cut_short_on_the_disk_is_fetched_again_alone(place: Place) -> None:
    model = serve(place)
    place.fetch()
    os.truncate((place.snapshot() / SHARD).resolve(), 100)
    place.hub.gets.clear()
    messages = place.fetch()
    assert "has 100 bytes and should have" in messages[0]["note"]
    assert place.hub.fetched() == [SHARD]
    assert (place.snapshot() / SHARD).read_bytes() == model.files[SHARD]


def test_a_hub_that_is_down_for_a_while_is_waited_for(place: Place) -> None:
    model = serve(place, status=503)
    with place.open() as process:
        assert process.stdout is not None
        message = json.loads(process.stdout.readline())
        assert message["retry"]
        assert "HTTP 503" in message["error"]
        model.status = None
        assert "path" in json.loads(process.stdout.read().splitlines()[-1])


def test_a_disk_that_is_too_small_is_said_before_weights_are_fetched(place: Place) -> None:
    serve(place)
    [message] = place.fetch(change="fetch.free_bytes = lambda path: 12_000")
    assert not message["retry"]
    assert "the disk is too small" in message["error"]
    assert f"{place.home / 'hub'} has room for 12.0 kB" in message["error"]
    assert "15.2 kB of 15.4 kB are missing" in message["error"]
    assert place.hub.fetched(".safetensors") == []


def mounted(place: Place, commands: str) -> tuple[str, ...]:
    """Prefix that gives a command mounts of its own."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    return ("unshare", "--mount", "sh", "-c", f'cd "{place.home}" && {commands} && exec "$@"', "sh")


def test_a_disk_that_fills_up_meanwhile_is_said(place: Place) -> None:
    serve(place, size=400_000)
    (place.home / "hub").mkdir()
    place.prefix = mounted(place, "mount -t tmpfs -o size=1m tmpfs hub")
    message = place.fetch(change="fetch.free_bytes = lambda path: 1 << 40")[-1]
    assert not message["retry"]
    assert f"the disk of {place.home / 'hub'} is full" in message["error"]


def test_a_small_disk_is_measured(place: Place) -> None:
    serve(place, size=400_000)
    (place.home / "hub").mkdir()
    place.prefix = mounted(place, "mount -t tmpfs -o size=1m tmpfs hub")
    assert "the disk is too small" in errors(place.fetch())[0]
    assert place.hub.fetched(".safetensors") == []


def test_a_cache_that_may_only_be_read_is_enough_when_all_is_there(place: Place) -> None:
    model = serve(place)
    place.fetch()
    shutil.rmtree(place.folder / "refs")
    place.prefix = mounted(place, "mount --bind hub hub && mount -o remount,bind,ro hub")
    message = place.fetch()[-1]
    assert message["path"] == str(place.snapshot())
    assert message["replace"]
    model.commit = "d" * 40
    model.files["config.json"] = b'{"changed": true}'
    [sentence] = errors(place.fetch())
    assert "cannot be read or written" in sentence
    assert "model.offline: true" in sentence


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_gated_model_needs_a_token_that_may_read_it(place: Place, token: str | None) -> None:
    serve(place, gated=True)
    if token:
        place.variables["HF_TOKEN"] = token
    [sentence] = errors(place.fetch())
    assert "is gated" in sentence
    assert ("the token that is given has no access" if token else "model.token_file") in sentence


def test_a_token_from_a_file_opens_a_private_model(place: Place) -> None:
    serve(place, private=True)
    place.hub.token = TOKEN
    [sentence] = errors(place.fetch())
    assert "knows no model org/model" in sentence
    (place.home / "secret").write_text(f"{TOKEN}\n")
    place.variables["HF_TOKEN_PATH"] = str(place.home / "secret")
    assert "path" in place.fetch()[-1]


def test_a_refused_token_is_said(place: Place) -> None:
    serve(place, status=403)
    place.variables["HF_TOKEN"] = TOKEN
    [sentence] = errors(place.fetch())
    assert "refuses the token that is given" in sentence


def test_an_unknown_model_and_an_unknown_revision_are_told_apart(place: Place) -> None:
    serve(place)
    [nothing] = place.fetch("org/nothing")
    assert not nothing["retry"]
    assert "knows no model org/nothing" in nothing["error"]
    place.fetch()
    [sentence] = errors(place.fetch(MODEL, "--revision=v7"))
    assert "the hub has no org/model at revision v7" in sentence


def test_a_model_that_lacks_a_listed_shard_is_no_model(place: Place) -> None:
    model = serve(place)
    del model.files[SHARD]
    [sentence] = errors(place.fetch())
    assert f"lacks files that its index lists: {SHARD}" in sentence


def test_offline_a_whole_snapshot_is_enough_and_nobody_is_asked(place: Place) -> None:
    serve(place)
    place.fetch()
    place.offline()
    before = place.hub.requests
    [message] = place.fetch()
    assert message["path"] == str(place.snapshot())
    assert not message["replace"]
    assert place.hub.requests == before


def test_offline_a_snapshot_without_refs_is_used_by_its_path(place: Place) -> None:
    serve(place)
    place.fetch()
    shutil.rmtree(place.folder / "refs")
    place.offline()
    [message] = place.fetch()
    assert message["path"] == str(place.snapshot())
    assert message["replace"]
    [message] = place.fetch(MODEL, f"--revision={'c' * 40}")
    assert not message["replace"]


def test_offline_several_snapshots_without_refs_need_a_choice(place: Place) -> None:
    serve(place)
    place.fetch()
    shutil.rmtree(place.folder / "refs")
    shutil.copytree(place.snapshot(), place.snapshot("d" * 40))
    place.offline()
    [sentence] = errors(place.fetch())
    assert f"several snapshots of org/model ({'c' * 40}, {'d' * 40})" in sentence
    [message] = place.fetch(MODEL, f"--revision={'d' * 40}")
    assert message["path"] == str(place.snapshot("d" * 40))


def test_offline_an_incomplete_snapshot_is_an_error_with_the_names(place: Place) -> None:
    serve(place)
    place.fetch()
    (place.snapshot() / SHARD).unlink()
    place.offline()
    [message] = place.fetch()
    assert not message["retry"]
    assert "is not whole" in message["error"]
    assert SHARD in message["error"]


def test_offline_a_missing_model_is_an_error_with_the_fix(place: Place) -> None:
    place.offline()
    [sentence] = errors(place.fetch())
    assert "is not in" in sentence
    assert "models--org--model" in sentence


def test_a_hub_out_of_reach_does_not_matter_when_all_is_here(place: Place) -> None:
    serve(place)
    place.fetch()
    place.unreachable()
    [message] = place.fetch()
    assert message["path"] == str(place.snapshot())
    assert message["replace"]
    assert "the hub cannot be reached" in message["text"]


def test_a_hub_out_of_reach_is_tried_again_when_something_is_missing(place: Place) -> None:
    serve(place)
    place.unreachable()
    with place.open() as process:
        assert process.stdout is not None
        assert process.stdin is not None
        message = json.loads(process.stdout.readline())
        process.stdin.close()
    assert message["retry"]
    assert "the hub cannot be reached for org/model" in message["error"]


def test_a_download_folder_of_its_own_is_given_to_the_engine(place: Place) -> None:
    serve(place)
    message = place.fetch(MODEL, f"--cache={place.home / 'elsewhere'}")[-1]
    assert message["path"].startswith(str(place.home / "elsewhere"))
    assert message["replace"]


def test_another_models_tokenizer_is_fetched_without_its_weights(place: Place) -> None:
    serve(place)
    place.hub.models["org/words"] = Model(sharded(1, 500), commit="e" * 40)
    assert place.fetch(MODEL, "--tokenizer=org/words")[-1]["path"] == str(place.snapshot())
    words = place.home / "hub" / "models--org--words" / "snapshots" / ("e" * 40)
    assert (words / "tokenizer.json").exists()
    assert not list(words.glob("*.safetensors"))


def test_errors_of_the_system_are_sentences_with_a_fix() -> None:
    cache = Path("/cache")
    full = huberrors.explain(OSError(28, "No space left on device"), MODEL, cache)
    assert not full.retry
    assert "the disk of /cache is full" in full.sentence
    denied = huberrors.explain(PermissionError(13, "Permission denied", "/cache/x"), MODEL, cache)
    assert "/cache/x cannot be read or written" in denied.sentence


def test_an_address_that_lets_its_reader_in_is_not_repeated() -> None:
    error = ConnectionError("GET http://cdn/file?Signature=abc failed")
    assert "Signature" not in huberrors.explain(error, MODEL, Path("/cache")).sentence
