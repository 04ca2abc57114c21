"""`vllm serve` flags that this package has to know, and a reading of a command line by argparse's rules.

Source: vLLM 0.32.0, entrypoints/launchers/cli_args.py (`BaseFrontendArgs`, `FrontendArgs`, `make_arg_parser`) and, for
the ways a flag can be spelt, utils/argparse_utils.py (`FlexibleArgumentParser`). Only flags whose fate we decide are
listed; any other flag passes through untouched, so a newer engine's flags need no change here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Arity(Enum):
    """How many values follow a flag."""

    SWITCH = "none; --no-<flag> exists"
    ONE = "one"
    MANY = "one or more"


def _flags(arity: Arity, names: str) -> dict[str, Arity]:
    return {f"--{name}": arity for name in names.split()}


# Read by the API server alone; a headless node has none. Some fail there: a chat template or a certificate that only
# the head has, --api-server-count. `--enable-flash-late-interaction` is missing on purpose: it reaches the engine too.
API_ONLY: dict[str, Arity] = {
    **_flags(
        Arity.SWITCH,
        """allow-credentials cohere-is-reasoning-model disable-fastapi-docs disable-uvicorn-access-log
        enable-auto-tool-choice enable-force-include-usage enable-log-deltas enable-log-outputs enable-offline-docs
        enable-per-request-metrics enable-prompt-tokens-details enable-request-id-headers enable-scale-out
        enable-server-load-tracking enable-ssl-refresh enable-tokenizer-info-endpoint
        exclude-tools-when-tool-choice-none grpc log-error-stack return-tokens-as-token-ids tokens-only
        trust-request-chat-template trust-request-mm-kwargs""",
    ),
    **_flags(
        Arity.ONE,
        """allowed-headers allowed-methods allowed-origins anthropic-disabled-thinking-effort api-server-count
        chat-template chat-template-content-format cohere-format data-parallel-supervisor-port
        default-chat-template-kwargs disable-access-log-for-endpoints dp-supervisor-probe-failure-threshold
        dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s fingerprint-mode fingerprint-value grpc-port
        h11-max-header-count h11-max-incomplete-event-size host max-log-len middleware port response-role root-path
        sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers ssl-keyfile tool-call-parser
        tool-parser-plugin tool-server tool-strict-level uds uvicorn-log-level""",
    ),
    **_flags(Arity.MANY, "api-key lora-modules"),
}

# What the group decides, and how to say it instead. In a group these are errors in the user's arguments.
OWNED: dict[str, str] = {
    "--nnodes": "set NNODES",
    "--node-rank": "set NODE_RANK",
    "--master-addr": "set MASTER_ADDR",
    "--master-port": "set MASTER_PORT",
    "--headless": "set NODE_RANK: ranks above 0 are headless",
    "--host": "set GEN_STACK_API_BIND",
    "--port": "set GEN_STACK_API_PORT",
    "--uds": "set GEN_STACK_API_BIND and GEN_STACK_API_PORT",
    "--api-key": "set GEN_STACK_API_KEY_FILE",
    "--shutdown-timeout": "set GEN_STACK_DRAIN",
    # Its counters tell whether the engine moves.
    "--disable-log-stats": "let the group watch the counters",
    # vLLM reads that file after the command line was judged; a rank or a port in it would go unseen.
    "--config": "write the file's settings as flags",
}

_KNOWN: dict[str, Arity] = {
    **API_ONLY,
    **_flags(
        Arity.ONE,
        """config cpu-distributed-timeout-seconds data-parallel-size device-ids distributed-executor-backend
        distributed-timeout-seconds download-dir load-format master-addr master-port model nnodes node-rank
        pipeline-parallel-size prefill-context-parallel-size revision shutdown-timeout tensor-parallel-size tokenizer
        tokenizer-revision""",
    ),
    **_flags(Arity.MANY, "ignore-patterns served-model-name"),
    **_flags(Arity.SWITCH, "disable-log-stats headless"),
}

_SHORT = {
    "-asc": "--api-server-count",
    "-dp": "--data-parallel-size",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
}

_NEGATIVE_NUMBER = re.compile(r"-(?:\d+|\d*\.\d+)")
_ATTACHED = re.compile(r"(-[nr])(\d+)")  # -n2: argparse takes a value without a space after one-letter flags


@dataclass(frozen=True)
class Item:
    """A piece of a command line: a flag with the values that certainly belong to it, or a bare word."""

    tokens: tuple[str, ...]
    flag: str | None = None  # canonical name of a known flag, without --no- and without .key
    values: tuple[str, ...] = ()
    complete: bool = True  # False: an unknown flag that may own the words after it

    @property
    def bare(self) -> bool:
        """Whether this is a word: a positional argument or an unknown flag's value."""
        return not is_option(self.tokens[0])


