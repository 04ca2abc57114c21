"""The parts of the model's making that need no Docker engine and no network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tools import model
from tools.cache import cache_dir
from tools.process import ToolError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEN_STACK_CACHE", str(tmp_path / "cache"))


def fill_cache() -> None:
    made = cache_dir() / f"model-{model.model_key()}"
    made.mkdir()
    (made / "config.json").write_text("{}")


def test_a_model_that_is_there_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / model.NAME
    folder.mkdir()
    (folder / "config.json").write_text("mine")
    assert model.ensure_model(tmp_path) == folder
    assert (folder / "config.json").read_text() == "mine"


def test_the_cached_model_is_copied(tmp_path: Path) -> None:
    fill_cache()
    folder = model.ensure_model(tmp_path / "new" / "models")
    assert folder == tmp_path / "new" / "models" / model.NAME
    assert (folder / "config.json").read_text() == "{}"
    assert [path.name for path in folder.parent.iterdir()] == [model.NAME]


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ToolError, match="cannot make the folder"):
        model.ensure_model(tmp_path / "file" / "models")


def test_files_are_made_readable_by_everyone(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir(mode=0o700)
    (tmp_path / "sub" / "file").touch(mode=0o600)
    tmp_path.chmod(0o700)
    model.readable_by_all(tmp_path)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "sub")] == [0o755, 0o755]
    assert (tmp_path / "sub" / "file").stat().st_mode & 0o777 == 0o644
