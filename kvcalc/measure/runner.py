"""One measured run per kind of attention: build, fill, count, time, check; and the document they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvcalc.attention.cache import TokenCache, held_bytes
from kvcalc.attention.core import CORES
from kvcalc.errors import KvcalcError, MismatchError, RunError, UsageError
from kvcalc.measure.bandwidth import read_roof
from kvcalc.measure.budget import check_fits, chunk_tokens
from kvcalc.measure.build import AttentionLayer, build_layer, check_buildable, layer_windows, make_cache, materialize
from kvcalc.measure.device import allocated_by, describe_device, free_bytes, release, resolve_device
from kvcalc.measure.distributed import ALONE, Group, describe_ranks, device_of, join
from kvcalc.measure.environment import describe_environment
from kvcalc.measure.faults import check_finite, faults
from kvcalc.measure.prefill import Progress, prefill, run_layers
from kvcalc.measure.ranks import check_size, find_place
from kvcalc.measure.sharding import share_of_spec
from kvcalc.measure.timing import summarize, time_call
from kvcalc.measure.verify import verify
from kvcalc.memory import kv_cache
from kvcalc.memory.dtypes import Dtype, parse_dtype
from kvcalc.memory.workload import check_tensor_parallel, resolve_workload
from kvcalc.model.describe import describe_model
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf, apply, attention_parameters, side_by_side
from kvcalc.schema import SCHEMA_VERSION

_TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_WARM_UP_STEPS = 3


class Request(NamedTuple):
    """What to run: final context length N, batch, K timed steps, element type, seed, device, ranks."""

    context_tokens: int
    batch_size: int
    steps: int
    dtype: Dtype
    device: torch.device
    seed: int
    group: Group = ALONE

    @property
    def torch_dtype(self) -> torch.dtype:
        return _TORCH_DTYPES[self.dtype.name]


def measure(
    model: ModelSpec,
    *,
    context_tokens: int | None = None,
    batch_size: int = 1,
    steps: int = 32,
    num_layers: int | None = None,
    what_if: WhatIf = WhatIf(),
    all_variants: bool = False,
    device: str = "auto",
    dtype: str | None = None,
    seed: int = 0,
    tensor_parallel_size: int = 1,
    progress: Progress = lambda what, done, of: None,
) -> dict[str, Any]:
    """The measure document: for each kind of attention asked for, predicted and held bytes and the time of a step.

    `context_tokens` is the final length: context_tokens - steps tokens are prefilled, then `steps` decoded. The first
    `num_layers` layers are built, all by default. With `tensor_parallel_size`, every process that torchrun started
    calls this, runs its share of the heads and returns the same figures.

    Raises UsageError (2), ModelError (3) for what cannot be run, DoesNotFitError (4) before anything is allocated
    where memory is short, RunError (1) where the run itself fails: out of memory after all, a lost device or rank, NaN.
    Differing bytes are reported, not raised: see `check_bytes`.
    """
    place = find_place()
    check_size(place, tensor_parallel_size)
    where = resolve_device(device)
    workload = resolve_workload(model, context_tokens, batch_size, dtype)
    if workload.kv_dtype.name not in _TORCH_DTYPES or (
        dtype is not None and not parse_dtype(dtype, "--dtype").is_float
    ):
        raise UsageError(f"--dtype {dtype}: measure computes in {', '.join(_TORCH_DTYPES)}")
    if steps >= workload.context_tokens:
        raise UsageError(
            f"--steps {steps} must be less than the context of {workload.context_tokens} tokens they end at"
        )
    warnings = [*workload.warnings]
    if num_layers is not None and num_layers > model.num_layers:
        raise UsageError(f"--layers {num_layers}: {model.name} has {model.num_layers}")
    if num_layers is not None and num_layers < model.num_layers:
        warnings.append(f"{num_layers} of {model.num_layers} layers are run; bytes and times are theirs")
    if model.is_encoder:
        warnings.append(
            f"{model.name} is an encoder: its layers are run as decoders, as the formula has it; engines keep nothing"
        )
    cut = model if num_layers is None else model.head(num_layers)
    wanted, skipped = _variants_of(cut, what_if, all_variants)
    wanted = _that_split(wanted, skipped, place.size, all_variants)
    request = Request(workload.context_tokens, batch_size, steps, workload.kv_dtype, where, seed)
    with join(place) as group:
        request = request._replace(group=group)
        where, error = _prepare([share_of_spec(spec, place.size) for _, spec in wanted], request)
        group.agree(error)
        request = request._replace(device=where)
        with faults(where):
            group.barrier()
            roof = read_roof(where)
            runs = [_run(kind, spec, request, roof["read_bytes_per_second"], progress) for kind, spec in wanted]
    warnings += _remarks(runs)
    return {
        "schema_version": SCHEMA_VERSION,
        "model": describe_model(apply(cut, what_if)),
        "workload": {
            "context_tokens": request.context_tokens,
            "batch_size": batch_size,
            "steps": steps,
            "dtype": request.dtype.name,
            "seed": seed,
            "tensor_parallel_size": place.size,
        },
        "device": describe_device(where),
        "environment": describe_environment(where),
        "roof": roof,
        "runs": runs,
        "skipped": skipped,
        "warnings": warnings,
    }


def check_bytes(document: dict[str, Any]) -> None:
    """Raise MismatchError (exit 5) where held and predicted bytes differ, RunError (1) where a self-check failed."""
    for run in document["runs"]:
        for rank in run["ranks"] or [run]:
            if rank["held_bytes"] != rank["predicted_bytes"]:
                whose = f"{run['attention']}, rank {rank['rank']}" if "rank" in rank else run["attention"]
                raise MismatchError(
                    f"{whose}: predicted {rank['predicted_bytes']:,} bytes, the cache holds {rank['held_bytes']:,}"
                )
    for run in document["runs"]:
        check = run["verified"]
        if not check["ok"]:
            if check["max_abs_error"] is None:
                raise RunError(f"{run['attention']}: NaN in the output of the self-check")
            raise RunError(
                f"{run['attention']}: cached decode differs from the full pass by {check['max_abs_error']}, "
                f"more than {check['tolerance']}"
            )


def _variants_of(
    spec: ModelSpec, what_if: WhatIf, all_variants: bool
) -> tuple[list[tuple[str, ModelSpec]], list[dict[str, str]]]:
    """The (kind, spec) to run and the kinds the model cannot have, each with its reason."""
    if not all_variants:
        changed = apply(spec, what_if)
        return [(changed.attention.kind, changed)], []
    wanted: list[tuple[str, ModelSpec]] = []
    skipped: list[dict[str, str]] = []
    for kind, found in side_by_side(spec, what_if):
        if isinstance(found, str):
            skipped.append({"attention": kind, "reason": found})
        else:
            wanted.append((kind, found))
    return wanted, skipped


def _that_split(
    wanted: list[tuple[str, ModelSpec]], skipped: list[dict[str, str]], size: int, all_variants: bool
) -> list[tuple[str, ModelSpec]]:
    """Those of the kinds whose heads `size` devices can share. The others are skipped with the reason, or refused
    where one kind was asked for."""
    kept = []
    for kind, spec in wanted:
        try:
            check_tensor_parallel(spec, size)
            kept.append((kind, spec))
        except UsageError as error:
            if not all_variants:
                raise
            skipped.append({"attention": kind, "reason": error.message})
    return kept


def _prepare(shares: list[ModelSpec], request: Request) -> tuple[torch.device, KvcalcError | None]:
    """This rank's own device, and why it cannot run its shares, before anything is allocated; None where it can."""
    device, place = request.device, request.group.place
    try:
        device = device_of(device, place)
        # On a CPU the ranks of this machine share what is free.
        free = free_bytes(device) // (1 if device.type == "cuda" else place.local_size)
        for spec in shares:
            check_buildable(spec)
            check_fits(
                spec, request.dtype, request.context_tokens, request.batch_size, request.steps, device.type, free
            )
    except KvcalcError as error:
        return device, error
    return device, None


