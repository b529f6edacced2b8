"""vLLM's log, of V0 and V1."""

from __future__ import annotations

from kvcalc.engines.log import LogReader
from kvcalc.engines.log_lines import Log


class VllmLog(LogReader):
    """Reads vLLM's log."""

    memory_options = ("max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "enforce_eager")

    def pipeline_parallel_size(self, log: Log) -> int:
        """The number in the log, or else of the stages in a list of their layers, such as 16,32."""
        layers = log.text("pp_layer_partition")
        if layers is None or log.text("pipeline_parallel_size") is not None:
            return super().pipeline_parallel_size(log)
        return layers.count(",") + 1


LOG = VllmLog()
