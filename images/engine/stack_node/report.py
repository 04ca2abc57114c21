"""What the head knows, as `/status` shows it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stack_node.group import Phase

if TYPE_CHECKING:
    from stack_node.group import Group
    from stack_node.roster import Mate


def status(group: Group, now: float) -> dict[str, Any]:
    """The group as a JSON object; fields in docs/protocol.md."""
    waits = group.phase in (Phase.RESTING, Phase.DOWN)
    return {
        "group": group.settings.group,
        "phase": group.phase.value,
        "ready": group.ready,
        "sentence": sentence(group, now),
        "epoch": group.epoch,
        "instance": group.instance,
        "failures": group.budget.failures,
        "max_restarts": group.settings.max_restarts,
        "next_try_s": max(0.0, group.until - now) if waits else None,
        "restarts": dict(group.restarts),
        "last_fault": group.last_fault,
        "last_recovery_s": group.last_recovery_s,
        "last_detection_s": group.last_detection_s,
        "api": {"running": group.pulse.running} if group.phase in (Phase.READY, Phase.DRAINING) else None,
        "members": [member(group, rank) for rank in range(group.settings.nnodes)],
    }


def member(group: Group, rank: int) -> dict[str, Any]:
    """One rank as a JSON object."""
    mate = group.roster.mates.get(rank)
    if mate is None:
        empty = {"rank": rank, "node": "", "address": "", "state": "missing"}
        return {**empty, "text": "has not joined", "done": 0, "total": 0}
    state = member_state(group, mate)
    done, total, text = mate.progress
    words = {"blocked": mate.blocked, "fetching": text or "fetches the weights"}
    return {
        "rank": rank,
        "node": mate.join.node,
        "address": mate.join.address,
        "state": state,
        "text": words.get(state, ""),
        "done": done,
        "total": total,
    }


def member_state(group: Group, mate: Mate) -> str:
    """What a connected node does, in one word."""
    if mate.blocked:
        return "blocked"
    if mate.told_to_stop or mate.leaving:
        return "stopping"
    if mate.engaged:
        return "running" if group.phase in (Phase.READY, Phase.DRAINING) else "starting"
    return "waiting" if mate.prepared else "fetching"


def sentence(group: Group, now: float) -> str:
    """The group's state in plain words."""
    left = max(0.0, group.until - now)
    failures = group.budget.failures
    tries = f"{failures} of {group.settings.max_restarts} restarts used"
    words = {
        Phase.FORMING: f"waiting for {group.roster.waits_for() or group.obstacle or 'a moment'}",
        Phase.CHECKING: "the nodes test their connections",
        Phase.STARTING: "the engine starts",
        Phase.READY: "ready",
        Phase.DRAINING: f"draining; {group.pulse.running} requests are running",
        Phase.ENDING: "the engine is being ended on every node",
        Phase.RESTING: f"next attempt in {left:.0f} s ({tries})",
        Phase.DOWN: f"down after {failures} failures; one more attempt in {left:.0f} s; see the last fault",
        Phase.CLOSED: "stopped",
    }
    return words[group.phase]
