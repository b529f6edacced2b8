"""Compile `decode.c` once on this machine, and keep the library in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from kvcalc.atomic_file import move, replace

SOURCE = Path(__file__).with_name("decode.c")

# -ffast-math allows sums per lane. Infinities must keep their meaning, because they mask tokens.
_FLAGS = ("-O3", "-ffast-math", "-fno-finite-math-only", "-fPIC", "-w")
_NATIVE, _WIDE, _OPENMP = "-march=native", "-mprefer-vector-width=512", "-fopenmp"
# Not every compiler supports all three. The sets are tried in this order until one compiles. Without these flags the
# kernel is slower, but the results are the same.
_EXTRA_FLAGS = ((_NATIVE, _WIDE, _OPENMP), (_NATIVE, _OPENMP), (_NATIVE,), (_OPENMP,), ())
_TIMEOUT_SECONDS = 300
"""For all calls of the compiler together. They take about ten seconds, and minutes on a busy machine."""
_HUNG_SECONDS = 3600
"""How long a compiler that did not finish is not tried again. The machine may only have been busy."""


def built() -> Path:
    """The path of the library, which is compiled first if it is not in the cache or was damaged there.

    Raises OSError with a one-line reason if there is no C compiler, or if compiling fails. A compiler that hangs is
    tried once an hour, until it is another one.
    """
    command, folder = _command(), _folder()
    hung = folder / f"hung-{_fingerprint(command)}"
    if hung.exists() and time.time() - hung.stat().st_mtime < _HUNG_SECONDS:
        raise OSError(f"{command[0]} did not finish in an earlier run; remove {_shown(hung)} to try it again")
    try:
        return _built(_Compiler(command, time.monotonic() + _TIMEOUT_SECONDS), folder)
    except TimeoutError:
        hung.touch()
        raise


def _fingerprint(command: list[str]) -> str:
    """A text that changes with the command, and if the compiler is replaced: its path, time and size."""
    path = os.path.realpath(shutil.which(command[0]) or command[0])
    status = os.stat(path)
    parts = (*command, path, str(status.st_mtime_ns), str(status.st_size))
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]


class _Compiler:
    """A C compiler, and the time by which all its work must be done."""

    def __init__(self, command: list[str], deadline: float) -> None:
        self.command, self._deadline = command, deadline

    def run(self, *arguments: str) -> str:
        """What the compiler prints. Raises OSError if it fails, and TimeoutError if it does not finish in time."""
        name = self.command[0]
        try:
            done = subprocess.run(  # noqa: S603 - the user's own compiler
                [*self.command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
                errors="replace", timeout=max(self._deadline - time.monotonic(), 0.01), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{name} did not finish within {_TIMEOUT_SECONDS} seconds") from None
        if done.returncode:
            complaint = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise OSError(f"{name} failed: {complaint.strip()}")
        return done.stdout


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


def _built(compiler: _Compiler, folder: Path) -> Path:
    # The key changes with the source, the compiler, the flags and the processor.
    version = compiler.run("--version")
    command = compiler.command
    parts = (SOURCE.read_text(), *command, version, *_FLAGS, repr(_EXTRA_FLAGS), platform.machine(), _processor())
    key = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:16]
    library = folder / f"decode-{key}.so"
    if _is_intact(library):
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made, compiled = Path(scratch, "decode.o"), Path(scratch, "decode.so")
        _compile(compiler, made)
        _link(compiler, made, compiled)
        move(str(compiled), str(library))
        replace(str(_checksum_of(library)), hashlib.sha256(library.read_bytes()).hexdigest().encode())
    return library


def _checksum_of(library: Path) -> Path:
    return library.with_suffix(".so.sha256")


def _is_intact(library: Path) -> bool:
    """Whether the library is as it was compiled. Loading a truncated one would end the process with SIGBUS."""
    try:
        return _checksum_of(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


def _compile(compiler: _Compiler, made: Path) -> None:
    """Compile with the first set of _EXTRA_FLAGS that the compiler accepts. Raises OSError if it accepts none."""
    for extra in _EXTRA_FLAGS:
        try:
            compiler.run(*_FLAGS, *extra, "-c", str(SOURCE), "-o", str(made))
            return
        except TimeoutError:
            raise
        except OSError as error:
            failure = error
    raise failure


def _link(compiler: _Compiler, made: Path, compiled: Path) -> None:
    """Link without OpenMP's runtime, so that torch's own runtime is used.

    A second runtime would compete with torch's for the cores. If torch's runtime is not visible, link with OpenMP's.
    """
    for extra in ((), (_OPENMP,)):
        compiler.run("-shared", str(made), "-o", str(compiled), *extra, "-lm")
        try:
            ctypes.CDLL(str(compiled), mode=os.RTLD_NOW)
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
