"""YAML for compose and Kubernetes: text in it means itself to both."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from kvcalc.errors import UsageError
from kvcalc.writing.terminal import one_line

# What YAML 1.2 and Go's parsers read as a number or as a boolean, and PyYAML as text: 1e3, 0o17, y.
_NOT_PLAIN = re.compile(r"[-+.]?\d|[yYnN]$")
# The fields of a container in which Kubernetes expands `$(NAME)`.
_EXPANDED = ("command", "args", "env")
# The largest document that is read.
_MOST_NODES, _MAX_DEPTH, _LONG_NUMBER = 100_000, 64, re.compile(r"[-+]?\d[\da-fA-Fx_]{1000}")


class Interpolated(str):
    """Text in which compose replaces variables."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _NOT_PLAIN.match(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def compose_file(comments: Iterable[str], document: Mapping[str, Any]) -> str:
    """A compose file with comments at its head. Compose replaces variables only in `Interpolated` text.

    Raises UsageError (exit 2) for text that is not Unicode.
    """
    return _write(comments, [_literal(document, True)])


def kubernetes_file(comments: Iterable[str], documents: Iterable[Mapping[str, Any]]) -> str:
    """Manifests with comments at their head. Kubernetes expands no variable in them.

    Raises UsageError (exit 2) for text that is not Unicode.
    """
    return _write(comments, [_literal(document, False) for document in documents])


def _write(comments: Iterable[str], documents: list[Any]) -> str:
    head = "".join(f"# {one_line(line)}\n" for line in comments)
    return head + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=sys.maxsize)


def _literal(value: Any, is_expanded: bool) -> Any:
    """A copy of a document whose texts mean themselves. `is_expanded`: whether its reader replaces variables here.

    `$$` is a dollar sign in all values of a compose file (compose-spec, 12-interpolation.md), and in `_EXPANDED` of
    Kubernetes (third_party/forked/golang/expansion/expand.go).
    """
    if isinstance(value, Mapping):
        return {key: _literal(item, is_expanded or key in _EXPANDED) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item, is_expanded) for item in value]
    if not isinstance(value, str):
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        hint = "rename it, or print the command instead of a file, for example with --emit vllm"
        raise UsageError(f"{value}: not UTF-8, which a manifest must be", hint) from None
    return value.replace("$", "$$") if is_expanded and not isinstance(value, Interpolated) else str(value)


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


def resolved(word: str, variables: Mapping[str, str]) -> str:
    """A word with the container's variables, which Kubernetes writes as $(NAME). $$ is a dollar sign."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word).replace("$$", "$")
