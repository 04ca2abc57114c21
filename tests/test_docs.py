"""The documentation says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from stack_node.config import VARIABLES
from tools.docs import documents

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_generated_documents_are_up_to_date() -> None:
    for path, text in documents().items():
        assert (ROOT / path).read_text("utf-8") == text, f"{path}: run `make generated`"


def test_every_variable_of_the_image_stands_in_the_contract() -> None:
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", (ROOT / "docs/contracts.md").read_text(), re.MULTILINE))
    assert table == {*VARIABLES, "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_ADDR"}


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
