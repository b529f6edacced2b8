"""An engine keeps its rules if requests share a prefix, tokens are drafted, or a part of the model is on the host."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from kvcalc.question.question import CacheReuse, Question, SpeedQuestion
from kvcalc.server.budget import Budget, budget
from kvcalc.server.case import Case, make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.simulation.scheduler import Scheduler, scheduler_of
from kvcalc.throughput.hardware import find_devices
from tests.conftest import loaded
from tests.documents import estimate, texts

NGRAM, EAGLE = Speculation("ngram", 3, 2.0), Speculation("eagle", 3, 2.0)


def serve(name: str, engine: str, tokens: tuple[int, int, int], **asked: Any) -> dict[str, Any]:
    """An answer about `tokens`: of a prompt, of an answer, and the number of clients. On one H100."""
    speed = SpeedQuestion(input_tokens=tokens[0], output_tokens=tokens[1], concurrency=tokens[2])
    return estimate(loaded(name), engine=engine, devices=find_devices("h100"), speed=speed, **asked)


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("vllm", "gemma-3-27b gpt-oss-20b llama-3-8b qwen3-next-80b-a3b"),
        ("sglang", "gemma-3-27b gpt-oss-20b llama-3-8b qwen3-next-80b-a3b"),
        ("tensorrt-llm", "gemma-3-27b gpt-oss-20b llama-3-8b"),
    ],
)
def test_a_prefix_shorter_than_a_block_changes_nothing(engine: str, names: str) -> None:
    # A page of SGLang has one token by default.
    asked: dict[str, Any] = {"engine_settings": {"page-size": "64"}} if engine == "sglang" else {}
    for name in names.split():
        plain = serve(name, engine, (8192, 500, 64), **asked)
        shared = serve(name, engine, (8192, 500, 64), reuse=CacheReuse(prefix_tokens=15), **asked)
        assert shared["reuse"]["prefix"]["found_tokens"] == 0
        for part in ("kv_cache", "fit", "throughput", "engine"):
            assert shared[part] == plain[part], (name, part)


@pytest.mark.parametrize("name", ["gemma-3-27b", "gpt-oss-20b"])
def test_a_shared_prefix_never_makes_windows_run_fewer_requests(name: str) -> None:
    loads = [serve(name, "vllm", (8192, 500, 64), reuse=CacheReuse(prefix_tokens=n)) for n in (15, 1024, 4096, 8000)]
    found = [load["throughput"]["serving"] for load in loads]
    for less, more in pairwise(found):
        assert less["running_requests"] <= more["running_requests"] + 1  # a mean, rounded
        assert less["tokens_per_second"] < more["tokens_per_second"]
        assert less["ttft_seconds"] > more["ttft_seconds"]


def running(case: Case, tokens: int) -> int | None:
    found = budget(case)
    assert isinstance(found, Budget)
    share = case.allocation.largest_stage(case.share, case.workload.kv_dtype, tokens, 1)
    return case.allocation.most_running(share, case.workload.kv_dtype, found.offered_bytes, 8192, tokens)


@pytest.mark.parametrize("prefix", [0, 15, 4096])
def test_drafts_take_their_slots_in_running_requests_and_nothing_else(prefix: int) -> None:
    """N-grams have no weights and no cache, so a request with drafts is as large as one that is longer."""
    speed = SpeedQuestion(input_tokens=8192, output_tokens=500, concurrency=64)
    question = Question(
        kvcalc.load_model("gemma-3-27b"), engine="vllm", devices=find_devices("h100"), speed=speed,
        reuse=CacheReuse(prefix_tokens=prefix) if prefix else None,
    )  # fmt: skip
    plain, drafted = make_case(question), make_case(question._replace(speculative=NGRAM))
    for tokens in (8192, 8192 + 250, 8192 + 500):
        most = running(drafted, tokens)
        assert most is not None
        assert most == running(plain, tokens + NGRAM.num_tokens)


def test_drafts_do_not_halve_what_windows_hold() -> None:
    plain = serve("gemma-3-27b", "vllm", (8192, 500, 64))["throughput"]["serving"]
    drafted = serve("gemma-3-27b", "vllm", (8192, 500, 64), speculative=EAGLE)
    speedup = drafted["speculative"]["speedup"]
    assert speedup > 1
    assert drafted["throughput"]["serving"]["tokens_per_second"] > plain["tokens_per_second"]


def schedule(name: str, engine: str, **asked: Any) -> Scheduler:
    case = make_case(Question(loaded(name), 4096, engine=engine, devices=find_devices("h100"), **asked))
    speed = speed_of(case, [])
    assert isinstance(speed, Speed)
    return scheduler_of(case, speed.model, 4096)


@pytest.mark.parametrize(
    ("name", "engine"),
    [("gemma-3-27b", "vllm"), ("gpt-oss-20b", "vllm"), ("gpt-oss-20b", "tensorrt-llm"), ("llama-3-8b", "sglang")],
)
def test_the_simulated_pool_of_a_server_that_drafts_is_its_own(name: str, engine: str) -> None:
    plain, drafted = schedule(name, engine), schedule(name, engine, speculative=NGRAM)
    assert (drafted.pool.block_tokens, drafted.finds_own) == (plain.pool.block_tokens, plain.finds_own)
    assert list(drafted.pool.table[: len(plain.pool.table)]) == list(plain.pool.table)
    assert (drafted.pool.prompt_table is None) == (plain.pool.prompt_table is None)


def test_a_simulated_llama_server_that_drafts_saves_its_state() -> None:
    draft = Speculation("draft", 2, 2.0, kvcalc.load_model("gemma-3-1b"))
    plain, drafted = (schedule("gemma-3-4b", "llama.cpp", speculative=asked) for asked in (None, draft))
    assert drafted.rules.schedule == plain.rules.schedule
    assert plain.rules.schedule.part_ends == (516, 4)


PLACED: dict[str, Any] = {"engine": "llama.cpp", "dtype": "q4_0", "devices": find_devices("rtx-4090")}
PLACES: dict[str, dict[str, Any]] = {
    "layers": {"n-gpu-layers": "5", "host-memory": "128GiB"},
    "cache": {"no-kv-offload": True},
    "layers and cache": {"n-gpu-layers": "30", "no-kv-offload": True},
}


@pytest.mark.parametrize("settings", PLACES.values(), ids=PLACES)
def test_a_draft_model_is_beside_a_model_that_is_partly_on_the_host(settings: dict[str, Any]) -> None:
    """llama.cpp places a draft model by options of its own. Only --no-kv-offload counts for both."""
    spec, draft = kvcalc.load_model("gemma-3-27b"), kvcalc.load_model("gemma-3-1b")
    of_both = {name: value for name, value in settings.items() if name == "no-kv-offload"}
    plain = estimate(spec, context_tokens=8192, engine_settings=settings, **PLACED)
    drafted = estimate(
        spec, context_tokens=8192, engine_settings=settings, speculative=Speculation("draft", 2, 2.0, draft), **PLACED
    )
    own = estimate(draft, context_tokens=8192, engine_settings=of_both, **PLACED)
    assert drafted["fit"]["kv_cache_bytes"] == plain["fit"]["kv_cache_bytes"] + own["fit"]["kv_cache_bytes"]
    on_host = [found["fit"]["host"]["kv_cache_bytes"] if found["fit"]["host"] else 0 for found in (plain, own, drafted)]
    assert on_host[0] + on_host[1] == on_host[2] > 0
    assert drafted["fit"]["host"]["weights_bytes"] == plain["fit"]["host"]["weights_bytes"]
    if of_both:
        assert drafted["throughput"] is None
        assert any("--no-kv-offload" in text for text in texts(drafted))


def test_a_step_that_drafts_has_the_hosts_time_for_all_its_tokens() -> None:
    asked: dict[str, Any] = {"engine_settings": {"n-gpu-layers": "30"}, **PLACED}
    spec = kvcalc.load_model("gemma-3-27b")
    plain, drafted = (
        estimate(spec, context_tokens=8192, speculative=how, **asked)["throughput"] for how in (None, NGRAM)
    )
    assert plain["host"]["decode_seconds"] < drafted["host"]["decode_seconds"] < drafted["decode_step_seconds"]
    assert drafted["host"]["prefill_copied_bytes"] == plain["host"]["prefill_copied_bytes"] > 0
    assert drafted["energy"] is None  # the host's is not known
