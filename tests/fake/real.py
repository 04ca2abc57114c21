"""The real engine in plain containers on lab hosts, behind the same interface as the fake one (`conftest`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tests.asking import http, soon
from tools.engine_image import TAG
from tools.model import NAME

if TYPE_CHECKING:
    import signal

    from tests.lab.host import Host
    from tests.lab.lab import Lab

MODEL = f"/srv/models/{NAME}"
_FLAGS = [
    "--max-model-len=512",
    "--max-num-seqs=4",
    "--distributed-executor-backend=mp",
    '--compilation-config={"mode":"DYNAMO_TRACE_ONCE","backend":"eager"}',
]
_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}


class RealGroup:
    """Three ranks of vLLM, tensor parallel as the fake ones (the model's heads divide by three), without a supervisor.

    Pipeline parallel differs in one thing: a request after the death of a remote rank hangs instead of failing.
    """

    ready_s = 300.0

    def __init__(self, lab: Lab):
        self.lab = lab
        self.nnodes = 3
        self.master_port = 29500
        self.url = f"http://{lab.host(1).address}:8000"

    def host(self, rank: int) -> Host:
        return self.lab.host(rank + 1)

    def start(self, rank: int, *flags: str) -> None:
        host, head = self.host(rank), self.host(0)
        group = [
            f"--nnodes={self.nnodes}",
            f"--tensor-parallel-size={self.nnodes}",
            f"--node-rank={rank}",
            f"--master-addr={head.address}",
            f"--master-port={self.master_port}",
        ]
        group += ["--headless"] if rank else [f"--host={head.address}", "--port=8000"]
        env = {**_ENV, "VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"}
        words = [word for name, value in env.items() for word in ("-e", f"{name}={value}")]
        words += ["--network=host", "--init", "--shm-size=2g", "-v", f"{MODEL}:{MODEL}:ro", "--entrypoint=vllm", TAG]
        host.docker("run", "-d", f"--name=rank{rank}", *words, "serve", MODEL, *_FLAGS, *group, *flags)

    def start_all(self, *flags: str) -> None:
        for rank in reversed(range(self.nnodes)):
            self.start(rank, *(flags if rank == 0 else ()))
        assert soon(lambda: http(f"{self.url}/health")[0] == 200, self.ready_s), self.log(0)

    def log(self, rank: int) -> str:
        return self.host(rank).engine_log(f"rank{rank}")

    def processes(self, rank: int) -> dict[int, str]:
        """Processes of a rank's host, by their ids there."""
        lines = self.host(rank).sh(["ps", "-eo", "pid=,args="], user=None).stdout.splitlines()
        return {int(line.split()[0]): line.split(maxsplit=1)[1] for line in lines}

    def find(self, rank: int, title: str) -> int:
        def matches(words: str) -> bool:
            return words.startswith(title) if title else "/vllm serve" in words and "python" in words.split()[0]

        return next(pid for pid, words in self.processes(rank).items() if matches(words))

    def alive(self, rank: int, title: str) -> bool:
        try:
            return bool(self.find(rank, title))
        except StopIteration:
            return False

    def signal(self, rank: int, title: str, number: signal.Signals) -> None:
        self.host(rank).sh(["kill", f"-{number.name[3:]}", str(self.find(rank, title))], user=None)

    def status(self, rank: int, seconds: float = 30) -> int | None:
        def state() -> list[str]:
            return (
                self.host(rank).docker("inspect", "-f", "{{.State.Running}} {{.State.ExitCode}}", f"rank{rank}").split()
            )

        return int(state()[1]) if soon(lambda: state()[0] == "false", seconds) else None

    def ask(self, tokens: int = 3, timeout: float = 60, **more: Any) -> tuple[int, str]:
        body = {"model": MODEL, "prompt": "one two three", "max_tokens": tokens, "ignore_eos": True, **more}
        return http(f"{self.url}/v1/completions", body, timeout=timeout)

    def metric(self, name: str) -> float:
        text = http(f"{self.url}/metrics")[1]
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def connections(self, rank: int) -> int:
        """Established connections that a rank's processes opened to the master port."""
        lines = self.host(rank).sh(["ss", "-Htn", "state", "established"], user=None).stdout.splitlines()
        return sum(line.split()[3].endswith(f":{self.master_port}") for line in lines)

    def end(self) -> None:
        for rank in range(self.nnodes):
            self.host(rank).docker("rm", "-f", f"rank{rank}", check=False)
        time.sleep(0.2)
