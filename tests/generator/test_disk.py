from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gen_stack.disk import RECORD, Difference, differences, locked, unified_diff, write
from gen_stack.output import OutputFile, outputs
from gen_stack.planner import make_plan
from gen_stack.problems import GenStackError
from tests.generator.helpers import FOUR, ONE, TWO, load

FILES = {
    "a/compose.yaml": OutputFile("one\n"),
    "a/image/run": OutputFile("#!/bin/sh\n"),
    "a/secrets/token": OutputFile("t\n", secret=True),
    "secrets/t.token": OutputFile("t\n", secret=True),
}


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Take down all that a run could change: content, mode, time and identity of every file and folder."""
    found = {}
    for path in sorted([folder, *folder.rglob("*")]):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (state.st_mode, state.st_mtime_ns, state.st_ino, content)
    return found


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def kinds(folder: Path, files: dict[str, OutputFile]) -> dict[str, str]:
    return {one.path: one.kind for one in differences(folder, files)}


def stack(folder: Path, text: str) -> dict[str, OutputFile]:
    loaded = load(text)
    return outputs(loaded, make_plan(loaded), folder)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def test_a_first_run_writes_all_of_it(tmp_path: Path) -> None:
    assert write(tmp_path, FILES) == [Difference(path, "missing") for path in sorted(FILES)]
    assert {path: text for path, text in contents(tmp_path).items() if path != RECORD} == {
        path: file.text for path, file in FILES.items()
    }


def test_a_second_run_touches_nothing(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    before = snapshot(tmp_path)
    assert write(tmp_path, FILES) == []
    assert snapshot(tmp_path) == before


def test_a_second_run_touches_nothing_with_a_node_left_over_either(tmp_path: Path) -> None:
    write(tmp_path, {**FILES, "b/compose.yaml": OutputFile("x")})
    write(tmp_path, FILES)
    before = snapshot(tmp_path)
    assert write(tmp_path, FILES) == [Difference("b/compose.yaml", "left over")]
    assert snapshot(tmp_path) == before


def test_looking_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / "a" / "compose.yaml").write_text("changed\n")
    before = snapshot(tmp_path)
    differences(tmp_path, FILES)
    list(unified_diff(tmp_path, FILES))
    assert snapshot(tmp_path) == before
    assert len(differences(tmp_path / "nowhere", FILES)) == len(FILES)
    assert not (tmp_path / "nowhere").exists()


def test_modes_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0o000, 0o077):
        folder = tmp_path / str(umask)
        before = os.umask(umask)
        try:
            folder.mkdir()
            write(folder, FILES)
        finally:
            os.umask(before)
        assert mode(folder / "a/secrets/token") == mode(folder / "secrets/t.token") == "0o600"
        assert mode(folder / "a/secrets") == mode(folder / "secrets") == "0o700"
        assert mode(folder / "a/image/run") == "0o755"
        assert mode(folder / "a/compose.yaml") == "0o644"
        assert mode(folder / RECORD) == "0o600"


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [("a/secrets/token", 0o644, "0o600"), ("a/secrets", 0o755, "0o700"), ("a/image/run", 0o644, "0o755")],
)
def test_modes_are_repaired(path: str, wrong: int, right: str, tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / path).chmod(wrong)
    assert set(kinds(tmp_path, FILES).values()) == {"mode"}
    write(tmp_path, FILES)
    assert mode(tmp_path / path) == right
    assert differences(tmp_path, FILES) == []


def test_a_changed_spec_changes_what_gen_stack_wrote(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    new = {**FILES, "a/compose.yaml": OutputFile("two\n")}
    assert write(tmp_path, new) == [Difference("a/compose.yaml", "changed")]
    assert (tmp_path / "a/compose.yaml").read_text() == "two\n"


@pytest.mark.parametrize("first", [True, False], ids=["made before the first run", "edited after it"])
def test_a_persons_file_is_never_written_over(first: bool, tmp_path: Path) -> None:
    if not first:
        write(tmp_path, FILES)
    (tmp_path / "a").mkdir(exist_ok=True)
    (tmp_path / "a/compose.yaml").write_text("by hand\n")
    before = snapshot(tmp_path)
    with pytest.raises(GenStackError) as caught:
        write(tmp_path, {**FILES, "a/image/run": OutputFile("new\n"), "a/other": OutputFile("new\n")})
    assert str(caught.value) == (
        f"{tmp_path}/a/compose.yaml: this file is not as gen-stack wrote it, so somebody's work may be in it; "
        "nothing was written. Put the change into the spec (--diff shows it), move the file away, and run again"
    )
    assert snapshot(tmp_path) == before


def test_all_files_of_a_person_are_named_at_once(tmp_path: Path) -> None:
    for path in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("by hand\n")
    with pytest.raises(GenStackError) as caught:
        write(tmp_path, FILES)
    assert str(caught.value).count("\n") == len(FILES) - 1


def test_a_file_that_is_as_it_would_be_is_no_persons(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/compose.yaml").write_text("one\n")
    assert "a/compose.yaml" not in kinds(tmp_path, FILES)


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / "a/notes").write_text("mine")
    (tmp_path / "a/image/notes").write_text("mine")
    write(tmp_path, {path: file for path, file in FILES.items() if path != "a/image/run"})
    assert contents(tmp_path)["a/notes"] == contents(tmp_path)["a/image/notes"] == "mine"


def test_what_is_not_needed_any_more_is_removed_with_its_empty_folder(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    rest = {path: file for path, file in FILES.items() if path != "a/image/run"}
    assert write(tmp_path, rest) == [Difference("a/image/run", "obsolete")]
    assert not (tmp_path / "a/image").exists()
    assert differences(tmp_path, rest) == []


def test_what_is_not_needed_any_more_but_was_changed_stays(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / "a/image/run").write_text("by hand\n")
    rest = {path: file for path, file in FILES.items() if path != "a/image/run"}
    assert write(tmp_path, rest) == [Difference("a/image/run", "left over")]
    assert (tmp_path / "a/image/run").read_text() == "by hand\n"


def test_a_node_that_is_gone_from_the_spec_may_still_run_and_stays(tmp_path: Path) -> None:
    write(tmp_path, stack(tmp_path, FOUR))
    found = write(tmp_path, stack(tmp_path, TWO))
    assert {one.path.split("/")[0] for one in found if one.kind == "left over"} == {"c", "d"}
    assert (tmp_path / "c/compose.yaml").exists()
    assert (tmp_path / "d/secrets/group_token").exists()


def test_a_token_is_made_once(tmp_path: Path) -> None:
    write(tmp_path, stack(tmp_path, TWO))
    token = (tmp_path / "secrets/t.token").read_text()
    for text in (FOUR, TWO, f"{TWO}api: {{port: 9000}}\n"):
        write(tmp_path, stack(tmp_path, text))
        assert (tmp_path / "secrets/t.token").read_text() == token
        assert (tmp_path / "b/secrets/group_token").read_text() == token


def test_a_copy_of_the_token_stands_in_for_a_lost_original(tmp_path: Path) -> None:
    write(tmp_path, stack(tmp_path, TWO))
    token = (tmp_path / "secrets/t.token").read_text()
    shutil.rmtree(tmp_path / "secrets")
    shutil.rmtree(tmp_path / "a")
    write(tmp_path, stack(tmp_path, TWO))
    assert (tmp_path / "secrets/t.token").read_text() == (tmp_path / "a/secrets/group_token").read_text() == token


def test_a_token_that_a_person_changes_reaches_all_nodes(tmp_path: Path) -> None:
    write(tmp_path, stack(tmp_path, TWO))
    (tmp_path / "secrets/t.token").write_text("rotated\n")
    write(tmp_path, stack(tmp_path, TWO))
    assert (tmp_path / "a/secrets/group_token").read_text() == "rotated\n"
    assert (tmp_path / "b/secrets/group_token").read_text() == "rotated\n"


def test_without_the_record_what_is_right_is_recognised(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / RECORD).unlink()
    assert differences(tmp_path, FILES) == []
    write(tmp_path, FILES)
    assert set(json.loads((tmp_path / RECORD).read_text())["files"]) == set(FILES)


def test_without_the_record_what_is_not_right_may_be_a_persons(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / RECORD).unlink()
    assert kinds(tmp_path, {**FILES, "a/compose.yaml": OutputFile("two\n")}) == {"a/compose.yaml": "foreign"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b"[" * 100_000,
        b'{"schema": "other/1", "files": {}}',
        b'{"schema": "gen-stack/record/1"}',
        b'{"schema": "gen-stack/record/1", "files": []}',
        b'{"schema": "gen-stack/record/1", "files": {"a": 7}}',
    ],
)
def test_a_damaged_record_is_named(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / RECORD).write_bytes(content)
    before = snapshot(tmp_path)
    with pytest.raises(GenStackError) as caught:
        write(tmp_path, FILES)
    words = "this is not gen-stack's record of what it wrote here; move it away"
    assert str(caught.value) == f"{tmp_path}/{RECORD}: {words}"
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("broken", ["write", "replace", "interrupt"])
def test_when_the_disk_refuses_nothing_changes(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FILES)
    before = contents(tmp_path)
    new = {path: OutputFile(f"{file.text}new\n", secret=file.secret) for path, file in FILES.items()}
    error: type[BaseException] = KeyboardInterrupt if broken == "interrupt" else OSError
    calls = 0

    def refuse(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if broken == "replace" else 3):
            raise error(28, "No space left on device")

    if broken == "replace":
        monkeypatch.setattr(Path, "replace", refuse)
    else:
        monkeypatch.setattr(Path, "chmod", refuse)  # the last step of each file that is put beside its place
    with pytest.raises(error):
        write(tmp_path, new)
    monkeypatch.undo()
    after = contents(tmp_path)
    assert {path: text for path, text in after.items() if not path.startswith(RECORD)} == {
        path: text for path, text in before.items() if not path.startswith(RECORD)
    }
    write(tmp_path, new)
    assert differences(tmp_path, new) == []


def test_a_run_that_ended_half_way_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, FILES)
    new = {path: OutputFile(f"{file.text}new\n", secret=file.secret) for path, file in FILES.items()}
    replace = Path.replace
    calls = 0

    def refuse(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == 4:  # the record, two of the files, and then no more
            raise OSError(5, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path, new)
    monkeypatch.undo()
    assert not [path for path in contents(tmp_path) if Path(path).name.startswith(".") and path != RECORD]
    assert kinds(tmp_path, new) == {"a/compose.yaml": "changed", "a/image/run": "changed"}
    assert kinds(tmp_path, FILES) == {"a/secrets/token": "changed", "secrets/t.token": "changed"}
    write(tmp_path, new)
    assert differences(tmp_path, new) == []


@pytest.mark.parametrize("path", ["a/compose.yaml", "a/secrets/token", RECORD])
def test_a_folder_where_a_file_should_be(path: str, tmp_path: Path) -> None:
    (tmp_path / path).mkdir(parents=True)
    before = snapshot(tmp_path)
    with pytest.raises(IsADirectoryError):
        write(tmp_path, FILES)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("path", ["a", "secrets", "a/secrets"])
def test_a_file_where_a_folder_should_be(path: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(NotADirectoryError):
        write(tmp_path, FILES)
    assert contents(tmp_path) == before


def test_a_folder_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    (tmp_path / "vault").mkdir()
    (tmp_path / "disk/a").mkdir()
    (tmp_path / "disk/a/secrets").symlink_to(tmp_path / "vault")
    write(tmp_path / "out", FILES)
    assert (tmp_path / "vault/token").read_text() == "t\n"
    assert (tmp_path / "out").is_symlink()
    assert differences(tmp_path / "disk", FILES) == []


def test_a_link_in_place_of_a_file_is_replaced_and_what_it_names_is_not(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / "elsewhere").write_text("one\n")
    (tmp_path / "a/compose.yaml").unlink()
    (tmp_path / "a/compose.yaml").symlink_to(tmp_path / "elsewhere")
    write(tmp_path, {**FILES, "a/compose.yaml": OutputFile("two\n")})
    assert (tmp_path / "elsewhere").read_text() == "one\n"
    assert not (tmp_path / "a/compose.yaml").is_symlink()


def test_a_diff_shows_what_would_change_and_no_secret(tmp_path: Path) -> None:
    write(tmp_path, {**FILES, "b/x": OutputFile("x\n"), "a/old": OutputFile("x\n")})
    (tmp_path / "a/image/run").chmod(0o644)
    new = {**FILES, "a/compose.yaml": OutputFile("two\n"), "a/new": OutputFile("new\n")}
    new["secrets/t.token"] = OutputFile("changed secret\n", secret=True)
    assert list(unified_diff(tmp_path, new)) == [
        f"--- {tmp_path}/a/compose.yaml\n",
        f"+++ {tmp_path}/a/compose.yaml\n",
        "@@ -1 +1 @@\n",
        "-one\n",
        "+two\n",
        "# a/image/run: mode\n",
        "--- /dev/null\n",
        f"+++ {tmp_path}/a/new\n",
        "@@ -0,0 +1 @@\n",
        "+new\n",
        "# secrets/t.token: changed (a secret, not shown)\n",
        "# a/old: obsolete\n",
        "# b/x: left over\n",
    ]


def test_a_diff_of_a_persons_file_shows_the_persons_change(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    (tmp_path / "a/compose.yaml").write_bytes(b"caf\xe9\n")
    assert list(unified_diff(tmp_path, FILES))[-2:] == ["-caf\N{REPLACEMENT CHARACTER}\n", "+one\n"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    entered = threading.Event()

    def second() -> None:
        with locked(tmp_path / "out"):
            entered.set()

    with locked(tmp_path / "out"):
        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.1)
    assert entered.wait(10)
    thread.join()


def test_runs_at_the_same_time_make_one_token(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(TWO)
    command = [sys.executable, "-m", "gen_stack", "spec.yaml", "-o", "out"]
    runs = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [run.wait(60) for run in runs] == [0, 0, 0]
    tokens = {path.read_text() for path in (tmp_path / "out").rglob("*token")}
    assert len(tokens) == 1


def test_one_node_more_or_less(tmp_path: Path) -> None:
    write(tmp_path, stack(tmp_path, ONE))
    write(tmp_path, stack(tmp_path, TWO))
    found = write(tmp_path, stack(tmp_path, ONE))
    assert {one.kind for one in found if one.path.startswith("a/")} == {"changed", "obsolete"}
    assert {str(path.relative_to(tmp_path)) for path in (tmp_path / "a").rglob("*")} == {"a/compose.yaml"}


def test_folders_of_an_image_are_open_to_any_user_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write(tmp_path / "out", {"a/image/x": OutputFile("x"), "a/secrets/y": OutputFile("y", secret=True)})
    finally:
        os.umask(before)
    modes = {name: (tmp_path / "out" / name).stat().st_mode & 0o777 for name in ("a", "a/image", "a/secrets")}
    assert modes == {"a": 0o755, "a/image": 0o755, "a/secrets": 0o700}
    assert (tmp_path / "out/a/image/x").stat().st_mode & 0o777 == 0o644
