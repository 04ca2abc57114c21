"""Two groups of two lab hosts with the real engine and one gateway: how they are placed, asked and put under load."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gen_stack.release import GATEWAY_IMAGE
from tests.lab.fixtures import Stack
from tools.downloads import haproxy
from tools.engine_image import TAG

if TYPE_CHECKING:
    from tests.lab.lab import Lab

HERE = Path(__file__).parent
USER_KEY, ENGINE_KEY = "sk-user", "sk-engine"
GATEWAY, API = 8080, 8000


@dataclass(frozen=True)
class Asked:
    """One request: begun and ended at, and its first byte after, in seconds; `fault` is empty when it was good."""

    streamed: bool
    began: float
    first: float
    ended: float
    fault: str


@dataclass
class Shop:
    """The stacks in the order of the hosts: group 0 is hosts 1 and 2, group 1 is hosts 3 and 4."""

    lab: Lab
    nodes: list[Stack]

    def head(self, group: int) -> Stack:
        return self.nodes[2 * group]

    def address(self, group: int = 0) -> str:
        return self.head(group).host.address

    def ready(self, group: int) -> bool:
        host = self.head(group).host
        with contextlib.suppress(OSError):
            return host.http_get(f"http://{host.address}:29600/readyz", 2)[0] == 200
        return False

    def ask(self, address: str, port: int, *, streamed: bool, tokens: int = 8, timeout: float = 60) -> Asked:
        """One completion from an address, as a client of its own."""
        key = USER_KEY if port == GATEWAY else ENGINE_KEY
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        body = {"model": "small", "prompt": "One, two, three", "max_tokens": tokens, "stream": streamed}
        connection = http.client.HTTPConnection(address, port, timeout=timeout)
        began = time.monotonic()
        first, fault = 0.0, ""
        try:
            connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}), headers)
            answer = connection.getresponse()
            text = b""
            while piece := answer.read1():
                first = first or time.monotonic() - began
                text += piece
            if answer.status != 200:
                fault = f"{answer.status} {text[:200].decode()}"
            elif streamed and b"[DONE]" not in text:
                fault = "the stream has no end"
        except (OSError, http.client.HTTPException) as error:
            fault = repr(error)
        finally:
            connection.close()
        return Asked(streamed, began, first, time.monotonic(), fault)

    def story(self) -> str:
        return "\n".join(f"--- {node.folder}\n{node.logs(30)}" for node in self.nodes)


@dataclass
class Load:
    """Clients at the gateway, each asking again as soon as it has an answer."""

    shop: Shop
    clients: int = 4
    tokens: int = 8
    done: list[Asked] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._run, args=(number % 2 == 0,)) for number in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, streamed: bool) -> None:
        while not self._over.is_set():
            self.done.append(self.shop.ask(self.shop.address(), GATEWAY, streamed=streamed, tokens=self.tokens))

    @property
    def failed(self) -> list[Asked]:
        return [one for one in self.done if one.fault]


def gateway_image(stack: Stack, scratch: Path) -> None:
    """Put HAProxy from Debian's packages where the official image's name is, which cannot be pulled here."""
    context = scratch / "haproxy-image"
    shutil.copytree(haproxy(), context / "haproxy", symlinks=True)
    lines = [f"FROM {TAG}", "COPY haproxy /opt/haproxy", "RUN ln -s /opt/haproxy/bin/haproxy /usr/local/sbin/haproxy"]
    (context / "Dockerfile").write_text("\n".join([*lines, "ENTRYPOINT []", ""]))
    folder = stack.host.put(context, "haproxy-image")
    stack.host.sh(["docker", "build", "-q", "-t", GATEWAY_IMAGE, "."], cwd=folder, env={"DOCKER_BUILDKIT": "0"})


def place(lab: Lab, scratch: Path) -> Shop:
    """Bring the generated folders to the hosts and build their images; nothing is started."""
    network = lab.host(1).address.rpartition(".")[0]
    (scratch / "spec.yaml").write_text((HERE / "spec.yaml").read_text().replace("10.77.0", network))
    (scratch / "engine_key").write_text(ENGINE_KEY)
    (scratch / "keys").write_text(USER_KEY)
    out = scratch / "generated"
    command = [sys.executable, "-m", "gen_stack", str(scratch / "spec.yaml"), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    hosts = {f"lab{number}": lab.host(number) for number in range(1, 5)}
    nodes = [Stack(host, host.put(out / name, name)) for name, host in hosts.items()]
    for node in nodes:
        node.compose("build", "engine")
    gateway_image(nodes[0], scratch)
    return Shop(lab, nodes)
