from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_node import argv, config, flags
from stack_node.config import Network, NodeConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stack_node.argv import EngineCommand

NETWORK = {rank: Network("10.0.0.11", f"10.0.0.1{rank + 1}", "ens1f0") for rank in range(3)}
DAY = 86400


QUIET = "--disable-access-log-for-endpoints=/health,/metrics,/ping"
ENDPOINT = ("--host=10.0.0.11", "--port=8000", QUIET, "--shutdown-timeout=60")


def node(rank: int = 0, nnodes: int | None = 3, **variables: str) -> NodeConfig:
    group = {"NNODES": str(nnodes), "NODE_RANK": str(rank), "MASTER_ADDR": "10.0.0.11"} if nnodes else {}
    read, problems = config.read({**group, **variables})
    assert problems == []
    return read


def command(
    cfg: NodeConfig, args: Sequence[str], environ: dict[str, str] | None = None, api_key: str | None = None
) -> EngineCommand:
    network = NETWORK[cfg.node_rank] if cfg.spans_nodes else None
    return argv.command(cfg, args, environ or {}, network, api_key)


def shared(rank: int) -> list[str]:
    return [
        "--nnodes=3",
        f"--node-rank={rank}",
        "--master-addr=10.0.0.11",
        "--master-port=29500",
        "--distributed-executor-backend=mp",
        f"--distributed-timeout-seconds={DAY}",
        f"--cpu-distributed-timeout-seconds={DAY}",
    ]


def test_plain_is_upstream() -> None:
    plain = command(node(nnodes=None), ["m", "--port", "81"], {"A": "b"})
    assert plain.argv == ("vllm", "serve", "m", "--port", "81")
    assert plain.env == {"A": "b"}
    assert plain.notes == ()
    assert plain.api_url == "http://127.0.0.1:81"
    assert plain.stop_s == argv.EXIT_S


def test_plain_with_an_endpoint() -> None:
    cfg = node(nnodes=None, GEN_STACK_API_BIND="::", GEN_STACK_API_PORT="8080", GEN_STACK_DRAIN="1500ms")
    plain = command(cfg, ["m"], api_key="k")
    assert plain.argv == ("vllm", "serve", "m", "--host=::", "--port=8080", "--shutdown-timeout=2")
    assert plain.env == {"VLLM_API_KEY": "k"}
    assert plain.api_url == "http://[::1]:8080"
    assert plain.stop_s == 1.5 + argv.EXIT_S


def test_group_of_one_has_no_group_flags() -> None:
    alone = command(node(nnodes=1), ["m", "-tp", "4"])
    assert alone.argv == ("vllm", "serve", "m", "-tp", "4", *ENDPOINT)
    assert "VLLM_HOST_IP" not in alone.env


def test_head() -> None:
    head = command(node(0), ["m", "--tensor-parallel-size=3"], {"PATH": "/bin"}, "secret-key")
    assert head.argv == (
        *("vllm", "serve", "m", "--tensor-parallel-size=3"),
        *shared(0),
        *ENDPOINT,
    )
    assert head.env == {
        "PATH": "/bin",
        "VLLM_HOST_IP": "10.0.0.11",
        "GLOO_SOCKET_IFNAME": "ens1f0",
        "NCCL_SOCKET_IFNAME": "=ens1f0",
        "VLLM_API_KEY": "secret-key",
    }
    assert head.api_url == "http://10.0.0.11:8000"
    assert head.stop_s == 60 + argv.EXIT_S
    assert not any("secret-key" in note for note in head.notes)


def test_worker() -> None:
    worker = command(node(2), ["m", "--tensor-parallel-size=3"], {"VLLM_API_KEY": "k"})
    assert worker.argv == ("vllm", "serve", "m", "--tensor-parallel-size=3", *shared(2), "--headless")
    assert worker.env["VLLM_HOST_IP"] == "10.0.0.13"
    assert "VLLM_API_KEY" not in worker.env
    assert worker.api_url is None
    assert worker.stop_s == argv.EXIT_S


def test_ipv6_stands_without_brackets_for_vllm_and_with_them_in_urls() -> None:
    cfg = node(0, MASTER_ADDR="[fd00::11]")
    head = argv.command(cfg, ["m"], {}, Network("fd00::11", "fd00::11", "eth0"), None)
    assert "--master-addr=fd00::11" in head.argv
    assert "--host=fd00::11" in head.argv
    assert head.env["VLLM_HOST_IP"] == "fd00::11"
    assert head.api_url == "http://[fd00::11]:8000"


