"""What sessions and tiers of memory keep, in blocks of 16 tokens counted by hand, and what is refused.

llama-3.1-8b in vLLM: a token takes K and V of 32 layers with 8 heads of 128, in bf16.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.errors import LayoutError, UsageError
from kvcalc.memory.dtypes import DTYPES
from kvcalc.question.question import CacheReuse, SpeedQuestion
from kvcalc.server.reuse import prefix_hit_notes
from kvcalc.server.reuse.document import Store, _computed_again
from tests.documents import estimate, texts

ROW, GIB = 2 * 32 * 8 * 128 * 2, 2**30
PREFIX, PROMPT, ANSWER = 1024, 16_000, 384


def blocks(tokens: int) -> int:
    """The tokens in whole blocks."""
    return tokens // 16 * 16


def ask(reuse: CacheReuse, prompt: int = PROMPT, **more: Any) -> dict[str, Any]:
    speed = SpeedQuestion(None, prompt, more.pop("answer", ANSWER), prefix_hit_rate=more.pop("rate", 0.0))
    asked = {"engine": "vllm", "devices": kvcalc.find_devices("h100"), **more}
    return estimate(kvcalc.load_model("llama-3.1-8b"), reuse=reuse, speed=speed, **asked)


def test_a_turn_finds_the_whole_blocks_of_the_one_before() -> None:
    sessions = ask(CacheReuse(PREFIX, 4))["reuse"]["sessions"]
    rows = sessions["rows"]
    # Every turn adds as many tokens to the prefix.
    assert [row["end_tokens"] for row in rows] == [PREFIX + (PROMPT + ANSWER - PREFIX) * n // 4 for n in (1, 2, 3, 4)]
    assert [row["turn"] for row in rows] == [1, 2, 3, 4]
    assert [row["reused_tokens"] for row in rows] == [PREFIX, *(blocks(row["end_tokens"]) for row in rows[:-1])]
    for row in rows:
        assert row["computed_tokens"] == row["prompt_tokens"] - row["reused_tokens"] > 0
        assert row["end_tokens"] == row["prompt_tokens"] + ANSWER
        assert row["idle_bytes"] == (blocks(row["end_tokens"]) - PREFIX) * ROW
    last = rows[-1]
    assert (last["prompt_tokens"], last["end_tokens"]) == (PROMPT, PROMPT + ANSWER)
    assert (sessions["reused_tokens"], sessions["computed_tokens"]) == (last["reused_tokens"], last["computed_tokens"])
    assert sessions["reuse_rate"] == sum(r["reused_tokens"] for r in rows) / sum(r["prompt_tokens"] for r in rows)
    assert sessions["prefill_seconds"] < sessions["prefill_seconds_alone"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_idle_sessions_share_the_memory_beside_the_prefix(replicas: int) -> None:
    """Two DP ranks keep twice as many."""
    found = ask(CacheReuse(PREFIX, 4), devices=kvcalc.find_devices(f"h100x{replicas}"), data_parallel_size=replicas)
    fit, sessions = found["fit"], found["reuse"]["sessions"]
    idle = blocks(sessions["rows"][-2]["end_tokens"])
    own = (idle - PREFIX) * ROW
    assert (sessions["idle_tokens"], sessions["idle_session_bytes"]) == (idle, own)
    memory = fit["kv_cache_memory_bytes"]
    assert sessions["kept_sessions"] == replicas * ((memory - PREFIX * ROW) // own)
    # The batch that runs has the prefix already.
    assert sessions["kept_sessions_beside_batch"] == replicas * ((memory - fit["kv_cache_bytes"]) // own)


def test_memory_for_a_number_of_sessions_keeps_that_number() -> None:
    """Beside the batch, whose blocks of the prefix they share."""
    asked: dict[str, Any] = {
        "engine": "vllm",
        "context_tokens": 16_384,
        "batch_size": 2,
        "reuse": CacheReuse(PREFIX, 4),
    }
    spec = kvcalc.load_model("llama-3.1-8b")
    found = estimate(spec, kv_memory_bytes=8 * GIB, **asked)
    cache, own = found["kv_cache"]["bytes_per_device"], found["reuse"]["sessions"]["idle_session_bytes"]
    for more, kept in ((0, 3), (-1, 2), (own, 4)):
        sessions = estimate(spec, kv_memory_bytes=cache + 3 * own + more, **asked)["reuse"]["sessions"]
        assert sessions["kept_sessions_beside_batch"] == kept
    # Each of two DP ranks has half of the batch.
    twice = estimate(spec, kv_memory_bytes=cache + 3 * own, data_parallel_size=2, **{**asked, "batch_size": 4})
    assert twice["reuse"]["sessions"]["kept_sessions_beside_batch"] == 2 * 3


def test_sessions_that_add_no_whole_block_to_the_prefix_take_nothing_and_have_no_limit() -> None:
    """Each of two turns adds 10 tokens to 997 blocks; with 16 tokens, the first one fills a block."""
    for tokens, own in ((10, 0), (16, 16)):
        reuse = CacheReuse(997 * 16, 2)
        sessions = ask(reuse, 997 * 16 + 2 * tokens - 1, answer=1)["reuse"]["sessions"]
        assert sessions["idle_session_bytes"] == own * ROW
        assert (sessions["kept_sessions"] is None) is (own == 0)
        assert (sessions["kept_sessions_beside_batch"] is None) is (own == 0)


@pytest.mark.parametrize(
    ("engine", "prompt", "found"), [("vllm", 1024, 1008), ("vllm", 1025, 1024), ("sglang", 1000, 999)]
)
def test_only_the_last_token_of_a_prompt_must_be_computed(engine: str, prompt: int, found: int) -> None:
    document = ask(CacheReuse(prefix_tokens=prompt), prompt, engine=engine)
    assert document["workload"]["prefix_hit_rate"] == found / prompt


def test_a_prompt_that_is_all_prefix_computes_its_last_block() -> None:
    """Also if there is room for it in the context, which has the answer."""
    part = ask(CacheReuse(PREFIX), PREFIX, answer=100)["reuse"]["prefix"]
    assert part["found_tokens"] == part["shared_tokens"] == PREFIX - 16
    # With one more token, that one is computed.
    part = ask(CacheReuse(PREFIX + 1), PREFIX + 1)["reuse"]["prefix"]
    assert part["found_tokens"] == part["shared_tokens"] == PREFIX


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "logical"])
def test_a_prefix_is_compared_with_requests_that_share_nothing(engine: str, replicas: int) -> None:
    """As many run alone as without a prefix, on a device, or in memory for the cache without one."""
    asked: list[dict[str, Any]] = [
        {"devices": kvcalc.find_devices(f"h200x{replicas}"), "tensor_parallel_size": 1,
         "data_parallel_size": replicas},
        {"kv_memory_bytes": 20 * GIB},
    ]  # fmt: skip
    for more in asked:
        shared, alone = (
            estimate(kvcalc.load_model("mixtral-8x7b"), engine=engine, context_tokens=8000, reuse=reuse, **more)
            for reuse in (CacheReuse(prefix_tokens=4096), None)
        )
        found, most_alone = shared["reuse"]["prefix"], alone["fit"]["max_batch_size"]
        assert found["max_batch_size_alone"] == most_alone
        assert found["more_requests"] == shared["fit"]["max_batch_size"] - most_alone > 0


def test_the_last_token_of_a_context_is_computed_anyway() -> None:
    """A prompt of n + 1 tokens takes so much longer than the same prompt of which n are found."""

    def prefill(tokens: int, prompts: int = 1, cached: int = 0) -> Any:
        return SimpleNamespace(seconds=prompts * (tokens**2 - cached**2 + 10))

    assert _computed_again(SimpleNamespace(prefill=prefill), 100) == 100**2  # type: ignore[arg-type]


def test_without_a_device_there_are_no_seconds_and_no_memory() -> None:
    spec = kvcalc.load_model("llama-3.1-8b")
    sessions = estimate(spec, engine="vllm", reuse=CacheReuse(PREFIX, 4), context_tokens=8192)["reuse"]["sessions"]
    for name in ("kept_sessions", "kept_sessions_beside_batch", "prefill_seconds", "prefill_seconds_alone"):
        assert sessions[name] is None


def test_tiers_keep_the_prefix_once_and_the_tokens_after_it() -> None:
    large, small = 200 * GIB, 50 * 2**20  # the second one is too small for the prefix
    tiers = ask(CacheReuse(PREFIX, offload=(("cpu", large), ("disk", small))))["reuse"]["tiers"]["rows"]
    context = blocks(PROMPT + ANSWER)
    own = context - PREFIX
    sessions, left = divmod(large - PREFIX * ROW, own * ROW)
    assert [tier["sessions"] for tier in tiers] == [sessions, 0]
    assert tiers[0]["tokens"] == PREFIX + sessions * own + blocks(left // ROW)
    assert tiers[1]["tokens"] == blocks(small // ROW)
    assert all(tier["load_seconds"] > 0 for tier in tiers)


def test_a_tier_is_read_at_the_given_rate_or_at_its_own() -> None:
    offload = (("cpu", 3 * GIB), ("disk", 3 * GIB))
    context = blocks(PROMPT + ANSWER)
    known = ask(CacheReuse(PREFIX, offload=offload, bandwidths=(("cpu", 10**10), ("disk", 10**9))))
    tiers = known["reuse"]["tiers"]
    assert [tier["load_seconds"] for tier in tiers["rows"]] == [
        pytest.approx(context * ROW / rate) for rate in (10**10, 10**9)
    ]
    assert (tiers["session_tokens"], tiers["session_bytes"]) == (context, (context - PREFIX) * ROW)
    assert (tiers["unit_tokens"], tiers["unit_bytes"], tiers["prefix_bytes"]) == (16, 16 * ROW, PREFIX * ROW)
    assert [tier["sessions"] for tier in tiers["rows"]] == [(3 * GIB - PREFIX * ROW) // ((context - PREFIX) * ROW)] * 2
    assert not any("--offload-bandwidth" in text for text in texts(known))
    # The rate of a drive is assumed, that of the link to the host is the device's.
    assumed = [text for text in texts(ask(CacheReuse(PREFIX, offload=offload))) if "--offload-bandwidth" in text]
    assert len(assumed) == 1
    assert "--offload-bandwidth disk=" in assumed[0]


def test_the_next_request_takes_what_is_not_the_prefix() -> None:
    context: dict[str, Any] = {"context_tokens": 8192, "devices": kvcalc.find_devices("h100"), "engine": "vllm"}
    spec = kvcalc.load_model("llama-3.1-8b")
    for prefix in (PREFIX, 8192):  # the last token of a prompt is computed, and with it its block
        shared = min(prefix, 8192 - 16)
        found = estimate(spec, batch_size=3, reuse=CacheReuse(prefix), **context)
        part, fit = found["reuse"]["prefix"], found["fit"]
        assert (part["found_tokens"], part["shared_tokens"]) == (shared, shared)
        assert part["next_request_bytes"] == (8192 - shared) * ROW
        assert part["saved_bytes"] == 2 * shared * ROW
        alone = estimate(spec, batch_size=3, **context)["fit"]["max_batch_size"]
        assert part["max_batch_size_alone"] == alone
        assert part["more_requests"] == fit["max_batch_size"] - alone > 0


@pytest.mark.parametrize(("prefix", "is_short"), [(15, True), (16, True), (17, False), (32, False)])
def test_a_prefix_that_is_not_found_is_said(prefix: int, is_short: bool) -> None:
    """A prompt of 16 tokens finds no block, because its last token is computed."""
    prompt = max(prefix, 16)
    assert any("so this one is not found" in text for text in texts(ask(CacheReuse(prefix), prompt))) is is_short


def test_a_rate_of_hits_is_said_unless_a_prefix_gives_it() -> None:
    said = "30% of each prompt is found in the prefix cache"
    for reuse, is_said in (
        (CacheReuse(offload=(("cpu", GIB),)), True), (CacheReuse(PREFIX), False), (CacheReuse(turns=4), False),
    ):  # fmt: skip
        rate = 0.3 if is_said else 0.9
        found = ask(reuse, rate=rate)
        assert found["workload"]["prefix_hit_rate"] == rate
        assert any(said in text for text in texts(found)) is is_said


def test_a_rate_of_hits_is_no_lower_than_what_the_prefix_gives() -> None:
    for rate in (0.064, 0.5):  # 1,024 of 16,000 tokens are 6.4 %
        assert ask(CacheReuse(PREFIX), rate=rate)["workload"]["prefix_hit_rate"] == rate
    with pytest.raises(UsageError, match=r"contradicts --prefix-tokens: 6.4% of each prompt"):
        ask(CacheReuse(PREFIX), rate=0.063)


@pytest.mark.parametrize(
    ("reuse", "more", "message"),
    [
        (CacheReuse(turns=1001), {}, "--turns 1001: must be at most 1,000"),
        (CacheReuse(15_000, 4), {}, "--turns 4: a turn has 346 tokens, and its answer 384"),
        (CacheReuse(15_800, 2), {}, "--turns 2: a turn has 292 tokens, and its answer 384"),
        (CacheReuse(17_000), {}, "--prefix-tokens 17000: the prompt has 16,000 tokens"),
        (CacheReuse(offload=(("tape", GIB),)), {}, "--offload 'tape': not a tier"),
        (CacheReuse(offload=(("cpu", GIB),), bandwidths=(("cpu", GIB), ("disk", GIB))), {},
         "--offload-bandwidth disk: --offload has no such tier"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(reuse: CacheReuse, more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ask(reuse, **more)


def test_as_many_turns_as_are_allowed_are_answered() -> None:
    assert ask(CacheReuse(turns=1000), answer=8)["reuse"]["sessions"]["turns"] == 1000


def test_tiers_belong_to_one_dp_rank_without_stages() -> None:
    offload, two = CacheReuse(offload=(("cpu", GIB),)), kvcalc.find_devices("h100x2")
    with pytest.raises(LayoutError, match="without stages"):
        ask(offload, devices=two, tensor_parallel_size=1, pipeline_parallel_size=2)


def test_a_transfer_needs_a_device() -> None:
    spec = kvcalc.load_model("llama-3.1-8b")
    with pytest.raises(UsageError, match="--transfer-bandwidth needs a device"):
        estimate(spec, engine="vllm", reuse=CacheReuse(transfer="nvlink"))


def test_a_prefix_and_turns_of_nothing_leave_the_hit_rate_as_it_is() -> None:
    asked: dict[str, Any] = {"contexts": [4096, 16_384], "engine": "vllm", "gpus": ["h100"]}

    def prefills(rate: float, reuse: CacheReuse | None) -> list[Any]:
        points: Any = kvcalc.sweep("llama-3.1-8b", **asked, speed=SpeedQuestion(prefix_hit_rate=rate), reuse=reuse)
        return [point["prefill_seconds"] for point in points["points"]]

    assert prefills(0.5, CacheReuse()) == prefills(0.5, None) < prefills(0.0, CacheReuse()) == prefills(0.0, None)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_some_of_each_prompt_is_always_computed(rate: float) -> None:
    spec = kvcalc.load_model("llama-3.1-8b")
    with pytest.raises(UsageError, match="must be at least 0 and below 1"):
        prefix_hit_notes(rate, load_engine("vllm", spec), spec)


def test_a_unit_of_a_tier_takes_what_a_context_of_its_length_takes() -> None:
    for model in ("gpt-oss-20b", "llama-3.1-8b"):
        rules = load_engine("vllm", kvcalc.load_model(model))
        prefixes = rules.prefixes(rules.spec, DTYPES["bf16"])
        assert Store(prefixes, 1, 1).unit_bytes == prefixes.tier_bytes(prefixes.block_tokens)


def test_a_tier_rounds_units_up_to_its_pages_and_keeps_the_rest_without_pages() -> None:
    """Of 250 bytes of a device in units of 100 bytes: two whole units in pages of 4,096 bytes, or all bytes."""
    prefixes: Any = SimpleNamespace(tier_bytes=lambda tokens, after: 250 if tokens else 0, unit_bytes=100)
    for copies, in_pages in ((1, 2 * 4096), (41, 2 * 8192)):  # 41 x 100 bytes are two pages
        assert Store(prefixes, copies, 4096).tier_bytes(640) == in_pages
        assert Store(prefixes, copies, 1).tier_bytes(640) == 250 * copies
