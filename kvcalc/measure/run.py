"""One measured run: build the layers, fill their caches, count bytes, time steps and check outputs."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvcalc.attention.backends import BACKENDS
from kvcalc.attention.cache import TokenCache, held_bytes
from kvcalc.attention.recurrent import RecurrentMixer, StateCache
from kvcalc.errors import RunError
from kvcalc.measure.choose import SlowBackends, choose
from kvcalc.measure.devices.device import MemoryWatch, release, synchronize
from kvcalc.measure.devices.faults import check_finite
from kvcalc.measure.devices.graphs import Replay
from kvcalc.measure.devices.timing import Timings, flusher, prepare, time_call, time_calls
from kvcalc.measure.layers.stack import Report, Request, Stack, build, inputs, make_caches, random_query
from kvcalc.measure.prefill import prefill
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    import kvcalc.documents as documents

WARM_UP_STEPS = 3


class Measured(NamedTuple):
    """The raw results of one run on this rank, before the comparison with a roof.

    `prefill` and `memory` are the parts of the record with these names, and `backends` has its rows. `core` is None if
    there is no attention layer, or if none was timed alone.
    """

    stack: Stack
    held_bytes: int
    allocator_bytes: int
    expected_allocator_bytes: int | None
    prefill: documents.RunPrefill | None
    backend: str
    backends: list[documents.RunBackendsItem]
    decode: Timings
    core: Timings | None
    memory: documents.RunMemory


def choose_backends(
    stack: Stack, request: Request, flush: Callable[[], object], report: Report, slow: SlowBackends
) -> list[documents.RunBackendsItem]:
    """Give every attention layer the fastest backend. Identical layers share one choice. Returns the record's rows."""
    rows: list[documents.RunBackendsItem] = []
    chosen: dict[object, Any] = {}
    for number, (part, layer, cache) in enumerate(zip(stack.parts, stack.layers, stack.caches)):
        report("compare kernels", number, len(stack.layers))
        if isinstance(layer, RecurrentMixer) or not isinstance(cache, TokenCache):
            continue
        alike = (layer.core_query_shape(1), layer.cache_shapes(), cache.lengths, part.is_cross)
        if alike not in chosen:
            backends = request.storage.backend, request.storage.without_backends
            choice = choose(layer, cache, random_query(layer, request), flush, *backends, request.effort, slow)
            name = request.group.first(choice.backend.name)
            chosen[alike] = BACKENDS[name]
            described = ({"layer": part.layer, "is_chosen": row["name"] == name, **row} for row in choice.rows)
            rows += [cast("documents.RunBackendsItem", row) for row in described]
        layer.core = chosen[alike]
    if request.device.type == "cuda":
        # The workspaces and graphs of the other kernels would look like fragmentation.
        release(request.device)
    return rows


def time_decode(
    stack: Stack, hidden_states: Callable[[int], Tensor], request: Request, flush: Callable[[], object],
    report: Report,
) -> tuple[Timings, Tensor, Replay]:  # fmt: skip
    """Time `steps` decode steps of all layers. Also returns the output of the last step, and what repeats that step.

    On a CPU, each step adds the next token. A CUDA graph repeats one step. So on CUDA, the other tokens are decoded
    first without timing, and then the step of the last token is repeated over full caches.
    """
    outputs: list[Tensor] = []

    def step(x: Tensor) -> None:
        outputs.clear()
        outputs.append(stack.run(x))

    def again() -> None:
        for cache, length in zip(stack.caches, ahead):
            if isinstance(cache, TokenCache) and cache.length > length:
                cache.rewind(length)
        step(last)

    warm_up(stack, hidden_states)
    if request.device.type == "cuda":
        for _ in range(request.steps - 1):
            step(hidden_states(1))
        last, ahead = hidden_states(1), [cache.length for cache in stack.caches]
        step(last)
        report("decode", 0, request.steps)
        replay = prepare(request.device, again, request.storage.kind != "grow", request.group)
        taken = time_calls(request.device, replay, request.steps, flush, effort=request.effort, group=request.group)
        report("decode", request.steps, request.steps)
        return taken, outputs[0], replay

    def next_step(number: int) -> Callable[[], object]:
        nonlocal last, ahead
        last, ahead = hidden_states(1), [cache.length for cache in stack.caches]
        flush()
        return partial(step, last)

    last, ahead = torch.empty(0), []
    return time_steps(next_step, request, report), outputs[0], Replay(again, "wall clock")


