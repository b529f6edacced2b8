"""TensorRT-LLM's scheduler, and prefill and decode on separate instances.

Source: TensorRT-LLM 1.3, GuaranteedNoEvictPolicy and PyMicroBatchScheduler (_torch/pyexecutor/scheduler/scheduler.py,
which follow capacityScheduler.cpp and microBatchScheduler.cpp of cpp/tensorrt_llm/batch_manager).

- A request starts if there are blocks for its prompt and its longest answer beside those that all running ones may
  still take; if not, no later one does. That is the default of capacity_scheduler_policy (llmapi/llm_args.py).
- A step has one token of each running request and prompts, up to max_num_tokens. Prompts are not divided by default
  (enable_chunked_prefill), and one that does not fit into the step ends it. If max_num_tokens is not given, kvcalc
  assumes that a server with longer prompts has room for them.
- The overlap scheduler is on by default (disable_overlap_scheduler). With pipeline stages, other steps are in flight
  instead.
- Of the requests that arrive together, the longest prompt goes first to the DP rank with the fewest tokens of
  prompts, if it has fewer requests than the mean. A replica gets no more requests than it may run; the others wait for
  all of them (DefaultADPRouter, _torch/pyexecutor/scheduler/adp_router.py).
- With enable_balance, prompts wait until all DP ranks have one, for timeout_iters steps at most, and then for
  batching_wait_iters steps more (AttentionDpConfig, llmapi/llm_args.py).

Separate instances: every device has one buffer to send and one to receive, each for `max_tokens_in_buffer` tokens and
one more block (CacheTransBufferManager::preAllocBufferSize, batch_manager/cacheTransBuffer.cpp). trtllm-serve asks the
decode instance when the prefill instance has answered (schedule_style context_first, llmapi/disagg_utils.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines.scheduler import FEWEST_TOKENS, Balance, Disaggregation, Schedule

if TYPE_CHECKING:
    from kvcalc.engines.tensorrt_llm.engine import TensorrtLlm

DISAGGREGATION = Disaggregation(2, True, True, 0, 2, "device memory that NIXL and UCX take for themselves")


def schedule(engine: TensorrtLlm) -> Schedule:
    """The scheduler with the engine's settings."""
    chosen, stages = engine.chosen, max(1, len(engine.bounds))
    return Schedule(
        "guaranteed no evict", chosen.step_tokens, stages, divides=chosen.enable_chunked_prefill,
        overlaps=not chosen.disable_overlap_scheduler and stages == 1, reserves_answer=True, routing=FEWEST_TOKENS,
        is_exact=chosen.max_num_tokens is not None,
        balance=Balance(chosen.timeout_iters, chosen.batching_wait_iters) if chosen.enable_balance else None,
    )  # fmt: skip
