"""Checks whether the numbers in an engine's log follow from the model, by computing each number again."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from kvcalc.errors import KvcalcError, UsageError
from kvcalc.memory.dtypes import DTYPES, parse_dtype
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note, describe_notes
from kvcalc.planning.audit.figures import INPUT, Figure, count_equal, count_unexplained
from kvcalc.planning.audit.models import model_of
from kvcalc.planning.audit.setup import Question, Reading, Setup, make_setup
from kvcalc.planning.logs import ENGINES, Log, read_log
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.units import parse_count, parse_vllm_tokens

# Sizes and types to try if numbers are unexplained: the common ones.
_OTHER_SIZES = (1, 2, 4, 8, 16)
_OTHER_TYPES = ("bf16", "fp8", "fp32")

# Engines' names for layouts and types. kvcalc derives vLLM's layout from the model and the type. SGLang's fp4 has a
# scale of 8 bits per 16 elements (MHATokenToKVPoolFP4, mem_cache/memory_pool.py, 0.5.23).
_LAYOUTS = {"fp8_ds_mla": "fp8", "fp4_e2m1": "nvfp4", "float4_e2m1fn_x2": "nvfp4"}


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
) -> dict[str, Any]:
    """The audit document of a log: plain data, one row per number, sizes in bytes.

    `text` is the log's text, or its bytes in pieces. The other arguments override what the log says. Raises UsageError
    (exit 2) if the log has no number that kvcalc knows, and ModelError (exit 3) if the model is unknown or the engine
    does not support it.
    """
    log = read_log(text, name, engine)
    spec = model or model_of(log, name)
    question = Question(
        log.engine, spec, context_tokens or _context(log), tensor_parallel_size or _tensor_parallel_size(log),
        parse_count(log.text("pipeline_parallel_size") or _stages(log), "the log's pipeline-parallel size"),
        _dtype(log.text("dtype")), (_dtype(log.text("kv_dtype")) or "auto") if kv_dtype is None else kv_dtype,
    )  # fmt: skip
    answer = _best(log, question)
    return {
        "schema_version": SCHEMA_VERSION,
        "log": {"name": name, "num_lines": log.num_lines},
        "engine": {
            "name": log.engine,
            "version": log.text("version"),
            "rules_version": answer.setup.rules.version,
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
            "tensor_parallel_size": question.tensor_parallel_size,
            "pipeline_parallel_size": question.pipeline_parallel_size,
            "kv_dtype": answer.setup.dtype.name,
            "kv_dtype_reason": answer.setup.kv_dtype_reason,
        },
        "equal": count_equal(answer.figures),
        "unexplained": count_unexplained(answer.figures),
        "inputs": sum(figure.verdict == INPUT for figure in answer.figures),
        "explanation": _explanation(log, question, answer),
        "figures": [figure._asdict() for figure in sorted(answer.figures, key=lambda figure: figure.line)],
        "unread": [line._asdict() for line in log.unread],
        "warnings": describe_notes(
            [*answer.setup.notes, *(Note("log", "contradiction", c) for c in log.contradictions)]
        ),
    }


def _best(log: Log, question: Question) -> Answer:
    """The reading with the fewest unexplained and then the most equal numbers. If several tie, the newest rules win.

    Readings that the engine would refuse are skipped. If all are refused, the first refusal is raised.
    """
    refusals: list[KvcalcError] = []
    best: Answer | None = None
    for reading in import_module(f"kvcalc.planning.audit.{ENGINES[log.engine]}").readings(log, question.spec):
        try:
            setup = make_setup(question, reading)
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


def _merit(answer: Answer) -> tuple[int, int]:
    return -count_unexplained(answer.figures), count_equal(answer.figures)


def _explanation(log: Log, question: Question, answer: Answer) -> str | None:
    """The single settings that would explain all numbers. None if there are none or all numbers are explained."""
    if not count_unexplained(answer.figures):
        return None
    others = [
        (f"--tp {size}", question._replace(tensor_parallel_size=size))
        for size in (() if question.engine == "llama.cpp" else _OTHER_SIZES)
        if size != question.tensor_parallel_size
    ]
    others += [
        (f"--kv-dtype {name}", question._replace(kv_dtype=name))
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


def _context(log: Log) -> int | None:
    text = log.text("context_tokens")
    return None if text is None else parse_vllm_tokens(text, "the log's length")


def _stages(log: Log) -> str:
    """The number of pipeline stages in a list of their layers, such as 16,32."""
    return str((log.text("pp_layer_partition") or "").count(",") + 1)


def _tensor_parallel_size(log: Log) -> int:
    size = parse_count(log.text("tensor_parallel_size") or "1", "the log's tensor-parallel size")
    if (log.text("enable_attention_dp") or "").casefold() == "true":
        # Every rank is an attention replica (Mapping.dp_size, TensorRT-LLM's mapping.py).
        return 1
    if (log.text("enable_dp_attention") or "").casefold() == "true":
        # Attention is divided only among the devices of one data-parallel rank (SGLang's attn_tp_size).
        return max(1, size // parse_count(log.text("dp_size") or "1", "the log's data-parallel size"))
    # The newer spelling, and the copies that divide a prompt: both are parts of --tp-size (derive_attn_tp_size,
    # srt/runtime_context.py, SGLang 0.5.23).
    copies = [parse_count(log.text(name) or "1", f"the log's {name}") for name in ("attn_dp_size", "attn_cp_size")]
    return max(1, size // (copies[0] * copies[1]))


def _dtype(text: str | None) -> str | None:
    """kvcalc's name of a type that the log names. UsageError if kvcalc does not know it."""
    if text is None:
        return None
    name = text.removeprefix("torch.").casefold()
    try:
        return parse_dtype(_LAYOUTS.get(name, name), "the log's type").name
    except UsageError as error:
        raise UsageError(error.message, "give the type with --kv-dtype") from None
