"""Checks whether the numbers in an engine's log follow from the model, by computing each number again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import engine_class, load_engine, log_reader, resolve_kv_dtype
from kvcalc.engines.log import Reading, Setup
from kvcalc.engines.log_lines import INPUT, Figure, Log, count_equal, count_unexplained, lines_of
from kvcalc.errors import KvcalcError, ModelError, UsageError
from kvcalc.memory.dtypes import DTYPES, parse_dtype
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.workload import bind_workload, resolve_workload
from kvcalc.model.drafting import MTP, Speculation
from kvcalc.model.layout import Layout
from kvcalc.model.presets import all_presets
from kvcalc.model.resolve import find_published, spec_of
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.audit.parts import describe_parts
from kvcalc.planning.logs import read_log
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.releases import parse_release
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.resolve import computed
from kvcalc.units import parse_vllm_integer

if TYPE_CHECKING:
    import kvcalc.documents as documents

# Sizes and types to try if numbers are unexplained: the common ones.
_OTHER_SIZES = (1, 2, 4, 8, 16)
_OTHER_TYPES = ("bf16", "fp8", "fp32")

# What publishers of quantized copies add to a model's name: formats of weights, which do not change the cache's layout.
_WEIGHTS = re.compile(
    r"(?:[-.](?:a?wq|awq-marlin|gptq|auto-?round|int[248]|fp[48]|nvfp4|mxfp4|w\d+a\d+|bf16|fp16|f16|f32|bnb|unsloth|"
    r"\dbit|gguf|mlx|quantized|dynamic|block|compressed-tensors|ud|imat|[if]?q\d(?:-[k01])?(?:-(?:xxs|xs|s|m|l|xl))?))+$"
)
_FILES = (".gguf", ".safetensors")

_HINT = "name it: --model PRESET (kvcalc models), or --model PATH of its config.json"


class Run(NamedTuple):
    """The run as described by the log and the options. Lengths are in tokens, types are names, None means unknown.

    `kv_dtype` is `auto` if the engine chooses it. `release` is the engine's, unless a reading has one of its own.
    """

    engine: str
    spec: ModelSpec
    context_tokens: int | None
    layout: Layout
    dtype: str | None
    kv_dtype: str
    release: str | None


class Answer(NamedTuple):
    """One reading of a log, with its setup and its figures."""

    reading: Reading
    setup: Setup
    figures: list[Figure]


def audit(
    text: str | Iterable[bytes],
    name: str,
    *,
    model: ModelSpec | None = None,
    engine: str | None = None,
    tensor_parallel_size: int | None = None,
    kv_dtype: str | None = None,
    context_tokens: int | None = None,
) -> documents.Audit:
    """The audit document of a log: plain data, one row per number, sizes in bytes.

    `text` is the log's text, or its bytes in pieces. The other arguments override what the log says; `engine` may end
    in a release. Raises UsageError (exit 2) if the log has no number that kvcalc knows, and ModelError (exit 3) if the
    model is unknown or the engine does not support it.
    """
    named, at, release = (engine or "").partition("@")
    log = read_log(text, name, None if engine is None else named)
    if at:
        parse_release(named, release)
        log = log.saying("version", release)
    spec = model or _model_of(log, name)
    reader = log_reader(log.engine)
    if context_tokens is None and (length := log.text("context_tokens")) is not None:
        context_tokens = parse_vllm_integer(length, "the log's length")
    run = Run(
        log.engine, spec, context_tokens,
        Layout(tensor_parallel_size or reader.tensor_parallel_size(log), reader.pipeline_parallel_size(log)),
        _dtype(log, "dtype"),
        (_dtype(log, "kv_dtype") or "auto") if kv_dtype is None else kv_dtype, log.release,
    )  # fmt: skip
    answer = _best(log, run)
    return {
        "schema_version": SCHEMA_VERSION,
        "log": {"name": name, "num_lines": log.num_lines},
        "engine": {
            "name": cast(Any, log.engine),
            "version": log.text("version"),
            "rules_version": answer.reading.release or type(answer.setup.engine).version,
            "settings": dict(answer.reading.settings),
            "rules": list(answer.reading.taken),
        },
        "model": {
            "name": spec.name,
            "source": spec.source,
            "model_type": spec.model_type,
            "log_name": log.text("model"),
        },
        "workload": {
            "context_tokens": answer.setup.context_tokens,
            "tensor_parallel_size": run.layout.tensor_parallel_size,
            "pipeline_parallel_size": run.layout.pipeline_parallel_size,
            "kv_dtype": answer.setup.dtype.name,
            "kv_dtype_reason": answer.setup.kv_dtype_reason,
        },
        "equal": count_equal(answer.figures),
        "unexplained": count_unexplained(answer.figures),
        "inputs": sum(figure.verdict == INPUT for figure in answer.figures),
        "explanation": _explanation(log, run, answer),
        "figures": [
            cast("documents.AuditFigure", figure._asdict())
            for figure in sorted(answer.figures, key=lambda figure: figure.line)
        ],
        "parts": describe_parts(log, _question(run, answer)),
        "unread": [cast("documents.AuditUnreadItem", line._asdict()) for line in log.unread],
        "warnings": describe_notes(
            [*answer.setup.notes, *(Note("log", "contradiction", c) for c in log.contradictions)]
        ),
    }


def _question(run: Run, answer: Answer) -> Question:
    """The question about the server that wrote the log, without its devices."""
    settings, speculative = dict(answer.reading.settings), None
    drafted = settings.pop("num-speculative-tokens", None)
    if drafted is not None and run.spec.num_draft_layers:
        speculative = Speculation(MTP, int(drafted))
    release = answer.reading.release or run.release
    # A quantized checkpoint's type is that of its unquantized parts.
    dtype = run.dtype if run.spec.quantization is None and run.spec.named_dtype is None else None
    return Question(
        run.spec, answer.setup.context_tokens, dtype=dtype, kv_dtype=answer.setup.dtype.name,
        engine=f"{run.engine}@{release}" if release else run.engine, engine_settings=settings,
        speculative=speculative,
    ).with_layout(run.layout.asked)  # fmt: skip


def _best(log: Log, run: Run) -> Answer:
    """The reading with the fewest unexplained and then the most equal numbers. If several tie, the newest rules win.

    Readings that the engine would refuse are skipped. If all are refused, the first refusal is raised.
    """
    refusals: list[KvcalcError] = []
    best: Answer | None = None
    for reading in log_reader(log.engine).readings(log, run.spec):
        try:
            setup = _set_up(run, reading)
            answer = Answer(reading, setup, reading.check(log, setup))
        except KvcalcError as error:
            refusals.append(error)
            continue
        if best is None or _merit(answer) > _merit(best):
            best = answer
        if not count_unexplained(best.figures):
            break
    if best is None:
        raise refusals[0]
    return best


def _set_up(run: Run, reading: Reading) -> Setup:
    """The setup for one reading of a run's log. Raises UsageError (exit 2) and ModelError (exit 3) as estimate does."""
    spec, _ = computed(engine_class(run.engine), reading.spec or run.spec, run.dtype)
    settings = reading.settings
    # If the log has no length, use the model's maximum, as the engines do.
    release = reading.release or run.release
    engine = f"{run.engine}@{release}" if release else run.engine
    kv_dtype = reading.kv_dtype if run.kv_dtype == "auto" and reading.kv_dtype else run.kv_dtype
    dtype, reason = resolve_kv_dtype(engine, spec, kv_dtype, settings, run.dtype, reading.device_class)
    context = run.context_tokens or spec.max_position_embeddings
    workload = resolve_workload(spec, context, 1, run.dtype, dtype, run.layout)
    bound = bind_workload(spec, workload)
    engine_class_of_run = load_engine(engine, bound, settings, run.layout.pipeline_parallel_size)
    layout = run.layout._replace(
        token_ranks=engine_class_of_run.token_ranks, prompt_ranks=engine_class_of_run.prompt_ranks
    )
    engine_class_of_run.check_ranks(bound, layout)
    share = on_device(bound, layout.tensor_parallel_size)
    return Setup(
        bound, share, workload.kv_dtype, reason, workload.context_tokens, engine_class_of_run, settings, workload.notes,
        run.layout.num_devices,
    )  # fmt: skip


