"""The model's files on this node: found, fetched or checked before the engine needs them.

Inside the engine a slow download or a missing file would meet fixed limits, with all other ranks waiting. The download
is a child process (fetch.py), so that the hub's library and what it may do to memory stay out of the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from stack_node import flags
from stack_node.modelfiles import check_directory
from stack_node.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

IGNORED = ("original/**/*",)  # vLLM's default of --ignore-patterns

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_END_S = 3.0  # for the child to leave when it is told to
_FIND = "import sys; sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]; "  # never modules of the working folder
_RUN = f"{_FIND}from stack_node.fetch import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Source:
    """Where the weights come from, as the engine's arguments say."""

    model: str  # hub id, or a path
    revision: str | None
    load_format: str
    ignored: tuple[str, ...]  # patterns of weights that are not loaded
    download_dir: str | None  # instead of the hub's cache
    tokenizer: str | None  # hub id of another model that only the tokenizer comes from
    tokenizer_revision: str | None
    left: str | None  # why nothing is done about it here; None: something is

    @property
    def local(self) -> bool:
        """Whether the model is a path, by its looks: an id may name a folder that is there, too."""
        return self.model.startswith(("/", ".", "~"))


def source(args: Sequence[str], environ: Mapping[str, str]) -> Source:
    """What the engine's arguments say about the weights."""
    items = flags.split(args)
    model = flags.model(items)
    load_format = flags.last_value(items, "--load-format") or "auto"
    tokenizer = flags.last_value(items, "--tokenizer")
    return Source(
        model=model or "",
        revision=flags.last_value(items, "--revision"),
        load_format=load_format,
        ignored=flags.all_values(items, "--ignore-patterns") or IGNORED,
        download_dir=flags.last_value(items, "--download-dir"),
        tokenizer=tokenizer if tokenizer and tokenizer != model and _HUB_ID.fullmatch(tokenizer) else None,
        tokenizer_revision=flags.last_value(items, "--tokenizer-revision"),
        left=_left(model, load_format, environ),
    )


def _left(model: str | None, load_format: str, environ: Mapping[str, str]) -> str | None:
    if load_format == "dummy":
        return "--load-format=dummy needs no files"
    if model is None:
        return "the arguments do not tell the model; write it first"
    if environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return "VLLM_USE_MODELSCOPE is set"
    if "://" in model:
        return "the model is in an object store"
    path = model.startswith(("/", ".", "~"))
    if not path and (":" in model or model.endswith(".gguf")):
        return "GGUF files are chosen by the engine"
    if not path and not _HUB_ID.fullmatch(model):
        return "the model is neither a path nor a hub id"
    return None


def with_path(args: Sequence[str], path: str) -> list[str]:
    """The engine's arguments with a folder in the model's place, under the name that the model had.

    Arguments that do not tell the model are left as they are.
    """
    items = flags.split(args)
    model = flags.model(items)
    if model is None:
        return list(args)
    word = None if flags.has(items, "--model") else flags.model_word(items)
    words: list[str] = []
    for position, item in enumerate(items):
        if item.flag == "--model":
            words.append(f"--model={path}")
        else:
            words += [path] if position == word else item.tokens
    if flags.has(items, "--served-model-name"):
        return words
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], f"--served-model-name={model}", *words[end:]]


