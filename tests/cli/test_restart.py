"""Starting the same command again in a new process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvcalc.cli.interrupts import again

SCRIPT = """
import sys
from kvcalc.cli.interrupts import again
again("--without", "a kernel", "it broke")
print(sys.argv[1:])
"""


@pytest.mark.parametrize("given", [["measure", "gpt2"], ["measure", "gpt2", "--without", "another"]])
def test_the_command_runs_once_more_with_the_option(tmp_path: Path, given: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), *given], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str([*given, "--without", "a kernel"])]
    assert done.stderr.splitlines() == ["it broke"]


def test_other_programs_are_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook that calls kvcalc has arguments of its own."""
    monkeypatch.setattr(sys, "argv", ["notebook"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "notebook", "--port", "1"])
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("started"))
    again("--without", "a kernel", "it broke")
    assert capsys.readouterr().err == ""
