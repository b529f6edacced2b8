"""Files of servers: `kvcalc prefix`, `kvcalc audit` and `kvcalc score`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.api.arguments import asked, model_of, takes
from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf
from kvcalc.units import shown

if TYPE_CHECKING:
    from kvcalc.documents import Audit, Prefix, Score
    from kvcalc.planning.calibration import Calibration
    from kvcalc.question.question import SpeedQuestion
    from kvcalc.throughput.hardware import Devices


@takes(
    needs={
        **dict.fromkeys(
            (
                "devices", "cache_memory_bytes", "offload_bytes", "dtype", "kv_dtype", "engine", "engine_settings",
                "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "encoder_tokens",
                "kv_memory_bytes", "speed", "what_if",
            ),
            "model",
        ),
    },
    fields={"speed": "calibration"},
    instead={
        "context_tokens": "the trace has the lengths",
        "batch_size": "the trace has the requests",
        "fits_context": "the trace has the lengths",
        "speculative": "drafted tokens change no hit rate; kvcalc.estimate takes them",
        "reuse": "the trace says what is used again; offload_bytes=... are the tiers",
        "weights_bytes": "kvcalc.fit takes it; kv_memory_bytes=... is the memory for the cache",
        "gpus": "devices=kvcalc.find_devices(...)",
        "prices": "price_per_hour=... is that of one device",
    },
)  # fmt: skip
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
    after: float = 0.0,
    optimal: bool = False,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    engine: str = "auto",
    engine_settings: Mapping[str, Any] | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    speed: SpeedQuestion | None = None,
    what_if: WhatIf = WhatIf(),
) -> Prefix:
    """The document of `kvcalc prefix`: what a prefix cache of every size finds in the trace at the path `trace`.

    Without a `model`, there are only hit rates. `cache_memory_bytes` or `cache_tokens` are the sizes; without them,
    sizes double up to all blocks. `offload_bytes` has the tiers `cpu`, `disk` and `remote` in the order in which they
    are searched. `price_per_hour` is that of one device. The other arguments are those of `estimate`; of `speed`, the
    calibration is used.
    """
    from kvcalc.planning.prefix import Sizes
    from kvcalc.planning.prefix import prefix_curve as ask
    from kvcalc.planning.prefix.cost import MEMORY_PRICES, Prices

    for tier in memory_prices_per_gib_hour or {}:
        if tier not in MEMORY_PRICES:
            text = f"memory_prices_per_gib_hour: {shown(tier)} has no price"
            raise UsageError(text, f"one of {', '.join(MEMORY_PRICES)}")
    return ask(
        trace,
        None if model is None else asked(locals()),
        sizes=Sizes(cache_memory_bytes, cache_tokens),
        offload=tuple((offload_bytes or {}).items()),
        bandwidths=offload_bytes_per_second,
        prices=Prices(price_per_hour, memory_prices_per_gib_hour or {}),
        format=trace_format,
        block_tokens=trace_block_tokens,
        most_blocks=most_blocks,
        after=after,
        optimal=optimal,
    )  # fmt: skip


@takes(also={"text": Iterable})
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

    spec = None if model is None else model_of(model)
    return ask(
        text if isinstance(text, str) else _pieces(text), name, engine=engine, model=spec,
        tensor_parallel_size=tensor_parallel_size, kv_dtype=kv_dtype, context_tokens=context_tokens,
    )  # fmt: skip


def _pieces(text: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces of a log. UsageError (exit 2) for one that is not bytes."""
    for piece in text:
        if not isinstance(piece, bytes):
            raise UsageError(f"text: {shown(piece)} must be bytes", 'open the log with open("vllm.log", "rb")')
        yield piece


@takes(
    instead={
        "batch_size": "the results have the requests",
        "context_tokens": "the results have the lengths",
        "speed": "expert_parallel_size=... and calibration=... are arguments themselves",
    }
)
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
    prefix_hit_rate: float | None = None,
) -> Score:
    """The document of `kvcalc score`: the times of benchmark results beside the predicted ones.

    `results` maps the name of each file to its text. `calibration` is what `read_calibration` returns. The other
    arguments override what the files say.
    """
    from kvcalc.model.layout import LayoutAsked
    from kvcalc.planning.calibration.measured import Given
    from kvcalc.planning.calibration.score import score as ask

    given = Given(
        None if model is None else model_of(model), devices, engine, engine_settings, dtype, kv_dtype,
        LayoutAsked(tensor_parallel_size, pipeline_parallel_size, data_parallel_size, expert_parallel_size),
        calibration, prefix_hit_rate,
    )  # fmt: skip
    return ask(list(results.items()), given)
