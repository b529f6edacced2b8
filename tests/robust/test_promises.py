"""The promises of SECURITY.md that have no other test."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

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
)  # fmt: skip


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch escaped",)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with everything that other tools would run."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "evil.py").write_text("open('escaped', 'w')\n")
    (folder / "configuration_evil.py").write_text("open('escaped', 'w')\n")
    (folder / "sitecustomize.py").write_text("open('escaped', 'w')\n")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil()))
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ cycler.__init__.__globals__.os }}"}')
    return folder


def audited(events: str, *command: object, folder: Path) -> str:
    """Run a command in a process that prints a line for every audit event of these kinds."""
    code = f"""
import sys

def hook(event, details):
    if {events}:
        sys.__stderr__.write(f"EVENT {{event}} {{details!r}}\\n")

from kvcalc.__main__ import main
sys.addaudithook(hook)
sys.argv = ["kvcalc", *{[str(word) for word in command]!r}]
sys.exit(main())
"""
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2, 3, 4), done.stderr
    return done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words)[:40])
def test_no_socket_is_opened(model: Path, command: tuple[str, ...]) -> None:
    words = [word.replace("MODEL", str(model)) for word in command]
    found = audited('event.startswith(("socket.", "subprocess.", "os.system", "os.exec"))', *words, folder=model)
    assert "EVENT" not in found, found


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words)[:40])
def test_nothing_is_written(model: Path, command: tuple[str, ...]) -> None:
    words = [word.replace("MODEL", str(model)) for word in command]
    before = {path: path.stat().st_mtime_ns for path in model.rglob("*")}
    # Python itself writes the byte code of modules into __pycache__.
    is_write = (
        '"__pycache__" not in str(details) and ('
        'event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate")'
        ' or event == "open" and isinstance(details[0], str) and isinstance(details[2], int)'
        ' and details[2] & 3 and details[0] != "/dev/null")'
    )
    found = audited(is_write, *words, folder=model)
    assert "EVENT" not in found, found
    assert {path: path.stat().st_mtime_ns for path in model.rglob("*")} == before


def test_no_code_of_a_model_runs(model: Path) -> None:
    for command in COMMANDS:
        spawn(*(word.replace("MODEL", str(model)) for word in command), cwd=model)
        assert not (model / "escaped").exists(), command


def test_every_promise_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\| .* \| `(tests/[^`]+)` \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert len(rows) > 12
    for row in rows:
        file, _, name = row.partition("::")
        text = (ROOT / file).read_text()
        assert not name or f"def {name}(" in text, row