def time_steps(prepare: Callable[[int], Callable[[], object]], request: Request, report: Report) -> Timings:
    """Time `steps` steps, each once. `prepare(number)` returns the call for one step and is not timed."""
    seconds, cpu = [], []
    for number in range(request.steps):
        report("decode", number, request.steps)
        step = prepare(number)
        # All ranks start together, so that no rank's time includes waiting for another rank to start.
        request.group.barrier()
        before = time.process_time()
        seconds.append(time_call(request.device, step))
        cpu.append(time.process_time() - before)
    report("decode", request.steps, request.steps)
    return Timings(request.group.slowest(seconds), cpu if request.device.type == "cpu" else None, "wall clock")


def warm_up(stack: Stack, hidden_states: Callable[[int], Tensor]) -> None:
    """Run some steps and undo them, so that the caches do not change."""
    for cache in stack.caches:
        if isinstance(cache, StateCache) and WARM_UP_STEPS:
            cache.keep()
    starts = [cache.length for cache in stack.caches]
    for number in range(WARM_UP_STEPS):
        stack.run(hidden_states(1))
        for cache, start in zip(stack.caches, starts):
            if isinstance(cache, TokenCache) or number == WARM_UP_STEPS - 1:
                cache.rewind(start)


def time_core(stack: Stack, request: Request, flush: Callable[[], object], report: Report) -> Timings | None:
    """Time only attention over the full caches, without projections: all attention layers, one token per sequence.

    Returns None if there is no attention layer.
    """
    attending = stack.attention()
    if not attending:
        return None
    queries = {layer.core_query_shape(1): random_query(layer, request) for layer, _ in attending}

    def step() -> None:
        for layer, cache in attending:
            layer.attend(queries[layer.core_query_shape(1)], cache)

    report("attention core", 0, request.steps)
    taken = time_calls(request.device, step, request.steps, flush, effort=request.effort, group=request.group)
    report("attention core", request.steps, request.steps)
    return taken


def run_with_cache(spec: ModelSpec, request: Request, report: Report, slow: SlowBackends) -> Measured:
    """Build the layers, fill the caches, choose backends and time the steps. Does not free any memory.

    `slow` are the backends that earlier runs found too slow, and learns from this one.
    """
    watch = MemoryWatch(request.device)
    with torch.inference_mode():
        stack = build(spec, request, report)
        allocated, expected = make_caches(stack, request)
        if request.device.type == "cpu":
            release(request.device)
        hidden_states = inputs(spec, request)
        filled = prefill(stack, spec, request, report)
        if request.device.type == "cpu":
            release(request.device)
        flush = flusher(request.device, request.effort)
        rows = choose_backends(stack, request, flush, report, slow)
        decode, output, step = time_decode(stack, hidden_states, request, flush, report)
        check_finite(output, "decode")
        core = time_core(stack, request, flush, report)
        if request.trace is not None:
            write_trace(step.call, request, request.trace)
    attending = stack.attention()
    backend = attending[0][0].core.name if attending else "none"
    held = held_bytes(stack.caches)
    return Measured(stack, held, allocated, expected, filled, backend, rows, decode, core, watch.describe())


def run_without_cache(spec: ModelSpec, request: Request, report: Report) -> Measured:
    """Run without a cache: every step runs the whole prefix through all layers."""
    watch = MemoryWatch(request.device)
    with torch.inference_mode():
        stack = build(spec, request, report)
        prefix = inputs(spec, request)(request.context_tokens)
        outputs: list[Tensor] = []

        def step(tokens: int) -> None:
            outputs.clear()
            x = prefix[:, :tokens]
            for layer in stack.layers:
                x = x + layer(x)
            outputs.append(x[:, -1:])

        first = request.context_tokens - request.steps + 1
        step(first)
        decode = time_steps(lambda number: partial(step, first + number), request, report)
        check_finite(outputs[0], "decode")
    # The record of a run without a cache has no CPU time.
    decode = decode._replace(cpu_seconds=None)
    return Measured(stack, 0, 0, 0, None, "full prefix", [], decode, None, watch.describe())


def write_trace(step: Callable[[], object], request: Request, path: str) -> None:
    """`--trace FILE`: profile the timed step once more, and write a trace for https://ui.perfetto.dev.

    `step` is what was timed: on CUDA the replay of the graph. If there are several ranks, only rank 0 writes a trace.

    Raises RunError (exit 1) if the file cannot be written.
    """
    from torch.profiler import ProfilerActivity, profile

    # The profiler's library logs its start and stop on stderr. This must be turned off before its first use.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if request.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with warnings.catch_warnings():
        # torch 2.11 says on CUDA that it forgets earlier cycles. There is one.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with profile(activities=activities, record_shapes=True) as profiler:
            step()
            synchronize(request.device)
    if request.group.rank == 0:
        try:
            profiler.export_chrome_trace(path)
        except (OSError, RuntimeError) as error:
            raise RunError(f"cannot write {path}: {str(error).splitlines()[0]}") from None
        if not os.path.exists(path):
            raise RunError(f"cannot write {path}: the profiler wrote nothing")
