"""Triton kernels are compiled in a child process first, whose end is a reason and not the end of the run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import CompilationError
from triton.runtime import driver

from kvcalc.attention import launch, step
from kvcalc.attention.backends import split_kv
from kvcalc.attention.cache import TokenCache
from tests.measure.options import last_given
from tests.measure.quick import SMALL, quicken
from tests.simulated_cuda import simulated_cuda

# Runs in the child before anything else, as a compiler with a bug would in Triton's place.
HOOKS = {
    "abort": "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()",
    "exit": "import os; os._exit(3)",
    "hang": "import time; time.sleep(600)",
    "raise": "raise RuntimeError('PassManager::run failed\\nmore')",
}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Triton believes that there is an H100. Every test has a cache of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(driver, "_active", launch._Target("cuda", 90, 32))
    monkeypatch.setattr(launch, "_found", {})
    kernel = step._kernel
    kernel.cache_clear()
    yield
    kernel.cache_clear()
    launch._compiler.close()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """`child("abort")`: what the compiler of the child does."""

    def call(hook: str) -> None:
        lines = ("import triton.runtime.jit as jit", "def warmup(*_, **__):", f"    {HOOKS[hook]}")
        (tmp_path / "sitecustomize.py").write_text("\n".join((*lines, "jit.JITFunction.warmup = warmup", "")))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return call


def merge(splits: int = 4, elements: int = 128) -> None:
    part, out = (torch.empty(64, dtype=torch.bfloat16) for _ in range(2))
    constants = {"V_WIDTH": 128, "ELEMENTS": elements, "PARTS": 16}
    launch._check(split_kv.merge, (part, torch.empty(64), out, splits), constants)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_the_child_leaves_the_kernel_where_this_process_finds_it(tmp_path: Path) -> None:
    merge()
    found = files(tmp_path / "triton")
    assert {"merge.cubin"} <= {path.name for path in found}
    # The process itself, which would compile for the same device.
    part, out = (torch.empty(64, dtype=torch.bfloat16) for _ in range(2))
    assert driver.active.get_current_target() == GPUTarget("cuda", 90, 32)
    split_kv.merge.warmup(part, torch.empty(64), out, 4, V_WIDTH=128, ELEMENTS=128, PARTS=16, grid=(1,))
    assert files(tmp_path / "triton") == found


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        ("abort", "the compiler ended with signal 6"),
        ("exit", "the compiler ended with exit code 3"),
        ("hang", "the compiler was killed, after 0.5 seconds or for its memory"),
        ("raise", "PassManager::run failed"),
    ],
)
def test_the_end_of_the_child_is_a_reason(child: Any, monkeypatch: pytest.MonkeyPatch, hook: str, reason: str) -> None:
    if hook == "hang":
        monkeypatch.setattr(launch, "COMPILE_SECONDS", 0.5)
    child(hook)
    started, real = [0], launch._started

    def counted() -> Any:
        started[0] += 1
        return real()

    monkeypatch.setattr(launch, "_started", counted)
    for _ in range(3):
        with pytest.raises(launch.CompilerError, match=f"^{reason}$"):
            merge()
    assert started == [1]
    # Another kernel gets a new child.
    with pytest.raises(launch.CompilerError, match=f"^{reason}$"):
        merge(elements=64)
    assert started == [1 if hook == "raise" else 2]


def test_the_reason_is_the_compilers_own_message() -> None:
    """Triton's message begins with the place in the source, and has the cause in an error of its own."""
    error = CompilationError("f(x)", None, None)
    error.__cause__ = CompilationError("x = y", None, "Cannot bitcast data-type of size 32\nmore")
    assert launch._reason(error) == "Cannot bitcast data-type of size 32"


def test_lengths_and_strides_of_one_sort_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(launch._compiler, "ask", asked.append)
    for splits in (2, 3, 5, 33):
        merge(splits)
    assert len(asked) == 1


def test_without_a_child_the_process_compiles_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A child that ends before it comes to the compiler says nothing about it."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    merge()


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_an_abort_of_the_compiler_does_not_end_the_run(
    kvcalc: Any, child: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    quicken(monkeypatch)
    child("abort")
    asked = [*last_given((*SMALL, "--attention", kind, "--context", "64", "--steps", "2", "--device", "cuda"))]
    asked += ["--dtype", "bf16", "--json"]
    with simulated_cuda():
        result = kvcalc("measure", *asked)
        assert result.status == 0, result.err
        (row,) = json.loads(result.out)["runs"]
        rows = {each["name"]: each for each in row["backends"]}
        assert rows["triton"]["reason"] == "the compiler ended with signal 6"
        assert not rows["triton"]["is_chosen"]
        refused = kvcalc("measure", *asked, "--backend", "triton")
    assert refused.status == 1
    assert "--backend triton cannot run here: the compiler ended with signal 6" in refused.err


def test_a_step_that_does_not_compile_for_a_shape_is_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise launch.CompilerError("the compiler ended with signal 6")

    kernel = SimpleNamespace(can_store=lambda _: True, rotate_and_append=refuse, CompilerError=launch.CompilerError)
    monkeypatch.setattr(step, "_kernel", lambda device: kernel)
    with simulated_cuda():
        cuda = torch.device("cuda", 0)
        cache = TokenCache(1, ((2, 16), (2, 16)), 8, None, torch.bfloat16, cuda)
        query, key = (torch.ones(1, heads, 1, 16, dtype=torch.bfloat16, device=cuda) for heads in (4, 2))
        assert step.rotate_and_append(None, query, key, cache, value=key) is query
        assert cache.length == 1
