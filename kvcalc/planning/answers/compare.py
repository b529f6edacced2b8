"""Compare models under one workload with kinds of attention, engines and devices; or one model in several engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from kvcalc.engines import RELEASE, engine_class
from kvcalc.engines.default_engine import engine_on
from kvcalc.engines.options import AUTO_ENGINE, NO_ENGINE, check_settings, settings_of
from kvcalc.errors import KvcalcError, ModelError, SettingError, UsageError
from kvcalc.memory.workload import DEFAULT_CONTEXT_TOKENS
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import VARIANTS, WhatIf
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.answers.axis import parse_engines
from kvcalc.planning.answers.estimate import Answer, answer
from kvcalc.planning.answers.figures import FIGURES
from kvcalc.planning.answers.grouped_notes import RowNote, group_notes
from kvcalc.planning.answers.served_context import common_context
from kvcalc.question.question import Question, setting_texts
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.throughput.hardware import Devices


_Described = TypeVar("_Described")

# The keys that a row takes from its estimate, by part of the document; below, the keys that have another name in a row.
_TAKEN = {
    "model": ("attention", "num_layers", "num_kv_heads", "max_position_embeddings"),
    "kv_cache": ("dtype", *FIGURES),
    "weights": ("parameters", "active_parameters_per_token", "bytes", "dtype"),
    "fit": ("fits", "free_bytes", "max_context_tokens", "max_batch_size"),
    "throughput": (
        "decode_step_seconds", "low_seconds", "high_seconds", "decode_tokens_per_second", "prefill_seconds", "bound_by",
    ),
}  # fmt: skip
_RENAMED = {
    "kv_cache.dtype": "kv_dtype", "weights.bytes": "weights_bytes", "weights.dtype": "weights_dtype",
    "throughput.low_seconds": "decode_step_low_seconds", "throughput.high_seconds": "decode_step_high_seconds",
}  # fmt: skip
# Notes that are merged into one, by code.
_TOO_LARGE = "does-not-fit"
# Notes about memory lines that a row does not show.
_OF_LINES = ("first-start", "graph-estimate")
_FIGURES = [(part, key, _RENAMED.get(f"{part}.{key}", key)) for part, keys in _TAKEN.items() for key in keys]


class Row(NamedTuple):
    """The question of one row: a model, a kind of attention (None for the model's own), an engine, and devices or None.

    `name` is the model's name, or the typed text if the model is not known.
    """

    name: str
    model: ModelSpec | KvcalcError
    attention: str | None
    engine: str
    devices: Devices | None

    def of(self, question: Question, settings: Mapping[str, Any]) -> Question:
        """The question about this row, whose model is known, with those of the settings that its engine takes."""
        if isinstance(self.model, KvcalcError):
            raise self.model
        return question._replace(
            model=self.model, engine=self.engine, devices=self.devices, what_if=WhatIf(self.attention),
            engine_settings=settings_of(self.engine, settings),
        )  # fmt: skip


def parse_attentions(text: str | None) -> tuple[str | None, ...]:
    """The kinds of attention in `mha,mla` or `all`. Without a text, only None: the model's own attention."""
    if text is None:
        return (None,)
    if text.strip().casefold() == "all":
        return VARIANTS
    kinds = tuple(kind.strip().casefold() for kind in text.split(","))
    for kind in kinds:
        if kind not in VARIANTS:
            raise UsageError(f"--attention {kind!r}: not a kind of attention", f"one of {', '.join(VARIANTS)}, or all")
    return kinds


def compare(
    loaded: Sequence[tuple[str, ModelSpec | KvcalcError]],
    question: Question,
    *,
    attentions: Sequence[str | None] = (None,),
    engines: Sequence[str] = (AUTO_ENGINE,),
    devices: Sequence[Devices] = (),
) -> documents.Compare:
    """The compare document: a row for each model, kind of attention, engine and devices, in the order given.

    `loaded` are the models (`load_each`), and `question` is asked about each of them with the row's engine, devices
    and attention. Its settings may be those of several engines; each engine takes its own. All rows have the same
    context: one request's tokens with serving options, else the shortest context that all rows' servers allow and can
    hold, or without devices the shortest of the models' default contexts.

    A row that is refused has the reason and the exit code that estimate would return. If all rows are refused, the
    first refusal is raised. An unknown engine raises UsageError (exit 2).
    """
    settings = setting_texts(question.engine_settings or {})
    rows = list(_rows(loaded, attentions, engines, devices or (None,), question.dtype))
    names = list(dict.fromkeys(row.engine for row in rows))
    for engine in names:
        engine_class(engine)
    check_settings(names, settings, has_device=bool(devices))
    if question.context_tokens is None and not question.serves_requests and not question.fits_context:
        limits = [m.max_position_embeddings for _, m in loaded if isinstance(m, ModelSpec)]
        context_tokens = min(DEFAULT_CONTEXT_TOKENS, *(limit for limit in limits if limit is not None), 1 << 62)
        if devices:
            known = (row for row in rows if isinstance(row.model, ModelSpec))
            context_tokens = common_context((row.of(question, settings) for row in known), context_tokens)
        question = question._replace(context_tokens=context_tokens)
    answers = [_answer(row, question, settings) for row in rows]
    answered = [answer_of_row.document for answer_of_row in answers if isinstance(answer_of_row, Answer)]
    if not answered:
        raise next(answer_of_row for answer_of_row in answers if isinstance(answer_of_row, KvcalcError))
    workload = answered[0]["workload"]
    engines_used: Iterator[documents.CompareEnginesItem] = (
        {"name": document["engine"]["name"], "version": document["engine"]["version"]} for document in answered
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "workload": {"context_tokens": workload["context_tokens"], "batch_size": workload["batch_size"]},
        "hardware": _distinct(document["hardware"] for document in answered if document["hardware"] is not None),
        "engines": _distinct(engines_used),
        "models": [_describe(row, answer_of_row) for row, answer_of_row in zip(rows, answers)],
        "warnings": describe_notes(_notes(rows, answers)),
    }


def load_each(references: Sequence[str]) -> list[tuple[str, ModelSpec | KvcalcError]]:
    """The models as a user types them, each as typed and as it was read or refused."""
    loaded: list[tuple[str, ModelSpec | KvcalcError]] = []
    for reference in references:
        try:
            loaded.append((reference, load_model(reference)))
        except KvcalcError as error:
            loaded.append((reference, error))
    return loaded


def first_of(loaded: Sequence[tuple[str, ModelSpec | KvcalcError]]) -> ModelSpec:
    """The first model that was read. If there is none, the first refusal is raised."""
    for _, model in loaded:
        if isinstance(model, ModelSpec):
            return model
    raise next(error for _, error in loaded if isinstance(error, KvcalcError))


def _rows(
    loaded: Sequence[tuple[str, ModelSpec | KvcalcError]], attentions: Sequence[str | None], engines: Sequence[str],
    devices: Sequence[Devices | None], dtype: str | None,
) -> Iterator[Row]:  # fmt: skip
    for reference, model in loaded:
        if isinstance(model, KvcalcError):
            name = NO_ENGINE if engines[0] == AUTO_ENGINE else engines[0]
            yield Row(reference, model, None, name, devices[0])
            continue
        for kind in attentions:
            for engine in engines:
                for each in devices:
                    name = engine_on(engine, model, each, dtype)
                    yield Row(model.name, model, kind, name, each)


def _answer(row: Row, question: Question, settings: Mapping[str, Any]) -> Answer | KvcalcError:
    if isinstance(row.model, KvcalcError):
        return row.model
    try:
        return answer(row.of(question, settings))
    except SettingError:
        raise
    except KvcalcError as error:
        return error


def _describe(row: Row, answered: Answer | KvcalcError) -> documents.CompareRow:
    described: dict[str, Any] = {
        "model": row.name,
        "engine": row.engine,
        "gpu": None if row.devices is None else row.devices.gpu.name,
        "num_devices": None if row.devices is None else row.devices.num_devices,
        "tensor_parallel_size": None,
        "data_parallel_size": None,
        **{column: None for _, _, column in _FIGURES},
        "joules_per_token": None,
        "reason": None,
        "exit_code": 0,
    }
    if isinstance(answered, KvcalcError):
        described.update(attention=row.attention, reason=answered.message, exit_code=answered.exit_code)
        return cast("documents.CompareRow", described)
    document: Any = answered.document
    if row.attention is None and row.devices is not None and document["fit"] is None:
        described.update(
            reason=next(note.text for note in answered.notes if note.part == "fit"), exit_code=ModelError.exit_code
        )
    if document["hardware"] is not None:
        described["num_devices"] = document["hardware"]["num_devices"]
    described.update({key: document["engine"][key] for key in ("tensor_parallel_size", "data_parallel_size")})
    described.update({column: document[part][key] for part, key, column in _FIGURES if document[part] is not None})
    energy = document["throughput"] and document["throughput"]["energy"]
    if energy:
        described["joules_per_token"] = energy["joules_per_token"]
    return cast("documents.CompareRow", described)


def _notes(rows: Sequence[Row], answers: Sequence[Answer | KvcalcError]) -> list[Note]:
    """The refusals and the notes of the estimates, each remark once, without the notes that repeat a column."""
    row_notes, too_large = [], []
    for row, answered in zip(rows, answers):
        notes = (Note("models", "refused", answered.message),) if isinstance(answered, KvcalcError) else answered.notes
        gpu = None if row.devices is None else row.devices.gpu
        about_row = [RowNote(_words(row), note, gpu) for note in notes if note.code not in _OF_LINES]
        row_notes += [about for about in about_row if about.note.code != _TOO_LARGE]
        too_large += [about for about in about_row if about.note.code == _TOO_LARGE]
    if len(too_large) > 1:
        # The texts differ only in their figures, so one line covers all of them.
        text = "the batch does not fit: kvcalc fit says why"
        too_large = [about._replace(note=about.note._replace(text=text)) for about in too_large]
    return group_notes([*row_notes, *too_large], list(map(_words, rows)))


def _words(row: Row) -> tuple[str, ...]:
    """The words that identify a row: the model, the kind of attention, the engine and the devices."""
    kind = "" if row.attention is None else f"as {row.attention}"
    gpu, number = ("", "") if row.devices is None else (row.devices.gpu.name, f"x {row.devices.num_devices}")
    return row.name, kind, row.engine, gpu, number


def _distinct(values: Iterator[_Described]) -> list[_Described]:
    distinct: list[_Described] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


# The keys that each row takes from its engine's estimate: from `engine` and from `kv_cache`.
_FROM_ENGINE = ("version", "kv_dtype_reason", "block_size", "num_gpu_blocks", "kv_cache_tokens", "max_concurrency")
_FROM_CACHE = (
    "dtype", "total_bytes", "bytes_per_sequence", "bytes_per_token", "fixed_bytes_per_sequence", "bytes_per_device",
    "devices_total_bytes",
)  # fmt: skip


def compare_engines(question: Question) -> documents.Engines:
    """The document of `estimate --engine all`, or of several engines: plain data, exact integers, one row per engine.

    The question's engine is `all` or a comma-separated list. Each engine takes the settings it knows, and at least one
    engine must know each setting. If an engine refuses the model or the workload, its row has the reason. Raises
    UsageError (exit 2) for an unknown engine, and the errors of `make_case` for the formula itself.
    """
    if question.fits_context:
        raise UsageError("--context auto: several engines choose different contexts", "ask for one engine")
    engines = parse_engines([name.strip() for name in question.engine.split(",")])
    for name in engines:
        engine_class(name)
    settings = question.engine_settings or {}
    check_settings(engines, settings, has_device=question.devices is not None)
    rows, notes = [], []
    for name in engines:
        row, about = _row(name, question._replace(engine=name, engine_settings=settings_of(name, settings)))
        rows.append(row)
        notes += about
    plain = answer(question._replace(engine="logical", engine_settings=None, kv_memory_bytes=None)).document
    # The document has neither the speed nor the longest context.
    shared = [warning for warning in plain["warnings"] if warning["part"] not in ("throughput", "fit")]
    return {
        "schema_version": SCHEMA_VERSION,
        "model": plain["model"],
        "workload": plain["workload"],
        "tensor_parallel_size": plain["engine"]["tensor_parallel_size"],
        "pipeline_parallel_size": plain["engine"]["pipeline_parallel_size"],
        "data_parallel_size": plain["engine"]["data_parallel_size"],
        "stored_bytes": plain["kv_cache"]["stored_bytes"],
        "engines": rows,
        "warnings": [*shared, *notes],
    }


def _row(name: str, question: Question) -> tuple[documents.EngineRow, list[documents.Warning]]:
    """The row of one engine, and the warnings about its release. The row cannot show which release's rules count."""
    row: Any = {"model": question.model.name, "engine": name, **dict.fromkeys((*_FROM_ENGINE, *_FROM_CACHE))}
    row.update(fits=None, reason=None)
    try:
        document: Any = answer(question).document
    except (ModelError, UsageError) as error:
        row["reason"] = error.message
        return row, []
    row.update({key: document["engine"].get(key) for key in _FROM_ENGINE})
    row.update({key: document["kv_cache"][key] for key in _FROM_CACHE})
    row["fits"] = document["fit"]["fits"] if document["fit"] else None
    return row, [warning for warning in document["warnings"] if warning["code"] == RELEASE]
