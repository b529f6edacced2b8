"""Run a process and return its CPU time and peak memory, as counted by the operating system."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(
    command: list[str], environment: Mapping[str, str] | None = None, *, quiet: bool = True, root: Path | None = None
) -> tuple[float, float]:
    """CPU seconds (user and system) and peak MiB of `command`. This checkout comes before installed packages.

    With `root`, that checkout does, and it is the working directory.

    Its stdout is discarded, and its stderr too if `quiet`. Exits if the command fails.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL if quiet else None,
        env={**(os.environ if environment is None else environment), "PYTHONPATH": str(root or ROOT)}, cwd=root,
    )  # fmt: skip
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command} failed with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
