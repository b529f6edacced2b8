"""Answer `kvcalc fit`: whether a model fits, the largest context and batch, and the fewest devices it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from kvcalc.errors import DoesNotFitError, LayoutError, UsageError
from kvcalc.model.layout import Layout, LayoutAsked
from kvcalc.notes import describe_notes
from kvcalc.planning.answers.estimate import Answer, answer, answer_case, fit_of
from kvcalc.planning.answers.load import at_load
from kvcalc.planning.answers.server_part import describe_refusal, describe_server
from kvcalc.question.question import Question
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.budget import budget
from kvcalc.server.case import Case, make_case
from kvcalc.server.layout import as_started, over_machines, server_context, sizes_of

if TYPE_CHECKING:
    import kvcalc.documents as documents

# The parts of the estimate document that are also in the fit document.
_TAKEN = (
    "schema_version", "model", "workload", "engine", "kv_cache", "weights", "hardware", "fit", "server", "speculative",
    "reuse",
)  # fmt: skip

# No larger split is tried. The largest NVLink domain, that of GB200, has 72 devices.
_MOST_RANKS = 128


def fit(question: Question, lifts_limit: bool = False) -> documents.FitDocument:
    """The fit document: the parts of the estimate, and if the model does not fit, the fewest devices it fits on, and
    what the engine can keep in host memory instead.

    The question has devices. `lifts_limit` is whether its server takes contexts beyond the model's. Raises the errors
    of `make_case`, LayoutError with the document of the refusal, and ModelError (exit 3) if the weights are not known.
    """
    try:
        with documented_refusals():
            estimate, smallest, offload = answer_server(make_case(question), lifts_limit)
    except LayoutError as error:
        if " does not start" not in error.message:
            raise
        refused = DoesNotFitError(error.message, error.hint)
        refused.document = error.document
        raise refused from None
    fit_of(estimate.document)
    taken = {key: value for key, value in estimate.document.items() if key in _TAKEN}
    # The fit document has no throughput, so it has no notes about it.
    notes = [note for note in estimate.notes if note.part != "throughput"]
    document = {**taken, "smallest": smallest, "offload": offload, "warnings": describe_notes(notes)}
    return cast("documents.FitDocument", document)


def has_workload(question: Question) -> bool:
    """Whether the question names a context, a batch or requests, which are then to fit and not only the server."""
    return question.context_tokens is not None or question.batch_size > 1 or question.serves_requests


def is_refused(document: Mapping[str, Any], has_workload: bool, strict: bool) -> bool:
    """Whether the server of a document does not start or its workload does not fit.

    `strict` also refuses one that may not start, or whose fit is tight.
    """
    fit, server = document["fit"], document["server"]
    if server is None:
        return not fit["fits"] or (strict and fit["verdict"] == "tight")
    if server["starts"] is False or (strict and (server["starts"] is None or fit["verdict"] == "tight")):
        return True
    # A server that starts by itself need not hold a request of its whole context.
    return not fit["fits"] and (has_workload or server["starts"] is None)


@contextmanager
def documented_refusals() -> Iterator[None]:
    """Give a LayoutError the document of the refusal."""
    try:
        yield
    except LayoutError as error:
        error.document = {"schema_version": SCHEMA_VERSION, **describe_refusal(error), "warnings": []}
        raise


def answer_server(
    case: Case, lifts_limit: bool = False
) -> tuple[Answer, documents.SmallestLayout | None, documents.HostOffload | None]:
    """The estimate of a case on devices with its server, and what makes the model fit if it does not."""
    question = as_started(case.question, server_context(case.question, case.workload.context_tokens))
    case = at_load(case if question is case.question else make_case(question))
    estimate = answer_case(case)
    fit = estimate.document["fit"]
    if fit is None:
        return estimate, None, None
    smallest = offload = None
    if not fit["fits"]:
        smallest = _smallest(case)
        if case.engine.placement_options is not None:
            from kvcalc.server.offload import suggest

            offload = suggest(case)
    if case.engine_class.has_server:
        estimate = _with_server(estimate, describe_server(case, estimate, smallest, offload, lifts_limit))
    return estimate, smallest, offload


def _with_server(estimate: Answer, server: documents.Server) -> Answer:
    """The estimate with its server. A verdict that the memory leaves open says what these notes say."""
    estimate.document["server"] = server
    if server["starts"] is not None:
        return estimate
    notes = [note for note in estimate.notes if note.part != "fit" or note.code not in ("tight", "may-fit")]
    estimate.document["warnings"] = describe_notes(notes)
    return estimate._replace(notes=tuple(notes))


def _smallest(case: Case) -> documents.SmallestLayout | None:
    """The fewest devices of this kind that fit the workload with a larger --tp. None if no number of devices does.

    An engine that splits only layers gets more stages instead.
    """
    question, heads = case.question, case.model.attention.num_heads or 1
    if not case.engine.splits_heads:
        return _fewest_stages(case) if case.engine.splits_layers and case.engine.placement is None else None
    first = (question.tensor_parallel_size or 1) + 1
    for size in range(first, min(heads, _MOST_RANKS) + 1):
        if heads % size == 0:
            devices = case.devices._replace(num_devices=size)
            within, stages = over_machines(question, devices) if question.pipeline_parallel_size == 1 else (None, 1)
            split = question.with_layout(LayoutAsked(within or size, question.pipeline_parallel_size * stages))
            smallest = _layout_that_fits(case, split)
            if smallest is not None:
                return smallest
    return None


def _fewest_stages(case: Case) -> documents.SmallestLayout | None:
    """The fewest devices on which the workload fits with equal shares of the layers."""
    given = case.question.engine_settings or {}
    settings = {name: text for name, text in given.items() if name not in ("tensor-split", "split-mode")}
    first, most = case.question.pipeline_parallel_size + 1, min(case.spec.num_layers, _MOST_RANKS)
    for stages in range(first, most + 1):
        split = case.question._replace(
            devices=case.devices._replace(num_devices=stages), tensor_parallel_size=1, pipeline_parallel_size=stages,
            engine_settings=settings,
        )  # fmt: skip
        try:
            split_budget = budget(make_case(split))
        except UsageError:
            return None
        if not isinstance(split_budget, str) and all(room.free_bytes() >= 0 for room in split_budget.devices):
            return _describe(Layout(1, stages))
    return None


def _layout_that_fits(case: Case, question: Question) -> documents.SmallestLayout | None:
    """The sizes of the layout that is asked for, on as many devices as it needs. None if it does not fit."""
    layout = sizes_of(question)
    devices = case.devices._replace(num_devices=layout.num_devices)
    try:
        fit = answer(question._replace(devices=devices)).document["fit"]
    except UsageError:
        return None  # this model or this engine cannot be split this way
    return _describe(layout) if fit and fit["fits"] else None


def _describe(layout: Layout) -> documents.SmallestLayout:
    return {
        "num_devices": layout.num_devices,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "pipeline_parallel_size": layout.pipeline_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
    }
