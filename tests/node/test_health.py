from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING

import pytest

from stack_node import health
from stack_node.health import NodeStatus, Status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


NOW = 1000.0


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@contextmanager
def api(answer: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def status(api_url: str | None = None) -> Status:
    started = health.start_ticks(os.getpid())
    assert started is not None
    return Status(os.getpid(), started, "plain", os.getpid(), started, api_url)


def test_status_file_is_written_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    health.write(status())
    assert health.read() == status()
    assert health.main() == 0
    assert capsys.readouterr().out == f"healthy: plain: the engine runs (process {os.getpid()})\n"
    health.remove()
    assert health.read() is None
    assert health.main() == 1
    assert capsys.readouterr().out == (
        "unhealthy: no engine was started yet; the start checks are running, or the container's log says why not\n"
    )


def test_somebody_elses_file_stays() -> None:
    other = replace(status(), pid=os.getpid() + 1)
    health.write(other)
    health.remove()
    assert health.read() == other


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": 1}', '{"written": 1}', "\0"])
def test_a_broken_file_is_none(text: str) -> None:
    health.status_path().write_text(text)
    assert health.read() is None


def test_a_file_of_an_earlier_process_with_our_number() -> None:
    stale = replace(status(), started=1)
    assert health.judge(stale, NOW)[0] is False


def test_an_ended_engine() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie counts as ended
        assert health.judge(replace(status(), engine_pid=ended.pid), NOW) == (False, "the engine has ended")
    assert health.judge(replace(status(), engine_pid=ended.pid), NOW) == (False, "the engine has ended")


def test_api_answers() -> None:
    with api(200) as url:
        assert health.judge(status(url), NOW) == (True, f"{url}/health answers 200")
    with api(503) as url:
        assert health.judge(status(url), NOW) == (False, f"{url}/health answers 503")


def test_api_is_silent() -> None:
    with api(200) as url:
        pass
    healthy, sentence = health.judge(status(url), NOW)
    assert not healthy
    assert sentence.startswith(f"{url}/health does not answer: ")
    assert "refused" in sentence


def node_status(healthy: bool = True, written: float = NOW) -> NodeStatus:
    started = health.start_ticks(os.getpid())
    assert started is not None
    return NodeStatus(os.getpid(), started, "worker", healthy, "waits for the group", written)


def test_a_supervisor_says_how_its_node_is(capsys: pytest.CaptureFixture[str]) -> None:
    health.write_group(True, "waits for the group", "worker")
    assert health.main() == 0
    health.write_group(False, "not connected to the head: refused", "worker")
    assert health.main() == 1
    assert capsys.readouterr().out == (
        "healthy: worker: waits for the group\nunhealthy: worker: not connected to the head: refused\n"
    )
    health.remove()
    assert health.read() is None


def test_a_supervisor_that_hangs_is_noticed() -> None:
    assert health.judge(node_status(), NOW + 19)[0]
    assert health.judge(node_status(), NOW + 21) == (
        False,
        "the supervisor hangs: it has said nothing for 21 s; restart this container",
    )


def test_a_supervisor_that_is_gone_is_not_healthy() -> None:
    assert health.judge(replace(node_status(), started=1), NOW)[0] is False


def test_a_full_disk_leaves_the_last_word_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    health.write_group(True, "waits for the group", "worker")
    before = health.read()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("json.dump", full)
    with pytest.raises(OSError, match="No space left"):
        health.write_group(False, "x", "worker")
    assert health.read() == before
    assert list(tmp_path.iterdir()) == [health.status_path()]


def test_the_check_imports_little() -> None:
    """It runs every few seconds on every host."""
    program = (
        "import sys, stack_node.main; stack_node.main.main(['health']); "
        "print(*sorted({'http.client', 'ssl', 'asyncio', 'aiohttp', 'prometheus_client'} & set(sys.modules)))"
    )
    health.write_group(True, "waits for the group", "worker")
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(health.status_path().parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "healthy: worker: waits for the group\n\n"
