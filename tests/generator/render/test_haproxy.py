"""HAProxy's configuration, line by line where a spec changes it; tests/gateway has it in the real HAProxy."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from gen_stack.load import load_spec
from gen_stack.output import outputs
from gen_stack.planner import make_plan
from gen_stack.render.haproxy import SECRETS_FOLDER, haproxy_config
from tests.gateway.local import certificate
from tests.generator.helpers import FOUR, load
from tests.generator.regenerate import GOLDEN
from tools.downloads import haproxy

if TYPE_CHECKING:
    from pathlib import Path


def config(rest: str, files: dict[str, str] | None = None) -> str:
    plan = make_plan(load(f"{FOUR}replicas: 2\n{rest}\n", files))
    assert plan.gateway is not None
    return haproxy_config(plan, plan.gateway)


def servers(text: str) -> list[str]:
    return re.findall(r"^    server (.*)$", text, re.MULTILINE)


def test_every_group_is_asked_at_its_head_whether_it_is_ready() -> None:
    assert servers(config("api: {port: 9000}\nnetwork: {control_port: 29700}\ngateway: {nodes: [b]}")) == [
        "t-0 10.0.0.11:9000 addr 10.0.0.11 port 29700",
        "t-1 10.0.0.13:9000 addr 10.0.0.13 port 29700",
    ]


def test_engines_with_tls_of_their_own_are_spoken_to_in_tls() -> None:
    found = servers(config("engine: {args: {ssl-certfile: /c, ssl-keyfile: /k}}\ngateway: {nodes: [b]}"))
    assert [one.partition("29600 ")[2] for one in found] == ["ssl verify none"] * 2


def test_without_keys_nobody_is_asked_for_one_and_none_reaches_the_engines() -> None:
    text = config("gateway: {nodes: [a]}")
    assert "401" not in text
    assert "http-request del-header Authorization" in text


def test_no_secret_is_in_the_text() -> None:
    text = config("api: {key_file: k}\ngateway: {nodes: [a], keys_file: u}", {"k": "sk-engine", "u": "sk-user"})
    assert "sk-" not in text


def test_the_buffers_take_two_gibibytes_at_most_whatever_a_request_may_be() -> None:
    for size in ("1MiB", "2MiB", "8MiB", "31MiB"):
        text = config(f"gateway: {{nodes: [a], max_body: {size}}}")
        one, count = (int(re.findall(rf"tune\.{name} (\d+)", text)[0]) for name in ("bufsize", "buffers.limit"))
        assert one >= int(size.removesuffix("MiB")) * 2**20 + 2**16
        assert one * count <= 2**31


@pytest.mark.slow
def test_haproxy_takes_every_golden_configuration(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "golden")
    for spec in sorted(GOLDEN.glob("gateway*/spec.yaml")):
        loaded = load_spec(spec)
        for path, file in outputs(loaded, make_plan(loaded), tmp_path).items():
            if "/gateway/" in path:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                text = f"{cert}{key}" if path.endswith("tls.pem") else file.text
                (tmp_path / path).write_text(text.replace(SECRETS_FOLDER, str(tmp_path / "a/secrets/gateway")))
        command = [str(haproxy() / "bin/haproxy"), "-c", "-f", str(tmp_path / "a/gateway/haproxy.cfg")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, re.findall("ALERT|WARNING", done.stderr)) == (0, []), done.stderr
