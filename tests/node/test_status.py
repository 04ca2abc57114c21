from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from stack_node import health, status
from stack_node.main import main as stack_node
from tests.node.a_status import a_member, a_status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKEN = "a-token-of-this-group"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "token").write_text(f"{TOKEN}\n")


@contextmanager
def head(answer: object, code: int = 200) -> Iterator[int]:
    """A control port that wants the token; what it answers is text or a status."""
    text = answer if isinstance(answer, str) else json.dumps(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/status" and self.headers["Authorization"] == f"Bearer {TOKEN}"
            self.send_response(code if known else 401)
            self.end_headers()
            self.wfile.write(text.encode() if known else b"")

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def environment(folder: Path, port: int, **other: str) -> dict[str, str]:
    group = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "GEN_STACK_CONTROL_PORT": str(port)}
    return {**group, "GEN_STACK_TOKEN_FILE": str(folder / "token"), **other}


READY = """\
group       qwen
phase       ready
epoch       3
requests    2 running, 0 waiting
failures    1 of 5
restarts    1 engine, 1 lost
recovery    took 62 s the last time, noticed after 0.3 s
last fault  epoch 2, rank 1, engine: rank 1 (gpu-b, 10.0.0.12): the engine was killed by SIGKILL
              CUDA error: an illegal memory access
              See the manual

rank  node   address    state
0     gpu-a  10.0.0.11  running
1     gpu-b  10.0.0.12  running

this node (rank 1): healthy; worker: epoch 3: the engine is running
"""


def test_a_ready_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    health.write_group(True, "epoch 3: the engine is running", "worker")
    with head(a_status()) as port:
        assert status.main([], environment(tmp_path, port)) == 0
    assert capsys.readouterr() == (READY, "")


FETCHING = """\
group       qwen
phase       forming
            waiting for rank 2 to join; the weights of rank 1 (gpu-b, 10.0.0.12)
epoch       0
requests    closed
failures    0 of 5
restarts    none

rank  node   address    state
0     gpu-a  10.0.0.11  waiting
1     gpu-b  10.0.0.12  fetching  5.0 of 70.0 GiB; fetches the weights
2     -      -          missing   has not joined
"""


def test_a_group_that_forms() -> None:
    forming = a_status(
        phase="forming",
        ready=False,
        sentence="waiting for rank 2 to join; the weights of rank 1 (gpu-b, 10.0.0.12)",
        epoch=0,
        failures=0,
        restarts={},
        last_fault=None,
        last_recovery_s=None,
        api=None,
        members=[
            a_member(0, state="waiting"),
            a_member(1, state="fetching", text="fetches the weights", done=5 << 30, total=70 << 30),
            a_member(2, state="missing", text="has not joined", node="", address=""),
        ],
    )
    assert "\n".join(status.table(forming)) + "\n" == FETCHING


def test_a_group_that_is_down_says_when_it_tries_again() -> None:
    lines = status.table(a_status(phase="down", ready=False, sentence="down", failures=6, next_try_s=290.0))
    assert "failures    6 of 5, next attempt in 5 min" in lines


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (120, "2 min"), (3600, "60 min"), (9000, "2.5 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert status.duration(seconds) == text


def test_not_ready_is_an_exit_status(tmp_path: Path) -> None:
    with head(a_status(ready=False)) as port:
        assert status.main([], environment(tmp_path, port)) == 1


def test_json_is_the_heads_answer_and_this_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with head(a_status()) as port:
        assert status.main(["--json"], environment(tmp_path, port)) == 0
    printed = json.loads(capsys.readouterr().out)
    own = printed.pop("this_node")
    assert printed == a_status()
    assert (own["rank"], own["healthy"]) == (1, False)


def test_the_command_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with head(a_status()) as port:
        for name, value in environment(tmp_path, port).items():
            monkeypatch.setenv(name, value)
        assert stack_node(["status"]) == 0
    assert capsys.readouterr().out.startswith("group       qwen\n")


def test_names_and_logs_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with head(a_status(members=[a_member(0, node="\x1b[2Jx\u202ey")])) as port:
        status.main([], environment(tmp_path, port))
    out = capsys.readouterr().out
    assert "?[2Jx?y" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("args", [["--yaml"], ["--json", "--json"], ["x"]])
def test_wrong_arguments(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(args, {}) == 2
    assert capsys.readouterr().err == status.USAGE


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--help"], {}) == 0
    assert capsys.readouterr().out == status.USAGE


def test_wrong_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([], {}) == 2
    assert capsys.readouterr().err == (
        "stack-node status: NNODES is not set: this node serves alone; `stack-node health` says how it is\n"
    )
    assert status.main([], environment(tmp_path, 1, NODE_RANK="7", GEN_STACK_TOKEN_FILE="/nowhere")) == 2
    problems = capsys.readouterr().err.splitlines()
    assert "NODE_RANK='7'" in problems[0]
    assert problems[1] == "stack-node status: GEN_STACK_TOKEN_FILE=/nowhere cannot be read: No such file or directory"


def unreachable(folder: Path, port: int, capsys: pytest.CaptureFixture[str], **other: str) -> str:
    assert status.main([], environment(folder, port, **other)) == 3
    problem, own = capsys.readouterr().err.splitlines()
    assert own.startswith("this node (rank 1): unhealthy; ")
    assert TOKEN not in problem
    return problem.removeprefix("stack-node status: ")


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with head({}) as port:
        pass
    problem = unreachable(tmp_path, port, capsys)
    assert problem.startswith(f"the head does not answer at 127.0.0.1:{port} (")
    assert problem.endswith(f"whether a firewall closes TCP port {port}")


def test_another_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("another")
    with head(a_status()) as port:
        assert "has another token" in unreachable(tmp_path, port, capsys)


def test_a_group_without_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with head(a_status(), 403) as port:
        assert "tells only its own host" in unreachable(tmp_path, port, capsys)


@pytest.mark.parametrize(("answer", "code"), [("<html>", 200), ("[]", 200), ("{}", 200), ("", 404), ("[" * 99, 200)])
def test_something_else_answers(answer: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with head(answer, code) as port:
        assert f"is no head (HTTP status {code})" in unreachable(tmp_path, port, capsys)


def test_a_head_of_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other: dict[str, Any] = {"phase": "ready", "ready": True}
    with head(other) as port:
        assert unreachable(tmp_path, port, capsys) == "the head's status is of another version"


def test_a_group_of_one_needs_no_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with head(a_status()) as port:
        alone = {**environment(tmp_path, port, NNODES="1", NODE_RANK=""), "MASTER_ADDR": ""}
        assert status.main([], alone) == 0
    assert "this node" not in capsys.readouterr().out
