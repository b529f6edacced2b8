"""A model on one device under one engine's settings: what every number of a log is computed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.engines import Engine, load_engine, resolve_kv_dtype
from kvcalc.memory.kv_cache import on_device
from kvcalc.memory.workload import bind_workload, resolve_workload
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.planning.audit.figures import Figure
from kvcalc.planning.logs import Log


class Question(NamedTuple):
    """What was run, as the log and the options say: lengths in tokens, types by name, None where nobody says.

    `kv_dtype` is `auto` where it is left to the engine.
    """

    engine: str
    spec: ModelSpec
    context_tokens: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    dtype: str | None
    kv_dtype: str


class Setup(NamedTuple):
    """`spec` with its workload, one device's `share` of it, and the engine's accounting."""

    spec: ModelSpec
    share: ModelSpec
    dtype: Dtype
    kv_dtype_reason: str | None
    context_tokens: int
    rules: Engine
    settings: Mapping[str, str]
    notes: tuple[Note, ...]

    def pool(self, tokens: int | None = None) -> dict[str, int]:
        """What the engine says of its pool for a request of so many tokens, at full length where none are given.

        Raises ModelError (exit 3) where it keeps none: for encoders.
        """
        found = self.rules.blocks(self.share, self.dtype, tokens or self.context_tokens, 1, None)
        if not found:
            raise ModelError(f"{self.spec.name}: {self.rules.name}'s pool for encoders is not counted")
        return {name: value for name, value in found.items() if isinstance(value, int)}


class Reading(NamedTuple):
    """One way to read a log: settings of the engine, what was taken that the log does not say, and the check of it.

    `spec` is the model as the engine takes it there; None where that is the model itself. `release` is the engine's,
    None for the newest.
    """

    settings: Mapping[str, str]
    taken: tuple[str, ...]
    check: Callable[[Log, Setup], list[Figure]]
    spec: ModelSpec | None = None
    release: str | None = None


def make_setup(question: Question, reading: Reading) -> Setup:
    """The setup of a question read in one way. Raises what its estimate raises: UsageError (2), ModelError (3)."""
    spec, tensor_parallel_size = reading.spec or question.spec, question.tensor_parallel_size
    settings = reading.settings
    dtype, reason = resolve_kv_dtype(question.engine, spec, question.kv_dtype, settings, question.dtype)
    # Without a length in the log it is the model's own, as in the engines.
    context = question.context_tokens or spec.max_position_embeddings
    stages = question.pipeline_parallel_size
    workload = resolve_workload(
        spec, context, 1, question.dtype, dtype, tensor_parallel_size, pipeline_parallel_size=stages
    )
    bound = bind_workload(spec, workload)
    engine = f"{question.engine}@{reading.release}" if reading.release else question.engine
    rules = load_engine(engine, bound, settings, stages)
    share = on_device(bound, tensor_parallel_size)
    return Setup(bound, share, workload.kv_dtype, reason, workload.context_tokens, rules, settings, workload.notes)