def _merit(answer: Answer) -> tuple[int, int]:
    return -count_unexplained(answer.figures), count_equal(answer.figures)


def _explanation(log: Log, run: Run, answer: Answer) -> str | None:
    """The single settings each of which would explain all numbers. None if there are none, or if all numbers are
    explained."""
    if not count_unexplained(answer.figures):
        return None
    others = [
        (f"--tp {size}", run._replace(layout=run.layout._replace(tensor_parallel_size=size)))
        for size in (_OTHER_SIZES if engine_class(run.engine).splits_heads else ())
        if size != run.layout.tensor_parallel_size
    ]
    others += [
        (f"--kv-dtype {name}", run._replace(kv_dtype=name))
        for name in _OTHER_TYPES
        if DTYPES[name] != answer.setup.dtype
    ]
    held = []
    for words, other in others:
        try:
            if not count_unexplained(_best(log, other).figures):
                held.append(words)
        except KvcalcError:
            # The size does not divide the model, or the engine does not support the type.
            continue
    return f"all numbers are equal with {' or with '.join(held)}" if held else None


def _dtype(log: Log, fact: str) -> str | None:
    """kvcalc's name of a type that the log names. UsageError if kvcalc does not know it."""
    text = log.text(fact)
    if text is None:
        return None
    name = text.removeprefix("torch.").casefold()
    try:
        return parse_dtype(lines_of(log.engine).types.get(name, name), "the log's type").name
    except UsageError as error:
        raise UsageError(error.message, "give the type with --kv-dtype") from None


def _model_of(log: Log, name: str) -> ModelSpec:
    """The model from the dimensions in the log if they are complete, else the preset that the log names.

    The name is compared with the names of presets and of their releases, in full or the last part only, ignoring case
    and spaces, and then without the suffixes of quantized copies. A path is never opened. Raises ModelError (exit 3) if
    the log does not name a model or kvcalc does not know it.
    """
    logged_model = log.text("model")
    spec = log_reader(log.engine).model(log, logged_model or "model")
    if spec is not None:
        return spec
    if logged_model is None:
        raise ModelError(f"{name}: the log does not name its model", _HINT)
    wanted = list(_names_of(logged_model))
    for name_tried in wanted:
        published = find_published(name_tried)
        if published is not None:
            return published
    plain = set(map(_plain, wanted))
    for preset in all_presets():
        if not plain.isdisjoint(map(_plain, (preset.name, *preset.aliases))):
            return spec_of(preset)
    raise ModelError(f"{name}: the log names an unknown model, {logged_model[:80]!a}", _HINT)


def _names_of(name: str) -> Iterator[str]:
    """The name as it is, its last part, and that part without the suffixes of quantized copies."""
    yield name
    last = _plain(name)
    for file in _FILES:
        last = last.removesuffix(file)
    yield last
    base = _WEIGHTS.sub("", last)
    if base != last:
        yield base


def _plain(name: str) -> str:
    """The last part of a path or repository name, in lower case, with - for spaces and underscores.

    ModelScope's folders have ___ for a dot.
    """
    last = re.split(r"[/\\\\]", name.rstrip("/\\"))[-1].replace("___", ".")
    return last.casefold().replace(" ", "-").replace("_", "-")
