from __future__ import annotations

import pytest

from stack_node.counters import Counters, Parser

TEXT = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 18230.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a {b} \\"c\\" d"} 3.0
vllm:num_requests_running{engine="1",model_name="a {b} \\"c\\" d"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 1e+03
vllm:generation_tokens_total{engine="1",model_name="m"} 24.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7900000001e+09
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 9.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 100.0
vllm:iteration_tokens_total_sum{engine="0",model_name="m"} 5555.0
http_requests_total{handler="/v1/models",method="GET",status="2xx"} 77.0
"""
FOUND = Counters(progress=1124.25, running=4, waiting=2)


def parsed(*pieces: bytes) -> Counters | None:
    parser = Parser()
    for piece in pieces:
        parser.feed(piece)
    return parser.result()


def test_sums_over_engines() -> None:
    assert parsed(TEXT.encode()) == FOUND


@pytest.mark.parametrize("size", [1, 7, 100])
def test_it_does_not_matter_where_the_text_is_cut(size: int) -> None:
    data = TEXT.encode()
    assert parsed(*(data[start : start + size] for start in range(0, len(data), size))) == FOUND


def test_the_last_line_needs_no_end() -> None:
    assert parsed(TEXT.rstrip("\n").encode(), b'\nvllm:request_success_total{r="stop"} 1') == Counters(1125.25, 4, 2)


def test_labels_are_not_needed_and_time_stamps_are_left_out() -> None:
    text = b"vllm:prompt_tokens_total 5 1790000000\nvllm:num_preemptions_total\t{} 2 1790000000\n"
    assert parsed(text) == Counters(5, 0, 0)


def test_a_chunk_of_a_long_prompt_is_progress() -> None:
    """No token is counted before the first comes out; only the share of the cache in use moves."""
    text = 'vllm:prompt_tokens_total{{engine="0"}} 1e11\nvllm:kv_cache_usage_perc{{engine="0"}} {}\n'
    before, after = parsed(text.format(0.31).encode()), parsed(text.format(0.3111).encode())
    assert before is not None
    assert after is not None
    assert before.progress != after.progress


def test_an_engine_without_statistics_has_nothing_to_count() -> None:
    assert parsed(b"# TYPE http_requests_total counter\nhttp_requests_total 7.0\n") == Counters(0, 0, 0)


@pytest.mark.parametrize("text", [b"", b"<!doctype html>\n<html></html>", b"\0\xff", b"vllm:other 5"])
def test_what_are_no_metrics(text: bytes) -> None:
    assert parsed(text) is None


def test_values_that_are_none_are_left_out() -> None:
    text = b"# TYPE x counter\nvllm:prompt_tokens_total NaN\nvllm:prompt_tokens_total +Inf\nvllm:prompt_tokens_total\n"
    assert parsed(text + b"vllm:prompt_tokens_total{a=\nvllm:prompt_tokens_total{} x\n") == Counters(0, 0, 0)


def test_a_line_without_an_end_is_given_up() -> None:
    parser = Parser()
    with pytest.raises(ValueError, match="a line without an end"):
        parser.feed(b"x" * 1_000_000)
