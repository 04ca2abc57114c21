"""The generated gateway on this machine's loopback, run by the real HAProxy."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import ssl
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gen_stack.output import outputs
from gen_stack.planner import make_plan
from gen_stack.render.haproxy import SECRETS_FOLDER
from tests.asking import http as ask_http
from tests.asking import soon
from tests.gateway.stand_in import Head, free_port
from tests.generator.helpers import load
from tools.downloads import haproxy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ADDRESSES = ("127.0.0.2", "127.0.0.3")
ENGINE_KEY = "sk-engine"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class LocalGateway:
    """Two stand-in heads and the gateway before them. `ssl`: how a client looks at its certificate."""

    folder: Path
    heads: list[Head]
    port: int
    metrics_port: int
    files: dict[str, str]
    extra: str = ""
    ssl: ssl.SSLContext | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def write(self) -> None:
        """Generate, as gen-stack does, and put the files where HAProxy is told that they are."""
        nodes = "".join(f"  - {{name: n{i}, address: {_outside(head.address)}}}\n" for i, head in enumerate(self.heads))
        spec = (
            f"name: q\nmodel: /models/m\nnodes:\n{nodes}replicas: {len(self.heads)}\nengine: {{device: cpu}}\n"
            f"api: {{port: {self.heads[0].api_port}, key_file: engine_key}}\n"
            f"network: {{control_port: {self.heads[0].control_port}}}\n"
            f"gateway:\n  nodes: [n0]\n  bind: 127.0.0.1\n  port: {self.port}\n  metrics_port: {self.metrics_port}\n"
            f"  keys_file: keys\n{self.extra}"
        )
        loaded = load(spec, {"engine_key": ENGINE_KEY, **self.files})
        for path, file in outputs(loaded, make_plan(loaded), self.folder).items():
            if path.startswith(("n0/gateway/", "n0/secrets/gateway/")):
                (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / path).write_text(self._placed(file.text))

    def _placed(self, text: str) -> str:
        """Name the folders as they are here; HAProxy stays this user."""
        text = text.replace(SECRETS_FOLDER, str(self.folder / "n0/secrets/gateway"))
        for head in self.heads:
            text = text.replace(_outside(head.address), head.address)
        return re.sub(r"^ +[ug]id \d+\n", "", text, flags=re.MULTILINE)

    @property
    def config(self) -> Path:
        return self.folder / "n0/gateway/haproxy.cfg"

    def start(self) -> None:
        """Run HAProxy as the container does, and wait until it has found all heads."""
        with (self.folder / "log").open("wb") as log:
            command = [str(haproxy() / "bin/haproxy"), "-W", "-db", "-f", str(self.config)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        assert soon(lambda: self.ready(len(self.heads))), self.log()

    def listens_to_signals(self) -> bool:
        """Whether HAProxy's first process has come so far; in its first moments a signal is lost."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), 16)
        return bool(caught >> (signal.SIGUSR1 - 1) & 1)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)

    def reload(self) -> None:
        """What `docker compose kill -s HUP gateway` does; returns when the new worker serves."""
        assert self.process is not None
        before = self.log().count("Loading success")
        self.process.send_signal(signal.SIGHUP)
        assert soon(lambda: self.log().count("Loading success") > before), self.log()

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def lines(self) -> list[dict[str, Any]]:
        """The access log."""
        return [json.loads(line) for line in self.log().splitlines() if line.startswith("{")]

    def metrics(self) -> str:
        return ask_http(f"http://127.0.0.1:{self.metrics_port}/metrics")[1]

    def ready(self, count: int) -> bool:
        """Whether so many heads are in."""
        found = re.search(r'haproxy_backend_active_servers\{proxy="groups"\} (\d+)', self.metrics())
        return found is not None and int(found[1]) == count

    def connection(self, timeout: float = 20) -> http.client.HTTPConnection:
        if self.ssl is not None:
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=timeout, context=self.ssl)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(
        self,
        path: str = "/v1/completions",
        body: bytes | None = b'{"prompt": "hello"}',
        key: str | None = "sk-ann",
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> Answer:
        """One request on a connection of its own."""
        sent = {"Authorization": f"Bearer {key}"} if key else {}
        with contextlib.closing(self.connection()) as connection:
            connection.request(method or ("GET" if body is None else "POST"), path, body, {**sent, **(headers or {})})
            got = connection.getresponse()
            return Answer(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read().decode())

    def stream(self, chunks: int) -> Iterator[bytes]:
        """The pieces of a streamed answer as they come; raises what a client raises when it is cut."""
        with contextlib.closing(self.connection()) as connection:
            headers = {"Authorization": "Bearer sk-ann", "X-Stream": str(chunks)}
            connection.request("POST", "/v1/completions", b"{}", headers)
            answer = connection.getresponse()
            while piece := answer.read1():
                yield piece


def _outside(address: str) -> str:
    """An address of another host in the place of a loopback one, of which two groups cannot be in a spec."""
    return address.replace("127.0.0.", "10.0.0.")


@contextlib.contextmanager
def local_gateway(folder: Path, extra: str = "", **files: str) -> Iterator[LocalGateway]:
    """Two heads and a started gateway; nothing is left of them afterwards."""
    api, control = free_port(*ADDRESSES), free_port(*ADDRESSES)
    made = LocalGateway(
        folder,
        [Head(address, api, control) for address in ADDRESSES],
        free_port("127.0.0.1"),
        free_port("127.0.0.1"),
        {"keys": "# Ann\nsk-ann\nsk-bob\n", **files},
        extra,
    )
    with contextlib.ExitStack() as undo:
        for head in made.heads:
            head.start()
            undo.callback(head.stop)
        made.write()
        undo.callback(made.stop)
        if "tls" in extra:
            made.ssl = ssl.create_default_context(cadata=files["cert"])
        made.start()
        yield made


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for 127.0.0.1 that is signed by itself, and its key; `name` tells it from others."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    files = ["-keyout", str(folder / "k.pem"), "-out", str(folder / "c.pem")]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1", *files], check=True, capture_output=True)
    return (folder / "c.pem").read_text(), (folder / "k.pem").read_text()
