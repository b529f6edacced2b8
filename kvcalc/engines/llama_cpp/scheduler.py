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

from typing import TYPE_CHECKING

from kvcalc.engines.scheduler import Schedule
from kvcalc.model.caches import ChunkedAttention, SlidingWindowAttention
from kvcalc.model.spec import all_caches, has_states

if TYPE_CHECKING:
    from kvcalc.engines.llama_cpp.engine import LlamaCpp

# n_batch (common/common.h).
_BATCH_TOKENS = 2048


def schedule(engine: LlamaCpp) -> Schedule:
    """The scheduler of a server. With windows or states, which it saves, a prompt is divided near its end."""
    slides = any(isinstance(cache, (SlidingWindowAttention, ChunkedAttention)) for cache in all_caches(engine.spec))
    saves_states = has_states(engine.spec) or (slides and not engine.chosen.swa_full)
    ends = (engine.chosen.ubatch_size + 4, 4) if saves_states else ()
    return Schedule("slots", _BATCH_TOKENS, reserves_answer=True, has_slots=True, part_ends=ends)
