"""The lab itself: hosts come up with both generations, are what they claim to be, and leave nothing behind.

These tests have a lab of their own, by another number and in another folder, so a lab in use is not touched.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import images, system
from tests.lab.fixtures import Hosts, Stacks, lab_session
from tests.lab.host import OPERATOR, Software
from tests.lab.lab import Lab
from tests.lab.network import links, namespaces
from tests.lab.system import LabError
from tools import downloads

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/self/ns/net").exists(), reason="needs Linux and root"),
]

NUMBER = 78
ROOT = Path("/var/lib/gen-stack-lab-selftest")
IMAGE = "lab/busybox:1"
APPLETS = ("sh", "sleep", "cat", "id", "hostname", "httpd", "touch")
GPU = """
name: gpu
services:
  node:
    image: lab/busybox:1
    pull_policy: never
    network_mode: host
    init: true
    command: [sleep, "600"]
    deploy: {resources: {reservations: {devices: [{driver: nvidia, capabilities: [gpu], %s}]}}}
"""
SERVER = """
name: server
services:
  node:
    image: lab/server:1
    build: {context: ., args: {BASE: "lab/busybox:1"}}
    pull_policy: never
    init: true
    command: [httpd, -f, -p, "8000", -h, /www]
    secrets: [key]
    volumes: [{type: bind, source: /srv/models, target: /models, bind: {create_host_path: false}}]
    %s
secrets: {key: {file: ./secrets/key}}
"""
DOCKERFILE = "ARG BASE\nFROM ${BASE}\nCOPY page /www/page\n"


def make_lab(engine: str = "26.1") -> Lab:
    return Lab(ROOT, NUMBER, Software(engine))


@pytest.fixture(scope="module")
def busybox_tar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("busybox")
    tree = folder / "tree"
    (tree / "bin").mkdir(parents=True)
    shutil.copy2(downloads.busybox(), tree / "bin/busybox")
    for applet in APPLETS:
        (tree / "bin" / applet).symlink_to("busybox")
    system.run(["tar", "-C", tree, "-cf", folder / "busybox.tar", "."])
    return folder / "busybox.tar"


@pytest.fixture(scope="module", params=list(downloads.GENERATIONS))
def own_lab(request: pytest.FixtureRequest, busybox_tar: Path) -> Iterator[Lab]:
    made = make_lab(request.param)
    made.down()
    with lab_session(Hosts(3, made.software), made):
        made.import_image(IMAGE, busybox_tar)
        yield made
        made.forget_images()
    shutil.rmtree(ROOT)


def traces(lab: Lab) -> list[str]:
    """Return everything that is left of a lab, apart from its kept images."""
    prefix = lab.network.prefix
    found = [f"namespace {name}" for name in namespaces() if name.startswith(prefix)]
    found += [f"link {name}" for name in links() if name.startswith(prefix)]
    found += [f"mount {where}" for where in system.mounts_below(lab.root)]
    found += [f"cgroup {name}" for name in system.cgroup_children(f"gen-stack-lab-{lab.network.number}")]
    found += [f"file {path}" for path in lab.root.glob("*") if path.name not in ("images", "lock")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(lab.root) in command:
            found.append(f"process {process.name} {command}")
    return found


def page(folder: Path, text: str, network: str) -> Path:
    """Make the folder of a stack that serves one page; its secret is the owner's alone."""
    (folder / "secrets").mkdir(parents=True, mode=0o700)
    key = folder / "secrets/key"
    key.write_text("secret")
    key.chmod(0o600)
    (folder / "compose.yaml").write_text(SERVER % network)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    (folder / "page").write_text(text)
    return folder


def test_hosts_run_the_engine_and_compose_asked_for(own_lab: Lab) -> None:
    host = own_lab.host(1)
    assert host.docker("version", "--format", "{{.Server.Version}}").startswith(f"{own_lab.software.engine}.")
    assert str(own_lab.software.describe()["compose"]) in host.docker("compose", "version")
    assert [own_lab.host(number).sh(["hostname"]).stdout.strip() for number in (1, 2, 3)] == ["host1", "host2", "host3"]


def test_folders_belong_to_an_ordinary_user(own_lab: Lab, tmp_path: Path) -> None:
    host = own_lab.host(1)
    folder = host.put(page(tmp_path / "mine", "x", ""), "mine")
    found = host.sh(["stat", "-c", "%u %a %n", ".", "secrets", "secrets/key"], cwd=folder).stdout.splitlines()
    assert found == [f"{OPERATOR} 755 .", f"{OPERATOR} 700 secrets", f"{OPERATOR} 600 secrets/key"]
    assert host.sh(["id", "-u"]).stdout.strip() == str(OPERATOR)
    assert host.sh(["sh", "-c", "touch /srv/models/mine && touch /srv/not-mine"], check=False).returncode != 0
    assert not Path("/srv/models/mine").exists(), "the machine's own /srv is not the host's"


