"""A model on one device with one engine's settings, from which the numbers of a log are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcalc.engines import load_engine, resolve_kv_dtype
from kvcalc.engines.engine import Engine
from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.sharding import stages_of
from kvcalc.memory.workload import bind_workload, resolve_workload
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.planning.audit.figures import EQUAL, Figure
from kvcalc.planning.logs import Log
from kvcalc.records import NamedTuple


class Question(NamedTuple):
    """The run as described by the log and the options. Lengths are in tokens, types are names, None means unknown.

    `kv_dtype` is `auto` if the engine chooses it.
    """

    engine: str
    spec: ModelSpec
    context_tokens: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    dtype: str | None
    kv_dtype: str


class Setup(NamedTuple):
    """`spec` bound to its workload, one device's `share` of it, and the engine's memory rules.

    `ranks` is the number of devices that hold the model.
    """

    spec: ModelSpec
    share: ModelSpec
    dtype: Dtype
    kv_dtype_reason: str | None
    context_tokens: int
    rules: Engine
    settings: Mapping[str, str]
    notes: tuple[Note, ...]
    ranks: int = 1

    def pool(self, tokens: int | None = None) -> dict[str, int]:
        """The engine's figures about its pool for a request of `tokens` tokens. Default: the full context length.

        Raises ModelError (exit 3) if the engine has no pool, which is the case for encoders.
        """
        found = self.rules.blocks(self.share, self.dtype, tokens or self.context_tokens, 1, None)
        if not found:
            raise ModelError(f"{self.spec.name}: {self.rules.name}'s pool for encoders is not counted")
        return {name: value for name, value in found.items() if isinstance(value, int)}


class Reading(NamedTuple):
    """One way to read a log: the engine's settings, the assumptions beyond the log, and the function that checks it.

    `spec` is the model as the engine treats it, or None for the model itself. `release` is the engine's release, None
    for the newest. `kv_dtype` is the type of the cache if neither the log nor the user names one, None for the engine's
    default. `device_class` is the kind of device whose rules for the cache's type are tried, None for no device.
    """

    settings: Mapping[str, str]
    taken: tuple[str, ...]
    check: Callable[[Log, Setup], list[Figure]]
    spec: ModelSpec | None = None
    release: str | None = None
    kv_dtype: str | None = None
    device_class: str | None = None


def best_stage(check: Callable[[Log, Setup], list[Figure]], log: Log, setup: Setup) -> list[Figure]:
    """The figures of `check`, each of the pipeline stage for which it is equal, or of the first stage.

    Every stage prints its own lines, and not all of them say which stage it is.
    """
    if not setup.rules.bounds:
        return check(log, setup)
    stages = [check(log, setup._replace(share=stage)) for stage in stages_of(setup.share, setup.rules.bounds)]
    found: dict[tuple[int, str], Figure] = {}
    for figure in (figure for figures in stages for figure in figures):
        known = found.get((figure.line, figure.name))
        if known is None or (known.verdict != EQUAL and figure.verdict == EQUAL):
            found[figure.line, figure.name] = figure
    return list(found.values())


def make_setup(question: Question, reading: Reading) -> Setup:
    """The setup for one reading of a question. Raises UsageError (exit 2) and ModelError (exit 3) as estimate does."""
    spec, tensor_parallel_size = reading.spec or question.spec, question.tensor_parallel_size
    settings = reading.settings
    # If the log has no length, use the model's maximum, as the engines do.
    engine = f"{question.engine}@{reading.release}" if reading.release else question.engine
    asked = reading.kv_dtype if question.kv_dtype == "auto" and reading.kv_dtype else question.kv_dtype
    dtype, reason = resolve_kv_dtype(engine, spec, asked, settings, question.dtype, reading.device_class)
    context = question.context_tokens or spec.max_position_embeddings
    stages = question.pipeline_parallel_size
    workload = resolve_workload(
        spec, context, 1, question.dtype, dtype, tensor_parallel_size, pipeline_parallel_size=stages
    )
    bound = bind_workload(spec, workload)
    rules = load_engine(engine, bound, settings, stages)
    rules.check_ranks(bound, tensor_parallel_size)
    share = on_device(bound, tensor_parallel_size)
    return Setup(
        bound, share, workload.kv_dtype, reason, workload.context_tokens, rules, settings, workload.notes,
        tensor_parallel_size * stages,
    )  # fmt: skip
