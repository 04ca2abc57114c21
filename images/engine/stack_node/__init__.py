"""The node entrypoint: one process on every node, from environment to a supervised vLLM engine.

`config` reads the environment, `argv` decides the engine's command line, `host` looks at the machine, `checks` judges
what it saw, `supervise` and `logpump` run the engine, `health` answers Docker's HEALTHCHECK, `main` ties them together.
"""

__version__ = "0.1.0"

# The upstream release whose flags (flags.py) and behaviour this package was written against and is tested with.
ENGINE_VERSION = "0.32.0"