def test_host_network_has_the_hosts_address(own_lab: Lab, stacks: Stacks, tmp_path: Path) -> None:
    """Built on a shared base, started as the ordinary user; every host then sees every other, IPv4 and IPv6."""
    for number in (1, 2):
        stack = stacks.put(own_lab.host(number), page(tmp_path / f"n{number}", f"from {number}", "network_mode: host"))
        stack.up("--build")
        assert stack.compose("exec", "node", "hostname").stdout.strip() == f"host{number}"
    one, two, three = (own_lab.host(number) for number in (1, 2, 3))
    system.wait_until(lambda: _answers(three, f"http://{two.address}:8000/page"), "the page of host2", 10)
    assert three.http_get(f"http://{one.address}:8000/page") == (200, "from 1")
    assert three.http_get(f"http://[{two.address6}]:8000/page") == (200, "from 2")
    assert one.http_get(f"http://[{two.address6}]:8000/page") == (200, "from 2")
    two.cut()
    assert not _answers(three, f"http://{two.address}:8000/page", 0.5)
    two.heal()
    assert three.http_get(f"http://{two.address}:8000/page") == (200, "from 2")


def test_bridge_network_publishes_on_the_hosts_address(own_lab: Lab, stacks: Stacks, tmp_path: Path) -> None:
    host = own_lab.host(1)
    stacks.put(host, page(tmp_path / "bridged", "hello", f'ports: ["{host.address}:8000:8000"]')).up("--build")
    url = f"http://{host.address}:8000/page"
    system.wait_until(lambda: _answers(own_lab.host(3), url), "the page through the bridge", 10)
    assert own_lab.host(3).http_get(url) == (200, "hello")


@pytest.mark.parametrize("devices", ["count: 2", "device_ids: ['0', '1']"])
def test_gpu_form_starts_with_the_stub_hook_which_is_no_gpu(
    own_lab: Lab, stacks: Stacks, tmp_path: Path, devices: str
) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/compose.yaml").write_text(GPU % devices)
    stack = stacks.put(own_lab.host(1), tmp_path / "gpu")
    stack.up()
    assert stack.compose("ps", "--status", "running", "--services").stdout.split() == ["node"]


def test_bringing_up_what_is_up_changes_nothing(own_lab: Lab) -> None:
    before = [own_lab.host(number).init_pid() for number in (1, 2, 3)]
    own_lab.up(3)
    assert [own_lab.host(number).init_pid() for number in (1, 2, 3)] == before


def test_image_reaches_a_host_with_running_containers(
    own_lab: Lab, stacks: Stacks, tmp_path: Path, busybox_tar: Path
) -> None:
    busy, idle = own_lab.host(1), own_lab.host(2)
    stacks.put(busy, page(tmp_path / "busy", "still here", "network_mode: host")).up("--build")
    own_lab.import_image("lab/second:1", busybox_tar, "LABEL second=yes")
    wanted = images.image_id(own_lab._seed().data_root, "lab/second:1")
    assert [images.image_id(host.data_root, "lab/second:1") for host in (busy, idle)] == [wanted, wanted]
    assert busy.http_get(f"http://{busy.address}:8000/page") == (200, "still here")
    assert idle.docker("run", "--rm", "lab/second:1", "cat", "/etc/hostname").strip()


def test_reboot_keeps_the_disk_and_restarts_what_should_run(own_lab: Lab) -> None:
    host = own_lab.host(3)
    host.docker("run", "-d", "--name", "stays", "--restart", "unless-stopped", IMAGE, "sleep", "600")
    host.reboot()
    try:
        running = ("inspect", "-f", "{{.State.Running}}", "stays")
        system.wait_until(lambda: host.docker(*running, check=False).strip() == "true", "the container's return", 20)
    finally:
        host.docker("rm", "-f", "stays")


def test_killed_engine_is_healed_by_up(own_lab: Lab) -> None:
    untouched = own_lab.host(2).init_pid()
    host = own_lab.host(1)
    host.docker("run", "-d", IMAGE, "sleep", "600")
    for pid in system.processes(f"{host.cgroup}/engine"):
        os.kill(pid, signal.SIGKILL)
    system.wait_until(lambda: not host.healthy(), "the engine's death", 5)
    own_lab.up(3)
    assert host.healthy()
    assert host.containers() == []
    assert own_lab.host(2).init_pid() == untouched


def test_other_generation_replaces_the_host(own_lab: Lab) -> None:
    (other,) = set(downloads.GENERATIONS) - {own_lab.software.engine}
    changed = make_lab(other)
    changed.up(1)
    assert changed.host(1).docker("version", "--format", "{{.Server.Version}}").startswith(f"{other}.")
    own_lab.up(1)


def test_down_leaves_nothing_with_containers_running_and_paused(own_lab: Lab) -> None:
    own_lab.share_image(IMAGE)
    for number in (1, 2):
        own_lab.host(number).docker("run", "-d", "--name", "held", IMAGE, "sleep", "600")
    own_lab.host(2).docker("pause", "held")
    own_lab.down()
    assert traces(own_lab) == []
    own_lab.down()
    own_lab.up(3)


def test_half_made_lab_is_cleaned() -> None:
    half = make_lab()
    half.down()
    half.network.make_switch()
    half.network.connect(2)  # wires, but no host
    half.host(3)._install()  # a disk, but no wires
    system.make_cgroup(f"{half.host(4).cgroup}/init")
    half.up(2)
    assert half.host(2).healthy()
    half.down()
    assert traces(half) == []


def test_two_runs_cannot_use_one_lab(own_lab: Lab) -> None:
    with pytest.raises(LabError, match=f"in use by process {os.getpid()}"), make_lab().held():
        pass


def _answers(host: object, url: str, timeout: float = 2) -> bool:
    try:
        return host.http_get(url, timeout=timeout)[0] == 200  # type: ignore[attr-defined,no-any-return]
    except OSError:
        return False
