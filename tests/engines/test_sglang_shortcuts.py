"""SGLang's account has shortcuts for a batch and for the longest context. They give what the account itself gives."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.engines.engine import Engine
from kvcalc.memory.dtypes import DTYPES
from tests.engines.models import ask, gated_delta, gpt_oss, plain
from tests.engines.shapes import renamed

BF16 = DTYPES["bf16"]
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": plain(), "windows": gpt_oss(), "states": gated_delta(),
    "windows alone": {**gpt_oss(2), "layer_types": ["sliding_attention"] * 2},
    "encoder": renamed(
        "whisper", encoder_layers=4, decoder_layers=2, encoder_attention_heads=6, decoder_attention_heads=6,
        d_model=384, max_source_positions=1500, max_target_positions=448,
    ),
}  # fmt: skip
SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"page-size": "64"},
    {"page-size": "64", "max-running-requests": "16"},
    {"disable-radix-cache": "true", "speculative-num-draft-tokens": "4"},
    {"disable-radix-cache": "true", "max-running-requests": "16", "max-total-tokens": "9000"},
    {"max-running-requests": "16", "max-mamba-cache-size": "60", "speculative-num-draft-tokens": "4"},
    {"disaggregation-mode": "decode"},
    {"disaggregation-mode": "decode", "max-running-requests": "9", "page-size": "64"},
    {"disaggregation-mode": "decode", "disaggregation-decode-extra-slots": "5", "speculative-num-draft-tokens": "4"},
    {"disaggregation-mode": "prefill", "speculative-num-draft-tokens": "4"},
)

# The request table of a model with an encoder is not modelled.
ASKED = [
    (name, settings)
    for name in CONFIGS
    for settings in SETTINGS
    if name != "encoder" or "max-running-requests" not in settings
]


def rules_of(name: str, settings: dict[str, str]) -> Engine:
    return load_engine("sglang", kvcalc.read_config(CONFIGS[name], "test", "test"), settings)


@pytest.mark.parametrize(("name", "settings"), ASKED, ids=str)
def test_a_line_over_the_batch_has_the_bytes_of_every_batch(name: str, settings: dict[str, str]) -> None:
    rules = rules_of(name, settings)
    line = rules.batch_line(rules.spec, BF16, 1000)
    if line is None:  # windows and tables are no line
        assert "windows" in name or {"max-running-requests", "disaggregation-decode-extra-slots"} & set(settings)
        return
    for batch in (1, 2, 15):
        assert line.fixed_bytes + batch * line.bytes_of_each == rules.batch_bytes(rules.spec, BF16, 1000, batch)


@pytest.mark.parametrize(("name", "settings"), ASKED, ids=str)
def test_the_longest_context_fits_and_one_more_token_does_not(name: str, settings: dict[str, str]) -> None:
    rules = rules_of(name, settings)
    for batch in (1, 3):
        for tokens in (1000, 1024, 5000):
            memory = rules.batch_bytes(rules.spec, BF16, tokens, batch)
            longest = rules.longest_context(rules.spec, BF16, batch, memory)
            if longest is None:  # the windows are full: any context fits
                assert name == "windows alone"
                continue
            assert longest >= tokens
            assert rules.batch_bytes(rules.spec, BF16, longest, batch) <= memory
            assert rules.batch_bytes(rules.spec, BF16, longest + 1, batch) > memory


@pytest.mark.parametrize(("name", "settings"), ASKED, ids=str)
def test_growth_continues_as_it_begins(name: str, settings: dict[str, str]) -> None:
    """To the byte without windows. The pool of windows has whole pages of a share of the other one, unevenly."""
    rules = rules_of(name, settings)
    tokens = 5 * 64
    growth = rules.growth(rules.spec, BF16, tokens)
    for later in (tokens, 8 * tokens):
        held = rules.held_bytes(rules.spec, BF16, later, 1)
        within = 2 * 64 * growth.bytes_per_token if "windows" in name else 0
        assert abs(growth.fixed_bytes + growth.bytes_per_token * later - held) <= within


def test_a_model_of_windows_alone_has_only_the_pool_of_windows() -> None:
    found = ask(CONFIGS["windows alone"], "sglang", 1000, 3)["engine"]
    assert (found["max_total_num_tokens"], found["swa_max_total_num_tokens"]) == (0, 3 * 1000)
