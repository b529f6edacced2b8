"""A prefix that is found again while tokens are drafted, against a small cache of hashed blocks."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import engine_class
from kvcalc.engines.prefixes import PLAIN, Matching
from kvcalc.errors import ModelError, UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.question.question import CacheReuse, SpeedQuestion
from kvcalc.server.drafting import matching_of
from kvcalc.throughput.hardware import find_devices
from tests.conftest import loaded
from tests.documents import estimate

PREFIX, CONTEXT, BATCH = 8000, 16384, 8
EAGLE3 = Speculation("eagle", 3, 2.0)


def ask(name: str, engine: str, drafts: Speculation | None, prefix: int = PREFIX, **asked: Any) -> dict[str, Any]:
    reuse = asked.pop("reuse", CacheReuse(prefix))
    return estimate(
        loaded(name), engine=engine, context_tokens=CONTEXT, batch_size=BATCH, speculative=drafts,
        reuse=reuse, **asked,
    )  # fmt: skip


def found_in_blocks(common: int, prompt: int, block: int, ahead: int, drops: bool) -> int:
    """The tokens that a second prompt finds of a first one with `common` equal tokens.

    The key of a block is all text up to its end and the `ahead` tokens after it.
    """
    first, second = ([*range(common), *range(start, start + prompt - common)] for start in (10**6, 2 * 10**6))
    cached = {tuple(first[: end + ahead]) for end in range(block, prompt - ahead + 1, block)}
    blocks = 0
    while (end := (blocks + 1) * block) < prompt and tuple(second[: end + ahead]) in cached:
        blocks += 1
    return max(blocks - drops, 0) * block


@pytest.mark.parametrize(
    ("name", "engine", "drafts", "block", "ahead", "drops"),
    [
        ("llama-3.1-8b", "vllm", EAGLE3, 16, 1, False),
        ("llama-3.1-8b", "vllm", Speculation("ngram", 3, 2.0), 16, 0, False),
        ("llama-3.1-8b", "vllm@0.30", EAGLE3, 16, 0, True),
        ("llama-3.1-8b", "vllm@0.30", Speculation("ngram", 3, 2.0), 16, 0, False),
        ("deepseek-v3", "vllm", Speculation("mtp", 3, 2.0), 16, 1, False),
        ("minimax-m2.5", "vllm", Speculation("mtp", 3, 2.0), 16, 3, False),  # three modules
        ("minimax-m2.5", "vllm", Speculation("mtp", 2, 2.0), 16, 2, False),
        ("deepseek-v3", "sglang", Speculation("mtp", 1, 1.5), 1, 1, False),
        ("llama-3.1-8b", "sglang", Speculation("ngram", 3, 2.0), 1, 0, False),
        ("llama-3.1-8b", "tensorrt-llm@1.3.0rc28", EAGLE3, 32, 1, False),  # the first release that finds them
        ("llama-3.1-8b", "tensorrt-llm", Speculation("ngram", 3, 2.0), 32, 0, False),
        ("minimax-m2.5", "tensorrt-llm@1.3.0rc28", Speculation("mtp", 3, 2.0), 32, 3, False),
    ],
)
def test_as_many_tokens_are_found_as_in_a_cache_of_blocks(
    name: str, engine: str, drafts: Speculation, block: int, ahead: int, drops: bool
) -> None:
    for prefix in (15, 16, 17, 18, 19, 33, 176):
        prefix_part = ask(name, engine, drafts, prefix)["reuse"]["prefix"]
        assert prefix_part["found_tokens"] == found_in_blocks(prefix, 256, block, ahead, drops), prefix


@pytest.mark.parametrize(
    ("name", "engine", "drafts"),
    [
        ("llama-3.1-8b", "logical", EAGLE3),
        ("llama-3.1-8b", "vllm", EAGLE3),
        ("llama-3.1-8b", "vllm@0.30", EAGLE3),
        ("gemma-3-12b", "vllm", Speculation("ngram", 3, 2.0)),
        ("qwen3.5-27b", "vllm", Speculation("mtp", 2, 2.0)),
        ("llama-3.1-8b", "sglang", EAGLE3),
        ("llama-3.1-8b", "sglang", Speculation("draft", 3, 2.0, kvcalc.load_model("llama-3.2-1b"))),
        ("qwen3.5-27b", "sglang", Speculation("mtp", 2, 2.0)),
    ],
)
def test_the_batch_keeps_the_prefix_of_all_layers_once(name: str, engine: str, drafts: Speculation) -> None:
    alone = estimate(loaded(name), engine=engine, context_tokens=CONTEXT, batch_size=BATCH, speculative=drafts)
    shared = ask(name, engine, drafts)
    prefix, cache = shared["reuse"]["prefix"], shared["kv_cache"]
    assert prefix["saved_bytes"] == alone["kv_cache"]["bytes_per_device"] - cache["bytes_per_device"] > 0
    lines = shared["engine"].get("pool_lines")
    if lines is not None:
        assert sum(line["bytes"] for line in lines) == cache["bytes_per_device"]
    one = shared["engine"].get("request_lines")
    if one is not None:
        assert sum(line["bytes"] for line in one) == shared["engine"]["request_bytes"]
    # Without the drafting layers the same prefix takes less.
    if drafts.method != "ngram":
        plain = ask(name, engine, None)["reuse"]["prefix"]
        assert prefix["saved_bytes"] / prefix["shared_tokens"] > plain["saved_bytes"] / plain["shared_tokens"]


def test_a_dropped_block_must_be_kept_to_be_matched() -> None:
    old, new = (ask("llama-3.1-8b", engine, EAGLE3)["reuse"]["prefix"] for engine in ("vllm@0.30", "vllm"))
    block = 16 * 33 * 2 * 8 * 128 * 2  # K and V of 32 layers and the head, in bf16
    assert (old["found_tokens"], old["kept_bytes"] - new["kept_bytes"]) == (new["found_tokens"], block)


def test_a_session_finds_less_and_its_prefill_takes_longer() -> None:
    speed, devices = SpeedQuestion(None, 16_000, 384), find_devices("h100")
    plain, drafted = (
        estimate(
            kvcalc.load_model("llama-3.1-8b"), engine="vllm@0.30", reuse=CacheReuse(1024, 4), speculative=drafts,
            speed=speed, devices=devices,
        )
        for drafts in (None, EAGLE3)
    )  # fmt: skip
    sessions = [answer["reuse"]["sessions"] for answer in (plain, drafted)]
    assert sessions[0]["reused_tokens"] - sessions[1]["reused_tokens"] == 16
    assert sessions[1]["prefill_seconds"] > sessions[0]["prefill_seconds"]
    assert drafted["throughput"]["serving"]["ttft_seconds"] > 0
    assert sum(line["bytes"] for line in drafted["fit"]["lines"]) == drafted["fit"]["device_bytes"]


@pytest.mark.parametrize(
    ("name", "engine", "drafts", "text"),
    [
        ("llama-3.1-8b", "tensorrt-llm@1.2", EAGLE3, "before 1.3.0rc28"),
        ("llama-3.1-8b", "tensorrt-llm", Speculation("eagle1", 3, 2.0), "which prefixes tensorrt-llm finds again"),
        ("qwen3.5-27b", "vllm@0.30", Speculation("mtp", 2, 2.0), "this release finds again"),
    ],
)
def test_what_is_not_known_is_refused_by_name(name: str, engine: str, drafts: Speculation, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ask(name, engine, drafts)


def moved(name: str, engine: str, drafts: Speculation | None) -> dict[str, Any]:
    offload = CacheReuse(offload=(("cpu", 1 << 40),))
    return dict(ask(name, engine, drafts, reuse=offload)["reuse"]["tiers"])


# The rows of a token in bf16: K and V of 32 layers with 8 heads of 128, and those of the head that drafts.
ROW, HEAD = 32 * 2 * 8 * 128 * 2, 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("engine", "block", "found", "confirming"),
    [("vllm", 16, CONTEXT - 16, 16), ("sglang", 1, CONTEXT - 1, 0), ("llama.cpp", 1, CONTEXT, 0)],
)
def test_a_tier_keeps_the_rows_of_the_drafts_too(engine: str, block: int, found: int, confirming: int) -> None:
    tiers, plain = moved("llama-3.1-8b", engine, EAGLE3), moved("llama-3.1-8b", engine, None)
    assert plain["unit_bytes"] == block * ROW
    assert (tiers["unit_tokens"], tiers["unit_bytes"]) == (block, block * (ROW + HEAD))
    # vLLM loads one block less than the tier must have.
    assert (tiers["session_tokens"], tiers["loaded_bytes_per_device"]) == (found, found * (ROW + HEAD))
    assert tiers["session_bytes"] == (found + confirming) * (ROW + HEAD)
    assert tiers["rows"][0]["sessions"] == (1 << 40) // tiers["session_bytes"]
    ngram = moved("llama-3.1-8b", engine, Speculation("ngram", 3, 2.0))
    assert {key: ngram[key] for key in ("unit_bytes", "session_bytes")} == {
        key: plain[key] for key in ("unit_bytes", "session_bytes")
    }


def test_devices_keep_one_copy_only_if_the_drafts_are_mla_too() -> None:
    head = Speculation("draft", 3, 2.0, kvcalc.load_model("llama-3.2-1b"))
    asked: dict[str, Any] = {"tensor_parallel_size": 8, "reuse": CacheReuse(offload=(("cpu", 1 << 40),))}
    own, mixed = (
        ask("deepseek-v3", "vllm", drafts, **asked)["reuse"]["tiers"] for drafts in (Speculation("mtp", 1, 1.5), head)
    )
    assert own["session_bytes"] // 4096 == (own["loaded_bytes_per_device"] + own["unit_bytes"]) // 4096
    assert mixed["session_bytes"] == 8 * mixed["loaded_bytes_per_device"]
    with pytest.raises(ModelError, match="drafts that are not MLA"):
        ask("deepseek-v3", "sglang", head, **asked)


def test_a_prefill_instance_sends_them_too() -> None:
    def sent(name: str, engine: str, drafts: Speculation | None) -> int:
        speed = SpeedQuestion(None, CONTEXT + 1, 1)
        asked: dict[str, Any] = {
            "reuse": CacheReuse(transfer=10**11),
            "speed": speed,
            "devices": find_devices("b200x8"),
        }
        answer = estimate(loaded(name), engine=engine, speculative=drafts, **asked)
        return int(answer["throughput"]["kv_transfer"]["bytes_per_device"])

    for engine in ("vllm", "sglang"):
        plain, eagle = sent("llama-3.1-8b", engine, None), sent("llama-3.1-8b", engine, EAGLE3)
        assert eagle * 32 == plain * 33
    # Three modules: the decode instance computes two tokens itself, which here are those of a 1,025th block.
    three, one = (sent("minimax-m2.5", "vllm", Speculation("mtp", count, 1.5)) for count in (3, 1))
    assert three // 1024 == one // 1025


def test_n_grams_keep_nothing_so_a_tier_keeps_what_it_did() -> None:
    spec, drafts = loaded("llama-3.1-8b"), Speculation("ngram", 3, 2.0)
    assert matching_of(drafts, "vllm", spec, CacheReuse(offload=(("cpu", 1 << 30),))) == PLAIN


@pytest.mark.parametrize(
    ("name", "engine", "drafts", "text"),
    [
        ("llama-3.1-8b", "tensorrt-llm", Speculation("ngram", 3, 2.0), "what tensorrt-llm moves of drafts"),
        ("qwen3.5-27b", "vllm", Speculation("mtp", 2, 2.0), "vLLM with another tier or instance finds again"),
    ],
)
def test_what_is_moved_is_known_or_refused(name: str, engine: str, drafts: Speculation, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        moved(name, engine, drafts)


@pytest.mark.parametrize(
    ("method", "modules", "back"), [("mtp", 3, 3), ("mtp", 1, 1), ("eagle", 3, 1), ("ngram", 3, 0)]
)
def test_only_mtp_modules_that_follow_each_other_look_as_far_ahead_as_they_draft(
    method: str, modules: int, back: int
) -> None:
    spec = kvcalc.load_model("deepseek-v3")._replace(num_draft_layers=modules)
    for engine in ("vllm", "tensorrt-llm"):
        matching = engine_class(engine).reuse().matching(Speculation(method, 3), spec, None, "")
        assert matching == (Matching(back) if back else PLAIN)
