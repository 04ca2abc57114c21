"""The JSON Schema of the spec, made from the same models that check it."""

from __future__ import annotations

import json

from gen_stack.spec import Spec


def schema_text() -> str:
    """Write the JSON Schema (draft 2020-12) that editors complete and check with."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Spec.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
