from __future__ import annotations

import contextlib
import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from stack_node import config as configuration
from stack_node.logpump import Sink, Voice, copy, labelled, line_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stack_node.config import NodeConfig

NOTICE = r"stack-node: (\d+) lines? of output dropped here, because nobody read them in time"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)


def fill(write_end: int) -> int:
    """Make a pipe full, so that the next writer is stuck at once; returns how many bytes that took."""
    os.set_blocking(write_end, False)
    size = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            size += os.write(write_end, b"." * 4096)
    os.set_blocking(write_end, True)
    return size


def drain(read_end: int, until: bytes, skip: int = 0) -> bytes:
    data = b""
    while until not in data:
        data += os.read(read_end, 1 << 16)
    return data[skip:]


def test_bytes_pass_untouched(pipe: tuple[int, int]) -> None:
    source_read, source_write = os.pipe()
    reader = copy(source_read, Sink(pipe[1], labelled("stack-node")))
    original = b"caf\xe9 \x00\r 10%\r 20%\n\xff" * 100 + b"END"
    os.write(source_write, original)
    assert drain(pipe[0], b"END") == original
    os.close(source_write)
    reader.join(10)
    assert not reader.is_alive()


def test_own_lines_do_not_break_into_others(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1], labelled("stack-node[0/2]"))
    sink.put(b"loading 10%")
    Voice(sink)("ready")
    assert drain(pipe[0], b"ready\n") == b"loading 10%\nstack-node[0/2]: ready\n"


def test_a_stuck_reader_blocks_nobody_and_learns_what_it_missed(pipe: tuple[int, int]) -> None:
    filled = fill(pipe[1])
    sink = Sink(pipe[1], labelled("stack-node"), limit=10_000)
    lines = 20_000
    for number in range(lines):
        sink.put(b"line %d\n" % number)
    assert not sink.flush(0.01)
    sink.put(b"END\n")
    *seen, end = drain(pipe[0], b"END\n", filled).decode().splitlines()
    missed = [int(found[1]) for line in seen if (found := re.fullmatch(NOTICE, line))]
    assert missed
    assert len(seen) - len(missed) + sum(missed) == lines
    assert (seen[-1], end) == (f"line {lines - 1}", "END")
    assert sink.flush(10)


def test_a_gap_ends_on_a_whole_line(pipe: tuple[int, int]) -> None:
    filled = fill(pipe[1])
    sink = Sink(pipe[1], labelled("stack-node"), limit=4_000)
    text = b"".join(b"line %06d\n" % number for number in range(50_000))
    for start in range(0, len(text), 7):  # chunks that end anywhere
        sink.put(text[start : start + 7])
    sink.put(b"END\n")
    seen = drain(pipe[0], b"END\n", filled).decode().splitlines()
    gaps = [index for index, line in enumerate(seen) if re.fullmatch(NOTICE, line)]
    assert gaps
    for index, line in enumerate(seen[:-1]):
        # Only what was written before the gap, and could not be taken back, may end in the middle of a line.
        assert re.fullmatch(r"line \d{6}", line) or index in gaps or index + 1 in gaps


def test_a_reader_that_is_gone_is_no_error() -> None:
    read_end, write_end = os.pipe()
    sink = Sink(write_end, labelled("stack-node"))
    os.close(read_end)
    sink.put(b"lost\n")
    assert sink.flush(10)


def node(**variables: str) -> NodeConfig:
    config, problems = configuration.read(variables)
    assert problems == []
    return config


GROUP = {"NNODES": "3", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.11", "GEN_STACK_GROUP": "qwen"}


def test_text_has_the_node_in_front() -> None:
    assert line_of(node(**GROUP))("ready") == b"stack-node[1/3]: ready\n"
    assert line_of(node())("ready") == b"stack-node: ready\n"


def test_json_lines_have_time_node_and_group() -> None:
    line = line_of(node(**GROUP, GEN_STACK_LOG_FORMAT="json"), clock=lambda: 1_796_094_000.25)
    written = line('rank 2 says "no"\nand é')
    assert written.count(b"\n") == 1
    assert json.loads(written) == {
        "time": "2026-12-01T03:00:00.250Z",
        "node": 1,
        "nnodes": 3,
        "group": "qwen",
        "message": 'rank 2 says "no"\nand é',
    }


def test_a_voice_speaks_json_when_asked_to(pipe: tuple[int, int]) -> None:
    sink = Sink(pipe[1], line_of(node(**GROUP, GEN_STACK_LOG_FORMAT="json")))
    sink.put(b"loading 10%")
    Voice(sink)("ready")
    engine, own = drain(pipe[0], b"}\n").splitlines()
    assert engine == b"loading 10%"
    assert json.loads(own)["message"] == "ready"


def test_gaps_are_told_in_json_too(pipe: tuple[int, int]) -> None:
    filled = fill(pipe[1])
    sink = Sink(pipe[1], line_of(node(**GROUP, GEN_STACK_LOG_FORMAT="json")), limit=1_000)
    for number in range(1_000):
        sink.put(b"line %d\n" % number)
    sink.put(b"END\n")
    told = [json.loads(line) for line in drain(pipe[0], b"END\n", filled).splitlines() if line.startswith(b"{")]
    assert told
    assert all(re.fullmatch(NOTICE.removeprefix("stack-node: "), line["message"]) for line in told)


def test_odd_characters_in_a_sentence_are_no_error() -> None:
    assert line_of(node())("\udcff") == b"stack-node: \\udcff\n"
