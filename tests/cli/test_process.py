"""The command as a process: terminals, signals, tracebacks, and names that are not valid text."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import spawn


def run_on_terminal(*arguments: str, env: dict[str, str] | None = None) -> str:
    """The output of the command on a terminal with 80 columns, which is its stdin, stdout and stderr."""
    main, worker = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "80", **(env or {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcalc", *arguments], stdin=worker, stdout=worker, stderr=worker, env=environment
    )
    os.close(worker)
    chunks = []
    while True:
        try:
            chunk = os.read(main, 65536)
        except OSError:  # the worker side is closed
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(main)
    assert process.wait(timeout=300) == 0
    return b"".join(chunks).decode()


def test_an_answer_is_coloured_on_a_terminal_and_plain_off_it() -> None:
    on = run_on_terminal("estimate", "llama-3-70b")
    assert "KV cache" in on
    assert "\x1b[1m" in on
    plain = {"FORCE_COLOR": "1", "COLUMNS": "", "KVCALC_FORMAT": ""}
    off = spawn("estimate", "llama-3-70b", "--gpu", "h100x4", env=plain)
    assert "vllm 0.33.0 starts: " in off.out
    assert "\x1b" not in off.out + off.err
    assert max(map(len, off.out.splitlines())) <= 80
    wide = spawn(
        "compare", *["llama-3-70b"] * 2, "--gpu", "h100x4", "--format", "human", env={**plain, "COLUMNS": "130"}
    )
    assert max(map(len, wide.out.splitlines())) > 80


LISTS = (("models",), ("gpus",), ("compare", "gpt2"), ("sweep", "gpt2", "--context", "1k"), ("gpus", "h100"))


@pytest.mark.parametrize("words", LISTS)
def test_a_list_is_a_table_of_tabs_off_a_terminal(kvcalc: Any, words: tuple[str, ...]) -> None:
    assert "\t" in kvcalc(*words).out.splitlines()[0]


def test_a_variable_sets_the_format(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("fit", "llama-3-8b", "--gpu", "h100")
    assert kvcalc(*asked).out.startswith("vllm ")
    monkeypatch.setenv("KVCALC_FORMAT", "json")
    assert kvcalc(*asked).json["fit"]["fits"]
    assert kvcalc("gpus").out.startswith("{")
    assert kvcalc(*asked, "--get", "fit.fits").out == "true\n"
    assert kvcalc(*asked, "--format", "tsv").out.startswith("path\tvalue\n")
    monkeypatch.setenv("KVCALC_FORMAT", "jsno")
    wrong = kvcalc(*asked)
    assert (wrong.status, wrong.err) == (2, "kvcalc: KVCALC_FORMAT='jsno': not a format\n  did you mean json?\n")


@pytest.mark.parametrize("plain", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, None])
def test_no_colour_where_it_is_not_wanted(plain: dict[str, str] | None) -> None:
    options = ("--no-color",) if plain is None else ()
    out = run_on_terminal("estimate", "bert-base", "--kv-memory", "1G", *options, env=plain)
    assert "\x1b[3" not in out
    assert "KV cache" in out


def test_version_and_help() -> None:
    from kvcalc import __version__
    from kvcalc.cli.app import COMMANDS

    assert spawn("--version").out == f"kvcalc {__version__}\n"
    for arguments in ((), ("-h",), ("--help",)):
        result = spawn(*arguments)
        assert result.status == 0
        listed = {line.split()[0] for line in result.out.splitlines() if line.startswith("  ")}
        assert set(COMMANDS) <= listed


def wait_for_torch(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has begun to load torch's libraries. A loaded machine takes its time until then."""
    maps = Path(f"/proc/{process.pid}/maps")
    end = time.monotonic() + 120
    while maps.exists() and "libtorch" not in maps.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("delay", [None, 0.0, 3.0], ids=["at the start", "loading", "3 s later"])
def test_ctrl_c_leaves_with_130_and_without_a_trace(delay: float | None) -> None:
    command = [
        sys.executable,
        "-m",
        "kvcalc",
        "measure",
        "llama-7b",
        "--layers",
        "4",
        "--context",
        "16k",
        "--steps",
        "8000",
        "--device",
        "cpu",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # A test runner in the background may ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        if delay is None or not os.path.exists("/proc/self/maps"):
            time.sleep(0.02)
        else:
            wait_for_torch(process)
            time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    # In the first milliseconds the interpreter is still starting and handles Ctrl-C itself.
    assert process.returncode == 130 or delay is None
    assert out == b""
    assert b"Traceback" not in err or delay is None


def test_ctrl_c_where_a_module_would_swallow_it_is_heard() -> None:
    """Python prints and drops a KeyboardInterrupt that is raised in a finalizer."""
    code = """
import os, signal
from kvcalc.cli.interrupts import exiting_on_ctrl_c
class Module:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))
with exiting_on_ctrl_c():
    Module()
print("went on")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvcalc: interrupted\n")


def test_debug_lets_the_traceback_through() -> None:
    plain = spawn("estimate", "nope")
    assert "Traceback" not in plain.err
    assert "Traceback" in spawn("estimate", "nope", env={"KVCALC_DEBUG": "1"}).err


def test_a_bug_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kvcalc.cli.app import run

    def broken(*args: object, **options: object) -> None:
        raise ZeroDivisionError("two\nlines")

    monkeypatch.setattr("kvcalc.planning.answers.estimate.answer_case", broken)
    assert run(["estimate", "gpt2"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("kvcalc: internal error: ZeroDivisionError: two lines\n")
    assert "KVCALC_DEBUG" in err


def test_names_that_are_no_text_and_control_characters_are_printed_escaped(tmp_path: Path) -> None:
    config = '{"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}'
    path = os.fsencode(tmp_path) + b"/\xff\x1b[31m.json"
    with open(path, "w") as file:
        file.write(config)
    for format in ("tsv", "human", "json"):
        result = spawn("estimate", os.fsdecode(path), "--format", format)
        assert result.status == 0, result.err
        if format == "json":
            assert "\x1b" not in result.out
    with open(path, "w") as file:
        file.write("{}")
    result = spawn("estimate", os.fsdecode(path))
    assert result.status == 3
    assert "\x1b" not in result.err
