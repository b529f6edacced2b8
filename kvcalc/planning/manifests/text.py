"""A manifest as YAML, with comments at its head."""

from __future__ import annotations

from typing import Any

import yaml


def write(comments: list[str], *documents: dict[str, Any]) -> str:
    """The documents as YAML. Keys keep their order, and lines are not folded."""
    head = "".join(f"# {line}\n" for line in comments)
    return head + yaml.safe_dump_all(documents, sort_keys=False, width=1000)
