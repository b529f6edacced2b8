"""The exit code if stdin, stdout or stderr is closed, the disk is full, or a reader stops early."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Result, check_output, spawn

TOO_LARGE = ("llama-3-70b", "--gpu", "h100")
PLAN = ("llama-3-70b", "--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "8", "--gpu", "h100")
# A context beyond the model's length prints the value on stdout and a warning on stderr.
WARNS = ("estimate", "llama-3-8b", "--context", "1M", "--get", "kv_cache.total_bytes")
LOG = "Available KV cache memory: 9.00 GiB\nGPU KV cache size: 147,456 tokens\n"

needs_dev_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
# Python keeps a failed write in a buffer, or has no buffer.
buffered_or_not = pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])


@contextmanager
def without_reader() -> Iterator[int]:
    """The write end of a pipe whose reader has already closed it."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


def run(*arguments: object, env: dict[str, str] | None = None, module: str = "kvcalc", **streams: Any) -> Result:
    """`kvcalc` with other streams: `stdout` and `stderr` as subprocess takes them, captured by default."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, **(env or {})}, timeout=300, check=False, cwd=ROOT, **streams,
    )  # fmt: skip
    out = (done.stdout or b"").decode()
    check_output(str(arguments[0]), out)
    return Result(done.returncode, out, (done.stderr or b"").decode())


@cache
def as_usual(question: tuple[str, ...]) -> Result:
    """The result with streams that work."""
    return run(*question)


def run_in_shell(words: str, redirections: str) -> Result:
    """`kvcalc WORDS REDIRECTIONS` in a shell, which can close a stream for its command."""
    done = subprocess.run(
        f"{sys.executable} -m kvcalc {words} {redirections}", shell=True, capture_output=True, text=True, check=False
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("format", ["human", "tsv", "csv", "json"])
@pytest.mark.parametrize(
    "question", [("fit", *TOO_LARGE), ("estimate", *TOO_LARGE, "--check"), ("plan", *PLAN, "--max-tpot", "1us")]
)
def test_does_not_fit_is_4_even_if_nobody_reads_the_answer(question: tuple[str, ...], format: str) -> None:
    with without_reader() as pipe:
        result = run(*question, "--format", format, stdout=pipe)
    assert result.status == 4
    assert "Traceback" not in result.err
    assert "Broken pipe" not in result.err


def test_so_are_the_other_verdicts(tmp_path: Path) -> None:
    log, preset = tmp_path / "vllm.log", tmp_path / "preset.yaml"
    log.write_text(LOG)
    preset.write_text("name: nothing\n")
    for status, question in (
        (5, ("audit", log, "--model", "llama-3-8b")),
        (5, ("audit", log, "--model", "llama-3-8b", "--format", "human")),
        (3, ("models", "check", preset)),
        (3, ("models", "check", preset, "--format", "human")),
    ):
        read = run(*question)
        with without_reader() as pipe:
            unread = run(*question, stdout=pipe)
        assert (read.status, unread.status, unread.err) == (status, status, read.err), question


def test_batch_stops_when_nobody_reads_its_answers(tmp_path: Path) -> None:
    """Each answer is written as soon as it is known, so the questions after the one that nobody read are not asked."""
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"model": "gpt2"}\n{"model": "nope"}\n')
    assert run("batch", questions).status == 1
    with without_reader() as pipe:
        unread = run("batch", questions, stdout=pipe)
    assert (unread.status, unread.err) == (0, "")


def test_and_a_measurement_that_contradicts_the_prediction(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
import sys
import kvcalc.memory.kv_cache
kvcalc.memory.kv_cache.stored_bytes = lambda *args: 12345
from kvcalc.__main__ import main
from tests.measure.quick import quicken
import pytest
quicken(pytest.MonkeyPatch())
sys.exit(main())
"""
    words = ("measure", "gpt2", "--layers", "1", "--context", "8", "--steps", "1", "--device", "cpu")
    with without_reader() as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code, *words], stdout=pipe, stderr=subprocess.PIPE, check=False, cwd=ROOT
        )
    assert done.returncode == 5, done.stderr


def test_a_measurement_is_saved_even_if_nobody_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "record.json"
    words = ("measure", "gpt2", "--layers", "1", "--context", "8", "--steps", "1", "--device", "cpu", "--save", path)
    with without_reader() as pipe:
        result = run(*words, module="tests.measure.quick", stdout=pipe)
    assert (result.status, path.exists()) == (0, True), result.err


@pytest.mark.parametrize(
    "question",
    [
        ("estimate", "llama-7b", "--json"),
        ("estimate", "llama-7b", "--format", "human"),
        ("fit", "llama-3-8b", "--gpu", "h100", "--format", "human"),
        ("models",),
        ("sweep", "llama-7b", "--context", "1..2048:1", "--format", "csv"),
        ("--help",),
        ("fit", "--help"),
        ("--version",),
        ("help", "formats"),
    ],
    ids=" ".join,
)
def test_a_reader_that_stops_is_no_error_of_its_own(question: tuple[str, ...]) -> None:
    with without_reader() as pipe:
        result = run(*question, stdout=pipe)
    assert (result.status, result.err) == (0, "")


