"""`kvcalc measure` from end to end on a simulated CUDA device: options, kernels and layouts.

Every run must succeed, time graphs, hold the predicted bytes, and do nothing during a capture that CUDA refuses.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # flex loads it. Its first import must not run on a simulated device, half of it would stay.

import kvcalc as library
from kvcalc.attention import ragged, rope
from kvcalc.attention.backends import BACKENDS, Backend
from kvcalc.measure import choose, run, runner
from kvcalc.measure.devices.timing import Timings
from kvcalc.measure.expected import COMPILE_SECONDS
from kvcalc.measure.progress import Progress
from kvcalc.measure.sweep import parse_sweep
from tests.conftest import ROOT, at_night
from tests.documents import validate
from tests.measure.options import last_given
from tests.measure.quick import narrow
from tests.simulated_cuda import Machine, simulated_cuda
from tests.simulated_cuda.graphs import Graph
from tests.simulated_cuda.machine import BLOCK_BYTES

MODEL = ("--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--hidden-size", "64", "--layers", "2")
SHORT = (*MODEL, "--context", "200", "--steps", "3", "--dtype", "bf16", "--device", "cuda", "--json")
# Backends keep tensors.
UNUSED = {name: copy.deepcopy(backend) for name, backend in BACKENDS.items() if name != "native"}
MLA = ("--attention", "mla", "--kv-lora-rank", "512", "--qk-rope-head-dim", "64")


def renewed(name: str) -> Backend:
    """A backend that has not run. Those of the CPU keep nothing on a device."""
    return BACKENDS[name] if name == "native" else copy.deepcopy(UNUSED[name])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Backends are new, because they keep tensors."""
    rope._LAST.clear()
    ragged.on_device.cache_clear()
    for name in BACKENDS:
        monkeypatch.setitem(BACKENDS, name, renewed(name))
    with simulated_cuda() as machine:
        yield machine


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every run, the bytes that the allocator must have given its caches: each tensor in whole blocks."""
    found: list[int] = []
    make = run.make_caches

    def noted(stack: Any, *given: Any) -> Any:
        made = make(stack, *given)
        holders = [holder for cache in stack.caches for holder in (cache, *getattr(cache, "_each", ()))]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for holder in holders for value in vars(holder).values()
            for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, torch.Tensor)
        }  # fmt: skip
        found.append(sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in storages.values()))
        return made

    monkeypatch.setattr(run, "make_caches", noted)
    return found


def check(document: dict[str, Any], machine: Machine, allocations: list[int], method: str = "CUDA graph") -> None:
    validate(document, "measure")
    assert [capture.failure for capture in machine.captures if capture.failure] == []
    for number, row in enumerate(document["runs"]):
        assert row["predicted_bytes"] == row["held_bytes"] > 0
        assert row["allocator_bytes"] == allocations[number]
        assert row["verified"]["ok"]
        assert row["decode_step_seconds"]["method"] == method
        assert row["attention_core_seconds"]["method"] == "CUDA graph"
    check_released(machine)


def check_released(machine: Machine) -> None:
    """Except for what backends keep for the next run, all memory is free again."""
    for name in BACKENDS:
        BACKENDS[name] = renewed(name)
    rope._LAST.clear()
    ragged.on_device.cache_clear()
    gc.collect()
    assert machine.devices[0].allocated == 0


LAYOUTS: list[Any] = [
    (),
    ("--block-size", "16"),
    at_night(("--block-size", "256")),
    ("--kv-dtype", "int8"),
    ("--kv-dtype", "fp8", "--block-size", "16"),
    ("--kv-dtype", "fp8", "--cache-scales", "head", "--batch", "2"),
    ("--kv-dtype", "fp8", "--cache-scales", "tensor", "--block-size", "16"),
    ("--sliding-window", "64"),
    ("--sliding-window", "50", "--block-size", "16", "--kv-dtype", "int8"),
    at_night(("--attention", "mha", "--batch", "3")),
    ("--attention", "mqa", "--dtype", "fp16"),
    ("--dtype", "fp32"),
    MLA,
    (*MLA, "--block-size", "64"),
    at_night((*MLA, "--kv-dtype", "fp8", "--batch", "2")),
    ("--attention", "mla", "--mla", "expanded"),
]


@pytest.mark.parametrize("options", LAYOUTS, ids=" ".join)
def test_every_layout(kvcalc: Any, device: Machine, allocations: list[int], options: tuple[str, ...]) -> None:
    result = kvcalc("measure", *SHORT, *options)
    assert result.status == 0, result.err
    check(result.json, device, allocations)


@pytest.mark.parametrize(
    "options",
    [
        (), ("--block-size", "16", "--kv-dtype", "int8"), ("--sliding-window", "50"), (*MLA, "--mla", "expanded"),
        ("--backend", "sdpa-flash"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_different_lengths(kvcalc: Any, device: Machine, allocations: list[int], options: tuple[str, ...]) -> None:
    short = [word for word in SHORT if word not in ("--context", "200")]
    result = kvcalc("measure", *short, "--lengths", "200,40,90", *options)
    assert result.status == 0, result.err
    check(result.json, device, allocations)
    assert not [warning for warning in result.json["warnings"] if "allocator" in warning["text"]]


NAMED: list[Any] = [
    ("flex",),
    ("sdpa-flash", "--block-size", "16"),
    ("sdpa-efficient", "--dtype", "fp32"),
    ("sdpa-cudnn", "--attention", "mqa"),
    ("grouped-matmul", "--kv-dtype", "int8"),
    ("repeat-kv",),
]


@pytest.mark.parametrize("named", NAMED, ids=" ".join)
def test_every_backend_by_name(kvcalc: Any, device: Machine, allocations: list[int], named: tuple[str, ...]) -> None:
    result = kvcalc("measure", *SHORT, *named[1:], "--backend", named[0])
    assert result.status == 0, result.err
    check(result.json, device, allocations)
    assert result.json["runs"][0]["backend"] == named[0]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize(
    "options", [("--block-size", "16", "--kv-dtype", "int8"), at_night((*MLA, "--kv-dtype", "fp8"))]
)
def test_the_triton_kernel(options: tuple[str, ...]) -> None:
    """In a process of its own, because Triton decides when it is imported whether it interprets."""
    small = ("--heads", "2", "--kv-heads", "1", "--layers", "1", "--context", "40", "--steps", "1")
    command = ("kvcalc", "measure", *map(str, last_given((*SHORT, *small, *options))), "--backend", "triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_cuda", *command], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["runs"]
    assert row["predicted_bytes"] == row["held_bytes"]
    assert row["backend"] == "triton"
    assert row["decode_step_seconds"]["method"] == row["attention_core_seconds"]["method"] == "CUDA graph"


def test_all_backends_that_can_run_are_timed(kvcalc: Any, device: Machine) -> None:
    rows = {row["name"]: row for row in kvcalc("measure", *SHORT, "--block-size", "256").json["runs"][0]["backends"]}
    assert {"sdpa-flash", "sdpa-efficient", "grouped-matmul"} <= {name for name, row in rows.items() if row["seconds"]}
    assert rows["native"]["reason"] == "only runs on CPUs"


def test_a_kernel_that_waits_does_not_break_the_allocator(
    kvcalc: Any, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads a number of the device on the host. In torch 2.11, capturing this would end the run."""
    device.capture_breaks_allocator = True
    kind = type(BACKENDS["grouped-matmul"])
    decode = kind.decode

    def waiting(self: Backend, query: torch.Tensor, *given: Any) -> torch.Tensor:
        query[0, 0, 0, 0].item()
        return decode(self, query, *given)

    monkeypatch.setattr(kind, "decode", waiting)
    result = kvcalc("measure", *SHORT, "--backend", "grouped-matmul")
    assert result.status == 0, result.err
    assert result.json["runs"][0]["decode_step_seconds"]["method"] == "CUDA events"
    assert [capture.failure for capture in device.captures if capture.failure] == []


