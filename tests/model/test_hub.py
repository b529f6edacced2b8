"""hf:org/name: the cache first, then a local server that plays the Hub. Nothing leaves the machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvcalc.errors import RunError, UsageError
from kvcalc.model.hub import _within, fetch_config, parse_reference
from tests.conftest import Result, spawn

needs_hub = pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="the extra `hub`")

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
    "auto_map": {"AutoConfig": "evil.Evil"},
}  # fmt: skip
COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("hf:Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", "main")),
        ("hf:gpt2", ("gpt2", "main")),
        ("hf:org/name_1.x@v1.0", ("org/name_1.x", "v1.0")),
        ("hf:org/name@refs/pr/1", ("org/name", "refs/pr/1")),
    ],
)
def test_references(reference: str, expected: tuple[str, str]) -> None:
    assert parse_reference(reference) == expected


@pytest.mark.parametrize(
    "reference",
    [
        "hf:", "hf:/", "hf:org/", "hf:/name", "hf:a/b/c", "hf:org/na me", "hf:org/../name", "hf:org/..", "hf:.org/name",
        "hf:org/name-", "hf:org/a--b", "hf:org/näme", "hf:org/name\0", "hf:org/" + "x" * 100, "hf:https://x/y",
        "hf:org/name@", "hf:org/name@../x", "hf:org/name@a b", "hf:org/name@/x", "hf:org/name@a//b", "hf:org/name@-x",
    ],
)  # fmt: skip
def test_malformed_references_are_usage_errors(reference: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_reference(reference)
    assert caught.value.hint


def test_without_the_extra_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(RunError, match="not installed") as caught:
        fetch_config("hf:org/name", 1000)
    assert caught.value.hint == "pip install 'kvcalc[hub]'"


class Hub(ThreadingHTTPServer):
    """A server that answers as `answers[path]` says: (status, headers, body), or a number of seconds to stall."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.sent = 0
        self.is_endless = False

    def config(self, path: str, body: bytes, commit: str = COMMIT, **headers: str) -> None:
        self.answers[path] = (200, {"X-Repo-Commit": commit, "ETag": f'"{commit[:8]}"', **headers}, body)


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Authorization")))
        known = self.server.answers.get(self.path, (404, {"X-Error-Code": "RepoNotFound"}, b""))
        if isinstance(known, (int, float)):
            time.sleep(known)
            return
        status, headers, body = known
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        while with_body:
            with contextlib.suppress(OSError):  # the reader may have gone
                self.wfile.write(body)
                self.server.sent += len(body)
                with_body = self.server.is_endless and self.server.sent < 10**9
                continue
            with_body = False

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


# `python -m kvcalc` that waits two seconds for the Hub.
IMPATIENT = (
    "import sys; from kvcalc.model import hub; hub.SECONDS = 2; from kvcalc.__main__ import main; sys.exit(main())"
)


def ask(home: Path, hub: Hub | None, reference: str, **env: str) -> Result:
    return ask_in(("-m", "kvcalc"), home, hub, reference, env)


def ask_in(run: tuple[str, str], home: Path, hub: Hub | None, reference: str, env: dict[str, str]) -> Result:
    endpoint = f"http://127.0.0.1:{hub.server_port}" if hub else "http://127.0.0.1:9"
    base = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "",
        "HF_TOKEN": "",
        "NO_PROXY": "127.0.0.1",
    }
    return spawn("estimate", reference, "--context", "1", "--json", env={**base, **env}, run=run)


def put_in_cache(home: Path, commit: str, ref: str | None, config: dict[str, Any]) -> Path:
    repo = home / "hub" / "models--org--name"
    path = repo / "snapshots" / commit / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config))
    if ref:
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    return path


@needs_hub
def test_what_lies_in_the_cache_is_used_without_a_network(tmp_path: Path, hub: Hub) -> None:
    put_in_cache(tmp_path, COMMIT, "main", CONFIG)
    for server, env in ((hub, {}), (None, {}), (None, {"HF_HUB_OFFLINE": "1"})):
        result = ask(tmp_path, server, "hf:org/name", **env)
        assert (result.status, result.err) == (0, "")
        assert result.json["model"]["name"] == "org/name"
        assert result.json["model"]["source"] == f"hf:org/name@{COMMIT}"
        # 2 x 2 layers x 4 heads x 16 x 2 bytes.
        assert result.json["kv_cache"]["total_bytes"] == 512
    assert hub.asked == []