def _run(kind: str, whole: ModelSpec, request: Request, roof: float, progress: Progress) -> dict[str, Any]:
    """Measure one kind of attention, this rank's share of it, and free what it took."""
    spec, group = share_of_spec(whole, request.group.size), request.group

    def report(what: str, done: int, of: int) -> None:
        progress(f"{kind} {what}", done, of)

    device, tokens, batch = request.device, request.context_tokens, request.batch_size
    with torch.inference_mode():
        layers = _build(spec, request, report)
        caches, allocator_bytes = allocated_by(
            device, lambda: [make_cache(layer, batch, tokens, request.torch_dtype, device) for layer in layers]
        )
        hidden_states = _inputs(spec, request)
        chunk = chunk_tokens(spec.attention, tokens, batch, device.type)
        prefill(layers, caches, hidden_states, tokens - request.steps, chunk, report)
        backend = _choose_core(layers, caches, request)
        decode = _time_decode(layers, caches, hidden_states, request, report)
        core = _time_core(layers, caches, request, report)
    held = held_bytes(caches)
    checked = verify(whole.attention, layers[0].window, device, layers[0].core, request.seed, group)
    layers.clear()
    caches.clear()
    release(device)
    # From the formula alone: nothing here may come from a tensor.
    read = kv_cache.decode_read_bytes(spec, request.dtype, tokens, batch)
    weights = (attention_parameters(spec.attention) or 0) * spec.num_layers * request.dtype.block_bytes
    kv_rate = read / core["p50"]
    predicted = kv_cache.stored_bytes(spec, request.dtype, tokens, batch)
    return {
        "attention": kind,
        "num_layers": spec.num_layers,
        "predicted_bytes": predicted,
        "held_bytes": held,
        "allocator_bytes": allocator_bytes,
        "decode_step_seconds": decode,
        "attention_core_seconds": core,
        "kv_read_bytes_per_second": kv_rate,
        "fraction_of_roof": {"attention_core": kv_rate / roof, "step": (weights + read) / decode["p50"] / roof},
        "backend": backend,
        "verified": checked,
        "ranks": describe_ranks(group, device, predicted, held, allocator_bytes, roof),
    }


