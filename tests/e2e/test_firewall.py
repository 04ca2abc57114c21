"""`gen-stack ports SPEC --nft` on hosts that have a firewall: network namespaces, real rules, real connections."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.generator.regenerate import GOLDEN, REFERENCE, stacks
from tests.lab.network import Network
from tests.lab.system import run, wait_until
from tools.engine_image import install_debian_packages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.lab

HEAD, WORKER, STRANGER = 1, 2, 3
ENDPOINT, CONTROL, RENDEZVOUS, PICKED, OTHER = 8000, 29600, 29507, 40000, 2222
PORTS = (ENDPOINT, CONTROL, RENDEZVOUS, PICKED, OTHER)

LISTEN = """
import selectors, socket, sys
waiting = selectors.DefaultSelector()
for port in sys.argv[1:]:
    server = socket.create_server(("::", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
    waiting.register(server, selectors.EVENT_READ)
print("listening", flush=True)
while True:
    for key, _ in waiting.select():
        key.fileobj.accept()[0].close()
"""
CONNECT = """
import concurrent.futures, json, socket, sys
def reaches(port):
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=1.5).close()
    except OSError:
        return False
    return True
with concurrent.futures.ThreadPoolExecutor(9) as pool:
    print(json.dumps([int(port) for port, got in zip(sys.argv[2:], pool.map(reaches, sys.argv[2:])) if got]))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Three hosts that are nothing but networks, with servers of every kind on the first two."""
    if not shutil.which("nft"):
        install_debian_packages("nftables")
    made = Network(79)
    made.remove_switch()
    servers = []
    try:
        made.make_switch()
        for host in (HEAD, WORKER, STRANGER):
            made.connect(host)
        for host in (HEAD, WORKER):
            command = [*inside(made, host), sys.executable, "-c", LISTEN, *map(str, PORTS)]
            servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
        yield made
    finally:
        for server in servers:
            server.kill()
            server.communicate()
        made.remove_switch()


def inside(network: Network, host: int) -> list[str]:
    return ["ip", "netns", "exec", network.namespace(host)]


def nft(network: Network, host: int, *words: str, stdin: str | None = None) -> str:
    return run([*inside(network, host), "nft", *words], stdin=stdin).stdout


def reached(network: Network, host: int, address: str) -> list[int]:
    """Tell to which ports at an address a host can connect."""
    command = [*inside(network, host), sys.executable, "-c", CONNECT, address, *map(str, PORTS)]
    found: list[int] = json.loads(run(command).stdout)
    return found


def rules(spec: Path, *node: str) -> str:
    """Run gen-stack as a user does."""
    command = [sys.executable, "-m", "gen_stack", "ports", str(spec), "--nft", *node]
    return run(command).stdout


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_nodes_reach_each_other_and_a_stranger_the_endpoint_alone(
    family: str, network: Network, tmp_path: Path
) -> None:
    address = network.address6 if family == "ipv6" else network.address
    spec = tmp_path / "spec.yaml"
    nodes = "".join(f"  - {{name: n{host}, address: '{address(host)}', gpus: 8}}\n" for host in (HEAD, WORKER))
    spec.write_text(f"name: wall.{family}\nmodel: /models/m\nnodes:\n{nodes}")
    table = ("inet", f"gen-stack-wall.{family}")
    wait_until(lambda: reached(network, STRANGER, address(HEAD)) == list(PORTS), "the hosts to reach each other", 10)
    for host in (HEAD, WORKER):
        for _ in range(2):  # loading twice is loading once
            nft(network, host, "-f", "-", stdin=rules(spec, "--node", f"n{host}"))

    assert reached(network, WORKER, address(HEAD)) == list(PORTS)
    assert reached(network, HEAD, address(WORKER)) == list(PORTS)
    assert reached(network, HEAD, address(HEAD)) == list(PORTS)
    assert reached(network, STRANGER, address(HEAD)) == [ENDPOINT, OTHER]
    assert reached(network, STRANGER, address(WORKER)) == [ENDPOINT, CONTROL, RENDEZVOUS, OTHER]
    assert nft(network, HEAD, "list", "table", *table).count("counter packets 0") == 0

    nft(network, HEAD, "add", "element", *table, "watchers", f"{{ {address(STRANGER)} }}")
    assert reached(network, STRANGER, address(HEAD)) == [ENDPOINT, CONTROL, OTHER]
    for host in (HEAD, WORKER):
        nft(network, host, "delete", "table", *table)
    assert reached(network, STRANGER, address(HEAD)) == list(PORTS)


@pytest.mark.parametrize("spec", [*stacks(REFERENCE), *stacks(GOLDEN)], ids=lambda stack: stack.name)
def test_nftables_takes_the_rules_of_every_stack(spec: Path, network: Network, tmp_path: Path) -> None:
    nft(network, STRANGER, "-c", "-f", "-", stdin=rules(spec / "spec.yaml"))
    nft(network, STRANGER, "-f", "-", stdin=rules(spec / "spec.yaml"))
    nft(network, STRANGER, "flush", "ruleset")
