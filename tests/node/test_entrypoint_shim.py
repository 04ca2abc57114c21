"""The real script, from environment to engine, on this machine's loopback addresses."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.node.conftest import SCRIPT, as_a_prepared_host, engine, wait_until, with_shm, write_shim
from tests.node.local_group import TOKEN, LocalGroup, LocalNode, cleaned_up

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.node.conftest import Node

pytestmark = pytest.mark.slow

HOLD = "import signal; signal.pause()"
DISTRIBUTED = ["--distributed-executor-backend=mp"] + [
    f"--{kind}distributed-timeout-seconds=86400" for kind in ("", "cpu-")
]
MODEL = ["/", "--load-format=dummy"]
TRIO_ARGS = ["--tensor-parallel-size=3", "--chat-template", "/head/only", "--seed", "1"]
QUIET = "--disable-access-log-for-endpoints=/health,/metrics,/ping"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def group(rank: int, nnodes: int = 3, **variables: str) -> dict[str, str]:
    addresses = {"MASTER_ADDR": "127.0.0.1", "NODE_ADDR": f"127.0.0.{rank + 1}"}
    return {"NNODES": str(nnodes), "NODE_RANK": str(rank), **addresses, **variables}


def shim_group(folder: Path, nnodes: int, *args: str, **variables: str) -> LocalGroup:
    """A group whose engine prints what it was given and does what SHIM says, which is to hold."""
    (folder / "engine").mkdir()
    shim = write_shim(folder / "engine" / "vllm")
    return LocalGroup(folder, nnodes, {"SHIM": HOLD, **variables}, [*MODEL, *args], shim)


def has_printed(node: LocalNode, lines: int) -> bool:
    return node.output.count("\n") == lines


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroup]:
    """Three ranks whose engine runs; rank 1 is allowed fewer files than the others."""
    folder = tmp_path_factory.mktemp("trio")
    (folder / "api_key").write_text("very-secret\n")
    variables = {
        "GEN_STACK_API_KEY_FILE": str(folder / "api_key"),
        "SHIM": f"import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True); {HOLD}",
    }
    with cleaned_up(shim_group(folder, 3, *TRIO_ARGS, **variables)) as group:
        group.nodes[1].prefix = ["prlimit", "--nofile=1024:9000"]
        group.start()
        for node in group.nodes:
            wait_until(partial(has_printed, node, 2), "the engine's output")
        yield group


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_rank_of_three(trio: LocalGroup, rank: int) -> None:
    node = trio.nodes[rank]
    seen = engine(node.output)
    common = ["--nnodes=3", f"--node-rank={rank}", "--master-addr=127.0.0.11", f"--master-port={trio.port + 4}"]
    common += DISTRIBUTED
    if rank == 0:
        own = ["--host=127.0.0.11", f"--port={trio.port + 1}", QUIET, "--shutdown-timeout=60"]
        assert seen["argv"] == ["serve", *MODEL, *TRIO_ARGS, *common, *own]
        assert seen["env"]["VLLM_API_KEY"] == "very-secret"
    else:
        assert seen["argv"] == ["serve", *MODEL, "--tensor-parallel-size=3", "--seed", "1", *common, "--headless"]
        assert "VLLM_API_KEY" not in seen["env"]
        assert "only the head runs an API server: --chat-template\n" in node.errors
        assert "/head/only" not in node.errors
    assert seen["env"]["VLLM_HOST_IP"] == f"127.0.0.{rank + 11}"
    assert seen["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert seen["env"]["NCCL_SOCKET_IFNAME"] == "=lo"
    assert "very-secret" not in node.errors
    assert TOKEN not in node.log
    assert all(line.startswith(f"stack-node[{rank}/3]: ") for line in node.errors.splitlines())


def test_soft_limit_is_raised_for_the_engine(trio: LocalGroup) -> None:
    assert trio.nodes[1].output.splitlines()[1] == "(9000, 9000)"
    assert trio.nodes[1].says("warning: 9000 open files are allowed")


def test_health_of_a_group_that_starts(trio: LocalGroup) -> None:
    # The health file follows by half a second.
    starts = (0, "healthy: worker: epoch 1: the engine is running\n")
    wait_until(lambda: trio.nodes[1].health() == starts, "a healthy worker")
    wait_until(lambda: trio.nodes[0].health() == (1, "unhealthy: head: the engine starts\n"), "a head that starts")


def test_single_node_is_upstream(node: Node) -> None:
    done = node.run("m", "--seed=1")
    seen = engine(done.stdout)
    assert seen["argv"] == ["serve", "m", "--seed=1"]
    # PWD and the like come from shells and interpreters; nothing of ours may.
    added = set(seen["env"]) - set(node.environment({}))
    assert not [name for name in added if name.startswith(("PYTHON", "VLLM", "NCCL", "GLOO"))]


def test_single_node_refuses_nothing_about_the_host(node: Node) -> None:
    done = node.run("/no/such/model", prefix=["prlimit", "--nofile=256:256"])
    assert engine(done.stdout)["argv"] == ["serve", "/no/such/model"]


def test_group_of_one(tmp_path: Path) -> None:
    with cleaned_up(shim_group(tmp_path, 1, "-tp", "2", MASTER_ADDR="", NODE_ADDR="", SHIM="")) as group:
        group.start()
        node = group.nodes[0]
        wait_until(lambda: node.says("epoch 1 has failed: "), "an engine that ends at once is a fault")
        assert node.says(" ended with 0 without being asked")
        own = [f"--port={group.port + 1}", QUIET, "--shutdown-timeout=60"]
        assert engine(node.output)["argv"] == ["serve", *MODEL, "-tp", "2", *own]


@pytest.mark.parametrize("address", ["::1", "[::1]"])
def test_ipv6(tmp_path: Path, address: str) -> None:
    variables = {"MASTER_ADDR": address, "NODE_ADDR": "", "GEN_STACK_TOKEN_FILE": ""}
    with cleaned_up(shim_group(tmp_path, 2, "-pp=2", **variables)) as group:
        group.start()
        for node in group.nodes:
            wait_until(partial(has_printed, node, 1), "the engine's output")
            seen = engine(node.output)
            assert "--master-addr=::1" in seen["argv"]
            assert ("--host=::1" in seen["argv"]) is (node.rank == 0)
            assert seen["env"]["VLLM_HOST_IP"] == "::1"
            assert seen["env"]["GLOO_SOCKET_IFNAME"] == "lo"
            assert node.says("warning: GEN_STACK_TOKEN_FILE is not set")
        assert [node.stop() for node in reversed(group.nodes)] == [0, 0]


def test_wrong_arguments_and_variables_are_told_together(node: Node) -> None:
    done = node.run("m", "-tp=2", "--port=80", "--api-key", "hush", NNODES="2", NODE_RANK="2", MASTER_ADDR="<HEAD_IP>")
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line.partition(": error: ")[2].partition(":")[0] for line in done.stderr.splitlines()] == [
        "NODE_RANK='2'",
        "MASTER_ADDR='<HEAD_IP>'",
        "--port is decided by the group; leave it out and set GEN_STACK_API_PORT",
        "--api-key is decided by the group; leave it out and set GEN_STACK_API_KEY_FILE",
    ]
    assert "hush" not in done.stderr


def test_failed_checks_are_told_together(node: Node) -> None:
    done = node.run(
        "/no/such/model",
        "--tensor-parallel-size=6",
        prefix=["prlimit", "--nofile=512:1024", "--memlock=65536:65536"],
        **group(1, GEN_STACK_TOKEN_FILE="/no/such/token", GEN_STACK_RDMA="required"),
        PYTHONPATH=node.install_engine("0.32.0"),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 3
    assert done.stdout == ""
    for sentence in (
        "1024 open files are allowed (hard limit 1024) and the API server wants 65536, 8192 at least",
        "GEN_STACK_RDMA=required, but transport between nodes: TCP",
        "0 devices are visible, but tensor 6 x pipeline 1 x prefill-context 1 x data 1 over 3 nodes is 2 on each",
        "the model's path /no/such/model does not exist in this container",
        "GEN_STACK_TOKEN_FILE /no/such/token cannot be read (No such file or directory)",
    ):
        assert sentence in done.stderr


def test_cpu_engine_runs_one_process_a_node(node: Node) -> None:
    site = node.install_engine("0.32.0+cpu")
    done = node.run("m", "-tp=6", prefix=as_a_prepared_host(), PYTHONPATH=site, **group(1))
    assert done.returncode == 3
    assert "the CPU engine runs exactly one process a node" in done.stderr


@needs_root
def test_small_shared_memory(node: Node) -> None:
    done = node.run("m", "-tp=3", prefix=with_shm("64m"), **group(1))
    assert done.returncode == 3
    assert done.stderr == (
        "stack-node[1/3]: error: /dev/shm has 64 MiB, 64 MiB of them free; the engine's processes talk through it and "
        "need 1024 MiB, 512 MiB of them free; in the Compose file: `shm_size: 16gb`\n"
    )


def test_unreadable_api_key(node: Node) -> None:
    done = node.run("m", GEN_STACK_API_KEY_FILE="/no/such/key")
    assert done.returncode == 3
    assert "GEN_STACK_API_KEY_FILE /no/such/key cannot be read" in done.stderr


def test_no_engine(node: Node) -> None:
    (node.folder / "bin" / "vllm").unlink()
    done = node.run("m")
    assert done.returncode == 3
    assert "there is no 'vllm' on the PATH" in done.stderr


def test_a_program_is_simply_run(node: Node) -> None:
    done = node.run("sh", "-c", "echo $0 $1; exit 5", "a", "b", NNODES="9")
    assert (done.stdout, done.stderr, done.returncode) == ("a b\n", "", 5)
    done = node.run("/bin/echo", "--help-me")
    assert (done.stdout, done.returncode) == ("--help-me\n", 0)


@pytest.mark.parametrize("args", [["--help"], ["m", "-h"], ["--help=all"], ["--version"], ["-v"]])
def test_information_is_vllms_own(node: Node, args: list[str]) -> None:
    done = node.run(*args, NNODES="2")
    assert engine(done.stdout)["argv"] == ["serve", *args]
    assert (done.stderr, done.returncode) == ("", 0)


def test_no_arguments(node: Node) -> None:
    done = node.run()
    assert done.returncode == 2
    assert done.stderr.startswith("usage: stack-node MODEL")


def test_no_module_of_ours_shadows_another(tmp_path: Path) -> None:
    """Beside the script lies a config.py, which nobody may find under that name."""
    folder = tmp_path / "stack_node"
    folder.mkdir()
    shutil.copy(SCRIPT, folder)
    code = "import importlib.util, sys\ndef main(_):\n    print(importlib.util.find_spec('config'), sys.path[0])\n"
    (folder / "main.py").write_text(code)
    (folder / "config.py").touch()
    done = subprocess.run([sys.executable, folder / "stack-node"], capture_output=True, text=True, check=True)
    assert done.stdout == f"None {tmp_path}\n"


def test_health_of_a_node_with_an_api(node: Node) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""
    assert node.run("health").returncode == 1
    with node.start("m", "--port", port, SHIM=code) as process:
        wait_until(lambda: node.run("health").returncode == 0, "healthy")
        assert node.run("health").stdout == f"healthy: http://127.0.0.1:{port}/health answers 200\n"
        process.terminate()
        assert process.wait(30) == 0
    done = node.run("health")
    assert done.returncode == 1
    assert done.stdout.startswith("unhealthy: no engine was started yet")


@needs_root
def test_an_address_that_comes_late(tmp_path: Path) -> None:
    """In a network namespace of its own, whose loopback interface is down like a network after a reboot."""
    with cleaned_up(shim_group(tmp_path, 2, "-tp=2", MASTER_ADDR="10.9.9.1")) as group:
        head, worker = group.nodes
        worker.variables["NODE_ADDR"], worker.prefix = "10.9.9.2", ["unshare", "--net"]
        worker.start()
        waiting = "waiting up to 60 s for the network; NODE_ADDR is 10.9.9.2 and MASTER_ADDR is 10.9.9.1\n"
        wait_until(lambda: worker.says("\n"), "a first line")
        assert worker.errors == f"stack-node[1/2]: {waiting}"
        assert worker.process
        inside = ["nsenter", "--net", f"--target={worker.process.pid}"]
        head.variables["NODE_ADDR"], head.prefix = "10.9.9.1", inside
        head.start()
        for command in ("address add 10.9.9.1/24 dev lo", "address add 10.9.9.2/24 dev lo", "link set lo up"):
            subprocess.run([*inside, "ip", *command.split()], check=True)
        wait_until(partial(has_printed, worker, 1), "the engine's output")
        assert engine(worker.output)["env"]["VLLM_HOST_IP"] == "10.9.9.2"
        assert worker.stop() == 0


@needs_root
def test_a_stop_while_waiting_for_an_address(node: Node) -> None:
    variables = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.9.9.1"}
    prefix = ["unshare", "--net", *as_a_prepared_host()]
    with node.start("m", "-tp=2", prefix=prefix, **variables) as process:
        assert process.stderr
        assert "waiting up to 60 s" in process.stderr.readline()
        process.terminate()
        assert process.stderr.readline() == "stack-node[1/2]: stopped before the engine was started\n"
        assert process.wait(30) == 0


def test_a_model_file_is_served_also_where_every_file_is_executable(node: Node, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF\x03\0\0\0")
    model.chmod(0o777)
    assert engine(node.run(str(model)).stdout)["argv"] == ["serve", str(model)]
