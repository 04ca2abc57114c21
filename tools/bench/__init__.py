"""What the documentation states figures of, measured: `make bench`, or `python -m tools.bench SECTION ...`."""

import sys
from pathlib import Path

# The entrypoint's package is no part of the installed one; here it is run and simulated.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "images/engine"))
