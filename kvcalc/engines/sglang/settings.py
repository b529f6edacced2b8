"""SGLang's own options, parsed."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.options import Given
from kvcalc.records import NamedTuple
from kvcalc.units import parse_tokens


class Settings(NamedTuple):
    """If `max_running_requests` is None, SGLang derives it from the memory, and the request table is not counted.

    `max_mamba_cache_size` is the number of states. If it is None, there are as many as the sequences need.
    `chunked_prefill_size` is the number of tokens in a prefill step, None if it is not known.
    `speculative_num_draft_tokens` is the number of tokens that a step checks, None if it drafts none, and
    `speculative_eagle_topk` the branches of a tree of drafts.
    """

    page_size: int
    swa_full_tokens_ratio: float
    max_running_requests: int | None
    context_length: int | None
    max_mamba_cache_size: int | None
    mamba_full_memory_ratio: float
    disable_radix_cache: bool
    speculative_num_draft_tokens: int | None
    speculative_eagle_topk: int
    chunked_prefill_size: int | None
    attn_cp_size: int


def parse_settings(settings: Mapping[str, str], default_page_size: int) -> Settings:
    """Parse and check the given options. Raises UsageError (exit 2)."""
    given = Given("sglang", settings)
    context = parse_tokens(settings["context-length"], "--context-length") if "context-length" in settings else None
    return Settings(
        given.count("page-size", default_page_size),
        given.share("swa-full-tokens-ratio"),
        given.optional_count("max-running-requests"),
        context,
        given.optional_count("max-mamba-cache-size"),
        given.ratio("mamba-full-memory-ratio"),
        "disable-radix-cache" in settings,
        given.optional_count("speculative-num-draft-tokens"),
        given.count("speculative-eagle-topk"),
        given.optional_count("chunked-prefill-size"),
        given.count("attn-cp-size"),
    )
