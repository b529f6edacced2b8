"""The layers that draft tokens, as far as a log of vLLM tells."""

from __future__ import annotations

from kvcalc.errors import UsageError
from kvcalc.model.drafting import EAGLE, drafter_of, with_drafter
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.logs import Log

# Methods that draft without layers of their own (SpeculativeConfig, config/speculative.py, vLLM 0.33.0).
_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix")

_NO_LAYERS = "drafting takes no layers"
_LIKE_THE_LAST = "one drafting layer like the model's last, as an EAGLE head has"


def drafting_models(log: Log, spec: ModelSpec) -> list[tuple[ModelSpec, tuple[str, ...]]]:
    """The model with what drafts tokens, in the order to try, each with a remark.

    The model itself if nothing is drafted, or if its own MTP layers draft, which vLLM's rules add.
    """
    drafted, method = log.text("num_speculative_tokens"), (log.text("speculative_method") or "").casefold()
    if drafted in (None, "0") or (spec.num_draft_layers and (not method or "mtp" in method)):
        return [(spec, ())]
    none = (with_drafter(spec, None), (_NO_LAYERS,))
    if method in _WITHOUT_LAYERS:
        return [none]
    try:
        head = (with_drafter(spec, drafter_of(spec, None, EAGLE)), (_LIKE_THE_LAST,))
    except UsageError:
        # The log does not have the config of the head, and the model's config does not tell.
        return [none]
    return [head] if method.startswith("eagle") else [head, none]
