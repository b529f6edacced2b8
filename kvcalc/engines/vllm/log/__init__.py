"""vLLM's log, of V0 and V1."""

from __future__ import annotations

from collections.abc import Iterator

from kvcalc.engines.log import LogReader, Reading
from kvcalc.engines.log_lines import Log
from kvcalc.model.spec import ModelSpec


class VllmLog(LogReader):
    """Reads vLLM's log."""

    def readings(self, log: Log, spec: ModelSpec) -> Iterator[Reading]:
        from kvcalc.engines.vllm.log.readings import readings

        return readings(log, spec)

    def pipeline_parallel_size(self, log: Log) -> int:
        """The number in the log, or else of the stages in a list of their layers, such as 16,32."""
        layers = log.text("pp_layer_partition")
        if layers is None or log.text("pipeline_parallel_size") is not None:
            return super().pipeline_parallel_size(log)
        return layers.count(",") + 1


LOG = VllmLog()