def test_api_flags_stay_on_the_head_and_leave_the_workers_with_their_names() -> None:
    args = ["m", "--chat_template", "./t.jinja", "--enable-auto-tool-choice", "--tool-call-parser=hermes", "-asc", "2"]
    args += ["--lora-modules", "a=/a", "b=/b", "--no-enable-log-deltas", "--allowed-origins", '["*"]', "--seed", "1"]
    args += ["--default-chat-template-kwargs.enable_thinking", "false", "--reasoning-parser", "qwen3"]
    assert command(node(0), args).argv[2 : 2 + len(args)] == tuple(args)
    worker = command(node(1), args)
    assert worker.argv[2:7] == ("m", "--seed", "1", "--reasoning-parser", "qwen3")
    assert worker.notes[0] == (
        "left out here, since only the head runs an API server: --chat_template, --enable-auto-tool-choice, "
        "--tool-call-parser, -asc, --lora-modules, --no-enable-log-deltas, --allowed-origins, "
        "--default-chat-template-kwargs.enable_thinking"
    )


def test_rdma_off_and_interfaces_of_the_users() -> None:
    cfg = node(1, GEN_STACK_RDMA="off")
    worker = command(cfg, ["m"], {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "ens1f0"})
    assert worker.env["NCCL_IB_DISABLE"] == "1"
    assert worker.env["NCCL_SOCKET_IFNAME"] == "=ib0"
    assert worker.notes[-1] == "NCCL_SOCKET_IFNAME==ib0 is kept as it was set; by NODE_ADDR it would be =ens1f0"


def test_flags_go_before_a_double_dash() -> None:
    worker = command(node(1), ["--seed=1", "--", "m"])
    assert worker.argv[-3:] == ("--headless", "--", "m")


def test_a_time_out_of_the_users_is_kept() -> None:
    worker = command(node(1), ["m", "--distributed_timeout_seconds", "5"])
    assert f"--distributed-timeout-seconds={DAY}" not in worker.argv
    assert f"--cpu-distributed-timeout-seconds={DAY}" in worker.argv


@pytest.mark.parametrize(
    ("args", "fix"),
    [
        (["--nnodes=2"], "--nnodes is decided by the group; leave it out and set NNODES"),
        (["-n", "2"], "-n is decided by the group; leave it out and set NNODES"),
        (["-n2"], "-n2 is decided by the group; leave it out and set NNODES"),
        (["--node_rank", "1"], "--node_rank is decided by the group; leave it out and set NODE_RANK"),
        (["-r=1"], "-r is decided by the group; leave it out and set NODE_RANK"),
        (["--master-addr=x"], "--master-addr is decided by the group; leave it out and set MASTER_ADDR"),
        (["--master_port", "1"], "--master_port is decided by the group; leave it out and set MASTER_PORT"),
        (
            ["--headless"],
            "--headless is decided by the group; leave it out and set NODE_RANK: ranks above 0 are headless",
        ),
        (["--head"], "--head is decided by the group; leave it out and set NODE_RANK: ranks above 0 are headless"),
        (["--host", "::"], "--host is decided by the group; leave it out and set GEN_STACK_API_BIND"),
        (["--port=80"], "--port is decided by the group; leave it out and set GEN_STACK_API_PORT"),
        (["--api-key", "hush"], "--api-key is decided by the group; leave it out and set GEN_STACK_API_KEY_FILE"),
        (["--shutdown-timeout=3"], "--shutdown-timeout is decided by the group; leave it out and set GEN_STACK_DRAIN"),
        (["--config", "f"], "--config is decided by the group; leave it out and write the file's settings as flags"),
        (
            ["--distributed-executor-backend=ray"],
            "--distributed-executor-backend=ray: nodes are joined by 'mp'; leave it out",
        ),
    ],
)
def test_flags_that_the_group_owns(args: list[str], fix: str) -> None:
    assert argv.problems(node(1), ["m", "--tensor-parallel-size=3", *args]) == [fix]
    assert argv.problems(node(nnodes=None), ["m", *args]) == []


def test_sizes_and_mp_are_the_users() -> None:
    args = ["m", "-tp", "3", "--pipeline_parallel_size=2", "--distributed-executor-backend", "mp"]
    assert argv.problems(node(0), args) == []
    assert argv.sizes(args) == argv.Sizes(tensor=3, pipeline=2, prefill_context=1, data=1)
    assert argv.sizes(["m", "-tp", "many"]) is None


def test_processes_are_spread_evenly() -> None:
    assert argv.problems(node(0), ["m", "-tp=2", "-pp=2"]) == [
        "tensor 2 x pipeline 2 x prefill-context 1 x data 1 = 4 processes cannot be spread evenly over NNODES=3; "
        "every node runs the same number, so make the product a multiple of NNODES"
    ]


def test_plain_flags_and_variables_for_the_same_thing() -> None:
    cfg = node(nnodes=None, GEN_STACK_API_PORT="8080")
    assert argv.problems(cfg, ["m", "--port=1"]) == ["--port and GEN_STACK_API_PORT are both given; leave one out"]


@pytest.mark.parametrize("args", [["--uds=/s"], ["--grpc"], ["--headless"], ["--config", "f.yaml"]])
def test_an_api_that_cannot_be_asked(args: list[str]) -> None:
    assert command(node(nnodes=None), ["m", *args]).api_url is None


