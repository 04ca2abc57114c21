"""Models that people serve on several hosts, by hub id: the keys of their config.json that decide a plan."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any


@functools.lru_cache(maxsize=1)
def catalogue() -> dict[str, dict[str, Any]]:
    """Load the catalogue: configs by id, in lower case as the hub compares them."""
    text = (importlib.resources.files("gen_stack") / "data" / "catalogue.json").read_text("utf-8")
    return {name.lower(): one["config"] for one in json.loads(text)["models"] for name in one["ids"]}


def catalogue_config(model: str) -> dict[str, Any] | None:
    """Find the config of a model by its hub id; None when the catalogue has none."""
    return catalogue().get(model.lower())
