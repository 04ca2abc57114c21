"""What `make gateway` has seen, kept in build/gateway.json; `python -m tests.gateway.table` prints it."""

from __future__ import annotations

import json
from pathlib import Path

KEPT = Path(__file__).resolve().parents[2] / "build/gateway.json"


def note(what: str, figure: str) -> None:
    """Keep one figure of a demonstration."""
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps({**_kept(), what: figure}, indent=1))


def _kept() -> dict[str, str]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


if __name__ == "__main__":
    print(
        "\n".join(["| what | figure |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in _kept().items())])
    )
