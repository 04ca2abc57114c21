"""`make bench`: measures, prints tables, and with --write puts them into docs/measurements.md."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from dataclasses import fields
from pathlib import Path

from tools import process
from tools.bench.figures import Figure, Options, replaced, table
from tools.process import ToolError, say

PAGE = Path(__file__).resolve().parents[2] / "docs/measurements.md"
SECTIONS = {
    "generator": "The generator, as a whole process",
    "supervisor": "The supervisors of a ready, idle group: three nodes on loopback, fake engine",
    "detection": "From a fault until `/readyz` says no: three nodes on loopback, fake engine",
    "members": "A head with simulated members on loopback",
    "soak": "Random faults in a row: three nodes on loopback, fake engine",
    "real": "The real engine on two lab hosts, beside hand-started `vllm serve`",
}


def machine() -> str:
    """Where and when the figures were taken."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB of memory, "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    )


def measured(name: str, options: Options) -> list[Figure]:
    """The figures of one section."""
    figures: list[Figure] = importlib.import_module(f"tools.bench.{name}").section(options)
    return figures


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/measurements.md")
    for field in fields(Options):
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=type(field.default), default=field.default, help=f"default: {field.default}")
    return parser.parse_args()


def _body() -> None:
    given = _arguments()
    names = given.sections or list(SECTIONS)
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise ToolError(f"no such section: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    options = Options(**{field.name: getattr(given, field.name) for field in fields(Options)})
    missed = []
    for name in names:
        say(f"\n## {SECTIONS[name]}\n")
        figures = measured(name, options)
        text = table(figures)
        say(f"\n{text}")
        missed += [figure.what for figure in figures if figure.kept is False]
        if given.write:
            page = PAGE.read_text(encoding="utf-8")
            PAGE.write_text(replaced(page, name, f"## {SECTIONS[name]}\n\nOn {machine()}.\n\n{text}"), encoding="utf-8")
    if missed:
        raise ToolError(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    sys.exit(process.main(_body))
