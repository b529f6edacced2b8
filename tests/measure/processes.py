"""kvcalc commands in separate processes, forked from a server that has already loaded torch.

They can be started, signalled and killed like any process, but do not spend a second on loading torch. The server does
not load numpy, because kvcalc does not need it, so no process has it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, Result, check_output, without_progress
from tests.measure.options import last_given

# Two runs of the tests on one machine begin at different ports.
_PORTS = itertools.count(os.getpid())
_CONTEXT: Any = multiprocessing.get_context("forkserver")
_IMPORTS = """import os, sys, time
from kvcalc.measure import run, runner
from kvcalc.measure.devices import distributed
"""


def _start_server() -> None:
    """Start the server if it is not running."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        _CONTEXT.set_forkserver_preload(["tests.measure.preloaded"])
        multiprocessing.forkserver.ensure_running()


def _run(folder: str, streams: str, arguments: list[str], environment: dict[str, str], before: str) -> None:
    assert "tests.measure.preloaded" in sys.modules, "the server could not load torch"
    os.chdir(folder)
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(streams, name), os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ["kvcalc", "measure", *arguments]
    exec(_IMPORTS + before, {})
    from kvcalc.__main__ import main
    from tests.measure.quick import quicken

    quicken(pytest.MonkeyPatch())
    sys.exit(main())


class Command:
    """`kvcalc measure ARGUMENTS` in `folder`. The Python lines in `before` run first."""

    def __init__(
        self, folder: Path, *arguments: object, before: str = "", environment: dict[str, str] | None = None
    ) -> None:
        _start_server()
        self._streams = tempfile.TemporaryDirectory()
        given = (str(folder), self._streams.name, [*map(str, arguments)], environment or {}, before)
        self._process = _CONTEXT.Process(target=_run, args=given)
        self._process.start()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self._process.pid, number)

    def result(self, timeout: float = 300) -> Result:
        """Wait until the process ends, and return its result."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"still running after {timeout} s"
        out, err = (Path(self._streams.name, name) for name in ("out", "err"))
        check_output("measure", out.read_text())
        return Result(self._process.exitcode, out.read_text(), without_progress(err.read_text()))

    def end(self) -> None:
        """Kill the process if it is still running, and remove its files."""
        with suppress(ValueError):
            self._process.kill()
        self._process.join()
        self._streams.cleanup()


@contextmanager
def commands() -> Iterator[Any]:
    """Yield a function that starts a `Command`. All commands are ended at the end of the block."""
    started: list[Command] = []

    def start(folder: Path, *arguments: object, **options: Any) -> Command:
        started.append(Command(folder, *last_given(arguments), **options))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            command.end()


def wait_for(path: Path, seconds: float = 240) -> None:
    """Wait until there is a file at `path`."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.05)


def free_port() -> int:
    """A free port that no other worker of this run is given, below those that the system gives to clients."""
    worker = int("".join(filter(str.isdigit, os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0)
    while True:
        port = 15_000 + 1_000 * (worker % 16) + next(_PORTS) % 1_000
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def places(size: int) -> list[dict[str, str]]:
    """The environment of each of `size` ranks, as torchrun sets it on one machine."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size),
              "LOCAL_WORLD_SIZE": str(size)}  # fmt: skip
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