def test_tls_and_an_own_drain() -> None:
    plain = command(node(nnodes=None), ["m", "--ssl-certfile=c", "--host", "h", "--shutdown-timeout", "30"])
    assert plain.api_url == "https://h:8000"
    assert plain.stop_s == 30 + argv.EXIT_S


@pytest.mark.parametrize(
    ("args", "model"),
    [
        (["/m", "--seed", "1"], "/m"),
        (["--seed=1", "/m"], "/m"),
        (["--tool-call-parser", "x", "/m"], "/m"),
        (["--model", "/m", "--seed", "1"], "/m"),
        (["--dtype", "auto"], None),
        (["--dtype", "auto", "/m"], None),
        (["--", "/m"], "/m"),
    ],
)
def test_model(args: list[str], model: str | None) -> None:
    assert flags.model(flags.split(args)) == model


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("--api_key=x", ("--api-key", "x")),
        ("--no-enable-log-deltas", ("--enable-log-deltas", None)),
        ("--no_enable_log_deltas", ("--enable-log-deltas", None)),
        ("--no-port", (None, None)),
        ("--max-log", ("--max-log-len", None)),
        ("--enable", (None, None)),
        ("-tp=8", ("--tensor-parallel-size", "8")),
        ("-r0", ("--node-rank", "0")),
        ("-O3", (None, None)),
        ("--enable-lora", (None, None)),
        ("--enable-flash-late-interaction", (None, None)),
    ],
)
def test_spellings(token: str, expected: tuple[str | None, str | None]) -> None:
    assert flags.canonical(token) == expected


def test_values_that_look_like_flags() -> None:
    items = flags.split(["--sse-keep-alive-interval", "-1", "--chat-template", "-a b", "--max-log-len", "--seed"])
    assert [item.tokens for item in items] == [
        ("--sse-keep-alive-interval", "-1"),
        ("--chat-template", "-a b"),
        ("--max-log-len",),
        ("--seed",),
    ]


_VALUES = st.sampled_from(["auto", "8", "-1", '{"a": -1}', "x=y", "/p q", "0.9", "None"])
_OTHER = st.sampled_from(
    [
        "--dtype",
        "--seed",
        "--max_model_len",
        "--enable-prefix-caching",
        "--no-enable-chunked-prefill",
        "-tp",
        "-q",
        "-O2",
        "--hf-overrides",
        "--compilation-config.mode",
        "--kv-transfer-config",
        "--served-model-name",
    ]
)
_API = st.sampled_from(sorted(set(flags.API_ONLY) - set(flags.OWNED)))
_ENGINE_FLAG = st.one_of(
    st.tuples(_OTHER), st.tuples(_OTHER, _VALUES), st.builds(lambda f, v: (f"{f}={v}",), _OTHER, _VALUES)
)


@st.composite
def _api_flag(draw: st.DrawFn) -> tuple[str, ...]:
    flag = draw(_API)
    spelt = flag.replace("-", "_").replace("__", "--", 1) if draw(st.booleans()) else flag
    arity = flags.API_ONLY[flag]
    if arity is flags.Arity.SWITCH:
        return (draw(st.sampled_from([spelt, f"--no-{flag[2:]}"])),)
    if draw(st.booleans()):
        return (f"{spelt}={draw(_VALUES)}",)
    values = draw(st.lists(_VALUES, min_size=1, max_size=3 if arity is flags.Arity.MANY else 1))
    return (spelt, *values)


@given(st.lists(st.one_of(st.tuples(st.just("engine"), _ENGINE_FLAG), st.tuples(st.just("api"), _api_flag()))))
def test_every_rank_keeps_every_engine_flag_in_order(parts: list[tuple[str, tuple[str, ...]]]) -> None:
    args = ["m", *(token for _, tokens in parts for token in tokens)]
    kept = ["m", *(token for kind, tokens in parts if kind == "engine" for token in tokens)]
    head, *workers = (command(node(rank), args).argv for rank in range(3))
    assert list(head) == ["vllm", "serve", *args, *head[2 + len(args) :]]
    own_log_choice = any(flags.canonical(arg)[0] == QUIET.partition("=")[0] for arg in args)
    endpoint = [flag for flag in ENDPOINT if flag != QUIET or not own_log_choice]
    assert list(head[2 + len(args) :]) == [*shared(0), *endpoint]
    for rank, worker in enumerate(workers, 1):
        assert list(worker) == ["vllm", "serve", *kept, *shared(rank), "--headless"]


@given(st.lists(st.text(max_size=12)))
def test_splitting_loses_nothing(args: list[str]) -> None:
    assert [token for item in flags.split(args) for token in item.tokens] == args


def test_no_engine_flag_is_the_beginning_of_one_that_we_know() -> None:
    """Otherwise it would be taken for an abbreviation. From vLLM 0.32.0's arg_utils.py, the ones that come close."""
    for name in (
        "--model",
        "--enable-log-requests",
        "--data-parallel-rank",
        "--max-logprobs",
        "--log-level",
        "--tokenizer",
    ):
        assert flags.canonical(name)[0] in (None, name)
