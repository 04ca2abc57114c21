"""What is kept of a log, and which of its lines tell why an engine failed."""

from __future__ import annotations

from stack_node import logtail
from stack_node.logtail import Tail, root_cause

WORKER = "(Worker_TP1 pid=14)"
CORE = "(EngineCore pid=12)"
API = "(APIServer pid=1)"
STAMP = "12-01 02:57:12"

# As vLLM 0.32 writes it: a worker's error, then what the engine core and the API server make of it.
CASCADE = f"""\
{WORKER} INFO {STAMP} [gpu_model_runner.py:4801] Starting to load model m...
{CORE} INFO {STAMP} [core.py:101] Initializing a V1 LLM engine
{WORKER} ERROR {STAMP} [multiproc_executor.py:880] WorkerProc failed to start.
{WORKER} ERROR {STAMP} [multiproc_executor.py:880] Traceback (most recent call last):
{CORE} INFO {STAMP} [core.py:102] something else meanwhile
{WORKER} ERROR {STAMP} [multiproc_executor.py:880]   File "/x/multiproc_executor.py", line 851, in worker_main
{WORKER} ERROR {STAMP} [multiproc_executor.py:880]     worker = WorkerProc(*args, **kwargs)
{WORKER} ERROR {STAMP} [multiproc_executor.py:880] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.
{WORKER} INFO {STAMP} [multiproc_executor.py:899] Parent process exited, terminating worker
{CORE} ERROR {STAMP} [core.py:1110] EngineCore failed to start.
{CORE} ERROR {STAMP} [core.py:1110] Traceback (most recent call last):
{CORE} ERROR {STAMP} [core.py:1110]   File "/x/core.py", line 1080, in run_engine_core
{CORE} ERROR {STAMP} [core.py:1110] Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
{CORE} Process EngineCore:
{CORE} Traceback (most recent call last):
{CORE}     raise e from None
{CORE} Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
{API} Traceback (most recent call last):
{API}   File "/usr/local/bin/vllm", line 10, in <module>
{API}     sys.exit(main())
{API} RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
""".splitlines()  # noqa: E501


def test_the_cause_and_not_its_consequences() -> None:
    found = root_cause(CASCADE)
    assert found[-1].endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.")
    assert len(found) == 6
    assert all(line.startswith(WORKER) for line in found)


def test_a_consequence_when_there_is_nothing_else() -> None:
    assert root_cause(CASCADE[-4:])[-1].startswith(f"{API} RuntimeError: Engine core initialization failed")


def test_a_bare_traceback() -> None:
    lines = ["hello", "Traceback (most recent call last):", '  File "a.py", line 1, in <module>', "ValueError: bad", ""]
    assert root_cause([*lines, "bye"]) == lines[:4]


def test_an_error_line_in_service() -> None:
    lines = [
        f"{CORE} INFO {STAMP} [core.py:1] fine",
        f"{CORE} ERROR {STAMP} [dump_input.py:79] Dumping scheduler output",
        f"{CORE} ERROR {STAMP} [core.py:1149] EngineCore encountered a fatal error.",
        f"{CORE} ERROR {STAMP} [core.py:1149] RuntimeError: [gloo] Connection closed by peer [10.0.0.2]:41001",
        f"{API} ERROR {STAMP} [async_llm.py:701] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an "
        "issue. See stack trace (above) for the root cause.",
    ]
    assert root_cause(lines) == lines[:4]


def test_a_worker_that_said_nothing() -> None:
    """As vLLM 0.32 reports a worker that was killed."""
    lines = [
        f"{CORE} ERROR {STAMP} [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: -9), "
        "shutting down executor.",
        f"{CORE} ERROR {STAMP} [core.py:1512] RuntimeError: Executor failed.",
        f"{API} ERROR {STAMP} [async_llm.py:906] AsyncLLM output_handler failed.",
    ]
    assert root_cause(lines) == lines[:1]
    said = [f"{WORKER} Fatal Python error: Bus error", *lines]
    assert root_cause(said) == said[:1]


def test_pointers_under_a_traceback_are_left_out() -> None:
    lines = [f"{CORE} ERROR {STAMP} [core.py:1]     run()", f"{CORE} ERROR {STAMP} [core.py:1]     ^^~~", "OSError: a"]
    assert root_cause(lines) == [lines[0], lines[2]]


def test_a_native_crash() -> None:
    lines = [f"{WORKER} INFO {STAMP} [x.py:1] a", f"{WORKER} Fatal Python error: Segmentation fault", f"{API} later"]
    assert root_cause(lines) == lines[:2]


def test_without_an_error_the_last_lines() -> None:
    lines = [f"line {number}" for number in range(30)] + ["", "  "]
    assert root_cause(lines) == [f"line {number}" for number in range(18, 30)]
    assert root_cause([]) == []


def test_a_word_in_a_line_is_no_error() -> None:
    lines = [f"{CORE} INFO {STAMP} [x.py:1] retrying after ConnectionError: refused", "the RuntimeError: was handled"]
    assert root_cause([*lines, "last"]) == [*lines, "last"]


class _Sink:
    def __init__(self) -> None:
        self.data = b""

    def put(self, data: bytes) -> None:
        self.data += data


def test_streams_pass_untouched_and_keep_their_lines_apart() -> None:
    tail, sinks = Tail(), (_Sink(), _Sink())
    out, err = (tail.beside(sink) for sink in sinks)
    out.put(b"half \x1b[31mof ")
    err.put(b"whole\n")
    out.put(b"a line\x1b[0m\nrest")
    assert tail.lines() == ["whole", "half of a line", "rest"]
    assert sinks[0].data == b"half \x1b[31mof a line\x1b[0m\nrest"
    assert tail.taken == len(sinks[0].data + sinks[1].data)


def test_of_a_progress_bar_the_last_state() -> None:
    tail = Tail()
    tail.feed(1, b"1 %\r2 %\r")
    tail.feed(1, b"3 %\r\n")
    assert tail.lines() == ["3 %"]


def test_the_tail_is_bounded() -> None:
    tail = Tail()
    for number in range(1000):
        tail.feed(1, b"%d\n" % number)
    assert tail.lines()[0] == str(1000 - logtail.LINES)
    tail.feed(1, b"x" * (10 << 20))
    for _ in range(100):
        tail.feed(1, b"y" * 5000 + b"\n")
    assert sum(map(len, tail.lines())) <= logtail.BYTES