@needs_hub
def test_a_revision_is_its_own_in_the_cache(tmp_path: Path) -> None:
    put_in_cache(tmp_path, COMMIT, "main", CONFIG)
    put_in_cache(tmp_path, OTHER, "v2", {**CONFIG, "num_hidden_layers": 3})
    for revision, layers in (("", 2), ("@main", 2), ("@v2", 3), (f"@{OTHER}", 3), (f"@{COMMIT}", 2)):
        result = ask(tmp_path, None, f"hf:org/name{revision}", HF_HUB_OFFLINE="1")
        assert result.json["model"]["num_layers"] == layers


@needs_hub
def test_the_image_processors_config_in_the_cache_is_read(tmp_path: Path) -> None:
    config = {**CONFIG, "model_type": "phi3_v", "img_processor": {"name": "clip_vision_model"}}
    path = put_in_cache(tmp_path, COMMIT, "main", config)
    options = ("--context", "4k", "--images", "1", "--image-size", "336x336", "--get", "workload.images.tokens")
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_TOKEN": "", "HF_ENDPOINT": ""}
    refused = spawn("estimate", "hf:org/name", *options, env=env)
    assert "num_crops is in preprocessor_config.json" in refused.err
    (path.parent / "preprocessor_config.json").write_text(json.dumps({"num_crops": 4}))
    # 2 x 2 crops and the whole image of 144 tokens each, three rows of 12 ends, and a token between the two.
    assert spawn("estimate", "hf:org/name", *options, env=env).out == "757\n"


@needs_hub
def test_offline_and_not_in_the_cache(tmp_path: Path, hub: Hub) -> None:
    result = ask(tmp_path, hub, "hf:org/name", HF_HUB_OFFLINE="1")
    assert result.status == 1
    assert result.err.startswith("kvcalc: hf:org/name: not in the local cache, and HF_HUB_OFFLINE is set\n")
    assert hub.asked == []


@needs_hub
def test_config_json_alone_is_downloaded_once(tmp_path: Path, hub: Hub) -> None:
    hub.config("/org/name/resolve/main/config.json", json.dumps(CONFIG).encode())
    first = ask(tmp_path, hub, "hf:org/name", HF_TOKEN="hf_secret")
    assert (first.status, first.err) == (0, "")
    assert first.json["model"]["source"] == f"hf:org/name@{COMMIT}"
    assert {path for _, path, _ in hub.asked} == {"/org/name/resolve/main/config.json"}
    assert {token for _, _, token in hub.asked} == {"Bearer hf_secret"}
    hub.asked.clear()
    assert ask(tmp_path, hub, "hf:org/name").json == first.json
    assert hub.asked == []


@needs_hub
def test_a_revision_is_downloaded(tmp_path: Path, hub: Hub) -> None:
    hub.config("/org/name/resolve/v2/config.json", json.dumps({**CONFIG, "num_hidden_layers": 3}).encode(), OTHER)
    result = ask(tmp_path, hub, "hf:org/name@v2")
    assert (result.json["model"]["num_layers"], result.json["model"]["source"]) == (3, f"hf:org/name@{OTHER}")


@needs_hub
@pytest.mark.parametrize(
    ("status", "code", "exit_status", "text"),
    [
        (404, "RepoNotFound", 3, "no such model on the Hub"),
        (404, "RevisionNotFound", 3, "no such revision"),
        (404, "EntryNotFound", 3, "has no config.json"),
        (404, None, 3, "no such model on the Hub"),
        (401, "RepoNotFound", 1, "have no access"),
        (401, None, 1, "have no access"),
        (403, None, 1, "have no access"),
        (401, "GatedRepo", 1, "gated"),
        (403, "GatedRepo", 1, "gated"),
        (500, None, 1, "status 500"),
        (429, None, 1, "status 429"),
    ],
)
def test_refusals_are_one_line(
    tmp_path: Path, hub: Hub, status: int, code: str | None, exit_status: int, text: str
) -> None:
    hub.answers["/org/name/resolve/main/config.json"] = (status, {"X-Error-Code": code} if code else {}, b"")
    result = ask(tmp_path, hub, "hf:org/name")
    assert result.status == exit_status
    assert result.out == ""
    lines = result.err.splitlines()
    assert len(lines) <= 2
    assert lines[0].startswith("kvcalc: hf:org/name: ")
    assert text in lines[0]
    assert ("HF_TOKEN" in result.err) == (status in (401, 403))


