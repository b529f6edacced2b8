"""Prefill and decode instances on different kinds of device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvcalc
from kvcalc.planning.plan.disaggregated.platforms import join_caches, joined_kinds
from kvcalc.planning.plan.disaggregated.search import Instances, find_splits
from kvcalc.planning.plan.targets import Targets
from kvcalc.planning.plan.traffic import Platform, Traffic
from kvcalc.question.question import Question
from kvcalc.question.request_lengths import one_length
from kvcalc.throughput.hardware import find_gpu
from tests.test_schema import check

LINK = "infiniband-400g"
SPLIT: dict[str, Any] = {"disaggregate": True, "transfer": LINK, "input_tokens": 4096, "output_tokens": 500}
LOAD: dict[str, Any] = {"requests_per_second": 8.0, "max_tpot_seconds": 0.02, "max_ttft_seconds": 1.0}
PRICES = {"h100-sxm": 2.0, "h200-sxm": 3.0}
BOTH = "h100-sxm + h200-sxm"


def mixed_rows(document: Any) -> list[Any]:
    return [row for row in document["plans"] if "+" in row["gpu"]]


def plan_for_both() -> Any:
    return kvcalc.plan("qwen3-32b", ["h100", "h200"], prices=PRICES, **SPLIT, **LOAD)


@pytest.fixture(scope="module")
def usual() -> Any:
    return plan_for_both()


def test_cheap_prefill_and_fast_decode_are_combined(usual: Any) -> None:
    check(usual, "plan")
    (row,) = mixed_rows(usual)
    pools = row["disaggregated"]
    assert (pools["prefill"]["gpu"], pools["decode"]["gpu"], row["gpu"]) == ("h100-sxm", "h200-sxm", BOTH)
    cost = pools["prefill"]["num_devices"] * 2.0 + pools["decode"]["num_devices"] * 3.0
    assert row["cost_per_hour"] == pytest.approx(cost)
    assert row["price_per_hour"] is None
    assert row["cost_per_million_output_tokens"] == pytest.approx(cost / (row["tokens_per_second"] * 3600 / 1e6))
    assert cost < min(one["cost_per_hour"] for one in usual["plans"] if one is not row and one["fits"])
    assert usual["best"] == row
    assert " on h" in row["next_layout"]


def test_what_the_rows_of_one_kind_say_is_not_said_again(usual: Any) -> None:
    texts = [warning["text"] for warning in usual["warnings"] if warning["code"] != "close-price"]
    assert sum("no measurement of separate prefill and decode instances" in text for text in texts) == 1
    assert not [text for text in texts if BOTH in text]


@pytest.mark.settled
def test_the_times_are_those_of_each_kind() -> None:
    """A decode step is that of the decode instances' device, and the cache has the bytes of the model."""
    (row,) = mixed_rows(plan_for_both())
    decode, transfer = row["disaggregated"]["decode"], row["disaggregated"]["transfer"]
    tokens = 2 * 8 * 128 * 2 * 64  # K and V of 8 heads with 128 elements of 2 bytes, in 64 layers
    assert transfer["request_bytes"] == 4096 * tokens
    assert transfer["seconds"] == transfer["bytes_per_device"] / 50e9
    answer: Any = kvcalc.estimate(
        "qwen3-32b", engine="vllm", devices=kvcalc.find_devices(f"h200x{decode['tensor_parallel_size']}"),
        context_tokens=4096 + 250, batch_size=int(decode["requests_per_instance"]),
    )  # fmt: skip
    assert row["tpot_seconds"] == pytest.approx(answer["throughput"]["decode_step_seconds"], rel=0.05)


