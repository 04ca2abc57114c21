"""gen-stack: one YAML spec becomes one Docker Compose file per host."""

__version__ = "0.1.0"
