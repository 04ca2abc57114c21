"""Downloads: entries of the cache are whole or absent, made once, and errors are sentences."""

from __future__ import annotations

import shutil
import tarfile
from typing import TYPE_CHECKING

import pytest

from tools import downloads
from tools.process import ToolError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GEN_STACK_CACHE", str(tmp_path / "cache"))
    downloads._private_apt.cache_clear()
    return tmp_path / "cache"


def test_an_entry_is_made_once() -> None:
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "file").write_text("here")

    first = downloads._entry("thing", build)
    assert (first / "file").read_text() == "here"
    assert downloads._entry("thing", build) == first
    assert len(calls) == 1


def test_a_failed_entry_leaves_nothing_and_is_tried_again(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ToolError("no network")

    with pytest.raises(ToolError, match="no network"):
        downloads._entry("thing", fail)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    assert downloads._entry("thing", lambda folder: None).is_dir()


def test_an_engine_of_another_version_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(_suite: str, _packages: Sequence[str], folder: Path) -> None:
        (folder / "usr/sbin").mkdir(parents=True, exist_ok=True)
        program = folder / "usr/sbin/dockerd"
        program.write_text("#!/bin/sh\necho Docker version 27.0.1, build x\n")
        program.chmod(0o755)

    monkeypatch.setattr(downloads, "_unpack_debs", unpack)
    with pytest.raises(ToolError, match=r"another Docker engine than 26\.1: it says 'Docker version 27\.0\.1"):
        downloads.engine("26.1")
    assert not (cache / "engine-26.1").exists()


def test_a_machine_without_apt_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ToolError, match="this machine has no apt-get"):
        downloads.busybox()


def test_an_unknown_generation_names_the_known_ones() -> None:
    with pytest.raises(ToolError, match=r"no Docker generation '19\.03'; there are 20\.10, 26\.1"):
        downloads.engine("19.03")


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ("Debian\tmain\thttp://mirror.test/debian/\n", "http://mirror.test/debian/"),
        ("$(ORIGIN)\tmain\thttp://mirror.test/debian\n", "http://mirror.test/debian"),
        (
            "Debian\tmain\thttp://mirror.test/debian-security/\nDebian\tmain\thttp://mirror.test/debian/\n",
            "http://mirror.test/debian/",
        ),
    ],
)
def test_the_mirror_is_the_one_apt_is_set_up_with(
    rows: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keyring").touch()
    monkeypatch.setattr(downloads, "KEYRING", tmp_path / "keyring")
    monkeypatch.setattr(downloads, "run", lambda argv: rows)
    assert downloads._debian_mirror() == found


def test_a_machine_without_debians_archive_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keyring").touch()
    monkeypatch.setattr(downloads, "KEYRING", tmp_path / "keyring")
    monkeypatch.setattr(downloads, "run", lambda argv: "Vendor\tmain\thttp://vendor.test/apt/\n")
    with pytest.raises(ToolError, match="not set up with Debian's archive"):
        downloads._debian_mirror()


def test_an_engine_finds_its_libraries_where_it_will_be_mounted(tmp_path: Path) -> None:
    (tmp_path / "usr/lib/x86_64-linux-gnu/xtables").mkdir(parents=True)
    (tmp_path / "lib/x86_64-linux-gnu").mkdir(parents=True)
    env = downloads.engine_env(tmp_path.with_name("elsewhere"), layout=tmp_path)
    where = tmp_path.with_name("elsewhere")
    libraries = env["LD_LIBRARY_PATH"].split(":")
    assert sorted(libraries) == [f"{where}/lib/x86_64-linux-gnu", f"{where}/usr/lib/x86_64-linux-gnu"]
    assert f"{where}/usr/lib/x86_64-linux-gnu/xtables" in env["XTABLES_LIBDIR"].split(":")
    assert env["PATH"].startswith(f"{where}/usr/bin:{where}/usr/sbin:")


def test_one_file_is_taken_out_of_a_source_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thing-1.0/src").mkdir(parents=True)
    (tmp_path / "thing-1.0/src/program").write_text("binary")

    def pip(argv: Sequence[str]) -> str:
        with tarfile.open(f"{argv[argv.index('-d') + 1]}/thing-1.0.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / "thing-1.0", "thing-1.0")
        return ""

    monkeypatch.setattr(downloads, "run", pip)
    downloads._pip_source("thing", "1.0", "src/program", tmp_path / "program")
    assert (tmp_path / "program").read_text() == "binary"
    assert (tmp_path / "program").stat().st_mode & 0o111


def test_an_unknown_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        downloads.main(["engine-1.0"])
    assert ended.value.code == 2
    assert "no such thing: engine-1.0; there are engine-20.10" in capsys.readouterr().err


def test_a_failure_is_a_sentence_and_exit_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert downloads.main(["busybox"]) == 3
    assert "Traceback" not in (said := capsys.readouterr().err)
    assert "no apt-get" in said
