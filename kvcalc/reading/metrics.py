"""The metrics of a running server, in the text format of Prometheus: a file, or the page of a server.

A sample is `NAME{LABEL="VALUE",...} NUMBER`, one a line
(https://prometheus.io/docs/instrumenting/exposition_formats). Other lines are skipped: comments, and what a saved page
may have besides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from urllib.parse import quote, urlsplit, urlunsplit

from kvcalc.errors import KvcalcError, RunError, UsageError
from kvcalc.model.files import read_stdin, read_text
from kvcalc.records import NamedTuple

# No alternative begins like another, so a line is matched in time in proportion to its length.
_SAMPLE = re.compile(r'([A-Za-z_:][\w:]*)(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)')
_LABEL = re.compile(r'([A-Za-z_]\w*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
# The page of a server with thousands of series has 2 MB, and its longest lines have 2 KB.
_LARGEST_PAGE, _LONGEST_LINE = 16 << 20, 1 << 16
# The longest wait for a server, and for its whole page.
_TIMEOUT_SECONDS, _PAGE_SECONDS = 5.0, 15.0
_SIGNS = ":/?#[]@!$&'()*+,;=%~"  # of an address (RFC 3986)
_RUNS = "is this the address of the server, and does it run?"


class Sample(NamedTuple):
    """The value of one series."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples_in(text: str) -> Iterator[Sample]:
    """The samples with a finite value, in order."""
    for line in text.split("\n"):
        match = _SAMPLE.match(line) if len(line) <= _LONGEST_LINE else None
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if isfinite(value):
            labels = {name: _ESCAPE.sub(_unescaped, text) for name, text in _LABEL.findall(match[2] or "")}
            yield Sample(match[1], labels, value)


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def read_metrics(source: str, hint: str | None = None) -> str:
    """The text of a file, of stdin (`-`), or of the page at an http or https address.

    `hint` is for a server that answers, and has no such page. Raises UsageError (exit 2) for a file or an address that
    cannot be read, and RunError (exit 1) if a server does not answer.
    """
    if "://" in source:
        return _page(source, hint)
    if source != "-" and not os.path.lexists(source):
        told = source.rpartition("@")[2]  # an address without its scheme may have a password
        raise UsageError(f"{told}: no such file", "the address of a server begins with http:// or https://")
    return read_stdin(_LARGEST_PAGE) if source == "-" else read_text(source, _LARGEST_PAGE)


def shown_source(source: str) -> str:
    """A source as it is printed: an address without its user, its password and its query."""
    return source if "://" not in source else _address(source)[0]


def _address(url: str) -> tuple[str, str, str | None]:
    """An address without credentials, with its query, and the credentials in it. The path /metrics may be left out."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise UsageError("the address of a server is not valid", "http://localhost:8000/metrics") from None
    if parts.scheme not in ("http", "https"):
        raise UsageError(f"{parts.scheme[:20]!a}: only http and https are read", "http://localhost:8000/metrics")
    # A password with a slash would be a part of the path, which is printed.
    if not host or not host.isascii() or not host.isprintable() or " " in host or "@" in parts.path:
        raise UsageError("the address has no valid host", "write / and @ in a password as %2F and %40")
    place = (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    shown = urlunsplit((parts.scheme, place, path, "", ""))
    credentials = parts.netloc.rpartition("@")[0]
    address = quote(urlunsplit((parts.scheme, place, path, parts.query, "")), safe=_SIGNS, errors="replace")
    return shown, address, credentials or None


def _page(url: str, hint: str | None) -> str:
    """The text at an address, within `_PAGE_SECONDS`: the names of hosts are looked up without a limit of their own."""
    from threading import Thread

    outcome = list["str | KvcalcError"]()

    def read() -> None:
        try:
            outcome.append(_downloaded(url, hint))
        except KvcalcError as error:
            outcome.append(error)

    thread = Thread(target=read, daemon=True)
    thread.start()
    thread.join(_PAGE_SECONDS)
    if not outcome:
        raise RunError(f"{_address(url)[0]}: no whole page after {_PAGE_SECONDS:g} s", _RUNS)
    if isinstance(outcome[0], KvcalcError):
        raise outcome[0]
    return outcome[0]


def _downloaded(url: str, hint: str | None) -> str:
    """The text at an address. Redirections are not followed, so nothing is read or sent elsewhere."""
    from base64 import b64encode
    from http.client import HTTPException
    from urllib import request
    from urllib.error import HTTPError
    from urllib.parse import unquote

    shown, address, credentials = _address(url)
    page_request = request.Request(address, headers={"Accept": "text/plain"})  # noqa: S310 - http or https
    if credentials is not None:
        login = b64encode(unquote(credentials).encode(errors="replace")).decode()
        page_request.add_header("Authorization", f"Basic {login}")
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(), request.HTTPHandler(), request.HTTPSHandler(), request.HTTPErrorProcessor(),
        request.HTTPDefaultErrorHandler(),
    ):  # fmt: skip
        opener.add_handler(handler)
    try:
        with opener.open(page_request, timeout=_TIMEOUT_SECONDS) as answer:
            data: bytes = answer.read(_LARGEST_PAGE + 1)
    except HTTPError as error:
        with error:
            needs_login = error.code in (401, 403)
            told = f"{shown}: the server answers with HTTP {error.code}"
            raise RunError(told, "http://USER:PASSWORD@HOST:PORT/metrics" if needs_login else hint) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        cause = "no answer" if isinstance(reason, TimeoutError) else getattr(reason, "strerror", None)
        raise RunError(f"{shown}: {cause or 'no valid answer'}", _RUNS) from None
    if len(data) > _LARGEST_PAGE:
        raise RunError(f"{shown}: more than {_LARGEST_PAGE:,} bytes, which no metrics have")
    return data.decode(errors="replace")