class Weights:
    """Gets the weights in a thread and a child process of its own; every method returns at once."""

    def __init__(
        self,
        args: Sequence[str],
        environ: Mapping[str, str],
        say: Callable[[str], None],
        progress: Callable[[int, int, str], None],
        done: Callable[[str | None], None],
        failed: Callable[[str, bool], None],
        spare: set[int],
    ) -> None:
        """The callbacks come from a thread of this object's and must not wait.

        `progress(done, total, text)` in bytes, about once a second. `done(path)`: the weights are here; a path has to
        be put in the model's place (`with_path`), with None the engine finds them itself. `failed(reason, again)`:
        they cannot be had; where `again`, the attempts go on by themselves. `spare` are process ids that nobody else
        may kill or reap; the child's is among them while it runs.
        """
        self._source = source(args, environ)
        self._environ = dict(environ)
        self._say = say
        self._progress = progress
        self._done = done
        self._failed = failed
        self._spare = spare
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[str] | None = None
        self._stopped = False
        self._last_note = ""

    def start(self) -> None:
        """Begin, or begin again where it stopped; nothing happens while it runs."""
        with self._lock:
            if self._stopped or (self._thread is not None and self._thread.is_alive()):
                return
            self._thread = threading.Thread(target=self._work, daemon=True, name="weights")
            self._thread.start()

    def stop(self) -> None:
        """End for good, without another callback but one that is just under way. What was fetched remains."""
        with self._lock:
            self._stopped = True
            child = self._child
        if child is not None:
            self._let_go(child)

    # --- in the thread

    def _work(self) -> None:
        try:
            self._get()
        except OSError as error:  # no process, no descriptor
            self._fail(f"the weights cannot be looked after: {error}", again=False)

    def _get(self) -> None:
        wanted = self._source
        if wanted.left is not None:
            self._note(f"weights: left to the engine: {wanted.left}")
            self._finish(None)
        elif wanted.local or Path(wanted.model).exists():
            self._check(Path(wanted.model))
        else:
            self._fetch(wanted)

    def _check(self, path: Path) -> None:
        problems = check_directory(path, self._source.load_format) if path.is_dir() else []
        if problems:
            self._fail("; ".join(problems), again=False)
        else:
            self._finish(None)

    def _fetch(self, wanted: Source) -> None:
        child = self._launch(wanted)
        if child is None:
            return
        output: IO[str] = child.stdout  # type: ignore[assignment]
        try:
            with output:
                ended = self._listen(output)
        finally:
            self._let_go(child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
            child.kill()
            code = child.wait()
            self._spare.discard(child.pid)
            with self._lock:
                self._child = None
        if not ended:
            killed = "; out of memory, perhaps" if code == -9 else ""
            self._fail(f"the process that fetches the weights ended with {code}{killed}", again=False)

    def _launch(self, wanted: Source) -> subprocess.Popen[str] | None:
        command = [sys.executable, "-c", _RUN, str(Path(__file__).resolve().parents[1]), *fetch_arguments(wanted)]
        with self._lock:
            if self._stopped:
                return None
            # Its standard input is its life: it ends when that is closed, by `stop` or by this process's own end.
            self._child = subprocess.Popen(
                command,
                env=self._environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # all that matters comes as JSON
                text=True,
                encoding="utf-8",
                errors="replace",
            )
            self._spare.add(self._child.pid)
            return self._child

    def _listen(self, output: IO[str]) -> bool:
        """Pass on what the child says; whether it said how it ended."""
        pace = Pace(time.monotonic())
        for line in output:
            message = _parse(line)
            if "path" in message:
                self._note(message["text"])
                self._finish(message["path"] if message["replace"] else None)
                return True
            if "error" in message:
                self._fail(message["error"], message["retry"])
                if not message["retry"]:
                    return True
            elif "note" in message:
                self._note(message["note"])
            elif "total" in message:
                self._report(pace, message["done"], message["total"])
        return False

    def _report(self, pace: Pace, done: int, total: int) -> None:
        now = time.monotonic()
        text = pace.text(now, done, total)
        if pace.due(now, done, total):
            self._say(f"weights: {text}")
        self._progress(done, total, text)

    def _note(self, text: str) -> None:
        if text != self._last_note:  # the same check once a minute needs no line each time
            self._last_note = text
            self._say(text)

    def _finish(self, path: str | None) -> None:
        if not self._stopped:
            self._done(path)

    def _fail(self, reason: str, again: bool) -> None:
        if not self._stopped:
            self._failed(reason, again)

    @staticmethod
    def _let_go(child: subprocess.Popen[str]) -> None:
        with contextlib.suppress(OSError):
            child.stdin.close()  # type: ignore[union-attr]


def fetch_arguments(wanted: Source) -> list[str]:
    """Command line of fetch.py."""
    options = {
        "--revision": wanted.revision,
        "--cache": wanted.download_dir,
        "--load-format": wanted.load_format,
        "--tokenizer": wanted.tokenizer,
        "--tokenizer-revision": wanted.tokenizer_revision,
    }
    words = [wanted.model, *(f"{name}={value}" for name, value in options.items() if value is not None)]
    return [*words, *(f"--ignore={pattern}" for pattern in wanted.ignored)]


def _parse(line: str) -> dict[str, Any]:
    """A message of the child's; empty when it is none, such as a line that a library printed."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}
