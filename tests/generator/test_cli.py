from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from gen_stack.schema import schema_text
from tests.generator.helpers import FOUR, ONE, TWO

MODULE = [sys.executable, "-m", "gen_stack"]


def run(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run gen-stack in a folder; whatever it is told, it never ends in a traceback."""
    command = [*options.pop("command", MODULE), *arguments]
    text = {"text": True, "encoding": "utf-8", "errors": "surrogateescape"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, cwd=folder, timeout=60, **{**streams, **text, **options}
    )
    for said in (done.stdout, done.stderr):
        assert not said or ("Traceback" not in said and "Exception ignored" not in said), said
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spec.yaml").write_text(TWO)
    return tmp_path


def test_a_run_says_what_was_decided_written_and_is_to_do_next(folder: Path) -> None:
    done = run(folder, "spec.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    written = sum(path.is_file() and path.name != ".gen-stack.json" for path in (folder / "stacks").rglob("*"))
    assert (
        done.stdout
        == f"""\
t: /models/m on 2 nodes
  tensor parallel 8: one rank for each GPU of a node, where the links are fastest
  pipeline parallel 2: what tensor 8 leaves of 16 ranks
  image vllm/vllm-openai:v0.32.0 and our layer: a group needs its entrypoint
  fit not checked: nothing says what the model is; set model.config to its config.json
stacks/t: {written} files written
next: copy each folder to its host, and in it run
  a (10.0.0.11): docker compose up -d --wait   then the endpoint is http://10.0.0.11:8000
  b (10.0.0.12): docker compose up -d
"""
    )
    assert "stacks/t: up to date\n" in run(folder, "spec.yaml").stdout


def test_the_installed_command_is_the_module(folder: Path) -> None:
    script = Path(sysconfig.get_path("scripts")) / "gen-stack"
    if not script.exists():
        pytest.skip("gen-stack is not installed here, only on the path")
    command = [str(script)]
    assert run(folder, "spec.yaml", "--stdout", "a", command=command).stdout == (
        run(folder, "spec.yaml", "--stdout", "a").stdout
    )


@pytest.mark.parametrize("option", ["-o", "--output"])
def test_the_folder_to_write_into(option: str, folder: Path) -> None:
    assert run(folder, "spec.yaml", option, "x/y").returncode == 0
    assert (folder / "x/y/a/compose.yaml").exists()
    assert not (folder / "stacks").exists()


def test_a_spec_in_another_folder(folder: Path) -> None:
    (folder / "here").mkdir()
    (folder / "key").write_text("sk-1")
    (folder / "spec.yaml").write_text(f"{TWO}api: {{key_file: key}}\n")
    assert run(folder / "here", "../spec.yaml").returncode == 0
    assert (folder / "here/stacks/t/a/secrets/api_key").read_text() == "sk-1\n"


def test_errors_go_to_the_error_stream_and_nothing_is_written(folder: Path) -> None:
    (folder / "spec.yaml").write_text(TWO.replace("10.0.0.12", "10.0.0.11"))
    done = run(folder, "spec.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    words = "'10.0.0.11' is already the address of a; every node needs its own"
    assert done.stderr == f"spec.yaml:5: nodes[1].address: {words}\n"
    assert list(folder.iterdir()) == [folder / "spec.yaml"]


def test_warnings_go_to_the_error_stream_and_stop_nothing(folder: Path) -> None:
    (folder / "spec.yaml").write_text(f"{TWO}engine: {{version: 0.31.0}}\n")
    done = run(folder, "spec.yaml")
    assert done.returncode == 0
    words = "engine.version: gen-stack is tested with vLLM 0.32.0, not with 0.31.0"
    assert done.stderr == f"warning: spec.yaml:6: {words}\n"


def test_check(folder: Path) -> None:
    done = run(folder, "spec.yaml", "--check")
    assert done.returncode == 1
    assert "stacks/t/a/compose.yaml: missing\n" in done.stdout
    assert not (folder / "stacks").exists()
    run(folder, "spec.yaml")
    assert (run(folder, "spec.yaml", "--check").returncode, run(folder, "spec.yaml", "--check").stdout) == (0, "")
    (folder / "stacks/t/b/compose.yaml").write_text("by hand")
    done = run(folder, "spec.yaml", "--check")
    assert (done.returncode, done.stdout) == (1, "stacks/t/b/compose.yaml: foreign\n")


def test_diff(folder: Path) -> None:
    run(folder, "spec.yaml")
    (folder / "spec.yaml").write_text(f"{TWO}api: {{port: 9000}}\n")
    done = run(folder, "spec.yaml", "--diff")
    assert done.returncode == 0
    assert done.stdout.startswith("--- stacks/t/a/compose.yaml\n+++ stacks/t/a/compose.yaml\n@@ ")
    assert "-      GEN_STACK_API_PORT: '8000'\n" in done.stdout
    assert "+      GEN_STACK_API_PORT: '9000'\n" in done.stdout
    assert "8000" in (folder / "stacks/t/a/compose.yaml").read_text()


def test_stdout(folder: Path) -> None:
    done = run(folder, "spec.yaml", "--stdout", "b")
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["name"] == "t-b"
    assert list(folder.iterdir()) == [folder / "spec.yaml"]
    run(folder, "spec.yaml")
    assert (folder / "stacks/t/b/compose.yaml").read_text() == done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["spec.yaml", "--stdout", "c"], "--stdout c: no such node in the spec, whose nodes are a and b\n"),
        (["spec.yaml", "--check", "--diff"], "--check, --diff and --stdout exclude each other; choose one\n"),
        (["spec.yaml", "--check", "--stdout", "a"], "--check, --diff and --stdout exclude each other; choose one\n"),
        (["nowhere.yaml"], "nowhere.yaml:1: there is no such file; `gen-stack init` writes one to start from\n"),
        (["."], ".:1: this is a folder; name the spec file in it\n"),
        ([], "SPEC"),
        (["spec.yaml", "--nope"], "--nope"),
        (["spec.yaml", "other.yaml"], "other.yaml"),
        (["spec.yaml", "-o"], "-o"),
        (["spec.yaml", "--stdout"], "--stdout"),
        (["schema", "x"], "x"),
    ],
)
def test_wrong_use_is_status_2(arguments: list[str], words: str, folder: Path) -> None:
    done = run(folder, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert list(folder.iterdir()) == [folder / "spec.yaml"]


def test_help_names_every_option(folder: Path) -> None:
    done = run(folder, "--help")
    assert done.returncode == 0
    for word in ("SPEC", "--output", "-o", "--check", "--diff", "--stdout", "--version", "--help", "init", "schema"):
        assert word in done.stdout
    assert run(folder, "-h").stdout == done.stdout
    assert run(folder, "init", "--help").returncode == 0


def test_version(folder: Path) -> None:
    assert run(folder, "--version").stdout == "gen-stack 0.1.0\n"


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {}])
def test_nothing_that_is_no_terminal_gets_escape_codes(environment: dict[str, str], folder: Path) -> None:
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    for arguments in (["--help"], ["--nope"]):
        done = run(folder, *arguments, env={**plain, **environment})
        assert "\x1b" not in done.stdout + done.stderr


def test_schema(folder: Path) -> None:
    assert run(folder, "schema").stdout == schema_text()


def test_init_writes_a_spec_that_works_and_never_writes_over_one(folder: Path) -> None:
    assert run(folder, "init", "new.yaml").stdout == (
        "wrote new.yaml; change the nodes and the model in it, then run: gen-stack new.yaml\n"
    )
    before = (folder / "new.yaml").read_text()
    assert "gen-stack new.yaml" in before
    done = run(folder, "init", "new.yaml")
    words = "this file exists already; name another, or move it away"
    assert (done.returncode, done.stderr) == (2, f"new.yaml: {words}\n")
    assert (folder / "new.yaml").read_text() == before
    done = run(folder, "new.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert (run(folder, "init").returncode, (folder / "spec.yaml").read_text()) == (2, TWO)


def test_what_the_template_has_commented_out_works_too(folder: Path) -> None:
    run(folder, "init", "new.yaml")
    lines = (folder / "new.yaml").read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("# parallelism:"))
    full = "\n".join(lines[:start] + [re.sub(r"^# ?", "", line) for line in lines[start:]])
    (folder / "new.yaml").write_text(full)
    (folder / "api_key").write_text("sk-1")
    done = run(folder, "new.yaml")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("file", "file: File exists; nothing more was done\n"),
        ("file/x", "file/x: Not a directory; nothing more was done\n"),
        ("x" * 300, f"{'x' * 300}: File name too long; nothing more was done\n"),
        ("/proc/nowhere", "/proc/nowhere: No such file or directory; nothing more was done\n"),
        ("/dev/null", "/dev/null: File exists; nothing more was done\n"),
    ],
)
def test_a_folder_that_cannot_be_written_is_status_3(output: str, words: str, folder: Path) -> None:
    (folder / "file").write_text("mine")
    done = run(folder, "spec.yaml", "-o", output)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", words)


def test_a_persons_file_is_status_3(folder: Path) -> None:
    run(folder, "spec.yaml")
    (folder / "stacks/t/a/compose.yaml").write_text("by hand")
    done = run(folder, "spec.yaml")
    assert done.returncode == 3
    assert done.stderr.startswith("stacks/t/a/compose.yaml: this file is not as gen-stack wrote it")


def test_what_is_left_over_is_named_with_what_to_do(folder: Path) -> None:
    (folder / "spec.yaml").write_text(FOUR)
    run(folder, "spec.yaml")
    (folder / "spec.yaml").write_text(f"{TWO}engine: {{image: x}}\n")
    (folder / "stacks/t/a/image/Dockerfile").write_text("by hand")
    done = run(folder, "spec.yaml")
    assert done.returncode == 0
    for name in ("c", "d"):
        words = "left over from an earlier spec; stop it on its host, then delete the folder"
        assert f"stacks/t/{name}: {words}\n" in done.stdout
    words = "not needed any more; delete it if it is of no use to you"
    assert f"stacks/t/a/image/Dockerfile: {words}\n" in done.stdout
    assert "stacks/t/a: " not in done.stdout


@pytest.mark.parametrize("arguments", [["schema"], ["spec.yaml"], ["spec.yaml", "--stdout", "a"]])
def test_a_reader_that_goes_away(arguments: list[str], folder: Path) -> None:
    read, wrote = os.pipe()
    os.close(read)
    done = run(folder, *arguments, stdout=wrote)
    os.close(wrote)
    assert (done.returncode, done.stderr) == (3, "")


def test_streams_that_are_closed_or_full(folder: Path) -> None:
    shell = ["sh", "-c", '"$0" -m gen_stack "$@" >&-', sys.executable]
    assert run(folder, "spec.yaml", command=shell).returncode == 0
    shell[2] = shell[2].replace(">&-", "2>&-")
    assert run(folder, "nowhere.yaml", command=shell).returncode == 2
    with Path("/dev/full").open("w") as full:
        done = run(folder, "schema", stdout=full)
    assert (done.returncode, done.stderr) == (3, "gen-stack: No space left on device; nothing more was done\n")


def test_any_locale_gives_the_same_bytes(folder: Path) -> None:
    (folder / "spec.yaml").write_text(f"{TWO}engine: {{env: {{A: größe 😀}}}}\n", encoding="utf-8")
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(folder, "spec.yaml", "--stdout", "a", env=plain)
    assert done.stdout == run(folder, "spec.yaml", "--stdout", "a").stdout
    assert "A: größe 😀" in done.stdout
    assert run(folder, "--help", env=plain).returncode == 0


@pytest.mark.parametrize("name", ["my spec.yaml", "größe.yaml", "a\nb.yaml", "\udcff.yaml", "$HOME.yaml"])
def test_odd_names_of_files(name: str, folder: Path) -> None:
    (folder / name).write_text(ONE)
    done = run(folder, name, "-o", f"out {name}")
    assert (done.returncode, done.stderr) == (0, "")
    text = (folder / f"out {name}" / "a/compose.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["name"] == "t-a"
    assert run(folder, f"./{name}").returncode == 0


def test_a_spec_may_be_called_like_a_command(folder: Path) -> None:
    (folder / "schema").write_text(ONE)
    assert run(folder, "./schema").returncode == 0


def test_a_spec_may_come_through_a_pipe(folder: Path) -> None:
    done = run(folder, "/dev/stdin", "--stdout", "a", input=ONE)
    assert yaml.safe_load(done.stdout)["name"] == "t-a"


def test_an_interrupt_is_no_error_of_gen_stack(folder: Path) -> None:
    """A pipe that nobody writes to keeps it waiting, so that the interrupt meets it at work."""
    os.mkfifo(folder / "pipe")

    def hear() -> None:  # a background job inherits an ignored SIGINT, and so would this test's child there
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen([*MODULE, "pipe"], cwd=folder, stderr=subprocess.PIPE, text=True, preexec_fn=hear) as process:
        deadline = time.monotonic() + 30
        while "pipe" not in _waits_in(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            assert (process.communicate(timeout=30)[1], process.returncode) == ("stopped\n", 130)
        finally:
            process.kill()


def _waits_in(pid: int) -> str:
    """Say in which call of the kernel a process sleeps, such as `wait_for_partner`, which opening a pipe does."""
    try:
        where = Path(f"/proc/{pid}/wchan").read_text()
        return "pipe" if where in ("wait_for_partner", "fifo_open", "pipe_wait") else where
    except OSError:
        return ""
