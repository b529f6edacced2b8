"""The text format of Prometheus, and pages of servers that answer in every way."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from kvcalc.errors import KvcalcError, RunError, UsageError
from kvcalc.reading import metrics
from kvcalc.reading.metrics import read_metrics, samples_in, shown_source


@contextmanager
def serving(status: int = 200, headers: Mapping[str, str] = {}) -> Iterator[tuple[str, list[Any]]]:
    """A server of one page: its host and port, and the requests that it got."""
    requests = list[Any]()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, dict(self.headers)))
            self.send_response(status)
            for name, text in headers.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(b"vllm:x 1\n")

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("a 1", ("a", {}, 1.0)),
        ("a{} 1", ("a", {}, 1.0)),
        ('vllm:a_b{x="1", y="2",} 3.5e+2 1700000000000', ("vllm:a_b", {"x": "1", "y": "2"}, 350.0)),
        (r'a{x="q\"b\\s\nn}"}' + "\t2\r", ("a", {"x": 'q"b\\s\nn}'}, 2.0)),
        ('a_total{x="1"} 5 # {trace_id="4bf9"} 1.0', ("a_total", {"x": "1"}, 5.0)),
        ("# HELP a of a", None), ("", None), ("a", None), ("a NaN", None), ("a +Inf", None), ("a 1e999", None),
        ('a{x="1" 5', None), ('a{x="} 5', None), ("  % Total  5", None), ('{"a": 1}', None), ("1a 2", None),
    ],
)  # fmt: skip
def test_a_line(line: str, sample: Any) -> None:
    assert [tuple(each) for each in samples_in(f"b 7\n{line}\nc 8")] == [
        ("b", {}, 7.0), *([] if sample is None else [sample]), ("c", {}, 8.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    ["a{" * 30_000, 'a{b="' + "x" * 60_000, 'a{b="' + '\\"' * 30_000, 'a{b="' + "\\" * 60_000, 'a{"' * 20_000,
     "a{" + 'x="y",' * 10_000 + " 1", "a" + " " * 60_000],
)  # fmt: skip
def test_a_hostile_line_takes_time_in_proportion(line: str) -> None:
    begin = process_time()
    assert not [*samples_in("\n".join([line] * 20))]
    assert process_time() - begin < 2


def test_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (place, requests):
        assert read_metrics(f"http://{place}") == "vllm:x 1\n"
        assert read_metrics(f"http://user:p%40ss@{place}/other?token=secret") == "vllm:x 1\n"
        monkeypatch.setattr(metrics, "_LARGEST_PAGE", 5)
        with pytest.raises(RunError, match="more than 5 bytes"):
            read_metrics(f"http://{place}")
    assert [path for path, _ in requests] == ["/metrics", "/other?token=secret", "/metrics"]
    assert "Authorization" not in requests[0][1]
    assert base64.b64decode(requests[1][1]["Authorization"].removeprefix("Basic ")) == b"user:p@ss"


@pytest.mark.parametrize(
    ("status", "headers", "told", "hint"),
    [
        (404, {}, "HTTP 404", "where they are"), (401, {}, "HTTP 401", "USER:PASSWORD"),
        (500, {}, "HTTP 500", "where they are"),
        # A redirection would take the reader, and its password, elsewhere.
        (302, {"Location": "http://127.0.0.1:9/"}, "HTTP 302", "where they are"),
        (307, {"Location": "file:///etc/passwd"}, "HTTP 307", "where they are"),
    ],
)  # fmt: skip
def test_a_server_without_the_page(status: int, headers: dict[str, str], told: str, hint: str) -> None:
    with serving(status, headers) as (place, _), pytest.raises(RunError, match=told) as raised:
        read_metrics(f"http://user:secret@{place}/metrics?token=secret", "where they are")
    assert raised.value.message.startswith(f"http://{place}/metrics: ")
    assert hint in (raised.value.hint or "")


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(RunError, match="no answer"):
            read_metrics(f"http://127.0.0.1:{port}")
    with pytest.raises(RunError, match="refused"):
        read_metrics(f"http://user:secret@127.0.0.1:{port}")
    with pytest.raises(RunError, match=r"http://no-such-host\.invalid/metrics: "):
        read_metrics("http://no-such-host.invalid")


@pytest.mark.parametrize("beginning", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_server_that_never_ends(monkeypatch: pytest.MonkeyPatch, beginning: bytes) -> None:
    """It sends a little before every timeout."""
    monkeypatch.setattr(metrics, "_PAGE_SECONDS", 0.3)
    is_over = threading.Event()

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(beginning)
            while not is_over.wait(0.05):
                connection.sendall(beginning or b"H")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        try:
            with pytest.raises(RunError, match="no whole page after"):
                read_metrics(f"http://127.0.0.1:{server.getsockname()[1]}")
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://host/metrics", "://", "http://", "http:///metrics", "http://host:port/",
     "http://user:secret@host:99999/", "http://[::1/", "http://h\u00f6st/", "http://a b/", "gopher://x",
     "http://user:secret@/x", "http://host/secret@x", "http://a\ud800/", "http://host\x00/",
     "http://" + "a" * 100 + "/"],
)  # fmt: skip
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(KvcalcError) as raised:
        read_metrics(url)
    assert "secret" not in f"{raised.value.message} {raised.value.hint}"
    assert "\n" not in raised.value.message


def test_a_source_is_shown_without_credentials() -> None:
    assert shown_source("https://me:pw@host:8443/a/metrics?key=1#x") == "https://host:8443/a/metrics"
    assert shown_source("http://[::1]:30000") == "http://[::1]:30000/metrics"
    assert shown_source("saved.txt") == "saved.txt"


def test_a_file(tmp_path: Path) -> None:
    saved = tmp_path / "saved.txt"
    saved.write_text("vllm:x 1\n")
    assert read_metrics(str(saved)) == "vllm:x 1\n"
    for path in (str(tmp_path), str(tmp_path / "none"), os.devnull, "a\0b"):
        with pytest.raises(UsageError):
            read_metrics(path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match="not a regular file"):
        read_metrics(str(fifo))
