"""The lab's fixtures, for its own tests."""

from tests.lab.fixtures import lab, pytest_runtest_makereport, stacks

__all__ = ["lab", "pytest_runtest_makereport", "stacks"]
