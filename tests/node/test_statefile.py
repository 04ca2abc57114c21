from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from stack_node import statefile
from stack_node.statefile import State

if TYPE_CHECKING:
    from pathlib import Path

STATE = State(failures=3, last_fault={"kind": "engine", "rank": 1, "log": ["ünïcode"]}, retries=2)


def failing(error: int) -> object:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(error, os.strerror(error))

    return fail


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = statefile.path(str(tmp_path / "not" / "there" / "yet"), "qwen")
    assert statefile.save(path, STATE) is None
    assert statefile.load(path) == (STATE, None)
    assert statefile.save(path, State()) is None
    assert statefile.load(path) == (State(), None)
    assert [entry.name for entry in path.parent.iterdir()] == ["qwen.json"]


def test_groups_do_not_mix(tmp_path: Path) -> None:
    statefile.save(statefile.path(str(tmp_path), "a"), STATE)
    assert statefile.load(statefile.path(str(tmp_path), "b")) == (State(), None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0" * 100,
        "[]",
        "{}",
        "[" * 100_000,
        '{"failures": 1}',
        '{"failures": -1, "last_fault": null, "retries": 0}',
        '{"failures": true, "last_fault": null, "retries": 0}',
        '{"failures": 1, "last_fault": "x", "retries": 0}',
        '{"failures": 1, "last_fault": null, "retries": 0, "more": 1}',
    ],
)
def test_a_damaged_file_is_kept_aside_and_counts_as_none(tmp_path: Path, text: str) -> None:
    path = statefile.path(str(tmp_path), "qwen")
    path.write_text(text)
    assert statefile.load(path) == (
        State(),
        f"the saved state {path} was damaged; it is kept as qwen.json.damaged, and failures are counted from 0",
    )
    assert (tmp_path / "qwen.json.damaged").read_text() == text
    assert statefile.load(path) == (State(), None)


def test_a_damaged_file_that_cannot_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = statefile.path(str(tmp_path), "qwen")
    path.write_text("x")
    monkeypatch.setattr("pathlib.Path.replace", failing(30))
    assert statefile.load(path) == (
        State(),
        f"the saved state {path} is damaged and cannot be moved (Read-only file system); it is ignored",
    )


def test_what_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    path = statefile.path(str(tmp_path), "qwen")
    path.mkdir()
    assert statefile.load(path) == (
        State(),
        f"the saved state {path} cannot be read (Is a directory); failures are counted from 0",
    )


@pytest.mark.parametrize("where", ["os.fsync", "tempfile.mkstemp", "pathlib.Path.mkdir", "pathlib.Path.replace"])
def test_a_full_disk_leaves_the_old_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = statefile.path(str(tmp_path), "qwen")
    statefile.save(path, STATE)
    with monkeypatch.context() as patch:
        patch.setattr(where, failing(28))
        assert statefile.save(path, State()) == (
            f"the state cannot be saved in {path} (No space left on device); "
            "a restart of the head will forget its failures"
        )
    assert statefile.load(path) == (STATE, None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["qwen.json"]


def test_a_state_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem = statefile.save(statefile.path(str(tmp_path / "file"), "qwen"), STATE)
    assert problem is not None
    assert "cannot be saved" in problem
