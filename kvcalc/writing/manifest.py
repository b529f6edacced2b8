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
