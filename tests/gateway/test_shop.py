"""`make gateway`: two groups of two hosts with the real engine and a real model behind one gateway."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING

import pytest

from tests.asking import http, soon
from tests.gateway.conftest import START_S
from tests.gateway.shop import API, GATEWAY, USER_KEY, Load
from tests.gateway.table import note

if TYPE_CHECKING:
    from tests.gateway.shop import Asked, Shop

pytestmark = [pytest.mark.lab, pytest.mark.gateway, pytest.mark.timeout(900)]
PAIRS = 30


def test_the_gateway_alone_is_healthy_and_says_that_no_group_is_ready(placed: Shop) -> None:
    first = placed.nodes[0]
    first.compose("up", "-d", "--wait", "--wait-timeout", "60", "gateway")
    status, text = http(f"http://{placed.address()}:{GATEWAY}/v1/completions", {"prompt": "x"}, token=USER_KEY)
    assert (status, json.loads(text)["error"]["type"]) == (503, "server_error")
    user = first.host.sh(["ps", "-eo", "uid=,args="], user=None).stdout
    assert sorted(line.split()[0] for line in user.splitlines() if "haproxy.cfg" in line) == ["0", "99"]


def test_an_answer_comes_through_the_gateway_and_with_a_users_key_alone(shop: Shop) -> None:
    url = f"http://{shop.address()}:{GATEWAY}/v1/chat/completions"
    question = {
        "model": "small",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    }
    assert soon(lambda: http(url, question, token=USER_KEY, timeout=60)[0] == 200, 5, 0.5)
    status, text = http(url, question, token=USER_KEY, timeout=60)
    answer = json.loads(text)["choices"][0]["message"]["content"]
    assert status == 200
    assert "Paris" in answer
    assert [http(url, question, token=key)[0] for key in ("", "sk-engine")] == [401, 401]
    assert http(f"http://{shop.address()}:{GATEWAY}/metrics", token=USER_KEY)[0] == 404
    note("asked for the capital of France, through the gateway", answer)


def test_what_the_gateway_adds(shop: Shop) -> None:
    for streamed in (True, False):
        direct: list[Asked] = []
        through: list[Asked] = []
        for number in range(PAIRS):
            # The second of two finds warmer caches, so each is the second as often as the other.
            for some in (direct, through) if number % 4 < 2 else (through, direct):
                address, port = (shop.address(number % 2), API) if some is direct else (shop.address(), GATEWAY)
                some.append(shop.ask(address, port, streamed=streamed, tokens=1 if streamed else 16))
        assert not [one.fault for one in (*direct, *through) if one.fault]
        bare, behind = (statistics.median(one.first * 1000 for one in some) for some in (direct, through))
        what = "to the first byte of a stream" if streamed else "16 tokens, whole"
        figure = f"{bare:.1f} ms bare, {behind:.1f} ms through, {behind - bare:+.2f} ms; medians of {PAIRS}, in turn"
        note(f"real engine, {what}", figure)


def test_a_group_dies_under_load(shop: Shop) -> None:
    with Load(shop, tokens=64) as load:
        assert soon(lambda: len(load.done) >= 8, 120)
        time.sleep(2)
        killed = time.monotonic()
        shop.nodes[2].host.docker("kill", *shop.nodes[2].containers())
        after = time.monotonic()
        assert soon(lambda: any(one.began > after and not one.fault for one in list(load.done)), 30)
        time.sleep(15)
    failed, good = load.failed, [one for one in load.done if not one.fault]
    next_good = min(one.ended for one in good if one.ended > after) - killed
    note(
        "one of two groups killed under load, 4 clients",
        f"{len(failed)} of {len(load.done)} requests failed, {sum(one.streamed for one in failed)} of them streams; "
        f"a request made after it had its answer {next_good:.2f} s after the kill",
    )
    assert [one for one in failed if not one.streamed or one.began > after] == [], failed
    shop.nodes[2].host.docker("start", *shop.nodes[2].containers())


def test_a_rolling_change_costs_no_request(shop: Shop) -> None:
    with Load(shop) as load:
        assert soon(lambda: len(load.done) >= 12, 60)
        for group in (0, 1):
            before = len(load.done)
            stack = shop.head(group)
            stack.compose("stop", "engine", timeout=200)
            stack.compose("up", "-d", "engine")
            assert soon(lambda group=group: shop.ready(group), START_S, 0.5), shop.story()  # type: ignore[misc]
            assert len(load.done) > before
            time.sleep(3)
    note(
        "both groups stopped and started, one after the other, under load",
        f"{len(load.failed)} of {len(load.done)} failed",
    )
    assert load.failed == []
