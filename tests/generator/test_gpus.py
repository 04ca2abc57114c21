from __future__ import annotations

from gen_stack.gpus import known_type, memory_of, smallest, totals
from gen_stack.spec import Gpu
from tests.generator.helpers import TWO, error, load


def test_a_card_has_less_than_its_name_says() -> None:
    for name, total in totals().items():
        nominal = int("".join(letter for letter in name.rpartition("-")[2] if letter.isdigit()))
        assert 0.9 * nominal < total / 2**30 < nominal


def test_a_type_however_it_is_written() -> None:
    assert {known_type(name) for name in ("h100-80gb", "H100_80GB", "H100 80GB")} == {"H100-80GB"}


def test_a_size_goes_before_a_type() -> None:
    assert memory_of(Gpu(type="H100-80GB", memory="40GiB")) == 40 * 2**30
    assert memory_of(Gpu(type="H100-80GB")) == totals()["H100-80GB"]
    assert memory_of(Gpu()) is None


def test_the_smallest_node_decides() -> None:
    text = TWO.replace("12, gpus: 8", "12, gpus: 8, gpu: {memory: 40GiB}") + "gpu: {memory: 80GiB}\n"
    assert smallest(load(text).spec) == (40 * 2**30, 1)
    assert smallest(load(TWO.replace("12, gpus: 8", "12, gpus: 8, gpu: {memory: 40GiB}")).spec) is None


def test_an_unknown_type_gets_a_suggestion() -> None:
    line = error(f"{TWO}gpu: {{type: H100-80}}\n")
    assert "gpu.type: 'H100-80' is not in the table" in line
    assert "did you mean H100-80GB?" in line
    line = error(TWO.replace("12, gpus: 8", "12, gpus: 8, gpu: {type: Voodoo}"))
    assert "nodes[1].gpu.type" in line
    assert "known are A10G-24GB" in line
