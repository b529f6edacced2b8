"""The interface of an engine's start-up log: the patterns of its lines, and how its numbers are computed again.

An engine whose logs kvcalc reads has the lines, `log.yaml`, and a module `log` in its folder, with a `LogReader` named
`LOG`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvcalc.engines.account import BlockPool
from kvcalc.engines.engine import Engine, part_of
from kvcalc.engines.log_lines import EQUAL, Figure, Log, Passes
from kvcalc.errors import ModelError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.sharding import stages_of
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.records import NamedTuple


class Setup(NamedTuple):
    """A model on one device with one engine's settings, from which the numbers of a log are computed.

    `spec` is bound to its workload, and `share` is one device's part of it. `ranks` is the number of devices that hold
    the model.
    """

    spec: ModelSpec
    share: ModelSpec
    dtype: Dtype
    kv_dtype_reason: str | None
    context_tokens: int
    engine: Engine
    settings: Mapping[str, str]
    notes: tuple[Note, ...]
    ranks: int = 1

    def pool(self) -> BlockPool:
        """The engine's figures about its pool for a request of the full context length.

        Raises ModelError (exit 3) if the engine has no pool, which is the case for encoders.
        """
        pool = self.engine.blocks(self.share, self.dtype, self.context_tokens, 1, None).pool
        if pool is None:
            raise ModelError(f"{self.spec.name}: {self.engine.name}'s pool for encoders is not counted")
        return pool


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


class LogReader:
    """Reads the start-up log of one engine, whose lines are in `log.yaml` (`log_lines.lines_of`).

    The facts `model`, `version`, `context_tokens`, `dtype`, `kv_dtype`, `tensor_parallel_size` and
    `pipeline_parallel_size` have the same names for all engines. So do the records of measured memory, with the part
    `size`: `weights`, `consumed` (weights and the driver), `non_torch`, `activation`, `graphs` and `checkpoint` (the
    files); and `device_memory` with `total` and `free`.
    """

    passes: type[Passes] = Passes
    memory_options: tuple[str, ...] = ()
    """The facts that are options of the engine and change its memory, but not the layout of its cache."""

    def readings(self, log: Log, spec: ModelSpec) -> Iterator[Reading]:
        """Every way to read the log that is consistent with its settings, the newest rules first.

        That is the function `readings` of the module `log.readings` in the engine's folder, unless the class has its
        own. The module loads the engine, so it is imported only when the log's engine is known.
        """
        readings: Iterator[Reading] = part_of(log.engine, "log.readings").readings(log, spec)
        return readings

    def model(self, log: Log, name: str) -> ModelSpec | None:
        """The model, called `name`, from the dimensions in the log. None if the log does not have all of them."""
        return None

    def tensor_parallel_size(self, log: Log) -> int:
        """The number of devices that split the heads of the attention."""
        return log.number("tensor_parallel_size", "tensor-parallel size")

    def pipeline_parallel_size(self, log: Log) -> int:
        """The number of pipeline stages."""
        return log.number("pipeline_parallel_size", "pipeline-parallel size")


def best_stage(check: Callable[[Log, Setup], list[Figure]], log: Log, setup: Setup) -> list[Figure]:
    """The figures of `check`, each of the pipeline stage for which it is equal, or of the first stage.

    Every stage prints its own lines, and not all of them say which stage it is.
    """
    if not setup.engine.bounds:
        return check(log, setup)
    stages = [check(log, setup._replace(share=stage)) for stage in stages_of(setup.share, setup.engine.bounds)]
    best: dict[tuple[int, str], Figure] = {}
    for figure in (figure for figures in stages for figure in figures):
        known = best.get((figure.line, figure.name))
        if known is None or (known.verdict != EQUAL and figure.verdict == EQUAL):
            best[figure.line, figure.name] = figure
    return list(best.values())
