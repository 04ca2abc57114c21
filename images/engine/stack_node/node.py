"""One node from start to end: decide, check, run the engine, report how it ended."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from stack_node import argv, checks, flags, health, host, launchers, logpump, supervise
from stack_node import config as configuration
from stack_node.config import Network, NodeConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from stack_node.argv import EngineCommand
    from stack_node.host import Facts
    from stack_node.logpump import Sink, Voice
    from stack_node.supervise import Outcome

EXIT_STOPPED = 0
EXIT_ENDED = 1
EXIT_ARGUMENTS = 2
EXIT_CHECKS = 3

# How long an address may take to appear: after a reboot Docker is often up before the network is.
ADDRESS_WAIT_S = 60.0

# The log's reader gets so long to take the last lines.
FLUSH_S = 2.0


def serve(args: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the engine with these arguments until it ends; returns the exit status."""
    supervise.take_signals()
    environ, unassigned = launchers.assign(environ)
    config, problems = configuration.read(environ)
    errors = logpump.Sink(2, logpump.line_of(config))
    say = logpump.Voice(errors)
    try:
        return _serve(config, [*unassigned, *problems, *argv.problems(config, args)], args, environ, errors, say)
    except supervise.StopRequestedError:
        say("stopped before the engine was started")
        return EXIT_STOPPED
    finally:
        errors.flush(FLUSH_S)


def _serve(
    config: NodeConfig,
    problems: Sequence[str],
    args: Sequence[str],
    environ: Mapping[str, str],
    errors: Sink,
    say: Voice,
) -> int:
    for warning in configuration.warnings(environ):
        say(f"warning: {warning}")
    if problems:
        for problem in problems:
            say(f"error: {problem}")
        return EXIT_ARGUMENTS
    network = find_network(config, say, ADDRESS_WAIT_S) if config.spans_nodes else None
    found = [network] if isinstance(network, str) else []
    facts = host.gather(config, flags.model(flags.split(args)), environ)
    found += judge(config, args, network if isinstance(network, Network) else None, facts)
    if found or isinstance(network, str):
        for finding in found:
            say(f"error: {finding}")
        return EXIT_CHECKS
    api_key = facts.key_file.text.strip() if facts.key_file and facts.key_file.text else None
    command = argv.command(config, args, environ, network, api_key)
    for line in introduction(config, network, facts, command):
        say(line)
    if config.in_group:
        return _run_in_group(config, args, environ, network, facts, api_key, errors, say)
    outcome = _run(config, command, errors, say)
    status, sentence = conclusion(outcome)
    say(sentence)
    return status


