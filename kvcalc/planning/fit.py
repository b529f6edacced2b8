"""Answer `kvcalc fit`: whether a model fits, the largest context and batch, and the fewest devices it needs."""

from __future__ import annotations

from typing import Any

from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import describe_notes
from kvcalc.planning.case import Case, Question, make_case
from kvcalc.planning.estimate import answer, answer_case
from kvcalc.planning.load import at_load
from kvcalc.throughput.hardware import Devices

# The parts of the estimate document that are also in the fit document.
_TAKEN = ("schema_version", "model", "workload", "engine", "kv_cache", "weights", "hardware", "fit", "speculative")

# No larger split is tried. The largest NVLink domain, that of GB200, has 72 devices.
_MOST_RANKS = 128


def fit(model: ModelSpec, devices: Devices, **asked: Any) -> dict[str, Any]:
    """The fit document: the parts of the estimate, and if the model does not fit, the fewest devices it fits on, and
    what llama.cpp can keep in host memory instead.

    `asked` has the other fields of a `Question`. Raises the errors of `make_case`, and ModelError (exit 3) if the
    weights are not known.
    """
    case = at_load(make_case(Question(model, devices=devices, **asked)))
    found = answer_case(case)
    taken = {key: found.document[key] for key in _TAKEN}
    if "reuse" in found.document:
        taken["reuse"] = found.document["reuse"]
    smallest = None if found.fit["fits"] else _smallest(case)
    # The fit document has no throughput, so it has no notes about it.
    notes = [note for note in found.notes if note.part != "throughput"]
    offload = None
    if not found.fit["fits"] and case.engine_name == "llama.cpp":
        from kvcalc.planning.offload import suggest

        offload = suggest(case)
    return {**taken, "smallest": smallest, "offload": offload, "warnings": describe_notes(notes)}


def _smallest(case: Case) -> dict[str, Any] | None:
    """The fewest devices of this kind that fit the workload with a larger --tp. None if no number of devices does."""
    asked, heads = case.question, case.model.attention.num_heads or 1
    first = (asked.tensor_parallel_size or 1) + 1
    stages, replicas = asked.pipeline_parallel_size, asked.data_parallel_size
    for size in range(first, min(heads, _MOST_RANKS) + 1):
        if heads % size:
            continue
        devices = case.devices._replace(num_devices=size * stages * replicas)
        try:
            found = answer(asked._replace(devices=devices, tensor_parallel_size=size)).document["fit"]
        except UsageError:
            continue  # this model or this engine cannot be split this way
        if found and found["fits"]:
            sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": stages, "data_parallel_size": replicas}
            return {"num_devices": devices.num_devices, **sizes}
    return None
