"""Fixtures of the whole tree: one lab serves the lab's own tests and the end-to-end tests, one after the other."""

from tests.lab.fixtures import lab, pytest_runtest_makereport, stacks

__all__ = ["lab", "pytest_runtest_makereport", "stacks"]
