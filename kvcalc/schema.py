"""The version of the JSON documents, and their JSON Schema: schema.json, made from the declarations in `documents`."""

from __future__ import annotations

import os
from typing import Any, Final

SCHEMA_VERSION: Final = 3

READABLE_VERSIONS = (1, 2, SCHEMA_VERSION)
"""The versions of records and profiles that are read: they are the same in all of these."""

Schema = dict[str, Any]
"""A JSON Schema, or a node of one."""


def load_schema() -> Schema:
    """Load the JSON Schema. `$defs` has one schema per document (estimate, engines, audit, measure, ...)."""
    import json

    with open(os.path.join(os.path.dirname(__file__), "schema.json"), encoding="utf-8") as file:
        schema: Schema = json.load(file)
    return schema
