"""YAML from outside, within limits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from kvcalc.errors import UsageError

# The largest document that is read.
_MOST_NODES, _MAX_DEPTH, _LONG_NUMBER = 100_000, 64, re.compile(r"[-+]?\d[\da-fA-Fx_]{1000}")


def read_documents(text: str) -> list[dict[str, Any]]:
    """The documents of a compose file or of manifests. Empty if the text is not YAML with a mapping.

    Raises UsageError (exit 2) for YAML that is too large or nested too deeply, with its aliases written out.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_size(yaml.parse(text, Loader=loader))
        documents = list(yaml.load_all(text, Loader=loader))
    # PyYAML raises the last three for a value that does not suit its tag: !!bool x, !!int "", !!timestamp x.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError):
        return []
    return [document for document in documents if isinstance(document, dict)]


def _check_size(events: Iterable[Any]) -> None:
    """Raise UsageError (exit 2) for a document that is too large to read: aliases repeat what they name."""
    sizes: dict[str, int] = {}
    levels: list[tuple[str | None, int]] = []  # of each open collection: its anchor, and its nodes so far
    for event in events:
        if isinstance(event, yaml.DocumentStartEvent):
            sizes, levels = {}, [(None, 0)]
        elif isinstance(event, yaml.CollectionStartEvent):
            levels.append((event.anchor, 1))
        elif isinstance(event, (yaml.NodeEvent, yaml.CollectionEndEvent)):
            if isinstance(event, yaml.ScalarEvent) and _LONG_NUMBER.match(event.value):
                raise UsageError(f"{event.value[:40]}...: a number has at most 1,000 digits")
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = levels.pop()
            else:
                anchor, size = event.anchor, 1
            if isinstance(event, yaml.AliasEvent):
                size = sizes.get(anchor or "", _MOST_NODES)  # an alias within its own anchor has no end
            elif anchor is not None:
                sizes[anchor] = size
            levels[-1] = (levels[-1][0], levels[-1][1] + size)
        if len(levels) > _MAX_DEPTH or (levels and levels[-1][1] > _MOST_NODES):
            limits = f"at most {_MOST_NODES:,} values and {_MAX_DEPTH} levels are read"
            raise UsageError(f"the YAML is too large: {limits}", "paste the service or the container alone")
