"""`kvcalc measure`: choose the runs, check that they fit, run each kind of attention at each point, and build the
document."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from kvcalc.attention.backends import BACKENDS
from kvcalc.errors import KvcalcError, MismatchError, RunError, UsageError
from kvcalc.measure.bandwidth import multiply_again, read_again, read_roof
from kvcalc.measure.choose import CannotRunError, SlowBackends
from kvcalc.measure.devices.device import (
    ALLOCATION_SLACK,
    describe_device,
    free_bytes,
    release,
    resolve_device,
    whole_cache_bytes,
)
from kvcalc.measure.devices.distributed import ALONE, device_of, join, shared_device
from kvcalc.measure.devices.environment import describe_environment
from kvcalc.measure.devices.faults import faults
from kvcalc.measure.devices.ranks import Place, check_size, find_place
from kvcalc.measure.devices.timing import Effort
from kvcalc.measure.expected import planned_run
from kvcalc.measure.figures import above_roof, describe_run, remarks_on_runs, scaled
from kvcalc.measure.layers.parts import parts_of, remarks_on
from kvcalc.measure.layers.sharding import share_of_spec
from kvcalc.measure.layers.stack import Request, Stack
from kvcalc.measure.layers.storage import check_goes_with, check_lengths, parse_storage
from kvcalc.measure.prefill import KINDS as PREFILLS
from kvcalc.measure.progress import Progress
from kvcalc.measure.run import run_with_cache, run_without_cache
from kvcalc.measure.sizes.budget import check_fits, layers_that_fit, predicted_bytes
from kvcalc.measure.sizes.capacity import check_axis, find_capacity
from kvcalc.measure.sweep import Sweep, curve
from kvcalc.measure.verify import verify, verify_state
from kvcalc.memory.dtypes import parse_dtype
from kvcalc.memory.workload import bind_workload, check_tensor_parallel, resolve_workload
from kvcalc.model.describe import describe_model
from kvcalc.model.mixers.attention import AttentionShape
from kvcalc.model.spec import ModelSpec, has_states
from kvcalc.model.variants import WhatIf, apply, side_by_side
from kvcalc.notes import Note, describe_notes
from kvcalc.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    import kvcalc.documents as documents

_COMPUTED = ("fp32", "fp16", "bf16")


def measure(
    model: ModelSpec,
    *,
    context_tokens: int | None = None,
    batch_size: int = 1,
    lengths: tuple[int, ...] = (),
    steps: int = 32,
    num_layers: int | None = None,
    what_if: WhatIf = WhatIf(),
    all_variants: bool = False,
    device: str = "auto",
    dtype: str | None = None,
    kv_dtype: str | None = None,
    cache_scales: str | None = None,
    cache: str = "preallocated",
    block_size: int | None = None,
    mla: str = "absorbed",
    backend: str = "auto",
    without_backends: tuple[str, ...] = (),
    sweep: Sweep | None = None,
    until_full: str | None = None,
    memory_bytes: int | None = None,
    trace: str | None = None,
    prefill: str = "sample",
    seed: int = 0,
    tensor_parallel_size: int = 1,
    effort: Effort = Effort(),
    progress: Progress | None = None,
    keep: Callable[[documents.Measure], object] | None = None,
    known_roof: documents.MeasureRoof | None = None,
    slow: SlowBackends | None = None,
    place: Place | None = None,
) -> documents.Measure:
    """The measure document: predicted and held bytes and the time of a step, for each requested kind of attention.

    `context_tokens` is the final length: the caches are filled with context_tokens - steps tokens, then `steps` tokens
    are decoded. `lengths` are the final lengths of the sequences, in place of a context and a batch. `prefill` says
    how the caches are filled: "sample" with random rows, and a short prompt is timed, or "full" with the whole prompt.
    The first `num_layers` layers are built (default: all, or as many as fit). `sweep` runs several contexts and batch
    sizes. `until_full` ("context" or "batch") searches for the largest value that fits. With `tensor_parallel_size`,
    every process started by torchrun calls this function, runs its share of the heads and returns the same figures.
    `effort` sets the size of the roofs' measurements. `progress` is told what is running. `keep` gets the document of
    the runs so far after each of several runs but the last. `known_roof` is that of an earlier document, which is not
    measured again, and `slow` has the backends that earlier calls found too slow. `trace` is a file for a trace of one
    step. `place` is this process among those of the run (default: as torchrun says).

    Raises UsageError (exit 2), ModelError (3) for a model that cannot run, and DoesNotFitError (4) before anything is
    allocated if there is not enough memory. Raises RunError (1) if the run fails: out of memory anyway, a lost device
    or rank, NaN. Different bytes do not raise an error here; see `check_bytes`.
    """
    progress = Progress() if progress is None else progress
    slow = SlowBackends() if slow is None else slow
    place = find_place() if place is None else place
    check_size(place, tensor_parallel_size)
    where = resolve_device(device)
    storage = parse_storage(kv_dtype, cache, block_size, mla, backend, without_backends, where, cache_scales)
    if prefill not in PREFILLS:
        raise UsageError(f"--prefill {prefill[:40]!a}: one of {', '.join(PREFILLS)}")
    if lengths:
        check_lengths(lengths, storage, context_tokens, batch_size, sweep is not None, until_full, prefill)
        context_tokens, batch_size = max(lengths), len(lengths)
    points = sweep.points() if sweep else [(context_tokens, batch_size)]
    workloads = [resolve_workload(model, tokens, batch, dtype) for tokens, batch in points]
    workload = workloads[-1]
    if workload.kv_dtype.name not in _COMPUTED or (dtype is not None and not parse_dtype(dtype, "--dtype").is_float):
        raise UsageError(f"--dtype {dtype}: measure computes in {', '.join(_COMPUTED)}")
    shortest = min(lengths or [each.context_tokens for each in workloads])
    if steps >= shortest:
        whose = "shortest sequence" if lengths else "context"
        raise UsageError(f"--steps {steps} must be less than the {whose} of {shortest} tokens")
    if until_full is not None:
        check_axis(until_full, place.size, sweep is not None, storage)
    model = bind_workload(model, workload)
    notes = [*(Note("model", "remark", text) for text in model.remarks), *workload.notes]
    if num_layers is not None and num_layers > model.num_layers:
        raise UsageError(f"--layers {num_layers}: {model.name} has {model.num_layers}")
    if model.is_encoder:
        text = f"{model.name} is an encoder: its layers run as decoders, like in the formula, but engines keep no cache"
        notes.append(Note("model", "encoder", text))
    cut = model if num_layers is None else model.head(num_layers)
    wanted, skipped = _variants_of(cut, what_if, all_variants)
    wanted = _that_split(wanted, skipped, place.size, all_variants)
    check_goes_with(storage, [spec for _, spec in wanted])
    requests = [
        Request(
            each.context_tokens, batch, steps, each.kv_dtype, where, seed, ALONE, storage, trace, prefill, effort,
            lengths if len({*lengths}) > 1 else (),
        )
        for each, (_, batch) in zip(workloads, points)
    ]  # fmt: skip
    with join(place) as group:
        shares = [share_of_spec(spec, place.size) for _, spec in wanted]
        where, layers, error = _prepare(shares, requests, group.place, num_layers is None, sweep is not None)
        group.agree(error)
        group.agree(shared_device(group, where))
        layers = min(group.gather(layers))
        if layers < cut.num_layers:
            cut, wanted = cut.head(layers), [(kind, spec.head(layers)) for kind, spec in wanted]
        if layers < model.num_layers:
            chosen = "fit and run" if num_layers is None else "run"
            text = f"{layers} of {model.num_layers} layers {chosen}; bytes and times are for these layers"
            notes.append(Note("runs", "layers", text))
        requests = [request._replace(group=group, device=where) for request in requests]
        # How to describe each run, because the roof can still rise.
        ended: list[Callable[[documents.MeasureRoof], documents.Run]] = []
        capacity = None

        def document() -> documents.Measure:
            """The document of the runs that have ended."""
            runs = [describe(roof) for describe in ended]
            remarks = (
                *remarks_on(cut),
                *remarks_on_runs(runs, roof, whole_cache_bytes(where), ALLOCATION_SLACK.get(where.type, 0)),
            )
            every_note = [*notes, *_broken_backends(runs), *(Note("runs", "remark", text) for text in remarks)]
            return {
                "schema_version": SCHEMA_VERSION,
                "model": describe_model(apply(cut, what_if)),
                "workload": {
                    "context_tokens": requests[-1].context_tokens,
                    "batch_size": requests[-1].batch_size,
                    "lengths": [*requests[-1].lengths] or None,
                    "steps": steps,
                    "dtype": workload.kv_dtype.name,
                    "kv_dtype": storage.dtype(workload.kv_dtype).name,
                    "cache_scales": cast(Any, storage.scales if storage.kv_dtype else None),
                    "cache": cast(Any, storage.kind),
                    "block_size": storage.block_size,
                    "mla": cast(Any, storage.mla),
                    "backend": storage.backend,
                    "without_backends": [*storage.without_backends],
                    "prefill": cast(Any, prefill),
                    "seed": seed,
                    "tensor_parallel_size": place.size,
                },
                "device": describe_device(where),
                "environment": describe_environment(where),
                "roof": roof,
                "runs": runs,
                "sweep": sweep.describe() if sweep else None,
                "curve": curve(model.name, runs) if sweep else None,
                "capacity": capacity,
                "skipped": skipped,
                "warnings": describe_notes(every_note),
            }

        with faults(where):
            group.barrier()
            if known_roof is None:
                progress("read and multiply", 0, 1)
            roof: documents.MeasureRoof = known_roof or read_roof(where, requests[0].torch_dtype, effort)
            every = [(kind, spec, request) for request in requests for kind, spec in wanted]
            plans, known = [], set[str]()
            for kind, spec, request in every:
                plans.append(planned_run(kind, share_of_spec(spec, place.size), request, roof, kind not in known))
                known.add(kind)
            progress.plan(plans)
            for number, (kind, spec, request) in enumerate(every, start=1):
                progress.start(number)
                reason = _too_large(share_of_spec(spec, place.size), request) if sweep else None
                if reason:
                    skipped.append({"attention": kind, "reason": reason})
                else:
                    whole = apply(model, what_if) if not all_variants else _same_kind(model, what_if, kind)
                    try:
                        ended.append(_run(kind, spec, whole, request, roof, progress, slow, known_roof is None))
                    except CannotRunError as error:
                        # The runs before are kept, and others may still come. Other ranks may not have this error.
                        if group.size > 1 or (number == len(every) and not ended):
                            raise
                        skipped.append({"attention": kind, "reason": error.message})
                        release(where)
                        continue
                    if known_roof is None and (where.type == "cpu" or above_roof(ended[-1](roof))):
                        read_again(roof, where, request.torch_dtype, effort)
                    if keep is not None and number < len(every):
                        keep(document())
            if until_full is not None:
                capacity = find_capacity(wanted[0][1], requests[0], until_full, memory_bytes, progress)
    return document()


def check_bytes(document: documents.Measure) -> None:
    """Raise MismatchError (exit 5) if held and predicted bytes differ, and RunError (1) if a self-check failed."""
    for run in document["runs"]:
        ranks: Any = run["ranks"] or [run]
        for rank in ranks:
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
                f"{run['attention']}: decoding with a cache differs from the full pass by {check['max_abs_error']}, "
                f"more than {check['tolerance']}"
            )


def _broken_backends(runs: list[documents.Run]) -> list[Note]:
    """A note for each kernel that was tried and does not work on this machine, for which it is made."""
    tried = {(row["name"], row["reason"]) for run in runs for row in run["backends"]}
    return [
        Note("runs", "kernel", f"the {name} kernel was not used, so attention may be slower than it can be: {reason}")
        for name, backend in BACKENDS.items()
        if (reason := backend.failure) is not None and (name, reason) in tried
    ]


def _variants_of(
    spec: ModelSpec, what_if: WhatIf, all_variants: bool
) -> tuple[list[tuple[str, ModelSpec]], list[documents.MeasureSkippedItem]]:
    """The (kind, spec) pairs to run, and the kinds that the model cannot have, each with a reason."""
    if not all_variants:
        changed = apply(spec, what_if)
        return [(str(describe_model(changed)["attention"]), changed)], []
    wanted: list[tuple[str, ModelSpec]] = []
    skipped: list[documents.MeasureSkippedItem] = []
    for kind, variant in side_by_side(spec, what_if):
        if isinstance(variant, str):
            skipped.append({"attention": kind, "reason": variant})
        else:
            wanted.append((kind, variant))
    return wanted, skipped


def _same_kind(model: ModelSpec, what_if: WhatIf, kind: str) -> ModelSpec:
    """The whole model with attention of `kind`, which must be a kind that `_variants_of` returned."""
    return next(
        variant for name, variant in side_by_side(model, what_if) if name == kind and not isinstance(variant, str)
    )


def _that_split(
    wanted: list[tuple[str, ModelSpec]], skipped: list[documents.MeasureSkippedItem], size: int, all_variants: bool
) -> list[tuple[str, ModelSpec]]:
    """The kinds whose heads can be split over `size` devices.

    The others are added to `skipped` with a reason, or raise UsageError if only one kind was requested.
    """
    kept = []
    for kind, spec in wanted:
        try:
            check_tensor_parallel(spec, size)
            if size > 1 and has_states(spec):
                raise UsageError(f"--tp {size}: measure splits attention heads but not recurrent states")
            kept.append((kind, spec))
        except UsageError as error:
            if not all_variants:
                raise
            skipped.append({"attention": kind, "reason": error.message})
    return kept


def _prepare(
    shares: list[ModelSpec], requests: list[Request], place: Place, may_cut: bool, may_skip: bool
) -> tuple[torch.device, int, KvcalcError | None]:
    """Prepare this rank before anything is allocated.

    Returns the rank's own device, the number of layers of its shares that fit at all points, and an error. Points that
    do not fit are ignored if `may_skip`. The error is None if at least one point fits.
    """
    device, layers = requests[0].device, min(spec.num_layers for spec in shares)
    failure: KvcalcError | None = None
    try:
        device = device_of(device, place)
        for spec in shares:
            parts_of(spec)
        free = _free_bytes(device, place)
        fitting = 0
        for request in (request._replace(device=device) for request in requests):
            try:
                for spec in shares:
                    fits = layers_that_fit(spec, request, free)
                    if fits < spec.num_layers and not (may_cut and fits):
                        check_fits(spec, request, free)
                    layers = min(layers, fits)
                fitting += 1
            except KvcalcError as error:
                if not may_skip:
                    raise
                failure = error
        return device, layers, None if fitting else failure
    except KvcalcError as error:
        return device, layers, error


def _free_bytes(device: torch.device, place: Place) -> int:
    """The free bytes for this rank. On a CPU, the ranks of one machine share the free memory."""
    return free_bytes(device) // (1 if device.type == "cuda" else place.local_size)


def _too_large(spec: ModelSpec, request: Request) -> str | None:
    """The reason why one point of a sweep does not fit, or None if it fits."""
    try:
        check_fits(spec, request, _free_bytes(request.device, request.group.place))
    except KvcalcError as error:
        return f"{request.context_tokens:,} tokens, batch {request.batch_size}: {error.message}"
    return None


def _run(
    kind: str, whole: ModelSpec, model: ModelSpec, request: Request, roof: documents.MeasureRoof, progress: Progress,
    slow: SlowBackends, may_raise: bool,
) -> Callable[[documents.MeasureRoof], documents.Run]:  # fmt: skip
    """Measure this rank's share of one kind of attention, and free its memory. `model` has all layers of the model.

    Returns the run's row for a roof. If the prompt was above the roof, and `may_raise`, its products are timed.
    """
    spec, group = share_of_spec(whole, request.group.size), request.group

    if request.storage.kind == "none":
        measured = run_without_cache(spec, request, progress)
    else:
        measured = run_with_cache(spec, request, progress, slow)
    prompts = [
        part for part, _, _ in above_roof(describe_run(kind, spec, request, roof, measured)) if part == "prefill"
    ]
    if may_raise and prompts and measured.prefill:
        rows = measured.prefill["batch_size"] * measured.prefill["chunk_tokens"]
        multiply_again(roof, measured.stack.layers, rows, request.effort)
    checked = _verified(whole, measured.stack, request)
    measured.stack.clear()
    release(request.device)
    # The bytes on each rank and the read rate of its device, as the same list on every rank. It does not name machines.
    mine: Any = {
        "rank": group.rank, "device": str(request.device), "predicted_bytes": predicted_bytes(spec, request),
        "held_bytes": measured.held_bytes, "allocator_bytes": measured.allocator_bytes,
        "read_bytes_per_second": roof["read_bytes_per_second"],
    }  # fmt: skip
    rest = {
        "scaled": scaled(model, whole, request, measured.decode),
        "verified": checked,
        "ranks": group.gather(mine) if group.size > 1 else None,
    }

    def describe(roof: documents.MeasureRoof) -> documents.Run:
        return cast("documents.Run", {**describe_run(kind, spec, request, roof, measured), **rest})

    return describe


def _verified(whole: ModelSpec, stack: Stack, request: Request) -> documents.RunVerified:
    """Run the self-check for every kind of layer in the model. The largest error counts."""
    checks = []
    seen = set()
    for part in stack.parts:
        sort = (type(part.shape), part.window is None, getattr(part.shape, "kind", None))
        if sort in seen or part.is_cross:
            continue
        seen.add(sort)
        if isinstance(part.shape, AttentionShape):
            layers = (p.shape for p in parts_of(whole) if p.layer == part.layer)
            attention = next(shape for shape in layers if isinstance(shape, AttentionShape))
            checks.append(verify(attention, part.window, request))
        else:
            checks.append(verify_state(part.shape, request))
    failed = [check for check in checks if not check["ok"]]
    return (failed or sorted(checks, key=lambda check: check["max_abs_error"] or 0.0))[-1]
