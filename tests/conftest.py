"""Fixtures of the whole tree: one lab serves the lab's own tests and the end-to-end tests, one after the other."""

from hypothesis import settings

from tests.lab.fixtures import lab, pytest_runtest_makereport, stacks

__all__ = ["lab", "pytest_runtest_makereport", "stacks"]

# How long an example takes says more about the machine than about the code.
settings.register_profile("gen-stack", deadline=None)
settings.load_profile("gen-stack")
