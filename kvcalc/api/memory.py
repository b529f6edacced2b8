"""Bytes, and the speed of a step: `kvcalc estimate`, `fit`, `compare` and `sweep`, and the lists of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvcalc.api.arguments import asked, takes
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf
from kvcalc.question.fields import check_devices

if TYPE_CHECKING:
    from kvcalc.documents import Compare, Estimate, FitDocument, Gpus, Models, Sweep
    from kvcalc.model.drafting import Speculation
    from kvcalc.question.question import CacheReuse, ImagesAsked, SpeedQuestion
    from kvcalc.throughput.hardware import Devices, Gpu

_Value = TypeVar("_Value")


@takes()
def estimate(
    model: ModelSpec | str,
    *,
    context_tokens: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    engine: str = "auto",
    engine_settings: Mapping[str, Any] | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    weights_bytes: int | None = None,
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
    the model is split over all `devices`. `kv_memory_bytes` is the memory for the cache on one device, and
    `weights_bytes` that of the weights, if a server printed another one than kvcalc counts.
    `engine_settings` maps the engine's own options to their values, for example `{"block-size": 32}`. `speed` describes
    requests to serve: `SpeedQuestion(input_tokens=2048, output_tokens=500, concurrency=32)`. Its
    `calibration` is what `read_calibration` returns. `what_if` replaces the model's attention. `speculative` says how
    tokens are drafted: `Speculation("mtp", 3, acceptance_length=2.4)`. `data_parallel_size` is the number of DP
    ranks, among which the batch is divided. With `fits_context`, the context is the longest one that fits, as the
    engine chooses it at its start. `reuse` says how a cache is used again:
    `CacheReuse(prefix_tokens=2048, turns=8, offload=(("cpu", 200 * 2**30),))`. `images` are those of every request:
    `ImagesAsked(2, 1920, 1080)`. Raises KvcalcError; its `exit_code` is the exit code of the command line.
    """
    from kvcalc.planning.answers.document import estimate as ask

    return ask(asked(locals()))


@takes(
    fields={
        "speed": "expert_parallel_size input_tokens output_tokens concurrency prefix_hit_rate confidence",
        "reuse": "prefix_tokens turns offload bandwidths backend",
    }
)
def fit(
    model: ModelSpec | str,
    devices: Devices,
    *,
    context_tokens: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    engine: str = "auto",
    engine_settings: Mapping[str, Any] | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    weights_bytes: int | None = None,
    speed: SpeedQuestion | None = None,
    what_if: WhatIf = WhatIf(),
    speculative: Speculation | None = None,
    data_parallel_size: int = 1,
    fits_context: bool = False,
    reuse: CacheReuse | None = None,
    images: ImagesAsked | None = None,
) -> FitDocument:
    """The document of `kvcalc fit`: whether the model fits on `devices`, and if not, how many devices it needs.

    The other arguments are those of `estimate`. `speed.calibration` has no effect here and is refused.
    """
    from kvcalc.planning.answers.fit import fit as ask

    return ask(asked(locals()))


@takes(
    either=(("engine", "engines"),),
    fields={"reuse": "prefix_tokens turns"},
    instead={
        "what_if": 'attentions=["gqa"] computes the cache as if the models had this attention',
        "weights_bytes": "kvcalc.fit takes it, of one model",
        "model": "models=[...]",
        "gpus": 'devices=[kvcalc.find_devices("h100x4"), ...]',
        "attention": "attentions=[...]",
    },
    also={"devices": (list, tuple)},
)
def compare(
    models: Sequence[str],
    *,
    attentions: Sequence[str | None] = (None,),
    engines: Sequence[str] | None = None,
    devices: Devices | Sequence[Devices] | None = None,
    context_tokens: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    engine: str = "auto",
    engine_settings: Mapping[str, Any] | None = None,
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    speed: SpeedQuestion | None = None,
    speculative: Speculation | None = None,
    data_parallel_size: int = 1,
    fits_context: bool = False,
    reuse: CacheReuse | None = None,
) -> Compare:
    """The document of `kvcalc compare`: one row for each model, kind of attention, engine and device.

    `attentions` are "mha", "mqa", "gqa" and "mla"; None is the model's own. `engines` are several, and "all" is every
    engine; `engine` is one. The other arguments are those of `estimate`. Of `reuse`, the prefix and the turns are used.
    """
    from kvcalc.planning.answers.axis import parse_engines
    from kvcalc.planning.answers.compare import compare as ask
    from kvcalc.planning.answers.compare import first_of, load_each
    from kvcalc.throughput.hardware import Devices

    several = (devices,) if isinstance(devices, Devices) else devices or ()
    for value in several:
        check_devices(value)
    loaded = load_each(models)
    question = asked({**locals(), "model": first_of(loaded), "devices": None})
    chosen = parse_engines(engines or (engine,))
    return ask(loaded, question, attentions=attentions, engines=chosen, devices=several)


