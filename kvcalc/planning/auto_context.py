"""`--context auto`: the longest context that fits, as engines choose it at their start.

- llama-server: --fit, which is on since December 2025 (pull request 16653). Without --ctx-size, it starts from the
  model's own length, and lowers it until every device keeps --fit-target free, but not below --fit-ctx. If that is not
  enough, it moves layers into host memory (common_params_fit_impl, common/fit.cpp, llama-cpp-python 0.3.36). llama.cpp
  interpolates between two lengths; kvcalc takes the longest one that fits.
- vLLM: --max-model-len auto, in 0.14.0 and not in 0.12.0: the longest length of which one request fits
  (_auto_fit_max_model_len, v1/core/kv_cache_planning.py, vLLM 0.33.0).
"""

from __future__ import annotations

from kvcalc.engines.options import Given
from kvcalc.errors import ModelError
from kvcalc.notes import Note
from kvcalc.planning.budget import budget
from kvcalc.planning.capacity import longest_context
from kvcalc.planning.case import Case
from kvcalc.planning.split import longest_context_of
from kvcalc.units import format_size

_MIB = 2**20
# llama.cpp rounds the context that it chooses down to a multiple of this.
_LLAMA_CPP_STEP = 256


def with_auto_context(case: Case) -> tuple[Case, Note]:
    """The case with the longest context that fits, and a note about it. The question of the result has this context.

    Raises ModelError (exit 3) if the model's own length, or what fits, is not known.
    """
    longest = case.spec.max_position_embeddings
    if longest is None:
        raise ModelError(
            f"{case.spec.name}: --context auto: the model's maximum length is not known", "give --context N"
        )
    batch = case.workload.batch_size
    if case.engine_name == "llama.cpp":
        given = Given("llama.cpp", case.settings)
        margin, least = given.count("fit-target") * _MIB, min(given.count("fit-ctx"), longest)
        # Slots that share the context share the model's length too.
        blocks = case.allocation.blocks(case.share, case.workload.kv_dtype, longest, batch, None)
        tokens = _longest(case.at(longest // (batch if blocks.get("n_stream") == 1 else 1), batch), margin)
        if tokens < longest:
            tokens = max(tokens - tokens % _LLAMA_CPP_STEP, least)
        left = f" and leaves {format_size(margin)} free (--fit-target)"
    else:
        tokens, left = max(_longest(case.at(longest, 1), 0), 1), ""
    text = f"--context auto is {tokens:,} tokens: "
    if tokens == longest:
        # The server measures the devices only, so the host's part may still be too large.
        text += "the model's maximum fits" + ("" if case.engine.placement is None else " on the device")
    elif case.engine_name == "llama.cpp" and tokens == least:
        text += "the least that llama-server chooses (--fit-ctx)"
        if case.engine.placement is None:
            text += "; -ngl auto also moves layers into host memory, as the server does"
    else:
        text += f"the longest context that fits{left}"
    found = case.at(tokens, batch)
    asked = found.question._replace(context_tokens=tokens, fits_context=False)
    return found._replace(question=asked), Note("workload", "auto-context", text)


def _longest(case: Case, margin: int) -> int:
    """The longest context that fits with `margin` bytes left on every device, at most the case's own."""
    found = budget(case)
    if isinstance(found, str):
        raise ModelError(f"{case.spec.name}: --context auto: it is not known what fits: {found}", "give --context N")
    if found.devices:
        longest = longest_context_of(found.devices, margin)
    else:
        longest = longest_context(case, found.pool_bytes - margin, found.pool_shrinkage)
    return case.workload.context_tokens if longest is None else min(case.workload.context_tokens, longest)
