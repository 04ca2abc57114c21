"""Several hosts on one machine: a network namespace, a mount namespace and a real Docker engine each.

`Lab` makes and removes them, `Host` is one of them; `fixtures` has both for pytest. See `docs/lab.md`.
"""

from tests.lab.host import Host
from tests.lab.lab import Lab
from tests.lab.system import LabError

__all__ = ["Host", "Lab", "LabError"]
