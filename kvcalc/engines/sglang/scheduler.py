"""SGLang's scheduler, and prefill and decode on separate instances.

Source: SGLang 0.5.23, get_next_batch_to_run, _get_new_batch_prefill_raw, update_running_batch and on_idle
(srt/managers/scheduler.py), PrefillAdder (schedule_policy.py), retract_decode (schedule_batch.py), and in
scheduler_components NewTokenRatioTracker (new_token_ratio_tracker.py) and SchedulerRecvSkipper (recv_skipper.py). The
policy is the default, fcfs.

- If requests wait, a step computes prompts, up to chunked_prefill_size tokens, while decoding requests stand still. A
  prompt that is too long for the step is continued in the next one. No other prompt joins a step that has
  max_prefill_tokens tokens of prompts (budget_state).
- With enable_mixed_chunk, off by default, a step that computes prompts also has the next tokens of running requests,
  which count in both limits. They sit out if the prompts leave no room in the cache.
- The scheduler receives requests after every step that computes prompts, and otherwise after scheduler_recv_interval
  decode steps, 1 by default.
- A request starts if its prompt, its answer and a page are fewer tokens than are free, without the part of the answers
  of decoding requests that they are expected to take: new_token_ratio, which is 0.7 at first and falls to 0.098 in 600
  decode steps. schedule_conservativeness multiplies 0.7, up to 1. It is 0.7 again when nothing is left to run. If a
  request may not start, no other is tried until one has left, unless no request decodes: the batch that notes it is
  then replaced. The answers of requests with ignore_eos count in full since 0.5.23 (and not yet in 0.5.20), but
  simulated requests end as those of users do.
- If the next decode step finds no room, the requests with the shortest answers so far are retracted. They wait at the
  end of the queue, and the ratio rises to what the others were seen to take. What may be left of them in the radix
  cache is not found here (release_req, srt/managers/schedule_batch.py).
- With overlap (event_loop_overlap; disable_overlap_schedule is off by default), a step is scheduled while the one
  before it runs. Requests that end with that one keep their places and tokens until then, but decode no further
  (_reqs_finishing_inflight), and if the next decode step finds no room, it waits for their tokens. A retracted request
  loses its token of the step that runs.
- Requests are read by a process of their own (TokenizerManager, srt/managers/tokenizer_manager.py), and the scheduler
  takes what is there before each step. When the clients of a benchmark start together, the longer of reading requests
  and computing their prompts counts (Prompts.hidden).
- The radix cache keeps one copy of a prefix (insert in mem_cache/radix_cache.py), in whole pages, and evicts leaves by
  their last access.
- DP ranks get requests in turn (round_robin_scheduler, srt/managers/data_parallel_controller.py), which is
  what load_balance_method means by default (handle_load_balance_method, arg_groups/serving_hook.py).

Separate instances: srt/disaggregation. A decode instance takes the tokens of a prompt before they are sent, and admits
a request only if `num_reserved_decode_tokens` tokens are left for it and for every other one
(DecodePreallocQueue._prealloc_required_tokens and _allocatable_token_budgets, decode.py; the default is in
arg_groups/fields/disagg.py). It has no radix cache (handle_pd_disaggregation, arg_groups/pd_disaggregation_hook.py),
and loads the cache of a retracted request from its copy in host memory (resume_retracted_reqs, decode.py). A prefill
instance forgets that its batch was full (batch_is_full, prefill.py). SGLang's router asks both instances at once. A
request that is sent or received has a row of the request table, like one that runs (DecodeReqToTokenPool, decode.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines.command import DECODE, PREFILL
from kvcalc.engines.scheduler import ROUND_ROBIN, Disaggregation, NewTokenRatio, Schedule
from kvcalc.throughput.scheduling import STEP_TOKENS

if TYPE_CHECKING:
    from kvcalc.engines.sglang.engine import Sglang

# SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR, SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS,
# SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION and SGLANG_RETRACT_DECODE_STEPS (srt/environ.py).
_FIRST_RATIO, _LEAST_FACTOR, _DECAY_STEPS, _MOST_TOKENS, _RETRACT_STEPS = 0.7, 0.14, 600, 4096, 20

DISAGGREGATION = Disaggregation(
    1, True, False, 512, 0, "device memory that NIXL and UCX take for themselves",
    {role: {"disaggregation-mode": role} for role in (PREFILL, DECODE)}, limits_held=True, preempted_keep="all",
)  # fmt: skip


def schedule(engine: Sglang) -> Schedule:
    """The scheduler of one DP rank with the engine's settings."""
    chosen = engine.chosen
    tokens, first = chosen.chunked_prefill_size or STEP_TOKENS, min(_FIRST_RATIO * chosen.schedule_conservativeness, 1)
    return Schedule(
        "prefill first", tokens, mixes=chosen.enable_mixed_chunk, overlaps=not chosen.disable_overlap_schedule,
        new_tokens=NewTokenRatio(first, first * _LEAST_FACTOR, _DECAY_STEPS, _MOST_TOKENS, _RETRACT_STEPS),
        merges_prefixes=True, routing=ROUND_ROBIN, receives_every=chosen.scheduler_recv_interval,
        enough_tokens=chosen.max_prefill_tokens if chosen.max_prefill_tokens < tokens else None, reads_beside=True,
    )  # fmt: skip