@needs_hub
def test_no_server_at_all(tmp_path: Path) -> None:
    result = ask(tmp_path, None, "hf:org/name")
    assert result.status == 1
    assert "download failed" in result.err
    assert len(result.err.splitlines()) <= 2


@needs_hub
def test_what_is_no_hub(tmp_path: Path, hub: Hub) -> None:
    hub.answers["/org/name/resolve/main/config.json"] = (200, {}, b"<html>")
    result = ask(tmp_path, hub, "hf:org/name")
    assert result.status == 1
    assert "not a Hugging Face Hub" in result.err


@needs_hub
def test_a_server_that_never_answers_and_a_body_that_never_comes_are_given_up(tmp_path: Path, hub: Hub) -> None:
    """Both at once, because each waits."""
    hub.answers["/org/name/resolve/main/config.json"] = 60.0
    hub.config("/org/cut/resolve/main/config.json", b"", **{"Content-Length": "500"})
    with ThreadPoolExecutor(2) as pool:
        patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "60", "HF_HUB_ETAG_TIMEOUT": "60"}
        run = ("-c", IMPATIENT)
        silent = pool.submit(ask_in, run, tmp_path / "silent", hub, "hf:org/name", patient).result
        cut = pool.submit(ask_in, run, tmp_path / "cut", hub, "hf:org/cut", {}).result
        assert silent().status == cut().status == 1
        assert silent().err.startswith("kvcalc: hf:org/name: the Hub did not answer within 2 seconds\n")
        assert len(silent().err.splitlines()) == 2
        assert len(cut().err.splitlines()) <= 2


def test_all_attempts_together_have_one_time_out() -> None:
    never = threading.Event()
    with pytest.raises(RunError, match="did not answer within 10 seconds"):
        _within(0.01, "hf:org/name", lambda: str(never.wait(60)))
    never.set()


@needs_hub
def test_a_huge_config_is_refused_before_it_is_read(tmp_path: Path, hub: Hub) -> None:
    hub.config("/org/name/resolve/main/config.json", b"", **{"Content-Length": "200000000"})
    result = ask(tmp_path, hub, "hf:org/name")
    assert result.status == 3
    assert "200,000,000 bytes" in result.err
    assert [command for command, _, _ in hub.asked] == ["HEAD"]


@needs_hub
def test_a_huge_config_in_the_cache_is_not_read(tmp_path: Path) -> None:
    with put_in_cache(tmp_path, COMMIT, "main", CONFIG).open("wb") as file:
        file.truncate(200_000_000)
    result = ask(tmp_path, None, "hf:org/name", HF_HUB_OFFLINE="1")
    assert result.status == 2
    assert "200,000,000 bytes" in result.err


@needs_hub
def test_what_is_downloaded_goes_through_the_same_reader(tmp_path: Path, hub: Hub) -> None:
    hub.config("/org/name/resolve/main/config.json", b"[1]")
    result = ask(tmp_path, hub, "hf:org/name")
    assert (result.status, result.err) == (2, "kvcalc: hf:org/name: not a JSON object\n")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@needs_hub