def is_option(token: str) -> bool:
    """Whether argparse takes a token for a flag rather than a value."""
    if not token.startswith("-") or len(token) == 1 or _NEGATIVE_NUMBER.fullmatch(token):
        return False
    return " " not in token.partition("=")[0]


def canonical(token: str) -> tuple[str | None, str | None]:
    """Known flag that a token spells (None when it is another) and the value attached to it.

    Accepts dashes and underscores, `--no-`, `--flag.key`, short forms and unambiguous beginnings, like vLLM's parser.
    """
    attached = _ATTACHED.fullmatch(token)
    if attached:
        return _SHORT[attached[1]], attached[2]
    name, equals, value = token.partition("=")
    given = value if equals else None
    if not name.startswith("--"):
        return _SHORT.get(name), given
    name = name.partition(".")[0].replace("_", "-")
    if name in _KNOWN:
        return name, given
    positive = "--" + name[len("--no-") :] if name.startswith("--no-") else name
    if positive != name and _KNOWN.get(positive) is Arity.SWITCH:
        return positive, given
    fitting = [flag for flag in _KNOWN if len(name) > len("--") and flag.startswith(name)]
    return (fitting[0] if len(fitting) == 1 else None), given


def split(args: Sequence[str]) -> list[Item]:
    """Pieces of a command line, in order; their tokens joined are the command line again."""
    return list(_items(list(args)))


def _items(args: list[str]) -> Iterator[Item]:
    position = 0
    while position < len(args):
        word = args[position]
        if word == "--":
            yield from (Item((rest,)) for rest in args[position:])
            return
        if not is_option(word):
            yield Item((word,))
            position += 1
            continue
        flag, attached = canonical(word)
        following = _count_values(args, position + 1, flag, attached, dotted="." in word.partition("=")[0])
        tokens = tuple(args[position : position + 1 + following])
        values = (attached,) if attached is not None else tokens[1:]
        yield Item(tokens, flag, values, complete=flag is not None or attached is not None)
        position += 1 + following


def _count_values(args: list[str], start: int, flag: str | None, attached: str | None, dotted: bool) -> int:
    if flag is None or attached is not None:
        return 0
    arity = Arity.ONE if dotted else _KNOWN[flag]
    most = {Arity.SWITCH: 0, Arity.ONE: 1, Arity.MANY: len(args)}[arity]
    count = 0
    while count < most and start + count < len(args) and not is_option(args[start + count]):
        count += 1
    return count


def last_value(items: Sequence[Item], flag: str) -> str | None:
    """Value of a flag's last occurrence, which is the one that argparse keeps."""
    values = [item.values[0] for item in items if item.flag == flag and item.values]
    return values[-1] if values else None


def has(items: Sequence[Item], flag: str) -> bool:
    """Whether a known flag is given."""
    return any(item.flag == flag for item in items)


def all_values(items: Sequence[Item], flag: str) -> tuple[str, ...]:
    """Values of the last occurrence of a flag that takes several; none when it is not given."""
    given = [item.values for item in items if item.flag == flag]
    return given[-1] if given else ()


def model(items: Sequence[Item]) -> str | None:
    """The model that is served, where the command line alone tells.

    That is `--model X`, or the first bare word after something that cannot own it. A word after a flag that we do not
    know (`--dtype auto`) might be its value, so the search goes on.
    """
    named = last_value(items, "--model")
    if named is not None:
        return named
    position = model_word(items)
    return None if position is None else items[position].tokens[0]


def model_word(items: Sequence[Item]) -> int | None:
    """Where the model stands as a word of its own."""
    free = True
    for position, item in enumerate(items):
        if item.bare and free and item.tokens[0] != "--":
            return position
        free = free if item.tokens[0] == "--" else item.complete and not item.bare
    return None
