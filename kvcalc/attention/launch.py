"""Launch a Triton kernel that was compiled in another process first.

Some compilers do not raise an error: Triton 3.1 ends its process with SIGABRT at MLA on Hopper. So a child process
compiles each kernel before its first launch here. It needs no GPU, and leaves the result in Triton's cache on disk, so
nothing is compiled twice. If the child dies or hangs, the launch raises `CompilerError`.

`python -m kvcalc.attention.launch` is the child. It reads a line of JSON for each kernel, and prints a line with None,
or with the reason why it does not compile.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

COMPILE_SECONDS = 120.0
"""The longest time for one kernel. The slowest takes five seconds."""
_START_SECONDS = 120.0
_INT32 = range(-(2**31), 2**31)
_READY = "ready"


class CompilerError(RuntimeError):
    """A kernel does not compile here. Its message is the reason."""


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
    """`kernel[grid](*given, **constants)`, for a kernel of `triton.jit` whose tl.constexpr arguments are `constants`.

    Raises CompilerError if the kernel does not compile, or if its compiler dies or hangs.
    """
    # Triton's interpreter compiles nothing.
    if isinstance(kernel, JITFunction):
        _check(kernel, given, constants)
    kernel[grid](*given, **constants)


_found: dict[Any, str | None] = {}


def _check(kernel: Any, given: tuple[Any, ...], constants: dict[str, Any]) -> None:
    key = kernel, given[0].device, *map(_sort, given), *constants.items()
    if key not in _found:
        target = driver.active.get_current_target()
        request = {
            "kernel": (kernel.__module__, kernel.__name__), "given": [_described(value) for value in given],
            "constants": constants, "target": (target.backend, target.arch, target.warp_size),
        }  # fmt: skip
        _found[key] = _compiler.ask(request)
    if (reason := _found[key]) is not None:
        raise CompilerError(reason)


def _sort(value: Any) -> Any:
    """What Triton compiles for, or a finer distinction: an integer of 1, a multiple of 16, or one of 64 bits."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16, value.untyped_storage().nbytes() in _INT32
    if type(value) is int:
        return value == 1, value % 16 == 0, value in _INT32
    return type(value)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"dtype": dtype, "bytes": value.untyped_storage().nbytes(), "offset": value.data_ptr() % 16}
    return value


def _rebuilt(described: Any) -> Any:
    """A tensor without memory, which looks to the compiler like the described one."""
    if not isinstance(described, dict):
        return described
    dtype = getattr(torch, described["dtype"])
    tensor = torch.empty(described["bytes"] // dtype.itemsize, dtype=dtype, device="meta")
    return tensor[described["offset"] // dtype.itemsize :]


class _Compiler:
    """The child process, which is started when it is needed, and again after it died."""

    def __init__(self) -> None:
        self._process: Any = None

    def ask(self, request: dict[str, Any]) -> str | None:
        """The reason why a kernel does not compile, or None if it does."""
        if self._process is None:
            self._process = _started()
            if self._answer(_START_SECONDS) != _READY:
                # It has not come to the compiler, so nothing is known about it.
                self.close()
                return None
        process = self._process
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answer = self._answer(COMPILE_SECONDS)
        if answer is not None:
            reason: str | None = json.loads(answer)
            return reason
        status = process.wait()
        self.close()
        if status == -9:
            return f"the compiler was killed, after {COMPILE_SECONDS:g} seconds or for its memory"
        return f"the compiler ended with {f'signal {-status}' if status < 0 else f'exit code {status}'}"

    def _answer(self, seconds: float) -> str | None:
        """The next line of the child, or None if it ends before. It is killed after `seconds`."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            return self._process.stdout.readline().strip() or None
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


_compiler = _Compiler()
atexit.register(_compiler.close)


def _started() -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(  # noqa: S603 - this module
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


class _Target:
    """Triton's driver of a device that is not there."""

    def __init__(self, backend: str, architecture: Any, warp_size: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(backend, architecture, warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile(request: dict[str, Any]) -> str | None:
    driver.set_active(_Target(*request["target"]))
    module, name = request["kernel"]
    try:
        kernel: Any = getattr(import_module(module), name)
        kernel.warmup(*map(_rebuilt, request["given"]), grid=(1,), **request["constants"])
    except Exception as error:  # whatever the compiler raises is the reason
        return _reason(error)
    return None


def _reason(error: BaseException) -> str:
    """One line. Triton's own message begins with the source, and is in `error_message` of the innermost error."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error)
    return str((text.strip().splitlines() or [type(error).__name__])[0])


def _serve() -> None:
    # Compilers print on stdout too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(_READY, file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_compile(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
