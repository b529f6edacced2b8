"""Compile `decode.c` once on this machine, and keep the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcalc.atomic_file import move, replace

SOURCE = Path(__file__).with_name("decode.c")

# -ffast-math allows sums per lane. Infinities must keep their meaning, because they mask tokens. -O3 takes longer to
# compile, and is not faster.
_FLAGS = ("-O2", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-w")
_NATIVE, _WIDE, _OPENMP = "-march=native", "-mprefer-vector-width=512", "-fopenmp"
# Not every compiler supports all three, or has OpenMP's runtime. The sets are tried in this order until one compiles
# and loads. Without these flags the kernel is slower, but the results are the same.
_EXTRA_FLAGS = ((_NATIVE, _WIDE, _OPENMP), (_NATIVE, _OPENMP), (_NATIVE,), (_OPENMP,), ())
_CPU_SECONDS = 60
"""The processor time of one call of the compiler. It takes three seconds."""
_TIMEOUT_SECONDS = 300
"""For all calls of the compiler together, and for waiting until another process has compiled."""
_HUNG_SECONDS = 3600
"""How long a compiler that did not finish is not tried again."""
_POLL_SECONDS = 0.05


def built() -> Path:
    """The path of the library, which is compiled first if it is not in the cache or was damaged there.

    One process compiles, and others wait for it. Raises OSError with a one-line reason if there is no C compiler, or if
    compiling fails. A compiler that hangs is tried once an hour, until it is another one.
    """
    command, folder = _command(), _folder()
    hung = folder / f"hung-{_fingerprint(command)}"
    _check_hung(command, hung)
    try:
        return _built(_Compiler(command, time.monotonic() + _TIMEOUT_SECONDS), folder, hung)
    except TimeoutError:
        hung.touch()
        raise


def _check_hung(command: list[str], hung: Path) -> None:
    if hung.exists() and time.time() - hung.stat().st_mtime < _HUNG_SECONDS:
        raise OSError(f"{command[0]} did not finish in an earlier run; remove {_shown(hung)} to try it again")


def _fingerprint(command: list[str]) -> str:
    """A text that changes with the command, and if the compiler is replaced: its path, time and size."""
    path = os.path.realpath(shutil.which(command[0]) or command[0])
    status = os.stat(path)
    parts = (*command, path, str(status.st_mtime_ns), str(status.st_size))
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]


class _Compiler:
    """A C compiler, and the time by which all its work must be done."""

    def __init__(self, command: list[str], deadline: float) -> None:
        self.command, self.deadline = command, deadline

    def run(self, *arguments: str) -> str:
        """What the compiler prints. Raises OSError if it fails, and TimeoutError if it does not finish in time."""
        name, call = self.command[0], [*self.command, *arguments]
        if os.name == "posix":  # the programs that the compiler starts inherit the limit
            call = ["/bin/sh", "-c", f'ulimit -S -t {_CPU_SECONDS}; exec "$@"', "sh", *call]
        process = subprocess.Popen(  # noqa: S603 - the user's own compiler
            call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
            errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=max(self.deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{name} did not finish within {_TIMEOUT_SECONDS} seconds") from None
        finally:
            _end(process)
        if _used_up(process.returncode, err):
            raise TimeoutError(f"{name} did not finish within {_CPU_SECONDS} seconds of processor time")
        if process.returncode:
            complaint = next((line for line in err.splitlines() if "error" in line), err[:200])
            raise OSError(f"{name} failed: {complaint.strip()}")
        return out


def _end(process: subprocess.Popen[str]) -> None:
    """End a process, and the programs that it started. They would hold its pipes."""
    if process.poll() is None:
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.communicate()


def _used_up(status: int, complaint: str) -> bool:
    """Whether a process, or one that it started and reports on, was ended by its limit of processor time."""
    number = getattr(signal, "SIGXCPU", None)
    return number is not None and (status in (-number, 128 + number) or bool(status and _XCPU.search(complaint)))


_XCPU = re.compile(r"CPU time limit exceeded|signal 24\b")


def _command() -> list[str]:
    """The command of the C compiler: CC, or the first one that is installed."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise OSError(f"CC is not a command: {error}") from None
    for compiler in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(compiler[0]):
            return compiler
    raise OSError("no C compiler found" + (f": CC is {named[0]}" if named else " (cc, gcc or clang)"))


