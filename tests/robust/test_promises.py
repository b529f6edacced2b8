"""The promises of SECURITY.md that have no other test."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import ROOT, spawn

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64,
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, "trust_remote_code": True,
}  # fmt: skip
COMMANDS = (
    ("estimate", "MODEL"), ("estimate", "MODEL", "--engine", "vllm", "--json"), ("fit", "MODEL", "--gpu", "h100"),
    ("compare", "MODEL", "gpt2"), ("sweep", "MODEL", "--context", "1k..4k"), ("models",), ("gpus",),
    ("plan", "MODEL", "--gpu", "h100", "--input-tokens", "100", "--output-tokens", "10", "--concurrency", "2"),
    ("audit", str(ROOT / "tests/logs/vllm.log")), ("score", str(ROOT / "tests/logs/vllm-bench.json"), "--gpu", "h100"),
    ("models", "check", "MODEL/config.json"), ("estimate", "nope"), ("completion", "bash"),
    ("prefix", str(ROOT / "tests/traces/files/mooncake.jsonl"), "MODEL", "--gpu", "h100"),
    ("check", "vllm serve qwen3-8b", "--gpu", "h100", "--live", str(ROOT / "tests/planning/live/vllm-0.33.0.txt")),
)  # fmt: skip


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch escaped",)


def hostile(folder: Path) -> Path:
    """A folder with everything that other tools would run."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("evil.py", "configuration_evil.py", "sitecustomize.py"):
        (folder / name).write_text("open('escaped', 'w')\n")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil()))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ cycler.__init__.__globals__.os }}"}')
    return folder


# Runs the commands in one process, which prints what it does that leaves traces elsewhere. Python itself writes the
# byte code of modules into __pycache__.
_WATCH = """
import contextlib, io, json, sys
from kvcalc.cli.app import run

def is_write(event, details):
    if event == "open":
        path, _, flags = details
        return isinstance(path, str) and isinstance(flags, int) and flags & 3 and path != "/dev/null"
    return event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate")

def hook(event, details):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec")):
        sys.__stdout__.write(f"SOCKET {words} {event} {details!r}\\n")
    elif is_write(event, details) and "__pycache__" not in str(details):
        sys.__stdout__.write(f"WRITE {words} {event} {details!r}\\n")

commands = json.loads(sys.argv[1])
words = []
sys.addaudithook(hook)
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = run(words)
    sys.__stdout__.write(f"STATUS {status}\\n")

# The hook hears what it is to hear.
import os, socket
words = "control"
socket.socket().close()
with contextlib.suppress(OSError):
    os.mkdir("/dev/null/folder")
"""


class Watched(NamedTuple):
    """What the process printed, and the hostile folder with the time of each file before it ran."""

    lines: list[str]
    folder: Path
    before: dict[Path, int]


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """All COMMANDS, run in the hostile folder."""
    folder = hostile(tmp_path_factory.mktemp("promises") / "model")
    before = times(folder)
    commands = [[word.replace("MODEL", str(folder)) for word in command] for command in COMMANDS]
    done = subprocess.run(
        [sys.executable, "-c", _WATCH, json.dumps(commands)], cwd=folder, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    statuses = [int(line.split()[1]) for line in lines if line.startswith("STATUS")]
    assert len(statuses) == len(COMMANDS)
    assert set(statuses) <= {0, 2, 3, 4}, statuses
    assert {" ".join(line.split()[:2]) for line in lines} >= {"SOCKET control", "WRITE control"}
    return Watched(lines, folder, before)


def test_no_socket_is_opened(watched: Watched) -> None:
    assert [line for line in watched.lines if line.startswith("SOCKET") and "control" not in line] == []


def test_nothing_is_written(watched: Watched) -> None:
    assert [line for line in watched.lines if line.startswith("WRITE") and "control" not in line] == []
    assert times(watched.folder) == watched.before


def test_no_code_of_a_model_runs(watched: Watched, tmp_path: Path) -> None:
    assert not (watched.folder / "escaped").exists()
    # Nor when Python starts in the folder, as the command itself.
    folder = hostile(tmp_path / "model")
    assert spawn("estimate", folder, cwd=folder).status == 0
    assert not (folder / "escaped").exists()


def test_every_promise_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\| .* \| `(tests/[^`]+)` \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert len(rows) > 12
    for row in rows:
        file, _, name = row.partition("::")
        text = (ROOT / file).read_text()
        assert not name or f"def {name}(" in text, row
