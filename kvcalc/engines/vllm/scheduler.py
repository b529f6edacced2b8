"""vLLM's scheduler, and prefill and decode on separate instances.

Source: vLLM 0.33.0, Scheduler.schedule (v1/core/sched/scheduler.py).

- First every running request gets its tokens, one or the next chunk of its prompt. If one finds no block, the last
  running request is preempted: it goes to the head of the queue and its cache is computed again, but for the blocks
  that it still finds in the prefix cache.
- If none was preempted, requests start in the order of their arrival while there are tokens in the step, fewer than
  max_num_seqs run, and there are free blocks for the whole prompt (scheduler_reserve_full_isl). max_num_batched_tokens
  is at least max_num_seqs. Without enable_chunked_prefill, one whose prompt does not fit into the step ends it.
- With asynchronous scheduling, the default, requests that end with a step keep their places and blocks until the next
  step is scheduled. With pipeline stages, other steps are in flight instead.
- When a request ends, its whole blocks are freed from the last one to the first, to the end of the queue of free
  blocks, and others to its front (free in v1/core/single_type_kv_cache_manager.py, free_blocks in
  v1/core/block_pool.py).
- A request goes to the DP rank with the fewest unfinished requests; waiting ones count up to four times if
  more than half of the cache is used (DPLBAsyncMPClient.get_core_engine_for_request, v1/engine/core_client.py). kvcalc
  takes the numbers of the moment, not those of the last report, up to 100 ms ago.

Separate instances: NixlConnector (distributed/kv_transfer/kv_connector/v1/nixl). register_kv_caches (base_worker.py)
registers the cache itself, so no device memory is taken for the transfer. A prefill instance keeps the cache of a
prompt until it has been read (request_finished, pull_scheduler.py), and a decode instance takes the blocks of the whole
prompt before (WAITING_FOR_REMOTE_KVS, v1/core/sched/scheduler.py). A consumer has one pipeline stage
(NixlBaseConnectorWorker, base_worker.py), and a producer with several of them only pushes. vllm-router asks the decode
instance when the prefill instance has answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines.scheduler import Disaggregation, Schedule

if TYPE_CHECKING:
    from kvcalc.engines.vllm.engine import Vllm

DISAGGREGATION = Disaggregation(2, False, False, 0, 0, "device memory that NIXL and UCX take for themselves")


def schedule(engine: Vllm) -> Schedule:
    """The scheduler with the engine's settings."""
    chosen, stages = engine.chosen, engine.chosen.pipeline_parallel_size
    return Schedule(
        "running first", chosen.max_num_batched_tokens, stages, divides=chosen.enable_chunked_prefill,
        overlaps=chosen.async_scheduling and stages == 1, finds_preempted=chosen.enable_prefix_caching,
        is_exact=not chosen.enable_chunked_prefill,
    )  # fmt: skip