@needs_dev_full
@buffered_or_not
@pytest.mark.parametrize(
    "question",
    [
        ("estimate", "llama-7b", "--json"),
        ("estimate", "llama-7b", "--format", "human"),
        ("estimate", "llama-7b", "--get", "kv_cache.total_bytes"),
        ("fit", *TOO_LARGE, "--format", "human"),
        ("sweep", "llama-7b", "--context", "1..2048:1", "--format", "csv"),
        ("models",),
        ("--help",),
        ("--version",),
        ("help", "formats"),
    ],
    ids=" ".join,
)
def test_a_full_disk_is_1(question: tuple[str, ...], env: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        result = run(*question, stdout=full, env=env)
    assert (result.status, result.err) == (1, "kvcalc: cannot write: No space left on device\n")


@needs_dev_full
@buffered_or_not
@pytest.mark.parametrize(
    ("status", "question"),
    [(0, WARNS), (3, ("estimate", "nope")), (2, ("--bogus",)), (4, ("fit", *TOO_LARGE)), (0, ("--version",))],
)
def test_messages_that_cannot_be_written_change_nothing(
    status: int, question: tuple[str, ...], env: dict[str, str]
) -> None:
    read = as_usual(question)
    assert read.status == status
    with open("/dev/full", "w") as full:
        assert run(*question, stderr=full, env=env)[:2] == read[:2]
    with without_reader() as pipe:
        assert run(*question, stderr=pipe, env=env)[:2] == read[:2]
    assert run_in_shell(" ".join(question), "2>&-")[:2] == read[:2]


def test_a_closed_stdout_is_1() -> None:
    for words in ("estimate gpt2", "estimate gpt2 --format human", "fit llama-3-70b --gpu h100", "--version", "--help"):
        for redirections in (">&-", ">&- <&-"):
            result = run_in_shell(words, redirections)
            assert result.status == 1
            assert result.err.splitlines()[-1] == "kvcalc: cannot write: stdout is closed"
        assert run_in_shell(words, ">&- 2>&-").status == 1
    assert run_in_shell("estimate nope", ">&-").status == 3


def test_a_closed_stdin_matters_only_if_it_is_read() -> None:
    words = "estimate llama-7b --get kv_cache.total_bytes"
    assert run_in_shell(words, "<&-") == (0, "1073741824\n", "")
    assert run_in_shell(words, "<&- 2>&-") == (0, "1073741824\n", "")
    for words in ("estimate -", "audit - --model gpt2", "score - --gpu h100", "batch", "batch -"):
        result = run_in_shell(words, "<&-")
        assert result.status == 2
        assert result.err.startswith("kvcalc: stdin")
        assert result.err.splitlines()[0].endswith("closed")


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    """Otherwise, messages would be written into that file."""
    code = f"""
import os, sys
from kvcalc.output.streams import prepare_streams
prepare_streams()
with open({str(tmp_path / "file")!r}, "w") as file:
    number = file.fileno()
    os.write(2, b"a message")
    print("another", file=sys.stderr)
os._exit(number)
"""
    done = subprocess.run(f'{sys.executable} -c "$CODE" <&- >&- 2>&-', shell=True, env={**os.environ, "CODE": code})
    assert done.returncode > 2
    assert (tmp_path / "file").read_text() == ""


def on_terminal(*arguments: str, typed: bytes) -> Result:
    """Run `kvcalc` with a terminal as stdin only, and type `typed` there."""
    main, worker = pty.openpty()
    threading.Timer(0.5, os.write, (main, typed)).start()
    try:
        return run(*arguments, stdin=worker)
    finally:
        os.close(worker)
        os.close(main)


def test_waiting_for_a_terminal_is_said() -> None:
    config = b'{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}\n\x04'
    asked = on_terminal("estimate", "-", "--get", "model.num_layers", typed=config)
    assert (asked.status, asked.out) == (0, "2\n")
    assert asked.err.splitlines()[0] == "kvcalc: reading from stdin; press Ctrl-D to end"
    for arguments in (("batch", "--get", "model.name"), ("batch", "-", "--get", "model.name")):
        asked = on_terminal(*arguments, typed=b'{"model": "llama-7b"}\n\x04')
        assert asked == (0, "llama-7b\n", "kvcalc: reading questions from stdin; press Ctrl-D to end\n")


def test_a_pipe_or_a_file_is_read_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(b'{"model": "llama-7b"}\n')
    assert spawn("batch", "--get", "model.name", stdin=path.read_bytes()).err == ""
    with path.open("rb") as file:
        assert run("batch", "--get", "model.name", stdin=file).err == ""
    assert spawn("batch", path, "--get", "model.name", cwd=ROOT).err == ""