def _build(spec: ModelSpec, request: Request, report: Progress) -> list[AttentionLayer]:
    generator = torch.Generator().manual_seed(request.seed)
    spans = layer_windows(spec)
    layers = []
    for number, window in enumerate(spans):
        report("weights", number, len(spans))
        layer = build_layer(spec.attention, window, request.torch_dtype, torch.device("meta"))
        layers.append(request.group.sum_outputs(materialize(layer, request.device, generator)))
    return layers


def _inputs(spec: ModelSpec, request: Request) -> Callable[[int], Tensor]:
    """A source of random hidden states (batch, n, hidden_size), the same for the same seed."""
    generator = torch.Generator().manual_seed(request.seed)
    width = spec.attention.hidden_size or 0

    def make(tokens: int) -> Tensor:
        states = torch.randn(request.batch_size, tokens, width, generator=generator)
        return states.to(request.device, request.torch_dtype)

    return make


def _random_query(layer: AttentionLayer, request: Request) -> Tensor:
    """One token's query of each sequence, as `attend` takes it."""
    return torch.randn(layer.core_query_shape(request.batch_size)).to(request.device, request.torch_dtype)


def _choose_core(layers: list[AttentionLayer], caches: list[TokenCache], request: Request) -> str:
    """Time the ways to run one decode step on the first layer's cache; give all layers the fastest, return its name."""
    layer, cache = layers[0], caches[0]
    query = _random_query(layer, request)
    seconds = {}
    for name, core in CORES.items():
        layer.core = core
        seconds[name] = min(time_call(request.device, lambda: layer.attend(query, cache)) for _ in range(3))
    best = request.group.first(min(seconds, key=lambda name: seconds[name]))
    for layer in layers:
        layer.core = CORES[best]
    return best


def _time_decode(
    layers: list[AttentionLayer], caches: list[TokenCache], hidden_states: Callable[[int], Tensor], request: Request,
    report: Progress,
) -> dict[str, Any]:  # fmt: skip
    """Time `steps` decode steps of all layers. Warm-up writes the first of these positions and takes it back."""
    start = caches[0].length
    for _ in range(_WARM_UP_STEPS):
        run_layers(layers, caches, hidden_states(1))
        for cache in caches:
            cache.rewind(start)
    seconds: list[float] = []
    outputs: list[Tensor] = []
    for step in range(request.steps):
        report("decode", step, request.steps)
        x = hidden_states(1)
        # Together, so that no rank's time holds its waiting for another to begin.
        request.group.barrier()
        outputs.clear()
        seconds.append(time_call(request.device, lambda: outputs.append(run_layers(layers, caches, x))))  # noqa: B023
    report("decode", request.steps, request.steps)
    check_finite(outputs[0], "decode")
    return summarize(request.group.slowest(seconds))


def _time_core(
    layers: list[AttentionLayer], caches: list[TokenCache], request: Request, report: Progress
) -> dict[str, Any]:
    """Time attention over the full caches alone, no projections: all layers, one token of each sequence."""
    query = _random_query(layers[0], request)

    def step() -> None:
        for layer, cache in zip(layers, caches):
            layer.attend(query, cache)

    for _ in range(_WARM_UP_STEPS):
        step()
    seconds = []
    for done in range(request.steps):
        report("attention core", done, request.steps)
        seconds.append(time_call(request.device, step))
    return summarize(request.group.slowest(seconds))


def _remarks(runs: list[dict[str, Any]]) -> list[str]:
    return [
        f"{run['attention']}: its cache of {run['held_bytes']:,} bytes was read faster than memory is: from the "
        "processor's own cache"
        for run in runs
        if run["fraction_of_roof"]["attention_core"] > 1
    ]
