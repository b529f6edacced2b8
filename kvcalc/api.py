"""The Python API: the same questions as on the command line, with numbers instead of text.

Every function returns the document that the command prints with `--json`, as plain dictionaries and lists.
`kvcalc.documents` has their types. Sizes are in bytes, lengths in tokens, times in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf
from kvcalc.planning.question import Question

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvcalc.documents import (
        Audit,
        Compare,
        Estimate,
        FitDocument,
        Gpus,
        Models,
        Plan,
        Prefix,
        Score,
        Simulate,
        Sweep,
    )
    from kvcalc.model.drafting import Speculation
    from kvcalc.planning.calibration import Calibration
    from kvcalc.planning.images import ImagesAsked
    from kvcalc.planning.layout import SpeedQuestion
    from kvcalc.planning.reuse import CacheReuse
    from kvcalc.throughput.hardware import Devices, Gpu


class Asked(TypedDict, total=False):
    """The other fields of a question, as keyword arguments. `estimate` describes each of them."""

    context_tokens: int | None
    batch_size: int
    dtype: str | None
    kv_dtype: str
    engine: str
    engine_settings: Mapping[str, Any] | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int
    encoder_tokens: int | None
    kv_memory_bytes: int | None
    speed: SpeedQuestion | None
    what_if: WhatIf
    speculative: Speculation | None
    data_parallel_size: int
    fits_context: bool
    reuse: CacheReuse | None
    images: ImagesAsked | None


def estimate(
    model: ModelSpec | str,
    *,
    context_tokens: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    engine: str = "logical",
    engine_settings: Mapping[str, Any] | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    devices: Devices | None = None,
    speed: SpeedQuestion | None = None,
    what_if: WhatIf = WhatIf(),
    speculative: Speculation | None = None,
    data_parallel_size: int = 1,
    fits_context: bool = False,
    reuse: CacheReuse | None = None,
    images: ImagesAsked | None = None,
) -> Estimate:
    """The document of `kvcalc estimate`: the bytes of the cache, and with `devices` whether it fits and how fast it is.

    `model` is a ModelSpec (`load_model`), or a name or path as on the command line. Without a `tensor_parallel_size`
    the model is split over all `devices`. `kv_memory_bytes` is the memory for the cache on one device.
    `engine_settings` maps the engine's own options to their values, for example `{"block-size": 32}`. `speed` describes
    requests to serve: `SpeedQuestion(input_tokens=2048, output_tokens=500, concurrency=32)`. Its
    `calibration` is what `read_calibration` returns. `what_if` replaces the model's attention. `speculative` says how
    tokens are drafted: `Speculation("mtp", 3, acceptance_length=2.4)`. `data_parallel_size` is the number of attention
    replicas, among which the batch is divided. With `fits_context`, the context is the longest one that fits, as the
    engine chooses it at its start. `reuse` says how a cache is used again:
    `CacheReuse(prefix_tokens=2048, turns=8, offload=(("cpu", 200 * 2**30),))`. `images` are those of every request:
    `ImagesAsked(2, 1920, 1080)`. Raises KvcalcError; its `exit_code` is the exit code of the command line.
    """
    from kvcalc.planning.estimate import answer

    question = Question(
        _model(model), context_tokens, batch_size, dtype, kv_dtype, engine, engine_settings, tensor_parallel_size,
        pipeline_parallel_size, encoder_tokens, kv_memory_bytes, devices, speed, what_if,
        speculative, data_parallel_size, fits_context, reuse, images,
    )  # fmt: skip
    return cast("Estimate", answer(question).document)


def fit(model: ModelSpec | str, devices: Devices, **asked: Unpack[Asked]) -> FitDocument:
    """The document of `kvcalc fit`: whether the model fits on `devices`, and if not, how many devices it needs."""
    from kvcalc.planning.fit import fit as ask

    return cast("FitDocument", ask(_model(model), devices, **asked))


def compare(
    models: Sequence[str],
    *,
    attentions: Sequence[str | None] = (None,),
    engines: Sequence[str] | None = None,
    devices: Devices | Sequence[Devices] | None = None,
    **asked: Unpack[Asked],
) -> Compare:
    """The document of `kvcalc compare`: one row for each model, kind of attention, engine and device.

    `attentions` are "mha", "mqa", "gqa" and "mla"; None is the model's own. `engines` overrides `engine`.
    """
    from kvcalc.planning.compare import compare as ask
    from kvcalc.throughput.hardware import Devices

    engine = asked.pop("engine", "logical")
    several = [devices] if isinstance(devices, Devices) else devices or ()
    document = ask(models, attentions=attentions, engines=engines or (engine,), devices=several, **asked)
    return cast("Compare", document)


def sweep(
    model: ModelSpec | str,
    *,
    contexts: Sequence[int],
    batches: Sequence[int] = (1,),
    kv_dtypes: Sequence[str] = ("auto",),
    tensor_parallel_sizes: Sequence[int] | None = None,
    engines: Sequence[str] = ("logical",),
    engine_settings: Mapping[str, Any] | None = None,
    gpus: Sequence[str] = (),
    **asked: Any,
) -> Sweep:
    """The document of `kvcalc sweep`: one point for every combination.

    `gpus` are names of devices, for example `h100x4`. Without `tensor_parallel_sizes`, the model is split over the
    number of devices in the name. `asked` may have `dtype`, `pipeline_parallel_size`, `encoder_tokens`,
    `kv_memory_bytes`, `speed`, `speculative`, `what_if`, `data_parallel_size` and `reuse`.
    """
    from kvcalc.notes import describe_notes
    from kvcalc.planning.axis import Axis
    from kvcalc.planning.sweep import sweep as ask
    from kvcalc.throughput.hardware import find_devices

    sizes = tensor_parallel_sizes
    grid = ask(
        _model(model),
        contexts=Axis([(tokens,) for tokens in contexts]),
        batches=Axis([(batch,) for batch in batches]),
        kv_dtypes=kv_dtypes,
        tensor_parallel_sizes=None if sizes is None else Axis([(size,) for size in sizes]),
        engines=engines,
        engine_settings=engine_settings,
        gpus=[find_devices(name) for name in gpus],
        **asked,
    )
    document = {**grid.head(), "points": list(grid.points()), "warnings": describe_notes(grid.notes)}
    return cast("Sweep", document)


def plan(
    model: ModelSpec | str,
    gpus: Sequence[Gpu | str],
    *,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    concurrency: int | None = None,
    requests_per_second: float | None = None,
    trace: str | None = None,
    trace_format: str | None = None,
    scale_rate: float = 1.0,
    max_ttft_seconds: float | None = None,
    max_tpot_seconds: float | None = None,
    confidence: int = 80,
    max_e2e_seconds: float | None = None,
    ttft_percentile: int | None = None,
    tpot_percentile: int | None = None,
    e2e_percentile: int | None = None,
    simulate: int | None = None,
    burstiness: float = 1.0,
    requests: int | None = None,
    seed: int = 0,
    **asked: Any,
) -> Plan:
    """The document of `kvcalc plan`: for each kind of device, the smallest layout that serves the requests.

    Give `input_tokens` and `output_tokens` with either `concurrency` or `requests_per_second`, or `trace`, the path of
    a file with the times and lengths of its requests, as in `simulate`. With a `confidence` of 80, times are judged at
    the upper end of their range, with 50 at the point estimate. A time limits the mean, or the percentile that is given
    for it: 50, 90, 95 or 99. Percentiles are simulated, with `burstiness`, `requests` and `seed` as in `simulate`.
    `simulate` is the number of layouts of each kind of device to simulate. `asked` may have `engines` (or `engine`),
    `engine_settings`, `dtype`, `kv_dtype`, `prices` (device name to price per hour), `max_devices`,
    `allow_beyond_limit`, `prefix_hit_rate`, `strict`, `all_layouts`, `with_front`, `images`, `speculative`, `reuse` and
    `speed`, of which only the calibration is used. With `disaggregate=True` there are also rows with prefill and decode
    on separate instances, joined by the link `transfer`: bytes per second of one device, or a name such as
    `infiniband-400g`.
    """
    from kvcalc.errors import UsageError
    from kvcalc.planning.lengths import one_length
    from kvcalc.planning.plan import plan as ask
    from kvcalc.planning.targets import Targets, check_percentiles
    from kvcalc.throughput.hardware import find_gpu

    drawn = (input_tokens, output_tokens, concurrency, requests_per_second)
    if trace is not None and any(value is not None for value in drawn):
        raise UsageError("trace has the times and the lengths of its requests: leave out the load and the lengths")
    if trace is None and (concurrency is None) == (requests_per_second is None):
        raise UsageError("plan needs either concurrency or requests_per_second")
    targets = Targets(
        concurrency, requests_per_second, max_ttft_seconds, max_tpot_seconds, confidence, max_e2e_seconds,
        ttft_percentile, tpot_percentile, e2e_percentile,
    )  # fmt: skip
    check_percentiles(targets)
    if trace is not None:
        from kvcalc.simulation.planned import planned_trace

        recorded = asked["simulation"] = planned_trace(trace, trace_format, scale_rate, requests)
        lengths, targets = recorded.lengths, recorded.rated(targets)
    elif input_tokens is None or output_tokens is None:
        raise UsageError("plan needs input_tokens and output_tokens, or a trace")
    else:
        lengths = one_length(input_tokens, output_tokens)
    if trace is None and (targets.highest_percentile is not None or simulate is not None):
        from kvcalc.simulation.planned import PlannedLoad

        asked["simulation"] = PlannedLoad(lengths, None, burstiness, seed, requests)
    kinds = [find_gpu(gpu) if isinstance(gpu, str) else gpu for gpu in gpus]
    asked.setdefault("engines", (asked.pop("engine", "vllm"),))
    document = ask(_model(model), kinds, lengths, targets, num_simulated=simulate, **asked)
    return cast("Plan", document)


def prefix_curve(
    trace: str,
    model: ModelSpec | str | None = None,
    *,
    devices: Devices | None = None,
    cache_memory_bytes: Sequence[int] = (),
    cache_tokens: Sequence[int] = (),
    offload_bytes: Mapping[str, int] | None = None,
    offload_bytes_per_second: Mapping[str, int] | None = None,
    price_per_hour: float | None = None,
    memory_prices_per_gib_hour: Mapping[str, float] | None = None,
    trace_format: str | None = None,
    trace_block_tokens: int | None = None,
    most_blocks: int = 1_000_000,
    **asked: Unpack[Asked],
) -> Prefix:
    """The document of `kvcalc prefix`: what a prefix cache of every size finds in the trace at the path `trace`.

    Without a `model`, there are only hit rates. `cache_memory_bytes` or `cache_tokens` are the sizes; without them,
    sizes double up to all blocks. `offload_bytes` has the tiers `cpu`, `disk` and `remote` in the order in which they
    are searched. `price_per_hour` is that of one device. `asked` has the other fields of a question, such as `engine`.
    """
    from kvcalc.errors import UsageError
    from kvcalc.planning.prefix import Sizes
    from kvcalc.planning.prefix import prefix_curve as ask
    from kvcalc.planning.prefix_cost import Prices

    if model is None and (asked or devices):
        raise UsageError(f"{next(iter(asked), 'devices')} needs a model")
    document = ask(
        trace,
        None if model is None else Question(_model(model), devices=devices, **asked),
        sizes=Sizes(cache_memory_bytes, cache_tokens),
        offload=tuple((offload_bytes or {}).items()),
        bandwidths=offload_bytes_per_second,
        prices=Prices(price_per_hour, memory_prices_per_gib_hour or {}),
        format=trace_format,
        block_tokens=trace_block_tokens,
        most_blocks=most_blocks,
    )
    return cast("Prefix", document)


def simulate(
    model: ModelSpec | str,
    devices: Devices | str,
    *,
    prompt_tokens: int | str | None = None,
    answer_tokens: int | str | None = None,
    requests_per_second: float | None = None,
    concurrency: int | None = None,
    burstiness: float = 1.0,
    trace: str | None = None,
    trace_format: str | None = None,
    scale_rate: float = 1.0,
    requests: int | None = None,
    seed: int = 0,
    max_ttft_seconds: float | None = None,
    max_tpot_seconds: float | None = None,
    replicas: int | None = None,
    prefill_replicas: int | None = None,
    prefill_tensor_parallel_size: int | None = None,
    prefill_data_parallel_size: int | None = None,
    prefill_gpu: str | None = None,
    transfer: int | str | None = None,
    step_factor: float = 1.0,
    **asked: Any,
) -> Simulate:
    """The document of `kvcalc simulate`: percentiles of the times that clients see, goodput, and the state over time.

    Give one of `requests_per_second`, `concurrency` and `trace`, the path of a file. Lengths are numbers, or
    distributions as on the command line: `"uniform:100..2000"`. `devices` may be a name: `"h100x4"`. `asked` may have
    the fields of a question: `engine` (default: vllm), `engine_settings`, `dtype`, `kv_dtype`, `tensor_parallel_size`,
    `pipeline_parallel_size`, `data_parallel_size`, `speculative`, `kv_memory_bytes`, `reuse`, of which the common
    prefix is used, and `speed`, of which the hit rate, the calibration and the expert-parallel size are used. With
    `prefill_replicas`, prompts are computed on instances of their own, on the kind of device `prefill_gpu` if it is
    another one, and `transfer` is the link to those that answer: bytes per second of one device, or a name such as
    `infiniband-400g`. The times of all steps are multiplied by
    `step_factor`.
    """
    from functools import partial

    from kvcalc.errors import UsageError
    from kvcalc.simulation.load import Load
    from kvcalc.simulation.requests import lengths_of
    from kvcalc.simulation.results import Limits
    from kvcalc.simulation.simulate import simulate as simulate_replicas
    from kvcalc.throughput.hardware import find_devices, find_gpu

    ask: Callable[..., dict[str, Any]] = simulate_replicas
    rows = None
    if trace is not None:
        from kvcalc.traces import read_trace

        rows = read_trace(trace, trace_format)
    load = Load(
        lengths_of(prompt_tokens, "prompt_tokens"), lengths_of(answer_tokens, "answer_tokens"), requests_per_second,
        concurrency, burstiness, rows, trace, scale_rate, requests, seed,
    )  # fmt: skip
    asked.setdefault("engine", "vllm")
    found = find_devices(devices) if isinstance(devices, str) else devices
    limits = Limits(max_ttft_seconds, max_tpot_seconds)
    if (prefill_replicas is None) != (transfer is None):
        raise UsageError("prefill_replicas and transfer need each other", 'for example transfer="infiniband-400g"')
    if prefill_replicas is not None and transfer is not None:
        from kvcalc.simulation.pools import Prefills, simulate_pools

        prefills = Prefills(
            prefill_replicas, transfer, prefill_tensor_parallel_size, prefill_data_parallel_size,
            gpu=None if prefill_gpu is None else find_gpu(prefill_gpu),
        )  # fmt: skip
        ask = partial(simulate_pools, prefills=prefills)
    document = ask(
        _model(model), load, limits=limits, replicas=replicas, step_factor=step_factor, devices=found, **asked
    )
    return cast("Simulate", document)


def audit(
    text: str | Iterable[bytes],
    name: str = "log",
    *,
    engine: str | None = None,
    model: ModelSpec | str | None = None,
    tensor_parallel_size: int | None = None,
    kv_dtype: str | None = None,
    context_tokens: int | None = None,
) -> Audit:
    """The document of `kvcalc audit`: the numbers in an engine's start-up log compared with kvcalc's.

    `text` is the log, or its bytes in pieces: with `open("vllm.log", "rb")`, it is read line by line. The other
    arguments override what the log says.
    """
    from kvcalc.planning.audit import audit as ask

    spec = None if model is None else _model(model)
    document = ask(
        text, name, engine=engine, model=spec, tensor_parallel_size=tensor_parallel_size, kv_dtype=kv_dtype,
        context_tokens=context_tokens,
    )  # fmt: skip
    return cast("Audit", document)


def score(
    results: Mapping[str, str],
    *,
    model: ModelSpec | str | None = None,
    devices: Devices | None = None,
    engine: str | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int | None = None,
    expert_parallel_size: int | None = None,
    data_parallel_size: int | None = None,
    calibration: Calibration | None = None,
) -> Score:
    """The document of `kvcalc score`: the times of benchmark results beside the predicted ones.

    `results` maps the name of each file to its text. `calibration` is what `read_calibration` returns. The other
    arguments override what the files say.
    """
    from kvcalc.planning.measured import Given
    from kvcalc.planning.score import score as ask

    given = Given(
        None if model is None else _model(model), devices, engine, engine_settings, dtype, kv_dtype,
        tensor_parallel_size, pipeline_parallel_size, expert_parallel_size, data_parallel_size, calibration,
    )  # fmt: skip
    return cast("Score", ask(list(results.items()), given))


def models(family: str | None = None) -> Models:
    """The document of `kvcalc models`: all presets, or the presets of one family."""
    from kvcalc.planning.models import list_models

    return cast("Models", list_models(family))


def gpus() -> Gpus:
    """The document of `kvcalc gpus`: all known devices."""
    from kvcalc.planning.gpus import list_gpus

    return cast("Gpus", list_gpus())


def _model(model: ModelSpec | str) -> ModelSpec:
    return load_model(model) if isinstance(model, str) else model
