"""The document of `kvcalc models --gpu`: the models that fit the devices, each in the best type of weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvcalc.engines import engine_class
from kvcalc.errors import KvcalcError
from kvcalc.memory.weights import count_parameters
from kvcalc.memory.workload import resolve_context
from kvcalc.model.presets import Preset
from kvcalc.model.resolve import spec_of
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.answers.estimate import Answer, answer
from kvcalc.planning.answers.served_context import served_context
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.resolve import with_engine

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.throughput.hardware import Devices

MOST = 25
"""How many models are listed at most, if no other number is asked for."""
_MOST_NAMED = 6


class _Candidate(NamedTuple):
    preset: Preset
    spec: ModelSpec
    parameters: int


def models_that_fit(
    presets: Sequence[Preset], devices: Devices, question: Question, most: int = MOST,
    max_weights_bytes: int | None = None, notes: Sequence[Note] = (),
) -> documents.ModelsFit:  # fmt: skip
    """The presets whose weights and cache fit the devices, the largest first, at most `most` of them.

    The model and the devices of the question are ignored, and `notes` are put before those of the answer. Each model is
    asked with its published weights first, and with smaller types until it fits. `left_out` is the number of models
    that may fit and were not asked.
    """
    question = question._replace(devices=devices)
    memory = devices.gpu.memory_bytes * devices.num_devices
    candidates, said = _candidates(presets, question, memory)
    rows: list[documents.ModelsFitModelsItem] = []
    first: documents.Estimate | None = None
    num_answers = 0
    for candidate in candidates:
        if len(rows) == most:
            break
        num_answers += 1
        try:
            best = _best(candidate, question, memory, max_weights_bytes)
        except KvcalcError as error:
            said.append(_refused(candidate.preset.name, error))
            continue
        if best is not None:
            first = first or best.document
            rows.append(_row(candidate, best))
    engines = {row["engine"] for row in rows}
    engine = None if first is None or len(engines) > 1 else first["engine"]
    return {
        "schema_version": SCHEMA_VERSION,
        "hardware": None if first is None else first["hardware"],
        "engine": None if engine is None else {"name": engine["name"], "version": engine["version"]},
        "context_tokens": question.context_tokens,
        "batch_size": question.batch_size,
        "models": rows,
        "left_out": len(candidates) - num_answers,
        "warnings": describe_notes([*notes, *said]),
    }


def _candidates(presets: Sequence[Preset], question: Question, memory: int) -> tuple[list[_Candidate], list[Note]]:
    """The models that may fit, the largest first, and notes about the models that are not asked."""
    candidates: list[_Candidate] = []
    notes: list[Note] = []
    short, unknown = [], []
    for preset in presets:
        try:
            spec = spec_of(preset)
        except KvcalcError as error:
            notes.append(_refused(preset.name, error))
            continue
        weights, longest = weights_of(spec), spec.max_position_embeddings
        if question.context_tokens is not None and longest is not None and longest < question.context_tokens:
            short.append(preset.name)
        elif weights is None:
            unknown.append(preset.name)
        else:
            candidates.append(_Candidate(preset, spec, count_parameters(weights).total))
    for names, why in ((short, "take fewer tokens than the context"), (unknown, "have weights that are not counted")):
        if names:
            more = f", and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            text = f"not asked, because they {why}: {', '.join(names[:_MOST_NAMED])}{more}"
            notes.append(Note("models", "not-asked", text))
    candidates.sort(key=lambda candidate: (-candidate.parameters, candidate.preset.name))
    return [candidate for candidate in candidates if any(_types(candidate, question, memory))], notes


def _refused(name: str, error: KvcalcError) -> Note:
    return Note("models", "refused", f"{name}: {error.message.removeprefix(f'{name}: ')}")


def _types(candidate: _Candidate, question: Question, memory: int) -> Iterator[tuple[str | None, int]]:
    """The types to ask, best first, and the least bytes of the weights in each. Those larger than memory are left out.

    A published checkpoint that is quantised in a way of its own takes at least half a byte for most weights.
    """
    types: list[tuple[str | None, float]] = [(question.dtype, 0)]
    if question.dtype is None:
        engine = with_engine(question._replace(model=candidate.spec)).engine
        types = [(None, 3.0 if candidate.spec.quantization else 15.0), *engine_class(engine).smaller_types]
    for name, bits in types:
        least = int(candidate.parameters * bits / 8)
        if least < memory:
            yield name, least


def _best(candidate: _Candidate, question: Question, memory: int, max_weights_bytes: int | None) -> Answer | None:
    """The answer with the best type of weights that fits, or None.

    Without a context, a usual one must fit, and the answer has the longest one that does.
    """
    smallest: int | None = None
    usual = resolve_context(candidate.spec, question.context_tokens)[0]
    for dtype, least in _types(candidate, question, memory):
        if smallest is not None and least >= smallest:
            continue
        of_type = question._replace(model=candidate.spec, dtype=dtype)
        answered = answer(of_type._replace(context_tokens=usual))
        held = answered.document["weights"]["bytes"]
        if held is None or (smallest is not None and held >= smallest):
            continue
        smallest = held
        if answered.fit["fits"] and (max_weights_bytes is None or held <= max_weights_bytes):
            tokens = served_context(of_type) if question.context_tokens is None else usual
            return answer(of_type._replace(context_tokens=tokens)) if tokens > usual else answered
    return None


def _row(candidate: _Candidate, answered: Answer) -> documents.ModelsFitModelsItem:
    fit, weights, speed = answered.fit, answered.document["weights"], answered.document["throughput"]
    return {
        "name": candidate.preset.name,
        "family": candidate.preset.family,
        "engine": answered.document["engine"]["name"],
        "parameters": candidate.parameters,
        "active_parameters_per_token": weights["active_parameters_per_token"],
        "dtype": weights["dtype"],
        "weights_bytes": weights["bytes"],
        "free_bytes": fit["free_bytes"],
        "context_tokens": answered.document["workload"]["context_tokens"],
        "max_context_tokens": fit["max_context_tokens"],
        "max_batch_size": fit["max_batch_size"],
        "decode_tokens_per_second": None if speed is None else speed["decode_tokens_per_second"],
        "prefill_seconds": None if speed is None else speed["prefill_seconds"],
    }
