"""The options with which an engine drafts tokens.

Sources: SpeculativeConfig, vllm/config/speculative.py, for the keys and the methods; the --speculative options of
sglang/srt/arg_groups, SGLang 0.5.23, where a step drafts `num_steps` tokens and checks one more.
"""

from __future__ import annotations

import json

from kvcalc.model.drafting import DFLASH, DRAFT, EAGLE, EAGLE1, MTP, NGRAM, Speculation
from kvcalc.planning.checkpoint import checkpoint_of
from kvcalc.records import NamedTuple

YOUR_HEAD = "<your EAGLE head>"

_VLLM_METHODS = {
    MTP: "mtp", EAGLE: "eagle3", EAGLE1: "eagle", DFLASH: "dflash", DRAFT: "draft_model", NGRAM: "ngram",
}  # fmt: skip
_SGLANG_ALGORITHMS = {
    MTP: "EAGLE", EAGLE: "EAGLE3", EAGLE1: "EAGLE", DFLASH: "DFLASH", DRAFT: "STANDALONE", NGRAM: "NGRAM",
}  # fmt: skip


class Drafting(NamedTuple):
    """A method of `kvcalc.model.drafting`, the tokens drafted per step, and the checkpoint that drafts them, or None.

    The model itself drafts with its MTP layers, and n-grams need no weights.
    """

    method: str
    num_tokens: int
    checkpoint: str | None


def drafting_of(asked: Speculation | None) -> Drafting | None:
    """How a printed command drafts tokens. None if it does not."""
    if asked is None:
        return None
    if asked.draft_model is not None:
        return Drafting(asked.method, asked.num_tokens, checkpoint_of(asked.draft_model).name)
    return Drafting(asked.method, asked.num_tokens, YOUR_HEAD if asked.method in (EAGLE, EAGLE1) else None)


def vllm_drafting(drafting: Drafting | None) -> list[str]:
    """The options of vLLM. The values are one JSON object."""
    if drafting is None:
        return []
    config: dict[str, object] = {"method": _VLLM_METHODS[drafting.method]}
    if drafting.checkpoint is not None:
        config["model"] = drafting.checkpoint
    return ["--speculative-config", json.dumps({**config, "num_speculative_tokens": drafting.num_tokens})]


def sglang_drafting(drafting: Drafting | None) -> list[str]:
    """The options of SGLang, for one chain of tokens and no tree."""
    if drafting is None:
        return []
    number, flags = drafting.num_tokens, ["--speculative-algorithm", _SGLANG_ALGORITHMS[drafting.method]]
    if drafting.checkpoint is not None:
        flags += ["--speculative-draft-model-path", drafting.checkpoint]
    if drafting.method in (NGRAM, DFLASH):
        return [*flags, "--speculative-num-draft-tokens", str(number + 1)]
    return [
        *flags, "--speculative-num-steps", str(number), "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(number + 1),
    ]  # fmt: skip
