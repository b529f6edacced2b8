"""Ctrl-C is acknowledged while no Python handler can run: in a C function, and in one that also keeps the lock."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Locking a mutex twice waits for ever, and no signal ends it.
FOREVER = """
import ctypes, sys
from kvcalc.cli.interrupts import ending_on_ctrl_c, exiting_on_ctrl_c
mutex = ctypes.create_string_buffer(256)
def forever(library):
    print("ready", flush=True)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a mutex of zeros is one of glibc")


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", FOREVER + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        # A test runner in the background may ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until_asleep(process: subprocess.Popen[str]) -> None:
    """Wait until the process waits for the mutex: before that, Python's own handler would answer."""
    stat = Path(f"/proc/{process.pid}/stat")
    # Once may be a short wait for something else.
    seen = 0
    while seen < 5:
        seen = seen + 1 if stat.read_text().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.01)


def test_a_computation_in_c_is_ended(tmp_path: Path) -> None:
    code = f"""
with ending_on_ctrl_c(lambda: open({str(tmp_path / "stopped")!r}, "w").close()):
    forever(ctypes.CDLL(None))
"""
    with started(code) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        wait_until_asleep(process)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("", "kvcalc: interrupted\n")
        assert process.returncode == 130
    assert (tmp_path / "stopped").exists()


def test_an_import_that_keeps_pythons_lock_is_answered() -> None:
    """As the loading of a large library does, which ends only later."""
    code = """
with exiting_on_ctrl_c():
    forever(ctypes.PyDLL(None))
"""
    with started(code) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == "ready\n"
        wait_until_asleep(process)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "kvcalc: interrupted\n"
        assert process.poll() is None


def test_the_line_is_said_once_and_the_helper_ends() -> None:
    code = """
import os, signal
with exiting_on_ctrl_c():
    pass
try:
    print(os.waitpid(-1, os.WNOHANG))
except ChildProcessError:
    print("no child", flush=True)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.set_wakeup_fd(-1), flush=True)
with exiting_on_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    sum(range(100_000))
print("went on")
"""
    with started(code) as process:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out, err) == (130, "no child\nTrue -1\n", "kvcalc: interrupted\n")


def test_handlers_are_as_before_after_the_block() -> None:
    code = """
import signal, threading, time
with ending_on_ctrl_c(lambda: None):
    assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert threading.active_count() == 2
end = time.monotonic() + 30
while threading.active_count() > 1 and time.monotonic() < end:
    time.sleep(0.01)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.set_wakeup_fd(-1), threading.active_count())
"""
    with started(code) as process:
        out, err = process.communicate(timeout=300)
        assert (out, err) == ("True -1 1\n", "")
