"""`--context auto`: the longest context that fits, as engines choose it at their start (`Engine.auto_context`)."""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.notes import Note
from kvcalc.planning.budget import budget
from kvcalc.planning.capacity import longest_context
from kvcalc.planning.case import Case
from kvcalc.planning.split import longest_context_of


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
    blocks = case.allocation.blocks(case.share, case.workload.kv_dtype, longest, batch, None)
    how = case.engine_class.auto_context(case.settings, longest, batch, blocks.get("n_stream") == 1)
    tokens = _longest(case.at(how.most_tokens, how.sequences), how.margin_bytes)
    if tokens < longest:
        tokens = max(tokens - tokens % how.step_tokens, how.least_tokens)
    text = f"--context auto is {tokens:,} tokens: "
    if tokens == longest:
        # The server measures the devices only, so the host's part may still be too large.
        text += "the model's maximum fits" + ("" if case.engine.placement is None else " on the device")
    elif how.least_reason and tokens == how.least_tokens:
        text += how.least_reason
        if case.engine.placement is None:
            text += "; -ngl auto also moves layers into host memory, as the server does"
    else:
        text += "the longest context that fits" + (f" and {how.margin_reason}" if how.margin_reason else "")
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
