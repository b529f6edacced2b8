"""DP ranks exchange tokens with the experts of all replicas. The busiest device decides."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from kvcalc.throughput.choices import distinct_experts, largest_normal
from kvcalc.throughput.costs import ExpertTimes, busiest_rank
from kvcalc.throughput.counts import Counts, bytes_of
from kvcalc.throughput.expert_parallel import ExpertExchange, ranks_reached
from kvcalc.throughput.hardware import find_gpu
from kvcalc.throughput.links import link_bytes_per_second
from tests.throughput.conftest import MakeCounts, MakeModel


def _expert_bytes(counts: Counts) -> list[int]:
    return [bytes_of(row.matrices) for row in counts.experts]


def test_a_token_reaches_at_most_as_many_ranks_as_it_has_experts() -> None:
    assert ranks_reached(8, 8, 1) == pytest.approx(7 / 8)
    assert ranks_reached(2, 2, 8) == pytest.approx(1, rel=0.01)
    # The expected number of distinct ranks for 8 draws from 8, without the token's own rank.
    assert ranks_reached(8, 8, 8) == pytest.approx(7 * (1 - (7 / 8) ** 8))
    assert 7.6 < ranks_reached(256, 256, 8) < 8
    # Experts that are split over all ranks need the tokens of all.
    assert ranks_reached(8, 1, 8) == 7


def test_a_rank_holds_all_of_the_attention_and_its_part_of_the_experts(counts_of: MakeCounts) -> None:
    one, eight = counts_of("deepseek-v3"), counts_of("deepseek-v3", data_parallel_size=8)
    assert eight.dense == one.dense
    assert eight.head == one.head
    assert _expert_bytes(eight) == [size // 8 for size in _expert_bytes(one)]
    both = counts_of("deepseek-v3", data_parallel_size=4, tensor_parallel_size=2)
    two = counts_of("deepseek-v3", tensor_parallel_size=2)
    assert both.dense == two.dense
    assert _expert_bytes(both) == _expert_bytes(eight)


def test_weights_that_are_spread_get_the_tokens_of_all_replicas(counts_of: MakeCounts) -> None:
    whole = counts_of("deepseek-v3", data_parallel_size=8)
    spread = counts_of("deepseek-v3", data_parallel_size=8, names=frozenset({"lm_head"}))
    assert bytes_of(spread.head) == bytes_of(whole.head) // 8
    assert [row.elements for row in spread.head] == [row.elements for row in whole.head]


def test_a_lone_replica_computes_as_before(model_of: MakeModel) -> None:
    plain, alone = (
        model_of("deepseek-v3", tensor_parallel_size=8),
        model_of("deepseek-v3", tensor_parallel_size=8, data_parallel_size=1),
    )
    assert plain.exchange is None
    assert plain.decode(64, 4096) == alone.decode(64, 4096)
    assert plain.prefill(4096, 3) == alone.prefill(4096, 3)


def test_the_cache_is_read_once_and_not_by_every_rank(model_of: MakeModel) -> None:
    def read(name: str, **layout: int) -> float:
        model = model_of(name, "h200", **layout)
        batch = model.layout.data_parallel_size
        return model.counts.kv_read_bytes(100_000) * 256 / batch

    # With --tp 8 every rank reads the latents of all sequences, with --dp 8 those of its own eighth.
    assert read("deepseek-v3", data_parallel_size=8) == read("deepseek-v3", tensor_parallel_size=8) / 8
    # Heads are divided in either case.
    assert read("gpt-oss-120b", data_parallel_size=8) == read("gpt-oss-120b", tensor_parallel_size=8)
    steps = [model_of("deepseek-v3", "h200", **{size: 8}).decode(256, 100_000)
             for size in ("tensor_parallel_size", "data_parallel_size")]  # fmt: skip
    assert steps[1].kv < steps[0].kv / 3
    assert steps[1].seconds < steps[0].seconds / 2


def test_nine_sequences_take_eight_replicas_as_long_as_sixteen_except_in_the_experts(model_of: MakeModel) -> None:
    model = model_of("deepseek-v3", "h200", data_parallel_size=8, expert_parallel_size=8)
    assert model.decode(9, 50_000).kv == model.decode(16, 50_000).kv
    assert model.decode(8, 50_000).kv < model.decode(9, 50_000).kv
    assert model.decode(9, 50_000).weights < model.decode(16, 50_000).weights


def test_a_mean_batch_between_two_takes_a_time_between_theirs(model_of: MakeModel) -> None:
    model = model_of("deepseek-v3", "h200", data_parallel_size=8, expert_parallel_size=8)
    eight, between, nine = (model.decode(batch, 50_000).kv for batch in (8, 8.25, 9))
    assert between == pytest.approx(eight + (nine - eight) / 4)


@pytest.mark.parametrize("layout", [(8, 1), (4, 2), (16, 1), (32, 1), (8, 4)])
def test_steps_never_shrink_and_never_beat_the_roofline(model_of: MakeModel, layout: tuple[int, int]) -> None:
    dp, tp = layout
    model = model_of(
        "deepseek-v3", "h200", "vllm", "fp8", data_parallel_size=dp, tensor_parallel_size=tp,
        expert_parallel_size=dp * tp,
    )  # fmt: skip
    steps = [model.decode(batch, 4096).seconds for batch in (1, 2, 7, 8, 9, 64, 100, 1000, 5000)]
    assert all(a <= b for a, b in pairwise(steps))
    for batch in (1, 8, 100, 5000):
        step = model.decode(batch, 4096)
        assert step.seconds == pytest.approx(sum(step[1:]))
        assert model.roofline(batch, 4096) <= step.seconds
    prompts = [model.prefill(tokens, batch).seconds for tokens, batch in ((10, 1), (1000, 1), (1000, 8), (1000, 9))]
    assert all(a <= b for a, b in pairwise(prompts))


def test_eight_prompts_on_eight_replicas_share_the_attention(model_of: MakeModel) -> None:
    model = model_of("deepseek-v3", "h200", "vllm", "fp8", data_parallel_size=8, expert_parallel_size=8)
    one, eight, nine = (model.prefill(8192, batch).seconds for batch in (1, 8, 9))
    assert eight < 8 * one
    assert nine - eight > (eight - one) / 7
    assert model.prefill_work(8192).compute == pytest.approx(model.prefill(8192, 8).compute / 8, rel=0.1)


@pytest.mark.parametrize("tokens", [4, 16, 64, 1000])
@pytest.mark.parametrize(("experts", "read", "groups"), [(256, 8, 8), (128, 8, 2), (128, 4, 4), (16, 2, 16)])
def test_the_busiest_rank_is_that_of_random_choices(experts: int, read: int, groups: int, tokens: int) -> None:
    """Against draws: each token chooses `read` of the experts, which are spread evenly over the groups of ranks."""
    random, most_experts, most_products, draws = Random(7), 0.0, 0.0, 200
    for _ in range(draws):
        chosen = [expert for _ in range(tokens) for expert in random.sample(range(experts), read)]
        rank = experts // groups
        most_experts += max(Counter(expert // rank for expert in set(chosen)).values())
        most_products += max(Counter(expert // rank for expert in chosen).values())
    row = ExpertTimes(experts, read, (), 0.0, groups, largest_normal(groups))
    reads, busier = busiest_rank(row, tokens, 1.0)
    # With a few tokens, the distributions are no normal ones.
    close = 0.25 if tokens * read < 4 * groups else 0.08
    assert reads / groups == pytest.approx(most_experts / draws, rel=close)
    assert busier * tokens * read / groups == pytest.approx(most_products / draws, rel=close)


def test_no_rank_is_idler_than_the_mean() -> None:
    row = ExpertTimes(256, 8, (), 0.0, 8, largest_normal(8))
    figures = [busiest_rank(row, tokens, 1.0) for tokens in (1, 8, 64, 1024, 100_000)]
    ratios = [busier for _, busier in figures]
    assert all(a >= b > 1 for a, b in pairwise(ratios))
    # A token has 8 of a rank's 32 experts at most.
    assert ratios[0] <= 8
    assert ratios[-1] < 1.01
    assert all(distinct_experts(256, 8, tokens) < reads <= 256 for tokens, (reads, _) in zip((1, 8, 64), figures))


def test_split_experts_are_equally_busy() -> None:
    assert busiest_rank(ExpertTimes(256, 8, (), 0.0), 64, 1.0) == (distinct_experts(256, 8, 64), 1.0)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("name", ["deepseek-v3", "minimax-m2", "qwen3-235b-a22b", "gpt-oss-120b"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 4), (4, 2), (8, 8)])
def test_whole_experts_in_a_tensor_parallel_group_make_no_step_faster(
    model_of: MakeModel, name: str, engine: str, tp: int, ep: int
) -> None:
    """Every rank waits for the busiest. vLLM 0.19, MiniMax-M2.5 on B200: 0 to 2 % longer at tp 2, 8 to 12 % at tp 4."""
    whole, split = (
        model_of(name, "b200", engine, "fp8", tensor_parallel_size=tp, expert_parallel_size=groups)
        for groups in (ep, 1)
    )
    for batch in (1, 4, 16, 64, 256, 1024):
        assert (
            split.decode(batch, 2000).seconds
            < whole.decode(batch, 2000).seconds
            < 1.3 * split.decode(batch, 2000).seconds
        )
    assert split.prefill(4000, 1).seconds < whole.prefill(4000, 1).seconds


@pytest.mark.parametrize(
    ("gpu", "measured"),
    # One all-to-all each way, with 8 ranks, 7168 wide, 8 of 256 experts, in microseconds by tokens per rank: DeepEP's
    # low-latency kernels in SGLang 0.5.12 (comm tables of ai-dynamo/aiconfigurator): dispatch in fp8, combine in bf16.
    [("h200", {1: 24.5, 128: 102.9, 1024: 692.1}), ("b200", {1: 44.1, 128: 73.8, 1024: 318.9})],
)
def test_an_exchange_takes_about_as_long_as_the_kernels(
    model_of: MakeModel, gpu: str, measured: dict[int, float]
) -> None:
    model = model_of("deepseek-v3", gpu, "sglang", "fp8", data_parallel_size=8, expert_parallel_size=8)
    assert model.exchange is not None
    for tokens, microseconds in measured.items():
        layer = model.exchange.seconds(tokens) / model.counts.moe_layers
        assert 0.5 < layer * 1e6 / microseconds < 2, tokens


def test_the_type_of_the_experts_decides_how_tokens_are_sent(counts_of: MakeCounts) -> None:
    counts, h200 = counts_of("deepseek-v3", "fp8", data_parallel_size=8, expert_parallel_size=8), find_gpu("h200")
    narrow = ExpertExchange(counts, h200, link_bytes_per_second)
    (row,) = counts.experts
    (matrices,) = row.matrices
    wide_experts = (row._replace(matrices=(matrices._replace(kind="bf16"),)),)
    wide = ExpertExchange(counts._replace(experts=wide_experts), h200, link_bytes_per_second)
    assert {each.kind for each in counts.dense} >= {"fp8"}
    assert narrow.prompt_seconds(1000) < wide.prompt_seconds(1000)


def test_wide_dispatch_and_the_network_take_longer(model_of: MakeModel) -> None:
    def bytes_seconds(gpu: str, dtype: str, replicas: int) -> float:
        layout = {"data_parallel_size": replicas, "expert_parallel_size": replicas}
        model = model_of("deepseek-v3", gpu, "sglang", dtype, **layout)
        assert model.exchange is not None
        return model.exchange.seconds(128) - model.exchange.latency

    narrow, wide = bytes_seconds("h200", "fp8", 8), bytes_seconds("h200", "bf16", 8)
    # Two bytes back, and one and a scale or two bytes out.
    assert wide / narrow == pytest.approx(4 / (3 + 4 / 128))
    # A100 multiplies fp8 weights in 16 bits.
    assert bytes_seconds("a100", "fp8", 8) == bytes_seconds("a100", "bf16", 8)
    assert bytes_seconds("h200", "fp8", 16) > 2 * narrow


def test_prompts_cross_the_network_once_for_each_node(model_of: MakeModel) -> None:
    def model(ranks: int, groups: int) -> ExpertExchange:
        found = model_of("deepseek-v3", "h200", "sglang", "fp8", data_parallel_size=ranks, expert_parallel_size=groups)
        assert found.exchange is not None
        return found.exchange

    # 58 layers of 7,168 numbers: a byte and a scale out, and two bytes back. 8 of 256 experts, 8 devices a node.
    token = 58 * 7168 * (3 + 4 / 128)
    for ranks, number in ((16, 2), (32, 4), (64, 8)):
        others = (number - 1) * (1 - (1 - 1 / number) ** 8)
        network = token * others / 50e9 * 1.25
        reached = (ranks - 1) * (1 - (1 - 1 / ranks) ** 8)
        # Of the ranks it reaches, 7 are in its own node. In other nodes, one of eight is where it arrives.
        copies = reached * (7 + (ranks - 8) * 7 / 8) / (ranks - 1)
        link = token * copies / 450e9 * 1.6
        assert model(ranks, ranks).prompt_seconds(1000) == pytest.approx(1000 * max(network, link))
        # Decoding sends a token to each device on its own.
        assert model(ranks, ranks).prompt_seconds(1000) < model(ranks, ranks).seconds(1000)
    # Experts that are split over all devices need every token on all of them.
    assert model(16, 1).prompt_seconds(1000) == pytest.approx(1000 * max(token / 50e9 * 1.25, token * 14 / 450e9 * 1.6))
    # In one node, nothing crosses the network.
    assert model(8, 8).prompt_seconds(1000) == pytest.approx(1000 * token * 7 * (1 - (7 / 8) ** 8) / 450e9 * 1.6)


def test_deepep_over_the_network(model_of: MakeModel) -> None:
    # docs/legacy.md of DeepEP: 128 tokens per rank, 64 ranks of H800: 173 us out and 314 us back.
    model = model_of("deepseek-v3", "h800", "sglang", "fp8", data_parallel_size=64, expert_parallel_size=64)
    assert model.exchange is not None
    layer = model.exchange.seconds(128) / model.counts.moe_layers
    assert layer * 1e6 == pytest.approx(173 + 314, rel=0.3)
