"""llama.cpp's scheduler: slots, and batches with the tokens of all of them.

Source: tools/server/server-context.cpp of llama.cpp, 2026: get_available_slot, and pre_decode of update_slots.

- Every slot has the cells of a whole request. A request gets a slot as soon as one is free: the one that was used
  longest ago, and of several the last one. Requests without a slot wait in the order of their arrival.
- A batch has the next tokens of all slots that answer, and then parts of prompts up to n_batch tokens, in the order of
  the slots and not of the arrivals (cont_batching, which is on by default). So several prompts may be computed in part.
- If the model has windows or recurrent states, a part of a prompt ends n_ubatch + 4 and 4 tokens before the end of the
  prompt, where the server saves the state (n_ctx_checkpoints; from pull request 20288 on).
- It runs one step at a time.
"""

from __future__ import annotations

from kvcalc.engines.scheduler import Schedule

# n_batch (common/common.h).
_BATCH_TOKENS = 2048


def schedule(ubatch_tokens: int, *, saves_states: bool) -> Schedule:
    """The scheduler of a server with this n_ubatch. `saves_states`: the model has windows or states to be saved."""
    ends = (ubatch_tokens + 4, 4) if saves_states else ()
    return Schedule("slots", _BATCH_TOKENS, reserves_answer=True, has_slots=True, part_ends=ends)
