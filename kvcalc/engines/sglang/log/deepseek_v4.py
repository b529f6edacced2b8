"""Checks SGLang's numbers for DeepSeek-V4: the bytes of a token, and the sizes of its pools.

Source: DSV4PoolConfigurator, model_executor/pool_configurator.py, SGLang 0.5.23. Earlier releases had compressor states
for every 128 tokens and, before them, pages without padding; public logs of both kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvcalc.engines.log import Reading, Setup, best_stage
from kvcalc.engines.log_lines import Figure, Log
from kvcalc.engines.sglang.deepseek_v4 import bytes_per_token
from kvcalc.records import NamedTuple

_INPUT = "an input: as many as fit in the memory"
_RATIO = 0.1  # DSV4_DEFAULT_SWA_FULL_TOKENS_RATIO


class Rules(NamedTuple):
    """How a release sizes the pools: padded pages, tokens per page of states, and whether windows have a ratio."""

    padded: bool
    state_page: int
    has_ratio: bool


_RULES = {
    Rules(True, 256, False): "windows for the requests that may run",
    Rules(True, 256, True): "windows for a share of the tokens",
    Rules(False, 256, True): "windows for a share of the tokens, and pages without padding",
    Rules(False, 128, True): "windows for a share of the tokens, pages without padding, and states for 128 tokens",
}


def readings(log: Log) -> Iterator[Reading]:
    """The newest rules first."""
    for rules, words in _RULES.items():
        yield Reading({}, (words,), partial(best_stage, partial(_check, rules)))


def _check(rules: Rules, log: Log, setup: Setup) -> list[Figure]:
    ratio = float(log.text("swa_full_tokens_ratio") or _RATIO) if rules.has_ratio else 0.0
    drafts = log.text("draft_tokens") is not None or log.text("drafts") is not None
    ring, figures = 16 if drafts else 8, []
    for record in log.named("v4_memory"):
        computed = bytes_per_token(setup.share, ratio, ring / rules.state_page, rules.padded)
        if drafts:
            # Room for one layer of the draft model.
            computed *= (setup.share.num_layers + 1) / setup.share.num_layers
        words = f"entries of a token, and {ratio:g} of its windows and states"
        figure = record.check_ratio("bytes", "bytes_per_full_token", computed, words)
        figures.append(figure._replace(printed=record.parts["bytes"], unit="bytes"))
    for record in log.named("v4_pools"):
        full, windows = int(record.parts["full"]), int(record.parts["windows"])
        figures.append(record.as_input("full", "full", "tokens", _INPUT))
        if rules.has_ratio:
            page = rules.state_page
            words = f"{ratio:g} of {full:,} tokens, in whole pages of {page}"
            figures.append(record.check_count("windows", "swa", int(full * ratio) // page * page, "tokens", words))
        else:
            figures.append(
                record.as_input("windows", "swa", "tokens", "an input: depends on the requests that may run")
            )
        for part, rate in (("c4", 4), ("c128", 128)):
            words = f"{full:,} tokens / {rate}"
            figures.append(record.check_count(part, part, full // rate, "slots", words))
        words = f"{windows:,} tokens / {rules.state_page} x {ring}"
        states = windows // rules.state_page * ring
        figures.append(record.check_count("states", "c4_state", states, "slots", words))
    for record in log.named("max_total_num_tokens"):
        figures.append(record.as_input("total", record.name, "tokens", _INPUT))
    return figures
