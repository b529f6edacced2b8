"""HTML and the SVG in it: elements whose text is escaped, and a page that loads nothing and runs nothing."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from kvcalc.writing.terminal import printable

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

# They have no end tag.
_EMPTY = ("meta",)


class Markup(str):
    """HTML that stands in a page as it is. Only this module makes it; any other text is escaped."""

    __slots__ = ()


def element(name: str, /, *inside: str, **attributes: object) -> Markup:
    """An element around texts and other elements. Attributes that are None are left out.

    An underscore in an attribute's name is a hyphen, except at its end: `class_`, `aria_label`.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_safe(str(value))}"'
        for key, value in attributes.items() if value is not None
    )  # fmt: skip
    return Markup(f"<{name}{given}>" if name in _EMPTY else f"<{name}{given}>{joined(inside, '')}</{name}>")


def joined(parts: Iterable[str], between: str = "\n") -> Markup:
    """Texts and elements, one after the other."""
    return Markup(between.join(part if isinstance(part, Markup) else _safe(part) for part in parts))


def tree(drawing: Markup) -> Element:
    """The elements of a drawing, to draw it in another way."""
    from xml.etree import ElementTree

    return ElementTree.fromstring(drawing)  # noqa: S314, this module made it


def page(title: str, generator: str, style: str, body: Markup) -> str:
    """A whole page. A browser applies `style`, which is known by its hash, and loads and runs nothing."""
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = [
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="generator", content=generator),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        Markup(f"<style>{style}</style>"),
    ]
    parts = [element("head", joined(["", *head, ""])), element("body", joined(["", body, ""]))]
    return f"<!DOCTYPE html>\n{element('html', joined(['', *parts, '']), lang='en')}\n"


def _safe(text: str) -> str:
    return escape(printable(text), quote=True)
