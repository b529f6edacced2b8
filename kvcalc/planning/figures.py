"""The figures of a cache, shared by the estimate document and the columns of a sweep."""

from __future__ import annotations

from kvcalc.memory.curves import read_sequence_bytes, stored_sequence_bytes
from kvcalc.planning.case import Case

FIGURES = (
    "stored_bytes", "total_bytes", "bytes_per_sequence", "bytes_per_token", "fixed_bytes_per_sequence",
    "bytes_per_device", "devices_total_bytes", "decode_read_bytes",
)  # fmt: skip


def cache_figures(case: Case) -> tuple[int, ...]:
    """The bytes of a case, in the order of `FIGURES`."""
    spec, workload, rules, device = case.cached, case.workload, case.rules, case.share
    tokens, batch, dtype = workload.context_tokens, workload.batch_size, workload.kv_dtype
    growth = rules.growth(spec, dtype, tokens)
    batches = workload.attention_batches(batch).items()
    return (
        batch * stored_sequence_bytes(spec, dtype, tokens),
        sum([replicas * rules.replica_bytes(spec, dtype, tokens, each) for each, replicas in batches]),
        growth.bytes_at(tokens),
        growth.bytes_per_token,
        growth.fixed_bytes,
        rules.batch_bytes(device, dtype, tokens, workload.attention_batch(batch)),
        workload.tensor_parallel_size
        * workload.prompt_ranks
        * sum([replicas * rules.all_stages_bytes(device, dtype, tokens, each) for each, replicas in batches]),
        batch * read_sequence_bytes(spec, dtype, tokens),
    )
