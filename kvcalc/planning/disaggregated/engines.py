"""What each engine needs for prefill and decode on separate instances.

- vLLM 0.33.0, NixlConnector (distributed/kv_transfer/kv_connector/v1/nixl). register_kv_caches (base_worker.py)
  registers the cache itself, so no device memory is taken for the transfer. A prefill instance keeps the cache of a
  prompt until it has been read (request_finished, pull_scheduler.py), and a decode instance takes the blocks of the
  whole prompt before (WAITING_FOR_REMOTE_KVS, v1/core/sched/scheduler.py). A consumer has one pipeline stage
  (NixlBaseConnectorWorker, base_worker.py), and a producer with several of them only pushes.
- SGLang 0.5.23, srt/disaggregation. A decode instance takes the tokens of a prompt before they are sent, and admits a
  request only if `num_reserved_decode_tokens` tokens are left for it and for every other one
  (DecodePreallocQueue._prealloc_required_tokens and _allocatable_token_budgets, decode.py; the default is in
  arg_groups/fields/disagg.py). It has no radix cache (handle_pd_disaggregation, arg_groups/pd_disaggregation_hook.py),
  and loads the cache of a retracted request from its copy in host memory (resume_retracted_reqs, decode.py).
- TensorRT-LLM 1.3. Every device has one buffer to send and one to receive, each for `max_tokens_in_buffer` tokens and
  one more block (CacheTransBufferManager::preAllocBufferSize, batch_manager/cacheTransBuffer.cpp).

`host_passes` is how often a request passes an engine's server one after the other. vllm-router asks the decode instance
when the prefill instance has answered, as does trtllm-serve (schedule_style context_first, llmapi/disagg_utils.py).
SGLang's router asks both at once.
"""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.records import NamedTuple


class SplitRules(NamedTuple):
    """An engine's rules for separate instances.

    `staged_prefill` and `staged_decode` say whether an instance may have several pipeline stages. `reserved_tokens` are
    left free for a request when it is admitted to a decode instance. `transfer_buffers` is the number of buffers of one
    prompt on each device. `decode_settings` are the options that a decode instance has in any case. `uncounted` names
    the memory that is not counted. `preempted_keep` is what a preempted request of a decode instance need not compute
    again: "nothing" but what it finds in the instance's own prefix cache, or "all", which SGLang copies to the host.
    """

    host_passes: int
    staged_prefill: bool
    staged_decode: bool
    reserved_tokens: int
    transfer_buffers: int
    decode_settings: tuple[str, ...]
    uncounted: str
    preempted_keep: str = "nothing"


RULES = {
    "vllm": SplitRules(2, False, False, 0, 0, (), "device memory that NIXL and UCX take for themselves"),
    "sglang": SplitRules(
        1, True, False, 512, 0, ("disable-radix-cache",),
        "the extra slots of a decode instance that runs at most 32 requests (--disaggregation-decode-extra-slots), and "
        "the memory that prefill and decode instances do not need for the other's graphs and activations",
        "all",
    ),
    "tensorrt-llm": SplitRules(2, True, True, 0, 2, (), "device memory that NIXL and UCX take for themselves"),
}  # fmt: skip


def rules_of(engine: str) -> SplitRules:
    """The rules of an engine, which may have a release. UsageError (exit 2) if it has no separate instances."""
    name = engine.partition("@")[0]
    if name not in RULES:
        raise UsageError(
            f"--disaggregate: {name} has no separate prefill and decode instances",
            f"--engine {', '.join(RULES)}",
        )
    return RULES[name]
