"""`--distinct-prompts`: the same prompts are sent in turn, and the prefix cache finds them again."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.question.question import CacheReuse, SpeedQuestion

LOAD: dict[str, Any] = {
    "prompt_tokens": "uniform:400..800", "answer_tokens": "fixed:60", "requests_per_second": 10.0, "requests": 200
}  # fmt: skip


def simulated(model: str = "llama-3.1-8b", **asked: Any) -> Any:
    return kvcalc.simulate(model, "h100", **{**LOAD, **asked})


def mean(document: Any, metric: str) -> float:
    return float(next(row["mean_seconds"] for row in document["times"] if row["metric"] == metric))


def test_fewer_prompts_are_found_more_often() -> None:
    own, *found = (simulated(distinct_prompts=number) for number in (None, 100, 20, 1))
    shares = [one["results"]["cached_tokens"] / one["load"]["mean_prompt_tokens"] / 200 for one in found]
    assert own["results"]["cached_tokens"] == 0
    # All but the first use of each prompt, to the last whole block: 16 of about 600 tokens.
    assert shares == [pytest.approx(share, abs=0.03) for share in (0.5, 0.9, 0.995)]
    assert [mean(one, "ttft") for one in (own, *found)] == sorted(
        (mean(one, "ttft") for one in (own, *found)), reverse=True
    )


def test_as_many_prompts_as_requests_change_nothing() -> None:
    own, same = simulated(), simulated(distinct_prompts=200)
    assert same["load"].pop("distinct_prompts") == 200
    assert own["load"].pop("distinct_prompts") is None
    assert same == own


def test_repeated_prompts_repeat_their_lengths() -> None:
    document = simulated(distinct_prompts=1, requests=40)
    assert document["load"]["mean_prompt_tokens"] % 1 == 0
    prompt = int(document["load"]["mean_prompt_tokens"])
    assert document["results"]["cached_tokens"] == 39 * ((prompt - 1) // 16 * 16)


@pytest.mark.parametrize(
    ("model", "engine", "keeps_copies"),
    [
        ("llama-3.1-8b", "sglang", False),
        ("llama-3.1-8b", "tensorrt-llm", False),
        ("llama-3.1-8b", "llama.cpp", False),
        ("gpt-oss-20b", "vllm", True),
    ],
)
def test_every_server_finds_them(model: str, engine: str, keeps_copies: bool) -> None:
    own, again = (simulated(model, engine=engine, distinct_prompts=number) for number in (None, 4))
    assert mean(again, "ttft") < mean(own, "ttft")
    assert again["results"]["cached_tokens"] > 0
    # A slot of llama.cpp keeps a prompt for its next request. Windows keep one for several requests, which have copies.
    texts = [warning["text"] for warning in again["warnings"] if warning["code"] == "not-shared"]
    assert [text.partition(":")[0] for text in texts] == [
        "every request finds its prompt, but holds all of its cache itself"
    ] * keeps_copies


def test_slots_keep_as_many_prompts_as_they_are() -> None:
    slots = {"parallel": "4"}
    few, many = (simulated(engine="llama.cpp", distinct_prompts=number, engine_settings=slots) for number in (4, 5))
    assert few["engine"]["max_running_requests"] == 4
    assert few["results"]["cached_tokens"] > many["results"]["cached_tokens"] == 0
    assert "5 prompts take turns in 4 slots" in "".join(note["text"] for note in many["warnings"])


def test_each_replica_computes_a_prompt_once() -> None:
    """gpt-oss has windows, so its requests share no blocks. Requests go to replicas in turn."""
    for prompts, first in ((4, 4), (3, 6)):  # three prompts come to both replicas
        found = kvcalc.simulate(
            "gpt-oss-20b", "h100", replicas=2, prompt_tokens="fixed:640", answer_tokens="fixed:20",
            requests_per_second=5.0,
            requests=40, distinct_prompts=prompts,
        )  # fmt: skip
        each = found["results"]["cached_tokens"] / (40 - first)
        assert 500 < each < 640
        assert each % 1 == 0


def test_a_small_cache_gives_prompts_up() -> None:
    small: dict[str, Any] = {"prompt_tokens": "fixed:800", "kv_memory_bytes": 2 * 2**30, "requests": 300}
    few, many = (simulated(distinct_prompts=number, **small) for number in (5, 100))
    assert few["results"]["cached_tokens"] == 295 * 784
    assert many["results"]["cached_tokens"] < 0.5 * 200 * 784
    assert mean(few, "ttft") < mean(many, "ttft")


def test_clients_replicas_and_drafts_find_them_too() -> None:
    for asked in (
        {"requests_per_second": None, "concurrency": 8},
        {"replicas": 2},
        {"speculative": Speculation("ngram", 3, 1.5)},
    ):
        own, again = (simulated(distinct_prompts=number, **asked) for number in (None, 4))
        assert again["results"]["cached_tokens"] > 0.8 * 200 * own["load"]["mean_prompt_tokens"]
        assert mean(again, "ttft") < mean(own, "ttft")


def test_prefill_instances_find_them() -> None:
    pools: dict[str, Any] = {"prefill_replicas": 1, "transfer": "nvlink"}
    own, again = (simulated(distinct_prompts=number, **pools) for number in (None, 10))
    assert again["prefill"]["mean_prefill_seconds"] < 0.7 * own["prefill"]["mean_prefill_seconds"]


def test_a_server_without_a_prefix_cache_says_so() -> None:
    off = simulated(distinct_prompts=4, engine_settings={"no-enable-prefix-caching": True})
    assert off["results"]["cached_tokens"] == 0
    assert any("are not found" in note["text"] for note in off["warnings"])


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"reuse": CacheReuse(100)}, "--prefix-tokens"),
        ({"speed": SpeedQuestion(prefix_hit_rate=0.5)}, "--prefix-hit-rate"),
        ({"trace": "tests/logs/trace.csv", "prompt_tokens": None, "answer_tokens": None, "requests_per_second": None,
          "requests": None}, "distinct_prompts and trace"),
    ],
)  # fmt: skip
def test_what_contradicts_it_is_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        simulated(distinct_prompts=4, **asked)
