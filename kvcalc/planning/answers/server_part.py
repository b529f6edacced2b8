"""The `server` part of a document: whether the server starts, what to try if not, one user's speed, and its command.

`fit`, `check` and `estimate` with a device share it. The verdict has three values: a server whose free memory may be
above or below zero within its range may start or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from kvcalc.engines import SERVERS, context_limits, engine_class, start_command
from kvcalc.engines.command import ServerArguments
from kvcalc.errors import KvcalcError
from kvcalc.model.variants import WhatIf
from kvcalc.planning.answers.estimate import Answer, answer
from kvcalc.planning.answers.throughput import describe_throughput
from kvcalc.question.question import Question
from kvcalc.server.capacity import usable_context
from kvcalc.server.case import Case, make_case
from kvcalc.server.checkpoint import checkpoint_of, drafting_of
from kvcalc.server.layout import server_context
from kvcalc.server.starts import Refused, refused_start, starts_within
from kvcalc.writing.shell import join

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.engines.reading import Reader

_SMALLER_CACHE = "fp8"
# One user's speed is that of an ordinary chat, whatever the server's longest context is.
_USUAL_CONTEXT = 4096
_OPTION = re.compile(r"(--[a-z0-9-]+) ([\w.]+)")


def describe_server(
    case: Case, estimate: Answer, smallest: documents.SmallestLayout | None, offload: documents.HostOffload | None,
    lifts_limit: bool = False,
) -> documents.Server:  # fmt: skip
    """The `server` part for a case and its estimate. `lifts_limit` is whether it takes contexts beyond the model's.

    `smallest` and `offload` are what `planning.answers.fit` suggests if the workload does not fit.
    """
    document: Any = estimate.document
    refused = refused_start(case, document, lifts_limit)
    starts, reason = (False, refused.reason) if refused is not None else starts_within(case, document["fit"])
    changes = [] if starts else list(_changes(case.question, document, refused, smallest, offload))
    described = {
        "starts": starts,
        "reason": reason,
        "try": changes,
        "command": start_words(case),
        "one_user": None if starts is False else _one_user(case, document["fit"]["max_context_tokens"]),
    }
    return cast("documents.Server", described)


def _changes(
    question: Question, document: Any, refused: Refused | None, smallest: documents.SmallestLayout | None,
    offload: documents.HostOffload | None,
) -> Iterator[documents.ServerChange]:  # fmt: skip
    """The smallest changes with which the server starts, each an option of its engine and the value."""
    reader, fit = reader_of(question.engine), document["fit"]
    if refused is not None:
        if refused.change is not None:
            yield {"option": refused.change[0], "value": refused.change[1]}
        return
    names = () if reader is None else tuple(reader.fields.values())
    tokens = usable_context(fit)
    option = engine_class(question.engine).context_option
    if option and question.context_tokens and tokens and tokens < document["workload"]["context_tokens"]:
        # The slots of llama.cpp have one option together.
        yield {"option": option, "value": str(tokens * question.batch_size)}
    if reader is not None and "kv_dtype" in names and document["kv_cache"]["dtype"] != _SMALLER_CACHE:
        try:
            smaller = answer(question._replace(kv_dtype=_SMALLER_CACHE)).document["fit"]
        except KvcalcError:
            smaller = None
        if smaller and smaller["verdict"] == "fits":
            values = {ours: theirs for theirs, ours in reader.values.get("kv_dtype", {}).items()}
            yield {"option": reader.flag_for("kv_dtype"), "value": values.get(_SMALLER_CACHE, _SMALLER_CACHE)}
    # One option changes: more devices in a machine, or more machines.
    sizes = ("tensor_parallel_size", "pipeline_parallel_size")
    changed = [size for size in sizes if smallest and cast(Any, smallest)[size] != (getattr(question, size) or 1)]
    if reader is not None and smallest and len(changed) == 1 and changed[0] in names:
        yield {"option": reader.flag_for(changed[0]), "value": str(cast(Any, smallest)[changed[0]])}
    for name, option in (("n_gpu_layers", "--n-gpu-layers"), ("n_cpu_moe", "--n-cpu-moe")):
        moved = offload and cast(Any, offload)[name]
        if moved:
            yield {"option": option, "value": str(moved["value"])}


def describe_refusal(error: KvcalcError) -> dict[str, Any]:
    """The keys that every document of a server has which does not start."""
    return {
        "starts": False,
        "reason": error.message.removeprefix("does not start: "),
        "try": _changes_in(error.hint),
    }


def _changes_in(hint: str | None) -> list[documents.ServerChange]:
    """The options and values that a hint names, if it names nothing else: `use --tp 2 or --ep 4`."""
    matches = [_OPTION.fullmatch(words) for words in (hint or "").removeprefix("use ").split(" or ")]
    return [{"option": match[1], "value": match[2]} for match in matches if match is not None] if all(matches) else []


@cache
def reader_of(engine: str) -> Reader | None:
    """The reader of an engine's command, whose release does not matter. None if the engine has no server."""
    from kvcalc.engines.reading import readers

    return next((reader for reader in readers() if reader.engine == engine.partition("@")[0]), None)


def start_words(case: Case) -> str | None:
    """The command that starts the server of a case.

    None if kvcalc cannot start its engine so, or if the question sets what no option of the engine says.
    """
    question, workload, name = case.question, case.workload, case.engine_name
    is_hypothetical = question.what_if != WhatIf() or question.weights_bytes is not None
    if name not in SERVERS or is_hypothetical or question.kv_memory_bytes is not None:
        return None
    default, _ = context_limits(question.engine, question.model)
    context = server_context(question, question.context_tokens or workload.context_tokens)
    is_default = context == default and not case.engine_class.chooses_context
    arguments = ServerArguments(
        workload.layout, None if is_default else context,
        workload.batch_size if case.engine_class.allocates_slots and workload.batch_size > 1 else None,
        workload.kv_dtype.name, question.engine_settings or {}, drafting=drafting_of(question.speculative),
        engine=question.engine,
        prompt_division=case.engine_class.prompt_division(question.model, question.engine_settings or {}),
    )  # fmt: skip
    words = start_command(name).on_machines(
        checkpoint_of(question.model, _asked_dtype(case)), arguments, case.devices.gpu.machine_devices
    )
    return None if words is None else join(words)


def _asked_dtype(case: Case) -> str | None:
    """The requested type of the weights. None for the model's own, with which the case replaces it."""
    dtype = case.question.dtype
    return None if dtype == case.spec.named_dtype else dtype


def _one_user(case: Case, longest: int | None) -> documents.OneUser | None:
    """The speed of one request alone, with a short context of at most `longest` tokens. None if it is not known."""
    tokens = min(_USUAL_CONTEXT, case.workload.context_tokens, longest or _USUAL_CONTEXT)
    speed = case.question.speed
    alone = speed and speed._replace(input_tokens=None, output_tokens=None, concurrency=None)
    try:
        single = make_case(case.question._replace(context_tokens=tokens, batch_size=1, speed=alone))
        step = describe_throughput(single, [])
    except KvcalcError:
        return None
    if step is None:
        return None
    tokens_of_step = step["tokens_per_second_per_sequence"] * step["decode_step_seconds"]
    low, high = (None if end is None else end / tokens_of_step for end in (step["low_seconds"], step["high_seconds"]))
    return {
        "context_tokens": tokens,
        "tpot_seconds": step["decode_step_seconds"] / tokens_of_step,
        "tpot_low_seconds": low,
        "tpot_high_seconds": high,
        "prefill_seconds": step["prefill_seconds"],
        "tokens_per_second": step["tokens_per_second_per_sequence"],
    }