def _built(compiler: _Compiler, folder: Path, hung: Path) -> Path:
    # The key changes with the source, the compiler, the flags and the processor.
    version = compiler.run("--version")
    command = compiler.command
    parts = (SOURCE.read_text(), *command, version, *_FLAGS, repr(_EXTRA_FLAGS), platform.machine(), _processor())
    key = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]
    library = folder / f"decode-{key}.so"
    if _is_intact(library):
        return library
    with _locked(folder, compiler.deadline):
        # Another process may have compiled it, or tried to, while this one waited.
        if _is_intact(library):
            return library
        _check_hung(command, hung)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compiled = Path(scratch, "decode.so")
            _make(compiler, Path(scratch, "decode.o"), compiled)
            checksum = hashlib.sha256(compiled.read_bytes()).hexdigest()
            move(str(compiled), str(library))
        replace(str(_checksum_of(library)), checksum.encode())
    return library


@contextmanager
def _locked(folder: Path, deadline: float) -> Iterator[None]:
    """Inside the block, no other process compiles in `folder`. The system unlocks it if the process dies.

    Raises OSError if another process still compiles at `deadline`.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError("another process is still compiling the kernel; try again later") from None
                time.sleep(_POLL_SECONDS)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(handle)


def _checksum_of(library: Path) -> Path:
    return library.with_suffix(".so.sha256")


def _is_intact(library: Path) -> bool:
    """Whether the library is as it was compiled. Loading a truncated one would end the process with SIGBUS."""
    try:
        return _checksum_of(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _make(compiler: _Compiler, made: Path, library: Path) -> None:
    """Compile and link with the first set of _EXTRA_FLAGS that works. Raises OSError if none does."""
    for extra in _EXTRA_FLAGS:
        try:
            compiler.run(*_FLAGS, *extra, "-c", str(SOURCE), "-o", str(made))
            return _link(compiler, made, library)
        except TimeoutError:
            raise
        except OSError as error:
            failure = error
    raise failure


def _link(compiler: _Compiler, made: Path, library: Path) -> None:
    """Link without OpenMP's runtime, so that torch's own runtime is used.

    A second runtime would compete with torch's for the cores. If torch's runtime is not visible, link with OpenMP's.
    """
    for extra in ((), (_OPENMP,)):
        compiler.run("-shared", str(made), "-o", str(library), *extra, "-lm")
        try:
            ctypes.CDLL(str(library), mode=os.RTLD_NOW)
            return
        except OSError as error:
            failure = error
    raise failure


def _processor() -> str:
    """A text that determines -march=native: the processor's list of features if the system provides it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(line for line in file if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


def _folder() -> Path:
    """kvcalc's folder in the user's cache. Only the user may write to it, because its files are executed."""
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if not os.path.isdir(home) and not os.path.isdir(base):
        raise OSError("the user's home folder does not exist, so compiled code is not stored")
    folder = Path(base, "kvcalc").absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid"):
        if stat.S_IMODE(folder.stat().st_mode) & 0o022:
            raise OSError(f"other users can write to {_shown(folder)}, so compiled code is not stored there")
        for path in (folder, *folder.parents, *folder.resolve().parents):
            _check_owner(path, folder)
    return folder


def _check_owner(path: Path, folder: Path) -> None:
    """Raise OSError if another user may replace what is in `path`, a part of the way to `folder`.

    The user, root and the user's own group are trusted. In a folder with the sticky bit (/tmp), others cannot replace
    what is not theirs.
    """
    for status in (path.lstat(), path.stat()):
        mode = status.st_mode
        is_shared = bool(mode & stat.S_IWOTH) or bool(mode & stat.S_IWGRP and status.st_gid not in (0, os.getgid()))
        if stat.S_ISLNK(mode):
            is_shared = False  # the mode of a link means nothing
        if status.st_uid not in (0, os.getuid()) or (is_shared and not mode & stat.S_ISVTX):
            reason = f"other users can write to {_shown(path)}, so compiled code is not stored in {_shown(folder)}"
            raise OSError(reason)


def _shown(path: Path) -> str:
    """A path for a reason, with `~` for the user's home. Reasons stand in records, which name no user."""
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) and path != home else str(path)