@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": '"../../../../../../escaped"'}, {"ETag": '"/tmp/escaped"'}, {"ETag": '"a/b"'},
        {"X-Linked-Etag": '"../../../../../../escaped"'}, {"X-Repo-Commit": "../../../../escaped"},
        {"X-Repo-Commit": "/tmp/escaped"}, {"X-Repo-Commit": ".."}, {"X-Repo-Commit": "main"},
    ],
    ids=str,
)  # fmt: skip
def test_a_server_cannot_choose_where_a_file_is_written(tmp_path: Path, hub: Hub, headers: dict[str, str]) -> None:
    home = tmp_path / "a" / "home"
    home.mkdir(parents=True)
    hub.config("/org/name/resolve/main/config.json", json.dumps(CONFIG).encode(), **headers)
    result = ask(home, hub, "hf:org/name")
    assert result.status == 1
    assert "not a Hugging Face Hub" in result.err
    assert not any("config" in name or "escaped" in name for name in files_in(tmp_path))
    assert not Path("/tmp/escaped").exists()


@needs_hub
def test_a_body_larger_than_stated_is_not_kept(tmp_path: Path, hub: Hub) -> None:
    hub.config("/org/name/resolve/main/config.json", b"x" * 2**20, **{"Content-Length": "5"})
    assert ask(tmp_path, hub, "hf:org/name").status == 2  # five bytes that are not JSON
    hub.is_endless = True
    path = "/org/name/resolve/v2/config.json"
    hub.answers[path] = (200, {"X-Repo-Commit": OTHER, "ETag": '"00"', "Content-Length": ""}, b"x" * 2**20)
    result = ask(tmp_path, hub, "hf:org/name@v2")
    assert result.status in (1, 3)
    assert hub.sent < 40 * 2**20
    assert not any(len(data) > 100 for data in files_in(tmp_path).values())


@needs_hub
def test_a_body_without_a_length_has_a_limit_too(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.is_endless = True
    monkeypatch.setattr(Handler, "answer", unlimited)
    hub.config("/org/name/resolve/main/config.json", b"x" * 2**20)
    result = ask(tmp_path, hub, "hf:org/name")
    assert result.status == 3
    assert "more than 8,388,608 bytes" in result.err
    assert hub.sent < 40 * 2**20
    assert not any(len(data) > 100 for data in files_in(tmp_path).values())


def unlimited(self: Handler, with_body: bool) -> None:
    """Answer without Content-Length: the body ends when the connection does."""
    status, headers, body = self.server.answers[self.path]
    self.send_response(status)
    for key, value in headers.items():
        self.send_header(key, value)
    self.end_headers()
    with contextlib.suppress(OSError):
        while with_body and self.server.sent < 10**9:
            self.wfile.write(body)
            self.server.sent += len(body)


@needs_hub
@pytest.mark.parametrize(
    "endpoint",
    ["http://[::1", "ftp://x", "not a url", "http://", "http://a b", "http://x:99999999", "https://me:secret@x y"],
)
def test_an_endpoint_that_is_not_a_url(tmp_path: Path, endpoint: str) -> None:
    result = ask(tmp_path, None, "hf:org/name", HF_ENDPOINT=endpoint)
    assert result.status == 2
    assert result.err.startswith("kvcalc: HF_ENDPOINT is not a URL\n")
    assert "secret" not in result.err


@needs_hub
def test_a_variable_that_huggingface_hub_cannot_read(tmp_path: Path) -> None:
    result = ask(tmp_path, None, "hf:org/name", HF_HUB_ETAG_TIMEOUT="soon")
    assert result.status == 1
    assert "internal error" not in result.err
    assert "check the variables HF_*" in result.err


@needs_hub
@pytest.mark.parametrize("place", ["http://me:secret@127.0.0.1:9/x", "http://me:secret@[::1/x", "//me:secret@\x7f/x"])
def test_a_password_in_a_redirect_is_not_printed(tmp_path: Path, hub: Hub, place: str) -> None:
    hub.config("/org/name/resolve/main/config.json", b"")
    for status in (302, 307):
        _, headers, body = hub.answers["/org/name/resolve/main/config.json"]
        hub.answers["/org/name/resolve/main/config.json"] = (status, {**headers, "Location": place}, body)
        result = ask(tmp_path, hub, "hf:org/name", HF_TOKEN="hf_secret")
        assert result.status == 1
        assert "secret" not in result.err
        assert "internal error" not in result.err
        assert len(result.err.splitlines()) <= 2
