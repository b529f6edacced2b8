"""The parts of a step, for a model and a device small enough to compute by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.memory.curves import Curve
from kvcalc.memory.reads import Reads
from kvcalc.model.layout import Layout
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.costs import matrix_flops
from kvcalc.throughput.counts import Counts, Experts, Matrices, Work
from kvcalc.throughput.hardware import Gpu, Interconnect
from kvcalc.throughput.links import link_bytes_per_second
from kvcalc.throughput.roofline import Part, SpeedModel, Step

# 1,000 bytes and 100 operations per second (200 in fp8). A link connects four devices at 50 bytes per second.
GPU = Gpu(
    "toy", None, None, 10**6, None, 1000, {"bf16": 100, "fp8": 200}, Interconnect("link", 50, 4), None, None, (), "",
    None,
)  # fmt: skip

# Kernels as fast as the device, launches that cost nothing, and no overlap of reading and multiplying.
IDEAL = Constants(
    weight_overhead={"bf16": 1.0}, compute_overhead={"bf16": 1.0}, expert_overhead=1.0, expert_compute_overhead=1.0,
    kv_overhead=1.0, attention_compute_overhead=1.0, device_overhead=1.0, roof_power=1.0, kernel_seconds=0.0,
    step_seconds=0.0, sequence_seconds=0.0, busy_sequence_seconds=0.0, head_seconds=0.0, kv_token_seconds=0.0,
    activation_passes=0.0, all_reduce_seconds=0.0, all_reduce_device_seconds=0.0, link_overhead=1.0,
    prompt_link_overhead=1.0, prompt_link_overhead_per_device=0.0, pcie_all_reduce_seconds=0.0,
    pcie_all_reduce_device_seconds=0.0, pcie_overhead=1.0,
    pcie_overhead_per_device=0.0, stage_seconds=0.0, prefill_overhead=1.0, prefill_expert_overhead=1.0,
    prefill_attention_overhead=1.0, ttft_seconds=0.0, ttft_steps=0.0, ttft_token_seconds=0.0,
    first_seconds=0.0, cold_seconds=0.0, token_overlap=1.0, expert_passes=0.0, prompt_launch_seconds=0.0,
)  # fmt: skip

# Four layers of width 10 with 17 kernels. Two of them send a token to 2 of 8 experts. Three have a cache of 20 bytes
# per token plus 100 bytes for any context, with two KV heads each. All of this is on one rank, for any number of ranks.
COUNTS = Counts(
    num_layers=4, moe_layers=2, attention_layers=3, hidden_size=10, launches=17, kv_heads=6,
    dense=(Matrices("bf16", 9000, 700),), head=(Matrices("bf16", 600, 30),),
    experts=(Experts(8, 2, (Matrices("bf16", 500, 40),)),),
    work=(Work(6, 4, None),), reads=Reads((), Curve((1,), (100,), (20,))), layout=Layout(),
)  # fmt: skip


def model(dtype: str = "bf16", layout: tuple[Any, ...] = (1, 1, 1), gpu: Gpu = GPU, **changes: Any) -> SpeedModel:
    dense, experts = (Matrices(dtype, 9000, 700),), (Experts(8, 2, (Matrices(dtype, 500, 40),)),)
    counts = COUNTS._replace(layout=Layout(*layout), dense=dense, experts=experts)
    return SpeedModel(counts, gpu, IDEAL._replace(**changes))


def decode(batch: float = 1, context: float = 50, **options: Any) -> Step:
    return model(**options).decode(batch, context)


def about(value: float) -> object:
    return pytest.approx(value, rel=1e-12)


def test_a_step_reads_each_weight_once_and_of_the_experts_those_touched() -> None:
    assert decode().weights == about((9000 + 600 + 2 * 500) / 1000)
    # With three tokens, an expert is missed by all with probability (6/8)^3, so 4.625 of 8 are read.
    assert decode(batch=3).weights == about((9000 + 600 + 4.625 * 500) / 1000)
    twice = GPU._replace(bandwidth_bytes_per_second=2000)
    assert decode(gpu=twice).weights == about(decode().weights / 2)
    assert decode(gpu=twice).kv == about(decode().kv / 2)


def test_reading_is_slower_by_the_overhead_of_each_stored_type() -> None:
    overheads = {"bf16": 1.5, "fp8": 3.0}
    options: dict[str, Any] = {"weight_overhead": overheads, "expert_overhead": 5.0}
    assert decode(**options).weights == about(1.5 * 9.6 + 5 * 1.5)
    assert decode(dtype="fp8", **options).weights == about(3 * 9 + 1.5 * 0.6 + 5 * 3)
    # A type without a fitted constant is read like 16 bits.
    assert decode(dtype="nvfp4", **options).weights == decode(**options).weights
    assert decode(device_overhead=2.0, **options).weights == about(2 * decode(**options).weights)


def test_experts_are_read_at_the_overhead_of_their_own_kernels_if_it_is_known() -> None:
    overheads = {"bf16": 1.0, "fp8": 3.0, "nvfp4": 2.0, "nvfp4 experts": 1.5}
    alike = decode(dtype="nvfp4", weight_overhead={**overheads, "nvfp4 experts": 2.0}).weights
    assert decode(dtype="nvfp4", weight_overhead=overheads).weights == about(alike - 0.5 * 2 * 500 / 1000)
    # Experts of other types are read like dense layers.
    assert decode(dtype="fp8", weight_overhead=overheads).weights == about(3 * 9 + 0.6 + 3)


def test_each_token_is_multiplied_with_the_dense_layers_the_head_and_its_own_experts() -> None:
    dense, head, experts, scores = 2 * 700 / 100, 2 * 30 / 100, 2 * 2 * 40 / 100, 6 * 50 / 100
    assert decode().compute == about(dense + head + experts + scores)
    assert decode(batch=3).compute == about(3 * decode().compute)
    # fp8 layers are multiplied twice as fast; the head and the scores stay in 16 bits.
    assert decode(dtype="fp8").compute == about(dense / 2 + head + experts / 2 + scores)
    slower = decode(compute_overhead={"bf16": 2.0}, expert_compute_overhead=3.0, attention_compute_overhead=5.0)
    assert slower.compute == about(2 * dense + 2 * head + 2 * 3 * experts + 5 * scores)
    # Three sequences at three times the overhead: the batch and the overhead multiply.
    assert decode(batch=3, compute_overhead={"bf16": 2.0}).compute == about(3 * (2 * (dense + head + experts) + scores))


def test_what_a_rank_holds_is_not_divided_again() -> None:
    two, four = (decode(batch=4, layout=layout) for layout in ((2, 1, 1), (4, 1, 1)))
    assert two[:5] == pytest.approx((two.seconds, *decode(batch=4)[1:5]))
    assert (two.weights, two.kv, two.compute, two.overhead) == (four.weights, four.kv, four.compute, four.overhead)


def test_every_sequence_reads_its_own_cache() -> None:
    # 20 bytes per token, plus 100 bytes for any context.
    assert decode(batch=3, context=50).kv == about(3 * (20 * 50 + 100) / 1000)
    assert decode(batch=3, context=50, kv_overhead=4.0).kv == about(4 * 3 * 1.1)
    one, two, three = (decode(context=tokens).kv for tokens in (100, 200, 300))
    assert three - two == about(two - one)


def test_kernels_and_steps_cost_once_and_each_sequence() -> None:
    assert decode().overhead == 0
    assert decode(batch=7, kernel_seconds=3.0).overhead == about(17 * 3)
    assert decode(batch=7, step_seconds=3.0).overhead == about(3)
    assert decode(batch=7, sequence_seconds=3.0).overhead == about(7 * 3)
    # Two KV heads in each of three layers.
    assert decode(batch=7, head_seconds=3.0).overhead == about(7 * 6 * 3)
    # Beyond 500 sequences, streaming takes more host time for each.
    assert decode(batch=500, busy_sequence_seconds=3.0).overhead == 0
    assert decode(batch=507, busy_sequence_seconds=3.0).overhead == about(7 * 3)
    # Each token's hidden state of ten 16-bit numbers, five times in each of four layers.
    assert decode(batch=7, activation_passes=5.0).overhead == about(7 * 5 * 4 * 10 * 2 / 1000)
    # A token that is checked as a draft moves as much as the first one of its sequence.
    assert model(activation_passes=5.0).decode(7, 50, 3).overhead == about(3 * 7 * 5 * 4 * 10 * 2 / 1000)
    # Each of two experts of a token moves six 16-bit numbers five times.
    moving = COUNTS._replace(experts=(COUNTS.experts[0]._replace(moved=6.0),))
    passed = SpeedModel(moving, GPU, IDEAL._replace(expert_passes=5.0))
    assert passed.decode(7, 100).overhead == about(7 * 2 * 5 * 6 * 2 / 1000)
    assert passed.prefill(40).overhead == about(40 * 2 * 5 * 6 * 2 / 1000)
    # The dense layers move eight numbers of a token.
    inside = SpeedModel(COUNTS._replace(moved=8.0), GPU, IDEAL._replace(expert_passes=5.0))
    assert inside.decode(7, 100).overhead == about(7 * 5 * 8 * 2 / 1000)
    # Three layers have a cache. The tokens of the longest sequence count, for any batch.
    assert decode(batch=7, context=50, kv_token_seconds=3.0).overhead == about(3 * 50 * 3)
    together = decode(batch=7, kernel_seconds=3.0, step_seconds=11.0, sequence_seconds=13.0)
    assert together.overhead == about(17 * 3 + 11 + 7 * 13)


def test_pipeline_stages_cost_one_hop_less_than_there_are_and_share_the_batch() -> None:
    assert decode(layout=(1, 3, 1), stage_seconds=7.0).overhead == about(2 * 7)
    assert decode(layout=(1, 1, 1), stage_seconds=7.0).overhead == 0
    assert decode(layout=(1, 3, 1), batch=12) == decode(batch=4)
    # With fewer sequences than stages, each stage has one sequence at a time, and stages are idle.
    assert decode(layout=(1, 3, 1), batch=2) == decode(batch=1)
    assert model(layout=(1, 3, 1)).roofline(12, 50) == model().roofline(4, 50)
    assert model(layout=(1, 3, 1)).roofline(2, 50) == model().roofline(1, 50)


def test_two_all_reduces_a_layer_move_each_byte_twice_less_a_devices_share() -> None:
    assert decode(batch=7, all_reduce_seconds=3.0).communication == 0
    token_bytes = 4 * 10 * 2
    for size in (2, 4):
        sent = 2 * token_bytes * 2 * (size - 1) / size / 50
        assert decode(layout=(size, 1, 1)).communication == about(sent)
        assert decode(layout=(size, 1, 1), batch=7, link_overhead=3.0).communication == about(7 * 3 * sent)
        # The latency without the bytes: once per all-reduce, for any batch.
        latency = {"all_reduce_seconds": 3.0, "all_reduce_device_seconds": 5.0}
        waiting = decode(layout=(size, 1, 1), batch=7, **latency).communication
        assert waiting == about(7 * sent + 2 * 4 * (3 + 5 * (size - 2)))


@pytest.mark.parametrize(
    ("layout", "all_reduces"),
    [
        # Two in each of 4 layers, and one more in the 3 with attention if ranks divide the tokens of the cache or of a
        # prompt. DP ranks exchange the tokens of the 2 layers with experts instead.
        (Layout(2), 8), (Layout(2, token_ranks=2), 11), (Layout(2, prompt_ranks=2), 9),
        (Layout(2, data_parallel_size=2), 6), (Layout(2, data_parallel_size=2, prompt_ranks=2), 9),
        (Layout(2, token_ranks=2, data_parallel_size=2), 9),
    ],
)  # fmt: skip
def test_all_reduces_follow_what_the_ranks_divide(layout: Layout, all_reduces: int) -> None:
    latency = SpeedModel(COUNTS._replace(layout=layout), GPU, IDEAL._replace(all_reduce_seconds=1e6)).costs.latency
    assert latency == about(all_reduces * 1e6)


def test_an_all_reduce_between_nodes_sends_only_a_share_of_the_bytes_over_the_network() -> None:
    """The toy device with eight devices on a link of 800 GB/s, in nodes joined by ports of 50 GB/s."""
    node = GPU._replace(interconnect=Interconnect("link", 800 * 10**9, 8))
    reduced = 2 * 4 * 10 * 2  # two all-reduces in each of four layers, of ten 16-bit numbers
    # Devices, nodes, devices in a node, and sends over the network one after the other.
    for size, nodes, near, sends in ((8, 1, 8, 0), (16, 2, 8, 2), (12, 2, 6, 2), (24, 3, 8, 4), (64, 8, 8, 6)):
        split = model(gpu=node, layout=(size, 1, 1))
        link, network = reduced * 2 * (near - 1) / near / 800e9, reduced * 2 * (nodes - 1) / nodes / near / 50e9
        assert (split.times.transfer, split.times.network) == (about(link), about(network))
        # NCCL's fixed time, and that of each send. Decoding sends its few bytes at a third of the port's rate.
        sent = decode(batch=7, gpu=node, layout=(size, 1, 1), link_overhead=5.0).communication
        fixed = 8 * (12e-6 * (nodes > 1) + 7e-6 * sends)
        assert sent == about(7 * (5 * link + 3 * network) + fixed)
        latency = {"all_reduce_seconds": 3.0, "all_reduce_device_seconds": 5.0}
        waiting = decode(gpu=node, layout=(size, 1, 1), **latency).communication
        assert waiting == about(8 * (3 + 5 * (near - 2)) + link + 3 * network + fixed)
        # The many bytes of prompts reach more of both, and up to eight devices of a node more than two.
        long: dict[str, Any] = {"prompt_link_overhead": 5.0, "prompt_link_overhead_per_device": -0.25}
        work = model(gpu=node, layout=(size, 1, 1), **long).prefill_work(20)
        assert work.communication == about(20 * ((5 - 0.25 * (near - 2)) * link + 1.07 * network))


def test_all_reduces_stay_in_a_node_if_a_stage_and_an_dp_rank_fit_into_it() -> None:
    node = GPU._replace(interconnect=Interconnect("link", 800 * 10**9, 8))
    alone = model(gpu=node, layout=(8, 1, 1)).times
    stages = model(gpu=node, layout=(8, 4, 1)).times
    # Only what a stage passes on goes to other nodes.
    assert stages.passed > 0
    assert stages == alone._replace(stages=4, passed=stages.passed)
    dense = COUNTS._replace(moe_layers=0, experts=())
    one, four = (SpeedModel(dense._replace(layout=Layout(8, 1, replicas)), node, IDEAL).times for replicas in (1, 4))
    assert four == one
    # Stages of 16 devices have all-reduces between nodes, as many as one stage.
    assert model(gpu=node, layout=(16, 2, 1)).times.network == model(gpu=node, layout=(16, 1, 1)).times.network > 0


def test_bridges_and_pcie_are_no_nodes() -> None:
    """Pairs of cards in one machine: one ring, whose slowest part is between the pairs, over PCIe."""
    pair = GPU._replace(interconnect=Interconnect("bridge", 300 * 10**9, 2), pcie_bytes_per_second=50 * 10**9)
    split = model(gpu=pair, layout=(4, 1, 1)).times
    assert (split.transfer, split.network, split.sends) == (about(160 * 2 * 3 / 4 / 50e9), 0, 0)
    alone = model(gpu=GPU._replace(interconnect=None), layout=(8, 1, 1)).times
    assert (alone.transfer, alone.network, alone.sends) == (about(160 * 2 * 7 / 8 / 32e9), 0, 0)


def test_devices_without_a_fast_link_have_constants_of_their_own() -> None:
    alone = GPU._replace(interconnect=None, pcie_bytes_per_second=25)
    sent = 2 * 80 * 2 * (1 / 2) / 25
    slow = {"pcie_all_reduce_seconds": 3.0, "pcie_all_reduce_device_seconds": 5.0, "pcie_overhead": 7.0}
    assert decode(layout=(2, 1, 1), gpu=alone, **slow).communication == about(7 * sent + 2 * 4 * 3)
    latency = decode(layout=(4, 1, 1), gpu=alone, **slow).communication - 7 * 2 * 80 * 2 * (3 / 4) / 25
    assert latency == about(2 * 4 * (3 + 2 * 5))
    assert decode(layout=(2, 1, 1), **slow).communication == decode(layout=(2, 1, 1)).communication


def test_each_further_device_over_pcie_adds_to_the_overhead_of_the_bytes() -> None:
    alone = GPU._replace(interconnect=None, pcie_bytes_per_second=25)
    slow = {"pcie_overhead": 7.0, "pcie_overhead_per_device": 0.5}
    for devices, overhead in ((2, 7.0), (4, 8.0), (8, 10.0)):
        sent = 2 * 80 * 2 * (devices - 1) / devices / 25
        assert decode(layout=(devices, 1, 1), gpu=alone, **slow).communication == about(overhead * sent)
    more = {"pcie_overhead_per_device": 0.5}
    assert decode(layout=(4, 1, 1), **more).communication == decode(layout=(4, 1, 1)).communication


def test_prompts_have_overheads_of_their_own_on_fast_links_and_those_of_a_step_over_pcie() -> None:
    """No more devices than 8 share a link in kernel tables."""
    own: dict[str, Any] = {"prompt_link_overhead": 3.0, "prompt_link_overhead_per_device": 0.25}
    slow: dict[str, Any] = {"pcie_overhead": 7.0, "pcie_overhead_per_device": 0.5, **own}
    alone = GPU._replace(interconnect=None, pcie_bytes_per_second=25)
    for devices, linked, pcie in ((2, 3.0, 7.0), (4, 3.5, 8.0), (8, 4.5, 10.0)):
        fast, ideal = (model(layout=(devices, 1, 1), **more).prefill_work(20).communication for more in (own, {}))
        assert fast == about(linked * ideal)
        sent = 2 * 80 * 2 * (devices - 1) / devices / 25
        over_pcie = model(layout=(devices, 1, 1), gpu=alone, **slow).prefill_work(20).communication
        assert over_pcie == about(pcie * 20 * sent)


def test_what_the_shorter_of_reading_and_multiplying_adds_is_its_own_part() -> None:
    dense_alone = COUNTS._replace(head=(), experts=(), work=(), reads=Reads((), Curve((1,), (0,), (0,))))
    # With power 2, 3 and 4 seconds together take 5.
    for held, elements, weights, compute in ((3000, 200, 1, 4), (4000, 150, 4, 1)):
        counts = dense_alone._replace(dense=(Matrices("bf16", held, elements),))
        step = SpeedModel(counts, GPU, IDEAL._replace(roof_power=2.0)).decode(1, 50)
        assert (step.weights, step.compute, step.seconds) == (about(weights), about(compute), about(5))
    # With nothing to read or nothing to multiply, only the other counts.
    for held, elements, seconds in ((0, 200, 4), (3000, 0, 3)):
        counts = dense_alone._replace(dense=(Matrices("bf16", held, elements),))
        assert SpeedModel(counts, GPU, IDEAL._replace(roof_power=2.0)).decode(1, 50).seconds == about(seconds)


def test_a_step_lasts_as_long_as_all_its_parts_together() -> None:
    step = decode(batch=3, layout=(2, 1, 1), kernel_seconds=7.0, roof_power=3.0)
    assert min(step[1:]) > 0
    assert step.seconds == about(step.weights + step.kv + step.compute + step.overhead + step.communication)


def test_the_largest_part_names_the_bound() -> None:
    names = ("weights", "kv", "compute", "overhead", "communication")
    for place, name in enumerate(names):
        parts = [1.0] * 5
        parts[place] = 2.0
        assert Step(6.0, *parts).bound_by == name


def test_the_ideal_step_reads_all_bytes_once_or_does_all_operations() -> None:
    bytes_read = 9000 + 600 + 4.625 * 500 + 3 * 1100
    fast = GPU._replace(flops_per_second={"bf16": 10**9})
    assert model(gpu=fast).roofline(3, 50) == about(bytes_read / 1000)
    wide = GPU._replace(bandwidth_bytes_per_second=10**9)
    operations = 3 * (2 * (700 + 30 + 2 * 40) + 6 * 50)
    assert model(gpu=wide).roofline(3, 50) == about(operations / 100)
    assert model(gpu=wide).roofline(1, 50) == about(operations / 3 / 100)
    # Overheads do not count here.
    assert model(gpu=wide, expert_compute_overhead=9.0, kernel_seconds=9.0).roofline(3, 50) == about(operations / 100)


def test_a_prompts_work_is_its_tokens_and_the_triangle_of_their_scores() -> None:
    tokens = 20
    dense, experts, scores = 2 * 700 / 100, 2 * 2 * 40 / 100, 4 * (20 * 21 / 2) / 100
    work = model().prefill_work(tokens)
    assert work == (about(work.compute), 0, 0, about(tokens * (dense + experts) + scores), 0, 0)
    slower = model(prefill_overhead=2.0, prefill_expert_overhead=3.0, prefill_attention_overhead=5.0)
    assert slower.prefill_work(tokens).compute == about(2 * tokens * (dense + 3 * experts) + 5 * scores)
    assert model(activation_passes=5.0).prefill_work(tokens).overhead == about(tokens * 5 * 80 / 1000)
    sent = 2 * 80 * 2 * (1 / 2) / 50
    slow = model(layout=(2, 1, 1), prompt_link_overhead=3.0).prefill_work(tokens)
    assert slow.communication == about(tokens * 3 * sent)
    # Launches and reading belong to the step that includes the prompt.
    busy = model(kernel_seconds=3.0, step_seconds=3.0, sequence_seconds=3.0, all_reduce_seconds=3.0)
    assert busy.prefill_work(tokens) == work


def test_of_several_stages_each_does_its_share_of_a_prompts_work() -> None:
    options: dict[str, Any] = {"activation_passes": 5.0, "prompt_link_overhead": 3.0}
    one, four = (model(layout=(2, stages, 1), **options) for stages in (1, 4))
    # Eight devices are more than the link's four. The two that all-reduce are in one node.
    assert four.prefill_work(20) == tuple(about(part / 4) for part in one.prefill_work(20))


def test_a_prefill_reads_each_weight_once_whatever_its_length() -> None:
    def weights(tokens: int, batch: int = 1, **options: Any) -> float:
        return model(**options).prefill(tokens, batch).weights

    experts = {tokens: 8 * (1 - 0.75**tokens) * 500 / 1000 for tokens in (1, 20, 40)}
    assert weights(1) == about(9.6 + experts[1])
    assert weights(20) == about(9.6 + experts[20])
    # Two prompts share the reading of weights.
    assert weights(20, batch=2) == about(9.6 + experts[40])
    assert weights(20, weight_overhead={"bf16": 3.0}, expert_overhead=5.0) == about(3 * 9.6 + 5 * 3 * experts[20])
    assert weights(1000) == about(9.6 + 4)


def test_a_lone_prefill_waits_for_the_launches_once_and_works_for_every_prompt() -> None:
    options: dict[str, Any] = {
        "kernel_seconds": 3.0,
        "sequence_seconds": 5.0,
        "activation_passes": 7.0,
        "all_reduce_seconds": 11.0,
    }
    lone = model(layout=(2, 1, 1), **options)
    work = lone.prefill_work(20)
    for batch in (1, 3):
        step = lone.prefill(20, batch)
        assert step.kv == 0
        assert step.compute == about(batch * (work.compute + 2 * 30 / 100))  # the head has the last token of each
        assert step.overhead == about(17 * 3 + batch * (5 + work.overhead))
        assert step.communication == about(2 * 4 * 11 + batch * work.communication)
        assert step.seconds == about(sum(step[1:]))
    assert lone.prefill(20) == lone.prefill(20, 1)


def test_a_lone_prompt_passes_all_stages_one_after_the_other() -> None:
    options: dict[str, Any] = {"activation_passes": 7.0, "prompt_link_overhead": 3.0, "all_reduce_seconds": 11.0}
    one, two = (model(layout=(2, stages, 1), stage_seconds=13.0, **options).prefill(20, 3) for stages in (1, 2))
    assert two.overhead == about(one.overhead + 13)
    assert (two.weights, two.compute, two.communication) == (one.weights, about(one.compute), about(one.communication))


def test_prefill_overlaps_reading_the_matrices_of_a_class_with_multiplying_all_prompts() -> None:
    step, tokens = model(roof_power=2.0).prefill(20, 3), 60
    dense, head, experts = (9, tokens * 14), (0.6, 3 * 0.6), (8 * (1 - 0.75**tokens) * 0.5, tokens * 1.6)
    scores = 3 * 4 * (20 * 21 / 2) / 100
    assert step.weights + step.compute == about(sum((a**2 + b**2) ** 0.5 for a, b in (dense, head, experts)) + scores)


def test_a_step_that_decodes_and_computes_prompts_reads_the_weights_once() -> None:
    """Each matrix is read once, and multiplied with the tokens of the sequences and of the prompts."""
    prompts, batch, tokens = [Part(5, 25, number=2.0)], 3, 40
    mixed = model(roof_power=2.0)
    found = mixed.decode(batch, 50).seconds + mixed.beside(prompts, batch).seconds
    distinct = 8 * (1 - 0.75 ** (batch + tokens)) * 0.5
    pairs = ((9, (batch + tokens) * 14), (0.6, (batch + 2) * 0.6), (distinct, (batch + tokens) * 1.6), (3 * 1.1, 9))
    scores = 2 * 4 * (25 * 26 / 2 - 5 * 6 / 2) / 100
    assert found == about(sum((a**2 + b**2) ** 0.5 for a, b in pairs) + scores)
    # What is read for the sequences anyway hides a part of the prompts' multiplying.
    alone = mixed.alone(prompts).seconds
    assert max(mixed.decode(batch, 50).seconds, alone) < found < mixed.decode(batch, 50).seconds + alone


def test_what_prompts_add_is_nothing_without_prompts_and_their_work_if_multiplying_bounds_the_step() -> None:
    mixed = model(roof_power=2.0)
    assert mixed.beside([], 3).seconds == 0
    # With so many sequences, the weights are read in no time beside multiplying.
    head = 2 * 30 / 100  # only the last token of a prompt needs it
    work = mixed.prefill_work(20).seconds + head
    assert mixed.beside([Part(0, 20)], 100_000).seconds == pytest.approx(work, rel=1e-6)
    # Constants that count once in a step count once. A prompt is one more request for the host.
    busy = model(kernel_seconds=3.0, step_seconds=3.0, all_reduce_seconds=3.0, sequence_seconds=7.0, roof_power=2.0)
    assert busy.beside([Part(0, 20)], 3).seconds == about(mixed.beside([Part(0, 20)], 3).seconds + 7)


def test_tokens_that_choose_alike_touch_fewer_experts() -> None:
    # Three tokens count as one and two halves.
    distinct = 8 * (1 - 0.75**2) * 0.5
    assert decode(batch=3, token_overlap=2.0).weights == about(9.6 + distinct)
    assert decode(batch=1, token_overlap=2.0) == decode(batch=1)


def test_a_type_the_device_has_no_units_for_is_multiplied_in_the_next_it_has() -> None:
    def flops(dtype: str, **known: int) -> float:
        return matrix_flops(GPU._replace(flops_per_second=known), dtype)

    everything = {"fp32": 1, "tf32": 2, "fp16": 3, "bf16": 4, "fp8": 5, "fp4": 6, "int8": 7}
    wanted = {"fp32": 2, "bf16": 4, "fp16": 4, "fp8": 5, "nvfp4": 6, "int8": 4, "int4": 4}
    assert {dtype: flops(dtype, **everything) for dtype in wanted} == wanted
    assert flops("fp32", fp32=1, bf16=4) == 1
    assert flops("fp32", bf16=4) == 4
    assert flops("bf16", fp32=1, fp16=3) == flops("fp8", fp32=1, fp16=3) == 3
    assert flops("bf16", fp32=1) == 1
    with pytest.raises(ValueError, match="toy: no FLOP/s known"):
        flops("bf16", int8=7)


def test_bytes_between_devices_travel_over_the_slowest_way_they_must_take() -> None:
    fast, slow = (GPU._replace(interconnect=Interconnect("link", speed, 4)) for speed in (10**12, 10**9))
    assert [link_bytes_per_second(fast, devices) for devices in (1, 4, 5, 9)] == [10**12, 10**12, 32e9, 50e9]
    assert [link_bytes_per_second(slow, devices) for devices in (4, 9)] == [10**9, 10**9]
    none = GPU._replace(interconnect=None)
    # PCIe 4.0 x16, unless the device has its own rate.
    assert link_bytes_per_second(none, 8) == 32e9
    assert link_bytes_per_second(none._replace(pcie_bytes_per_second=63 * 10**9), 8) == 63e9


def test_parts_of_prompts_add_up() -> None:
    mixed, two = model(roof_power=2.0), [Part(5, 25), Part(5, 25)]
    assert mixed.beside(two, 3) == mixed.beside([Part(5, 25, number=2.0)], 3)
    assert mixed.alone(two) == mixed.alone([Part(5, 25, number=2.0)])
    assert mixed.prefill_copied_bytes(20, 3) == 0  # no part of the model is in host memory


def test_beside_prompts_a_drafted_token_counts_as_a_sequence_does() -> None:
    for layout in ((1, 1, 1), (1, 2, 1)):
        mixed = model(roof_power=2.0, layout=layout)
        assert mixed.beside([Part(0, 20)], 4, 3) == mixed.beside([Part(0, 20)], 12)


def test_each_of_two_stages_decodes_half_of_the_sequences_beside_half_of_the_prompts() -> None:
    one, two = (model(roof_power=2.0, layout=(1, stages, 1)) for stages in (1, 2))
    whole, halves = one.beside([Part(0, 20)], 3), two.beside([Part(0, 20, number=2.0)], 6)
    assert (halves.weights, halves.compute) == (about(whole.weights), about(whole.compute))


def test_dp_ranks_send_the_tokens_of_their_prompts_to_the_experts() -> None:
    """Two ranks compute one prompt of 20 tokens each. Nothing else is sent: a rank is one device."""
    spread = model(layout=(1, 1, 2, 2))
    assert spread.exchange is not None
    sent, parts = spread.exchange.prompt_seconds(20), [Part(0, 20, share=0.5, number=2.0)]
    assert sent > 0
    assert spread.beside(parts, 4).communication == about(sent)
    assert spread.alone(parts).communication == about(sent + spread.exchange.latency)


def test_a_slower_device_takes_longer_for_all_that_it_computes_of_a_prompt() -> None:
    assert model(device_overhead=2.0).prefill_work(20).compute == about(2 * model().prefill_work(20).compute)


def test_attention_alone_is_a_step_without_matrices() -> None:
    bare = COUNTS._replace(dense=(), head=(), experts=(), moe_layers=0)
    for layout in (Layout(), Layout(pipeline_parallel_size=2)):
        found = SpeedModel(bare._replace(layout=layout), GPU, IDEAL._replace(
            roof_power=2.0, kv_overhead=1.5, attention_compute_overhead=2.0,
        ))  # fmt: skip
        for batch, context in ((1, 50), (7, 200)):
            assert found.attention_seconds(batch, context) == about(found.decode(batch, context).seconds)


def test_copies_that_divide_prompts_may_divide_the_requests_of_a_step_too() -> None:
    """Four copies in two groups: eight requests are two for each, or four for both copies of a group."""

    def of(replicas: int, **divided: Any) -> SpeedModel:
        layout = Layout(data_parallel_size=replicas, **divided).with_experts(None)
        return SpeedModel(COUNTS._replace(layout=layout), GPU, IDEAL)

    each, whole = of(2, prompt_ranks=2), of(2, prompt_ranks=2, divides_decode=False)
    assert each.attention_seconds(8, 50) == of(4).attention_seconds(8, 50)
    assert whole.attention_seconds(8, 50) == of(2).attention_seconds(8, 50) == about(2 * each.attention_seconds(8, 50))
    # Three prompts on two groups are two for one of them, and each copy computes half of both.
    assert [found.share_of_prompts(3) for found in (each, whole, of(2), of(4))] == [1 / 3, 1 / 3, 2 / 3, 1 / 3]


def test_a_step_waits_for_the_rank_with_most_sequences() -> None:
    layout = Layout(data_parallel_size=4, expert_parallel_size=4)
    found = SpeedModel(COUNTS._replace(layout=layout), GPU, IDEAL)
    assert found.decode(8, 50, busiest=2) == found.decode(8, 50)
    assert found.decode(8, 50, busiest=5).kv == about(5 / 2 * found.decode(8, 50).kv)


def test_a_prompt_on_dp_ranks_pays_for_all_reduces_and_for_the_exchange() -> None:
    layout = Layout(2, data_parallel_size=2, expert_parallel_size=4)
    found = SpeedModel(COUNTS._replace(layout=layout), GPU, IDEAL)
    assert found.exchange is not None
    reduced, exchanged = 20 * found.costs.prompt_transfer, found.exchange.prompt_seconds(20)
    assert min(reduced, exchanged) > 0
    # Both ranks compute a prompt at the same time, so that each takes half of theirs.
    assert found.prefill_work(40).communication == about(reduced + exchanged)
    both, latency = [Part(0, 20, share=0.5, number=2.0)], found.costs.latency + found.exchange.latency
    assert found.beside(both, 4).communication == about(reduced + exchanged)
    assert found.alone(both).communication == about(reduced + exchanged + latency)


def test_a_prompt_waits_for_the_host_if_launching_its_kernels_takes_longer() -> None:
    """17 kernels of 3 s."""
    waits = [model(prompt_launch_seconds=3.0).launch_wait(seconds) for seconds in (0.0, 40.0, 51.0, 60.0)]
    assert waits == [51, 11, 0, 0]


def test_tokens_that_are_checked_share_what_is_read_in_the_ideal_step_too() -> None:
    """With a fast memory, 3 tokens of each of 7 sequences are as many operations as 21 sequences have."""
    fast = SpeedModel(COUNTS, GPU._replace(bandwidth_bytes_per_second=10**12), IDEAL)
    assert fast.roofline(7, 50, 3) == about(fast.roofline(21, 50))
    # With fast units, they read as much as 7 sequences, and the experts that 21 tokens choose.
    dense = COUNTS._replace(experts=(), moe_layers=0)
    slow = SpeedModel(dense, GPU._replace(flops_per_second={"bf16": 10**12}), IDEAL)
    assert slow.roofline(7, 50, 3) == about(slow.roofline(7, 50))
