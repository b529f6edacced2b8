"""SGLang's log."""

from __future__ import annotations

from kvcalc.engines.log import LogReader
from kvcalc.engines.log_lines import Log


class SglangLog(LogReader):
    """Reads SGLang's log."""

    def tensor_parallel_size(self, log: Log) -> int:
        """The part of --tp-size that splits the heads, after data-parallel ranks and the copies that divide a prompt.

        Source: derive_attn_tp_size, srt/runtime_context.py, SGLang 0.5.23.
        """
        size = super().tensor_parallel_size(log)
        if log.flag("enable_dp_attention"):
            return max(1, size // log.number("dp_size", "data-parallel size"))
        return max(1, size // (log.number("attn_dp_size", "attn_dp_size") * log.number("attn_cp_size", "attn_cp_size")))


LOG = SglangLog()
