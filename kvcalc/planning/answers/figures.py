"""The figures of a cache, shared by the estimate document and the columns of a sweep."""

from __future__ import annotations

from kvcalc.memory.curves import stored_sequence_bytes
from kvcalc.planning.cases.case import Case
from kvcalc.records import NamedTuple


class CacheFigures(NamedTuple):
    """The bytes of a case: the keys of `kv_cache` in the JSON document."""

    stored_bytes: int
    total_bytes: int
    bytes_per_sequence: int
    bytes_per_token: int
    fixed_bytes_per_sequence: int
    bytes_per_device: int
    devices_total_bytes: int
    decode_read_bytes: int


FIGURES = CacheFigures._fields


def cache_figures(case: Case) -> CacheFigures:
    """The bytes of a case."""
    spec, workload, allocation, device = case.cached, case.workload, case.allocation, case.share
    tokens, batch, dtype = workload.context_tokens, workload.batch_size, workload.kv_dtype
    growth = allocation.growth(spec, dtype, tokens)
    batches = workload.attention_batches(batch).items()
    return CacheFigures(
        batch * stored_sequence_bytes(spec, dtype, tokens),
        sum([replicas * allocation.replica_bytes(spec, dtype, tokens, each) for each, replicas in batches]),
        growth.bytes_at(tokens),
        growth.bytes_per_token,
        growth.fixed_bytes,
        allocation.batch_bytes(device, dtype, tokens, workload.attention_batch(batch)),
        workload.tensor_parallel_size
        * workload.prompt_ranks
        * sum([replicas * allocation.all_stages_bytes(device, dtype, tokens, each) for each, replicas in batches]),
        batch * allocation.reads(spec, dtype).bytes_at(tokens),
    )
