"""The speed with drafted tokens: its limits, and its parts."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from kvcalc.throughput.constants import BUSY_SEQUENCES
from kvcalc.throughput.drafting import BETWEEN_SECONDS, DraftingModel, drafter_model
from kvcalc.throughput.roofline import Part, SpeedModel
from kvcalc.throughput.serving import serve
from tests.throughput.conftest import MakeModel


def drafting(
    target: SpeedModel, drafter: SpeedModel | None, tokens: int, length: float, *, accepted: bool = False
) -> DraftingModel:
    return DraftingModel(target, drafter, tokens, length, starts_with_accepted=accepted)


def test_one_query_token_is_the_step_without_drafting(model_of: MakeModel) -> None:
    for name in ("llama-3-70b", "gpt-oss-120b"):
        model = model_of(name, tensor_parallel_size=4)
        for batch in (1, 17, 300):
            assert model.decode(batch, 3000) == model.decode(batch, 3000, 1)
            assert model.roofline(batch, 3000) == model.roofline(batch, 3000, 1)


def test_no_drafted_token_is_no_drafting(model_of: MakeModel) -> None:
    target, small = model_of("llama-3-70b", tensor_parallel_size=4), model_of("llama-3.2-1b", tensor_parallel_size=4)
    model = drafting(target, small, 0, 1.0)
    assert model.decode(8, 4000) == target.decode(8, 4000)
    assert model.roofline(8, 4000) == target.roofline(8, 4000)
    assert serve(drafting(target, None, 0, 1.0), 1000, 200, 16, 16) == serve(target, 1000, 200, 16, 16)


def test_checking_tokens_reads_weights_and_cache_once(model_of: MakeModel) -> None:
    model = model_of("llama-3-70b", tensor_parallel_size=4)
    one, four = model.decode(1, 4000), model.decode(1, 4000, 4)
    # Four tokens of one sequence multiply as much as four sequences, but they read one cache.
    others = model.decode(4, 4000)
    assert four.weights == pytest.approx(others.weights, rel=1e-9)
    assert four.kv < others.kv
    assert four.kv == pytest.approx(one.kv, rel=0.01)
    assert one.seconds < four.seconds < others.seconds


def test_checking_tokens_moves_each_of_them_and_takes_the_rest_of_the_overhead_once(model_of: MakeModel) -> None:
    model = model_of("gpt-oss-120b", tensor_parallel_size=4)
    for batch in (2, BUSY_SEQUENCES + 100):
        one, four = model.decode(batch, 4000), model.decode(batch, 4000, 4)
        tokens = 3 * batch
        assert four.overhead - one.overhead == pytest.approx(
            tokens * (model.costs.moved + sum(of_row.move for _, of_row in model.costs.experts))
        )
        assert four.communication - one.communication == pytest.approx(tokens * model.costs.transfer)


def test_several_tokens_touch_more_experts(model_of: MakeModel) -> None:
    model = model_of("gpt-oss-120b")
    assert model.decode(1, 1000, 4).weights > 2 * model.decode(1, 1000).weights
    assert model.decode(1, 1000, 4).weights == pytest.approx(model.decode(4, 1000).weights, rel=1e-9)


def test_free_drafts_that_are_all_accepted_are_as_much_faster_as_tokens_are_drafted(model_of: MakeModel) -> None:
    target = model_of("llama-3-70b", tensor_parallel_size=4)
    for tokens in (1, 3, 7):
        found = drafting(target, None, tokens, tokens + 1).speedup(1, 500)
        # At batch 1 the step reads weights, and the few more tokens to multiply cost little.
        assert 0.9 * (tokens + 1) < found < tokens + 1


def test_drafts_that_are_never_accepted_only_cost(model_of: MakeModel) -> None:
    target, small = model_of("llama-3-70b", tensor_parallel_size=4), model_of("llama-3.2-1b", tensor_parallel_size=4)
    model = drafting(target, small, 4, 1.0)
    assert all(model.speedup(batch, 2000) < 1 for batch in (1, 16, 256))
    assert model.break_even_batch(2000) == 1


def test_a_step_is_drafting_and_checking(model_of: MakeModel) -> None:
    target, small = model_of("llama-3-70b", tensor_parallel_size=4), model_of("llama-3.2-1b", tensor_parallel_size=4)
    model = drafting(target, small, 4, 3.0)
    step, checked, drafted = model.decode(8, 2000), model.verify(8, 2000), model.draft(8, 2000)
    assert step.seconds == pytest.approx(checked.seconds + drafted.seconds)
    assert step.seconds == pytest.approx(sum(step[1:]))
    assert checked == target.decode(8, 2000, 5)
    assert list(drafted) == [pytest.approx(4 * part) for part in small.decode(8, 2000)]
    assert model.roofline(8, 2000) <= step.seconds


def test_mtp_computes_the_checked_tokens_in_its_first_pass(model_of: MakeModel) -> None:
    target, small = model_of("llama-3-70b"), model_of("llama-3.2-1b")
    found = drafting(target, small, 3, 2.0, accepted=True).draft(64, 2000).seconds
    assert found == pytest.approx(small.decode(64, 2000, 4).seconds + 2 * small.decode(64, 2000).seconds)


def test_the_passes_of_a_drafter_take_no_time_on_the_host(model_of: MakeModel) -> None:
    target, small = model_of("llama-3-70b"), model_of("llama-3.2-1b")
    drafter, c = drafter_model(target, small.counts), target.constants
    for batch in (32, BUSY_SEQUENCES + 100):
        host = c.step_seconds + batch * c.sequence_seconds + max(0, batch - BUSY_SEQUENCES) * c.busy_sequence_seconds
        assert host > 0
        assert drafter.decode(batch, 2000).seconds == pytest.approx(small.decode(batch, 2000).seconds - host)


def test_drafting_stops_paying_at_a_batch_and_not_before(model_of: MakeModel) -> None:
    model = drafting(model_of("llama-3-70b", tensor_parallel_size=4), None, 4, 1.6)
    batch = model.break_even_batch(4096)
    assert batch is not None
    assert all(model.speedup(smaller, 4096) > 1 for smaller in range(1, batch))
    assert model.speedup(batch, 4096) <= 1
    assert model.break_even_batch(4096) == batch


def test_drafting_that_always_pays_has_no_such_batch(model_of: MakeModel) -> None:
    assert drafting(model_of("llama-3-70b"), None, 1, 2.0).break_even_batch(8000) is None


def test_a_longer_acceptance_is_faster_and_pays_for_longer(model_of: MakeModel) -> None:
    target = model_of("llama-3-70b", tensor_parallel_size=4)
    models = [drafting(target, None, 4, length) for length in (1.2, 1.5, 1.8, 2.1)]
    rates = [serve(model, 1000, 500, 16, 16).tokens_per_second for model in models]
    batches = [model.break_even_batch(2000) or 10**9 for model in models]
    assert rates == sorted(rates)
    assert batches == sorted(batches)


def test_serving_gives_the_accepted_tokens_of_every_step(model_of: MakeModel) -> None:
    model = drafting(model_of("llama-3-70b", tensor_parallel_size=4), None, 3, 2.5)
    found = serve(model, 1000, 200, 16, 16)
    stall = 15 / 16 * found.decoding / 200 * model.beside([Part(0, 1000)], found.decoding).seconds
    assert found.tpot_seconds == pytest.approx(model.decode(found.decoding, 1100).seconds / 2.5 + stall)


def test_a_request_waits_for_whole_steps_before_its_first_token(model_of: MakeModel) -> None:
    target = model_of("llama-3-70b", tensor_parallel_size=4)
    # As many tokens as drafts: the time per token is the same, and each step is longer.
    free = drafting(target, None, 3, 1.0)
    slow, fast = serve(free, 1000, 200, 2, 2), serve(drafting(target, None, 3, 4.0), 1000, 200, 2, 2)
    assert fast.tpot_seconds < slow.tpot_seconds / 3
    # Prompts of the other request stop each token, so a step with four of them is longer, and so is half of it.
    longer = 4 * fast.tpot_seconds - slow.tpot_seconds
    assert longer > 0
    assert longer / 4 < fast.ttft_seconds - slow.ttft_seconds < 3 * longer


def test_a_drafter_computes_prompts_too(model_of: MakeModel) -> None:
    target, small = model_of("llama-3-70b"), model_of("llama-3.2-1b")
    model = drafting(target, small, 3, 2.0)
    assert model.prefill(2000).seconds == pytest.approx(target.prefill(2000).seconds + small.prefill(2000).seconds)
    more = small.prefill_work(2000).seconds
    assert model.prefill_work(2000).seconds == pytest.approx(target.prefill_work(2000).seconds + more)


@pytest.mark.parametrize(("engine", "waits"), [("vllm", True), ("vllm@0.13", False), ("llama.cpp", False)])
def test_engines_that_hide_the_hosts_time_do_not_while_they_draft(engine: str, waits: bool) -> None:
    def overhead(drafts: Speculation | None) -> float:
        document: Any = kvcalc.estimate(
            "llama-3-8b", context_tokens=4096, engine=engine, devices=kvcalc.find_devices("h100"), speculative=drafts
        )
        return float(document["throughput"]["parts"]["overhead_seconds"])

    model = kvcalc.load_model("llama-3.2-1b")
    none = overhead(None)
    one, two = (overhead(Speculation("draft", tokens, 2.0, model)) for tokens in (1, 2))
    # A second pass of the drafter costs its launches. The first one also costs what no pass hides.
    assert (one - none - (two - one) > 0.5 * BETWEEN_SECONDS) is waits
