"""`--profile FILE`: a torch profiler trace of one decode step, for chrome://tracing or https://ui.perfetto.dev."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvcalc.errors import RunError
from kvcalc.measure.device import synchronize
from kvcalc.measure.prefill import run_layers
from kvcalc.measure.stack import Request, Stack


def write_trace(stack: Stack, hidden_states: Callable[[int], Tensor], request: Request) -> None:
    """Profile the last token's step once more, and write the trace; rank 0's alone, of several.

    Raises RunError (exit 1) where the file cannot be written.
    """
    path = request.profile or ""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if request.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for cache in stack.caches:
        if cache.layout != "state" and cache.length == request.context_tokens:
            cache.rewind(cache.length - 1)
    with profile(activities=activities, record_shapes=True) as profiler:
        run_layers(stack.layers, stack.caches, hidden_states(1))
        synchronize(request.device)
    if request.group.rank == 0:
        try:
            profiler.export_chrome_trace(path)
        except (OSError, RuntimeError) as error:
            raise RunError(f"cannot write {path}: {str(error).splitlines()[0]}") from None
        if not os.path.exists(path) or not torch.is_inference_mode_enabled():
            raise RunError(f"cannot write {path}: the profiler left nothing there")
