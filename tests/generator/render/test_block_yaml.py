from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gen_stack.render.block_yaml import _Dumper, block

ODD = ["", "-", "--", "---", "...", "- a", "a: b", "a:", "a #b", "1:30", "2026-01-01", "0x1F", "1e5", "=", "<<", "~"]
WORDS = st.sampled_from([*ODD, "--max-model-len=8", "./cache", "10.0.0.11", "fd00::11", "c 231:* rwm", "yes", "it's"])
TEXTS = WORDS | st.text(max_size=12) | st.text("-.:0123456789aAeExX_~/ #'\"", max_size=8)
LEAVES = TEXTS | st.integers() | st.booleans()
NAMES = st.from_regex(r"[A-Za-z_]\w{0,20}", fullmatch=True)
VALUES = st.recursive(LEAVES, lambda one: st.lists(one, max_size=4) | st.dictionaries(NAMES, one, max_size=4))
SECTIONS = st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4)


class Whole(_Dumper):
    """PyYAML's own writer with our rules for texts, which the reference for every byte is."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


@settings(deadline=None, max_examples=500)
@given(SECTIONS)
def test_what_is_written_is_read_back(section: dict[str, Any]) -> None:
    assert yaml.safe_load(block(section)) == section


@settings(deadline=None, max_examples=500)
@given(SECTIONS)
def test_it_is_byte_for_byte_what_pyyaml_writes(section: dict[str, Any]) -> None:
    if all(isinstance(key, str) and key and key.isprintable() for key in section):
        text = yaml.dump(
            section, Dumper=Whole, sort_keys=False, width=10**6, allow_unicode=True, default_flow_style=False
        )
        assert block(section) == text.rstrip("\n")


@pytest.mark.parametrize("length", [127, 128, 1024, 2000])
def test_a_key_may_be_long(length: int) -> None:
    section = {"a": {"k" * length: "v"}}
    assert yaml.safe_load(block(section)) == section


def test_every_line_is_indented() -> None:
    section = {"a": [{"b": "c", "d": ["e"]}, [], ["f"]], "g": {}}
    lines = ["a:", "  - b: c", "    d:", "      - e", "  - []", "  - - f", "g: {}"]
    assert block(section, 2).split("\n") == [f"  {line}" for line in lines]
