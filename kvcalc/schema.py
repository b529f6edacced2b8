"""The version of the JSON documents, and their JSON Schema: schema.json, made from the declarations in `documents`."""

from __future__ import annotations

import os
from typing import Any

SCHEMA_VERSION = 2


def load_schema() -> dict[str, Any]:
    """Load the JSON Schema. `$defs` has one schema per document (estimate, engines, audit, measure, ...)."""
    import json

    with open(os.path.join(os.path.dirname(__file__), "schema.json"), encoding="utf-8") as file:
        schema: dict[str, Any] = json.load(file)
    return schema
