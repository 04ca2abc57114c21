"""What a test can ask of the fake engine: variables at its start, files in FAKE_DIR at run time.

Variables: FAKE_LOAD_S seconds of loading (0.5), FAKE_STEP_S seconds a token takes (0.02), FAKE_NOTICE_S seconds in
which a headless parent notices its child's end (2), FAKE_LEAVE_S seconds a headless node takes after SIGTERM (2),
FAKE_DEATH_S seconds in which the API says 503 after the engine's death (0.5), FAKE_EXECUTE_S seconds before a hanging
step is given up (300), FAKE_DIR (/srv/fake).

Files (one folder a node, so one rank can be hit alone):
    fail-start    the engine ends with 1 at its start: `always`, or so many times (the number in it counts down)
    die-loading   the worker ends in the middle of loading: the same
    slow-load     seconds that loading takes
    step          seconds that one step takes
    stall         while it is there, this rank's part of a step hangs
    mute          while it is there, the API takes connections and answers nothing
    exit          the first process ends at once with the code in the file, which is removed
    ignore-term   the first process ignores SIGTERM
    orphan        the worker leaves a process behind that is in a session of its own
    flood         while it is there, the first process logs some megabytes a second
"""

from __future__ import annotations

import os
import time
from pathlib import Path

DEFAULTS = {"LOAD_S": 0.5, "STEP_S": 0.02, "NOTICE_S": 2.0, "LEAVE_S": 2.0, "DEATH_S": 0.5, "EXECUTE_S": 300.0}


def seconds(name: str) -> float:
    """A duration from the environment (`FAKE_` + name)."""
    return float(os.environ.get(f"FAKE_{name}") or DEFAULTS[name])


def _file(name: str) -> Path:
    return Path(os.environ.get("FAKE_DIR") or "/srv/fake") / name


def is_set(name: str) -> bool:
    """Whether a switch is on."""
    return _file(name).exists()


def text(name: str) -> str | None:
    """What is in a switch's file, None where there is none."""
    try:
        return _file(name).read_text().strip()
    except OSError:
        return None


def number(name: str, otherwise: float) -> float:
    """The number in a switch's file."""
    found = text(name)
    return float(found) if found else otherwise


def strikes(name: str) -> bool:
    """Whether a switch that counts down (or says `always`) hits this time; one less is left after it."""
    found = text(name)
    if not found or found == "0":
        return False
    if found != "always":
        _file(name).write_text(str(int(found) - 1))
    return True


def take(name: str) -> str | None:
    """What is in a switch's file, which is removed."""
    found = text(name)
    if found is not None:
        _file(name).unlink(missing_ok=True)
    return found


def wait_while(name: str) -> None:
    """Hang as long as a switch is on."""
    while is_set(name):
        time.sleep(0.05)
