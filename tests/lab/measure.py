"""Measure the ways to bring an image into hosts: `python -m tests.lab.measure ARCHIVE TAG [--engine 20.10]`.

ARCHIVE is of `docker save TAG`. The lab used is number 76 in a folder of its own; it is removed at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.host import Host, Software
from tests.lab.lab import Lab, pipe, side_by_side
from tools import process
from tools.downloads import GENERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path("/var/lib/gen-stack-lab-measure")


def main() -> int:
    """Print seconds and disk space for each way."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.measure", description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("tag")
    parser.add_argument("--engine", choices=list(GENERATIONS), default="26.1")
    parser.add_argument("--hosts", type=int, default=3)
    options = parser.parse_args()
    return process.main(lambda: _measure(options.archive, options.tag, options.engine, options.hosts))


def _measure(archive: Path, tag: str, engine: str, count: int) -> None:
    lab = Lab(ROOT, 76, Software(engine))
    with lab.held():
        try:
            lab.down()
            lab.forget_images()
            hosts = lab.up(count)
            print(f"{archive.stat().st_size / 2**20:.0f} MiB archive, {count} hosts, engine {engine}")
            _report("docker load in every host at once", lambda: side_by_side(partial(_load, archive), hosts))
            lab.down()
            lab.up(count)
            _report("seed filled and shared", lambda: lab.load_image(tag, archive))
            lab.down()
            _report("hosts up", lambda: lab.up(count))
            _report("shared from the kept seed", lambda: lab.load_image(tag, archive))
            _report("hosts down", lab.down)
        finally:
            lab.down()
            lab.forget_images()
    shutil.rmtree(ROOT)


def _load(archive: Path, host: Host) -> None:
    pipe(["cat", str(archive)], host.command(["docker", "load", "-q"]))


def _report(what: str, work: Callable[[], object]) -> None:
    os.sync()
    before = shutil.disk_usage(ROOT).used
    start = time.monotonic()
    work()
    seconds = time.monotonic() - start
    os.sync()
    print(f"{what:40} {seconds:6.1f} s {(shutil.disk_usage(ROOT).used - before) / 2**20:+8.0f} MiB", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