def test_a_kernel_that_breaks_the_allocator_is_left_out_by_a_new_process(
    kvcalc: Any, device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to torch 2.11, nothing can run after a failed capture, so the command starts again without that kernel."""
    device.capture_breaks_allocator = True
    broken = BACKENDS["grouped-matmul"]
    decode = type(broken).decode

    def on_another_stream(self: Backend, *arguments: Any, **named: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream(torch.device("cuda", 0))):
            return decode(self, *arguments, **named)

    monkeypatch.setattr(type(broken), "decode", on_another_stream)
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.append([path, *command]))
    command = ["measure", *SHORT]
    monkeypatch.setattr(sys, "argv", ["kvcalc", *command])
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "kvcalc", *command])
    first = kvcalc(*command)
    left_out = ["--without-backend", broken.name]
    assert started == [[sys.executable, sys.executable, "-m", "kvcalc", *command, *left_out]]
    assert f"starting again without {broken.name}" in first.err
    device.is_allocator_broken = False
    second = kvcalc(*command, *left_out)
    assert second.status == 0, second.err
    (row,) = (row for row in second.json["runs"][0]["backends"] if row["name"] == broken.name)
    assert (row["seconds"], row["reason"]) == (None, "left out (--without-backend)")
    assert second.json["workload"]["without_backends"] == [broken.name]


def test_a_growing_cache_is_not_a_graph(kvcalc: Any, device: Machine) -> None:
    result = kvcalc("measure", *SHORT, "--cache", "grow")
    assert result.status == 0, result.err
    (row,) = result.json["runs"]
    assert row["predicted_bytes"] == row["held_bytes"]
    assert row["decode_step_seconds"]["method"] == "CUDA events"


def test_no_cache_at_all(kvcalc: Any, device: Machine) -> None:
    result = kvcalc("measure", *SHORT, "--cache", "none")
    assert result.status == 0, result.err
    assert result.json["runs"][0]["held_bytes"] == 0


def test_a_sweep(kvcalc: Any, device: Machine, allocations: list[int]) -> None:
    result = kvcalc("measure", *SHORT, "--sweep", "context=64:130,batch=2")
    assert result.status == 0, result.err
    assert len(result.json["runs"]) == 2
    check(result.json, device, allocations)


@pytest.fixture
def flex_takes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`flex_takes(seconds)`: the time of flex where kernels are compared. All others take 0.1 seconds."""

    def call(seconds: float) -> None:
        flex, last = type(BACKENDS["flex"]), [0.0]
        decode, prepare = flex.decode, choose.prepare

        def noted(self: Backend, *arguments: Any, **named: Any) -> Any:
            last[0] = seconds
            return decode(self, *arguments, **named)

        def prepared(*arguments: Any) -> Any:
            last[0] = 0.1
            return prepare(*arguments)

        monkeypatch.setattr(flex, "decode", noted)
        monkeypatch.setattr(choose, "prepare", prepared)
        monkeypatch.setattr(choose, "time_calls", lambda *_, **__: Timings([last[0]], None, "CUDA graph"))

    return call


SWEEP = ("--sweep", "context=64:130:200,batch=1:2")


def test_a_slow_kernel_is_not_compiled_for_every_context(kvcalc: Any, device: Machine, flex_takes: Any) -> None:
    flex_takes(0.2)
    result = kvcalc("measure", *SHORT, *SWEEP)
    assert result.status == 0, result.err
    assert device.compilations == 2
    rows = [next(row for row in run["backends"] if row["name"] == "flex") for run in result.json["runs"]]
    assert [row["seconds"] for row in rows] == [0.2, 0.2, None, None, None, None]
    assert rows[-1]["reason"] == "compiles for each context, and took 2.0 times the fastest at another one"


def test_a_kernel_as_fast_as_others_is_tried_at_every_context(kvcalc: Any, device: Machine, flex_takes: Any) -> None:
    flex_takes(0.05)
    result = kvcalc("measure", *SHORT, *SWEEP)
    assert result.status == 0, result.err
    assert device.compilations == 6
    assert {run["backend"] for run in result.json["runs"]} == {"flex"}


def test_the_first_run_is_expected_to_compile(device: Machine) -> None:
    progress, spec = Progress(), narrow(library.load_model("qwen2.5-0.5b"))
    sweep = parse_sweep("context=64:65", None, 1)
    runner.measure(spec, num_layers=1, steps=2, sweep=sweep, device="cuda", progress=progress)
    first, second = (planned.seconds["compare kernels"] for planned in progress.runs)
    assert first - second == pytest.approx(COMPILE_SECONDS["cuda"], abs=0.1)


def test_a_profile_compiles_a_slow_kernel_once(kvcalc: Any, device: Machine, flex_takes: Any, tmp_path: Path) -> None:
    flex_takes(0.2)
    given = ("qwen2.5-0.5b", "--context", "64,128,256", "--batch", "1", "--kv-dtype", "auto", "--save", tmp_path / "p")
    result = kvcalc("measure", "--profile", "--device", "cuda", "--json", *given)
    assert result.status == 0, result.err
    assert len(result.json["points"]) == 3
    assert device.compilations == 1


@pytest.mark.parametrize("axis", ["context", "batch"])
def test_until_full_ends_where_the_allocator_does(kvcalc: Any, device: Machine, axis: str) -> None:
    options = ("--layers", "1", "--context", "64", "--until-full", axis, "--memory", "24MiB")
    result = kvcalc("measure", *SHORT, *options)
    assert result.status == 0, result.err
    found = result.json["capacity"]
    assert 0.5 < found["ratio"] <= 1
    assert device.devices[0].limit == device.devices[0].total
    check_released(device)


def test_a_trace(kvcalc: Any, device: Machine, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = kvcalc("measure", *SHORT, "--trace", trace)
    assert result.status == 0, result.err
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_step_is_the_same_in_a_graph(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output after the last replay is that of the same step without a graph."""
    outputs: dict[bool, torch.Tensor] = {}

    def refuse(graph: Graph, *_: object, **__: object) -> None:
        raise RuntimeError("no graphs")

    for captures in (True, False):
        monkeypatch.setattr(run, "check_finite", lambda out, what, key=captures: outputs.update({key: out.cpu()}))
        if not captures:
            monkeypatch.setattr(Graph, "capture_begin", refuse)
        spec = library.read_config(
            {"model_type": "generic", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 16, "hidden_size": 32}, "small", "test"
        )  # fmt: skip
        runner.measure(spec, context_tokens=40, steps=3, device="cuda", dtype="fp32", backend="grouped-matmul")
    assert torch.equal(outputs[True], outputs[False])


@pytest.mark.parametrize("name", ["falcon-h1-tiny-90m", "gpt-oss-120b", "qwen3-next-80b-a3b"])
def test_models_with_states_and_windows(device: Machine, allocations: list[int], name: str) -> None:
    spec = narrow(library.load_model(name))
    layers = 4 if name.startswith("qwen") else 2
    document: Any = runner.measure(spec, num_layers=layers, context_tokens=150, steps=3, device="cuda", dtype="bf16")
    check(document, device, allocations)