@takes(
    either=(("engines", "engine"),),
    fields={"speed": "expert_parallel_size calibration prefix_hit_rate", "reuse": "prefix_tokens turns"},
    instead={
        "devices": 'gpus=["h100x4"]',
        "fits_context": "every point of a sweep has a context: contexts=[...]",
        "weights_bytes": "kvcalc.fit takes it, of one layout",
    },
)  # fmt: skip
def sweep(
    model: ModelSpec | str,
    *,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    kv_dtypes: Sequence[str] | None = None,
    tensor_parallel_sizes: Sequence[int] | None = None,
    engines: Sequence[str] | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    gpus: Sequence[str | Gpu | Devices] = (),
    context_tokens: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    engine: str = "auto",
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    speed: SpeedQuestion | None = None,
    what_if: WhatIf = WhatIf(),
    speculative: Speculation | None = None,
    reuse: CacheReuse | None = None,
) -> Sweep:
    """The document of `kvcalc sweep`: one point for every combination.

    Each of `contexts`, `batches`, `kv_dtypes`, `tensor_parallel_sizes` and `engines` is a list, for which one value may
    stand: `context_tokens`, `batch_size`, `kv_dtype`, `tensor_parallel_size` and `engine`. "all" is every engine.
    Without a context there is one, the default of `estimate`. `gpus` are names of devices, for example `h100x4`.
    Without `tensor_parallel_sizes`, the model is split over the number of devices in the name. The other arguments are
    those of `estimate`. Of `speed`, the lengths of requests have no effect here and are refused; of `reuse`, the prefix
    and the turns are used.
    """
    from kvcalc.notes import describe_notes
    from kvcalc.planning.answers.axis import Axis, parse_engines
    from kvcalc.planning.answers.sweep import sweep as ask
    from kvcalc.throughput.hardware import find_devices

    contexts, sizes = _several(contexts, context_tokens), _several(tensor_parallel_sizes, tensor_parallel_size)
    question = asked({**locals(), "context_tokens": None, "batch_size": 1, "kv_dtype": "auto", "engine": "auto"})
    grid = ask(
        question,
        contexts=None if contexts is None else Axis([contexts]),
        batches=Axis([batches or (batch_size,)]),
        kv_dtypes=[name.casefold() for name in kv_dtypes or (kv_dtype,)],
        tensor_parallel_sizes=None if sizes is None else Axis([sizes]),
        engines=parse_engines(engines or (engine,)),
        gpus=[find_devices(gpu) if isinstance(gpu, str) else gpu for gpu in gpus],
    )
    points = list(grid.points())
    return cast("Sweep", {**grid.head(), "points": points, "warnings": describe_notes(grid.notes)})


def _several(values: Sequence[_Value] | None, one: _Value | None) -> Sequence[_Value] | None:
    """The values of an axis, of which `one` stands for a list. None if neither is given."""
    return values if one is None else (one,)


@takes()
def models(family: str | None = None) -> Models:
    """The document of `kvcalc models`: all presets, or the presets of one family."""
    from kvcalc.planning.answers.models import Wanted, list_models

    return list_models(Wanted(family))


@takes()
def gpus() -> Gpus:
    """The document of `kvcalc gpus`: all known devices."""
    from kvcalc.planning.answers.gpus import list_gpus

    return list_gpus()
