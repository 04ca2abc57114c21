"""The lab by hand: `python -m tests.lab up --hosts 3`, `status`, `env 1`, `sh 1 docker ps`, `down`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import TYPE_CHECKING

from tests.lab.host import Software
from tests.lab.lab import Lab
from tools import process
from tools.downloads import GENERATIONS, docker_config, engine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 3 when something outside failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="bring hosts up (those that are up already stay as they are)")
    up.add_argument("--hosts", type=_positive, default=3, metavar="N")
    up.add_argument(
        "--engine", choices=list(GENERATIONS), default="26.1", help="generation of Docker Engine and Compose"
    )
    up.add_argument("--compose", metavar="VERSION", help="another Compose than the generation's")
    up.add_argument("--no-gpu-hook", action="store_true", help="an engine that refuses GPU reservations")
    commands.add_parser("down", help="remove everything (loaded images are kept aside for the next time)")
    commands.add_parser("forget", help="remove the images that `down` keeps, too")
    commands.add_parser("status", help="say which hosts there are")
    env = commands.add_parser("env", help="print what to export to talk to a host's engine: eval $(... env 1)")
    env.add_argument("host", type=_positive, metavar="HOST")
    shell = commands.add_parser("sh", help="run a command on a host as its ordinary user (default: a shell)")
    shell.add_argument("host", type=_positive, metavar="HOST")
    shell.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(argv)
    return process.main(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    lab = Lab()
    if options.command == "up":
        software = Software(options.engine, options.compose, gpu_hook=not options.no_gpu_hook)
        lab = Lab(software=software)
        with lab.held():
            lab.up(options.hosts)
        _status(lab)
    elif options.command == "down":
        with lab.held():
            lab.down()
    elif options.command == "forget":
        with lab.held():
            lab.forget_images()
    elif options.command == "status":
        _status(lab)
    elif options.command == "env":
        _env(lab, options.host)
    else:
        command = lab.host(options.host).command(options.argv or ["bash", "--norc", "-i"])
        sys.stdout.flush()
        os.execvp(command[0], command)


def _status(lab: Lab) -> None:
    numbers = lab.numbers()
    if not numbers:
        print("no hosts")
    for number in numbers:
        host = lab.host(number)
        software = host.installed() or {}
        state = "up" if host.answers() and host.init_pid() else "broken"
        versions = f"engine {software.get('engine', '?')}  compose {software.get('compose', '?')}"
        print(f"{host.name}  {state:6}  {host.address}  {host.address6}  {versions}")


def _env(lab: Lab, number: int) -> None:
    host = lab.host(number)
    software = host.installed()
    if software is None:
        raise process.ToolError(f"{host.name} is not up")
    client: Path = engine(str(software["engine"])) / "usr/bin"
    config = docker_config(str(software["compose"]), with_buildx=bool(software["buildx"]))
    variables = {"DOCKER_HOST": f"unix://{host.socket}", "DOCKER_CONFIG": str(config)}
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"export PATH={shlex.quote(str(client))}:$PATH")


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 64:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and 64")
    return number


if __name__ == "__main__":
    sys.exit(main())