def find_network(config: NodeConfig, say: Callable[[str], None], wait_s: float) -> Network | str:
    """The group's addresses as this host sees them; a sentence when they do not appear within `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    waiting = False
    while isinstance(network := _look_at_network(config, wait_s), str) and time.monotonic() < deadline:
        if not waiting:
            say(f"waiting up to {wait_s:.0f} s for the network; {_missing(config)}")
            waiting = True
        supervise.pause(0.5)
    return network


def _missing(config: NodeConfig) -> str:
    wanted = {"NODE_ADDR": config.node_addr, "MASTER_ADDR": config.master_addr}
    return " and ".join(f"{name} is {value}" for name, value in wanted.items() if value)


def _look_at_network(config: NodeConfig, wait_s: float) -> Network | str:
    name = config.master_addr or ""
    try:
        master = configuration.parse_address(name)
    except ValueError:
        try:
            master = host.resolve(name, config.node_addr)
        except OSError as error:
            return checks.unresolved(name, error.strerror or str(error))
    node = config.node_addr
    if node is None:
        try:
            node = host.route_source(master)
        except OSError as error:
            return checks.no_route(master, error.strerror or str(error))
    known = tuple(host.addresses())
    if not host.is_local(node):
        return checks.not_local("NODE_ADDR", node, known, wait_s)
    if config.serves_api and not host.is_local(master):
        return checks.not_head(master, known, wait_s)
    interface = host.interface_of(node, known)
    return checks.no_interface(node) if interface is None else Network(master, node, interface)


def judge(config: NodeConfig, args: Sequence[str], network: Network | None, facts: Facts) -> list[str]:
    """What keeps this host from starting; without a group nothing is refused that upstream would take."""
    if not config.in_group:
        return [*checks.engine(facts), *(checks.api_key(facts.key_file, facts.uid) if facts.key_file else ())]
    ids = flags.last_value(flags.split(args), "--device-ids")
    return checks.findings(config, network, argv.sizes(args), len(ids.split(",")) if ids else None, facts)


def introduction(config: NodeConfig, network: Network | None, facts: Facts, command: EngineCommand) -> list[str]:
    """Lines that say what is about to run."""
    lines = []
    if network is not None:
        lines.append(
            f"{'head' if config.serves_api else 'worker'} of group {config.group}: {network.node_addr} on "
            f"{network.interface}, head {configuration.url_host(network.master_addr)}:{config.master_port}"
        )
        lines.append(checks.transport(config, facts))
    if config.in_group:
        lines += [f"warning: {warning}" for warning in checks.warnings(config, facts)]
    return [*lines, *command.notes]


def conclusion(outcome: Outcome) -> tuple[int, str]:
    """Exit status for an engine's end, and a sentence about it."""
    if outcome.asked:
        return EXIT_STOPPED, "stopped"
    if outcome.status == 0:
        return EXIT_ENDED, f"the engine ended with 0 without being asked to: a failure, reported as {EXIT_ENDED}"
    if outcome.status > 0:
        return outcome.status, f"the engine ended with exit code {outcome.status}"
    name = signal.Signals(-outcome.status).name
    hint = "; out of memory, perhaps" if -outcome.status == signal.SIGKILL else ""
    return 128 - outcome.status, f"the engine was killed by {name}{hint}"


def _run_in_group(
    config: NodeConfig,
    args: Sequence[str],
    environ: Mapping[str, str],
    network: Network | None,
    facts: Facts,
    api_key: str | None,
    errors: Sink,
    say: Voice,
) -> int:
    from stack_node import control  # aiohttp and all: only a group needs it

    output = logpump.Sink(1, logpump.line_of(config))
    start = control.Start(
        config=config,
        args=args,
        environ=dict(environ),
        network=network,
        devices=-1 if facts.devices is None else facts.devices,
        engine_version=host.engine_version(),
        token=(facts.token_file.text or "").strip().encode() if facts.token_file else b"",
        api_key=api_key,
    )
    good = control.Control(start, output, errors, say).run()
    output.flush(FLUSH_S)
    say("stopped" if good else "ended")
    return EXIT_STOPPED if good else EXIT_ENDED


def _run(config: NodeConfig, command: EngineCommand, errors: Sink, say: Voice) -> Outcome:
    supervise.become_subreaper()
    output = logpump.Sink(1, logpump.line_of(config))
    pipes = [os.pipe(), os.pipe()]
    pid, life_fd = supervise.spawn(command.argv, command.env, pipes[0][1], pipes[1][1])
    for _, write_end in pipes:
        os.close(write_end)
    readers = [logpump.copy(pipes[0][0], output), logpump.copy(pipes[1][0], errors)]
    _publish(command, pid, say)
    try:
        return supervise.Supervisor(pid, command.stop_s, say).run()
    finally:
        os.close(life_fd)
        health.remove()
        for reader in readers:
            reader.join(FLUSH_S)
        output.flush(FLUSH_S)


def _publish(command: EngineCommand, pid: int, say: Voice) -> None:
    own, engine = health.start_ticks(os.getpid()) or 0, health.start_ticks(pid) or 0
    try:
        health.write(health.Status(os.getpid(), own, "plain", pid, engine, command.api_url))
    except OSError as error:
        say(f"warning: the health check will not work, its status file cannot be written: {error}")
