"""Does a model fit, how long a context and how large a batch fit, and how many devices would do?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import ModelError, UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.estimate import estimate
from kvcalc.throughput.hardware import Devices

# Of estimate's document, what stands in fit's.
_TAKEN = ("schema_version", "model", "workload", "engine", "kv_cache", "weights", "hardware", "fit")

# No model is split further: GB200's largest domain has 72 devices.
_MOST_RANKS = 128


def fit(
    model: ModelSpec,
    devices: Devices,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    **workload: Any,
) -> dict[str, Any]:
    """The fit document: estimate's account of the devices, and where it does not fit, the fewest that would.

    `workload` is estimate's. Raises what it raises, and ModelError (exit 3) where the weights are not known.
    """
    asked = {**workload, "pipeline_parallel_size": pipeline_parallel_size}
    document = estimate(model, devices=devices, tensor_parallel_size=tensor_parallel_size, **asked)
    if document["fit"] is None:
        reason = next((text for text in document["warnings"] if text.startswith("fit: ")), "fit: not known")
        raise ModelError(reason.removeprefix("fit: "), "kvcalc estimate --kv-memory SIZE asks of the cache alone")
    smallest = None
    if not document["fit"]["fits"]:
        smallest = _smallest(model, devices, tensor_parallel_size, pipeline_parallel_size, asked)
    return {**{key: document[key] for key in _TAKEN}, "smallest": smallest, "warnings": document["warnings"]}


def _smallest(
    model: ModelSpec, devices: Devices, beyond: int, stages: int, asked: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The fewest devices of this kind the same workload fits on by splitting heads further; None where none do."""
    heads = model.attention.num_heads or 1
    for size in range(beyond + 1, min(heads, _MOST_RANKS) + 1):
        if heads % size:
            continue
        number = size * stages
        try:
            found = estimate(model, devices=devices._replace(num_devices=number), tensor_parallel_size=size, **asked)
        except UsageError:
            continue  # this model, or this engine, is not split so
        if found["fit"] and found["fit"]["fits"]:
            return {"num_devices": number, "tensor_parallel_size": size, "pipeline_parallel_size": stages}
    return None