@pytest.mark.parametrize(
    ("rate", "clients", "prices", "limit"),
    [(6.0, None, (2.0, 3.0), 24), (14.0, None, (3.0, 2.0), 24), (None, 48, (2.0, 3.0), 24), (6.0, None, None, 8)],
)
def test_the_cheapest_pair_comes_first_within_the_limits(
    rate: float | None, clients: int | None, prices: Any, limit: int
) -> None:
    targets = Targets(clients, rate, 1.5, 0.03)
    question = Question(kvcalc.load_model("llama-3.1-8b"))
    traffic = Traffic(question, one_length(4096, 300), targets, False)
    weights = prices or (1.0, 1.0)
    kinds = [
        Platform(find_gpu(name), 12, "vllm", price=None if prices is None else price)
        for name, price in zip(("h100", "h200"), weights)
    ]
    known = Instances(traffic)
    pairs = find_splits(known, joined_kinds(kinds, LINK, limit), targets, keep=1000)
    assert isinstance(pairs, list)
    costs = []
    for pools in pairs:
        used = pools.devices_of(pools.numbers)
        of = [weights[kinds.index(kind)] for kind in (pools.kinds.prefill, pools.kinds.decode)]
        assert pools.kinds.prefill != pools.kinds.decode
        assert max(used) <= 12
        assert sum(used) <= limit
        if pools.too_slow(targets) is None:
            costs.append(used[0] * of[0] + used[1] * of[1])
    assert costs == sorted(costs)
    assert len({pools.kinds.names for pools in pairs}) == 2


def test_without_prices_the_fewest_devices_decide() -> None:
    document: Any = kvcalc.plan("qwen3-32b", ["h100", "h200"], prices={"h100-sxm": 1.0}, **SPLIT, **LOAD)
    (row,) = mixed_rows(document)
    assert row["cost_per_hour"] is None
    assert document["ranked_by"] == "num_devices"


@pytest.mark.parametrize(
    ("first", "second", "are_joined"),
    [
        ("h100", "h200", True), ("a100", "l40s", True), ("h100", "b200", False), ("h100", "mi300x", False),
        ("mi300x", "mi325x", True), ("h100", "a100", False),
    ],
)  # fmt: skip
def test_caches_are_only_sent_between_devices_of_one_architecture(first: str, second: str, are_joined: bool) -> None:
    one, other = find_gpu(first), find_gpu(second)
    assert join_caches(one, other) == join_caches(other, one) == are_joined


def test_nvlink_joins_one_kind_and_pcie_a_machine() -> None:
    load: dict[str, Any] = {"input_tokens": 2048, "output_tokens": 200, "requests_per_second": 4.0}
    ask: dict[str, Any] = {"disaggregate": True, **load}
    assert not mixed_rows(kvcalc.plan("llama-3.1-8b", ["h100", "h200"], transfer="nvlink", **ask))
    (row,) = mixed_rows(kvcalc.plan("llama-3.1-8b", ["a100-pcie", "l40s"], transfer="pcie", **ask))
    slower = min(find_gpu(name).pcie_bytes_per_second or 0 for name in ("a100-pcie", "l40s"))
    assert row["disaggregated"]["transfer"]["bandwidth_bytes_per_second"] == slower
    assert row["num_devices"] <= 8


def test_manifests_place_each_pool_on_its_kind(kvcalc: Any, tmp_path: Path) -> None:
    words: tuple[str, ...] = (
        "plan", "qwen3-32b", "--input-tokens", "4k", "--output-tokens", "500", "--requests-per-second", "8",
        "--max-tpot", "20ms", "--max-ttft", "1s", "--gpu", "h100,h200", "--price", "h100=2,h200=3",
    )  # fmt: skip
    words += ("--disaggregate", "--transfer-bandwidth", LINK)
    text = kvcalc(*words, "--emit", "k8s").out
    pods = [one for one in yaml.safe_load_all(text) if one["kind"] == "StatefulSet"]
    selectors = [pod["spec"]["template"]["spec"]["nodeSelector"]["gpu"] for pod in pods]
    assert selectors == ["h100-sxm", "h200-sxm"]
    assert "kubectl label nodes NAME gpu=h100-sxm, or gpu=h200-sxm" in text
    refused = kvcalc(*words, "--emit", "compose")
    assert refused.status == 2
    assert "--emit k8s" in refused.err
    commands = kvcalc(*words, "--emit", "vllm").out
    assert "on h100-sxm" in commands
    page = tmp_path / "plan.html"
    screen = kvcalc(*words, "--format", "human", "--report", page).out
    assert "decode, on h200-sxm:" in screen
    assert re.search(r"\d x h100-sxm \+ \d x h200-sxm", page.read_text())
