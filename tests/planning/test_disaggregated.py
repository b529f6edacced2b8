"""`kvcalc plan --disaggregate`: prefill and decode on separate instances."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import yaml

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.planning.plan.disaggregated.instances import Sent, transfer_bytes
from kvcalc.server.transfer import link_bytes_per_second
from kvcalc.throughput.hardware import find_gpu

LINK = "infiniband-400g"  # 50 GB/s
# K and V of 8 heads with 128 elements of 2 bytes, in 80 layers.
LLAMA_70B_TOKEN = 2 * 8 * 128 * 2 * 80
SPLIT = {"disaggregate": True, "transfer": LINK, "input_tokens": 7168, "output_tokens": 1024}


def planned(model: str = "llama-3-70b", gpu: str = "h100", **asked: Any) -> tuple[Any, Any]:
    """The document of a plan for one device and engine, and its row with separate instances."""
    document: Any = kvcalc.plan(model, [gpu], **{**SPLIT, **asked})
    (row,) = [row for row in document["plans"] if row["disaggregated"] is not None or not row["replicas"]]
    return document, row


USUAL: dict[str, Any] = {"requests_per_second": 3, "max_tpot_seconds": 0.03, "max_ttft_seconds": 4}


@pytest.fixture(scope="module")
def usual() -> tuple[Any, Any]:
    return planned(**USUAL, with_front=True)


def test_the_transfer_is_the_exact_cache_at_the_rate_of_the_link(usual: tuple[Any, Any]) -> None:
    pools = usual[1]["disaggregated"]
    prefill, decode, transfer = pools["prefill"], pools["decode"], pools["transfer"]
    assert transfer["request_bytes"] == 7168 * LLAMA_70B_TOKEN == 2_348_810_240
    # No head is on two devices, so the pool with fewer devices has the busiest ones.
    fewer = min(prefill["tensor_parallel_size"], decode["tensor_parallel_size"])
    assert fewer <= 8
    assert transfer["bytes_per_device"] == 2_348_810_240 // fewer
    assert transfer["seconds"] == transfer["bytes_per_device"] / 50e9
    # Prompts beyond the model's limit are cut.
    assert pools["ttft_parts"]["transfer_seconds"] == pytest.approx(transfer["seconds"], rel=0.15)


def test_a_cache_on_all_devices_is_sent_to_each() -> None:
    def split(ranks: int) -> Sent:
        return Sent(800 // ranks, 800)

    def copied(ranks: int) -> Sent:
        return Sent(800, 800 * ranks)

    assert [transfer_bytes(split(2), split(8)), transfer_bytes(split(8), split(2))] == [400, 400]
    assert [transfer_bytes(copied(8), copied(8)), transfer_bytes(copied(8), copied(1))] == [800, 800]
    # One device sends its whole latent to each of four.
    assert transfer_bytes(copied(1), copied(4)) == 3200


@pytest.mark.settled
def test_the_parts_add_up() -> None:
    _, row = planned(**USUAL)
    pools = row["disaggregated"]
    assert sum(pools["ttft_parts"].values()) == pytest.approx(row["ttft_seconds"])
    assert row["num_devices"] == sum(pools[role]["num_devices"] for role in ("prefill", "decode"))
    for role in ("prefill", "decode"):
        pool = pools[role]
        each = pool["tensor_parallel_size"] * pool["pipeline_parallel_size"] * pool["data_parallel_size"]
        assert pool["num_devices"] == pool["instances"] * each
        assert pool["utilization"] == pytest.approx(3 / pool["max_requests_per_second"])
        assert pool["requests_held"] <= pool["max_requests_held"]
    assert row["requests_per_second"] == 3
    # Requests end at the model's limit.
    assert 0.9 * 3 * 1024 < row["tokens_per_second"] < 3 * 1024


def test_tokens_per_second_have_the_range_of_the_time_of_a_token(usual: tuple[Any, Any]) -> None:
    row = usual[1]
    assert row["tpot_low_seconds"] < row["tpot_seconds"] < row["tpot_high_seconds"]
    one = row["tokens_per_second"] * row["tpot_seconds"]
    assert row["tokens_per_second_low"] * row["tpot_high_seconds"] == pytest.approx(one)
    assert row["tokens_per_second_high"] * row["tpot_low_seconds"] == pytest.approx(one)


def test_a_decode_instance_that_is_nearly_idle_holds_one_request() -> None:
    _, row = planned(requests_per_second=0.001)
    decode = row["disaggregated"]["decode"]
    assert 0 < decode["requests_per_instance"] < 0.1
    assert decode["requests_held"] == 1


def test_targets_are_for_the_upper_ends_of_the_ranges() -> None:
    asked: dict[str, Any] = {"requests_per_second": 3, "max_tpot_seconds": 0.02, "max_ttft_seconds": 1.2}
    upper, point = (planned(**asked, confidence=confidence)[1] for confidence in (80, 50))
    assert upper["ttft_high_seconds"] <= 1.2
    assert upper["tpot_high_seconds"] <= 0.02
    assert point["ttft_seconds"] <= 1.2 < point["ttft_high_seconds"]
    assert point["num_devices"] < upper["num_devices"]


def test_a_decode_step_is_that_of_the_estimate_without_prefills(usual: tuple[Any, Any]) -> None:
    decode = usual[1]["disaggregated"]["decode"]
    steps = []
    for batch in (int(decode["requests_per_instance"]), int(decode["requests_per_instance"]) + 1):
        found = kvcalc.estimate(
            "llama-3-70b", engine="vllm", devices=kvcalc.find_devices("h100x8"),
            tensor_parallel_size=decode["tensor_parallel_size"], context_tokens=7168 + 512, batch_size=batch,
        )  # fmt: skip
        steps.append(found["throughput"]["decode_step_seconds"])  # type: ignore[index]
    # At random, a request meets more than the mean number of others, and requests end at the model's limit.
    assert 0.8 * steps[0] <= usual[1]["tpot_seconds"] <= 1.2 * steps[1]


def test_the_better_row_comes_first_and_says_why_the_other_lost(usual: tuple[Any, Any]) -> None:
    document, row = usual
    first, second = document["plans"]
    assert first["num_devices"] <= second["num_devices"]
    assert document["best"] == first
    assert second["next_mode"] is None
    name = "aggregated" if first is row else "disaggregated"
    assert first["next_mode"] == f"{name}: {second['num_devices']} devices instead of {first['num_devices']}"
    plain: Any = kvcalc.plan(
        "llama-3-70b", ["h100"], input_tokens=7168, output_tokens=1024, requests_per_second=3, max_tpot_seconds=0.03,
        max_ttft_seconds=4,
    )  # fmt: skip
    (alone,) = plain["plans"]
    other = second if first is row else first
    assert {name: other[name] for name in alone} == alone, "the aggregated row is the same as without the option"
    assert set(other) - set(alone) == {"disaggregated", "next_mode"}


def test_the_power_is_that_of_both_pools_and_an_idle_instance_draws_less(usual: tuple[Any, Any]) -> None:
    row = usual[1]
    pools, tdp = row["disaggregated"], kvcalc.find_devices("h100").gpu.tdp_watts or 0
    assert row["kwh_per_million_output_tokens"] == pytest.approx(row["watts"] / row["tokens_per_second"] / 3.6)
    # An idle device draws 11 % of its TDP. A step draws 73 % of the rest, or all of it if operations bound it.
    prefill, decode = (pools[role]["num_devices"] * tdp for role in ("prefill", "decode"))
    busy = pools["prefill"]["utilization"]
    least = prefill * (0.11 + 0.89 * busy) + decode * (0.11 + 0.89 * 0.73)
    assert 0.98 * least < row["watts"] < prefill * (0.11 + 0.89 * busy) + decode


def test_why_a_layout_lost_has_its_price() -> None:
    document, row = planned(
        "llama-3.1-8b", requests_per_second=20, max_tpot_seconds=0.01, prices={"h100-sxm": 2.5}, input_tokens=4096,
        output_tokens=200, confidence=50,
    )  # fmt: skip
    first, second = document["plans"]
    lost = f"{second['num_devices']} devices instead of {first['num_devices']}, {second['cost_per_hour']:.2f} per hour"
    assert first["next_mode"].endswith(f": {lost}")
    assert row["next_layout"].endswith(" per hour")


def test_sglang_leaves_tokens_free_for_every_request() -> None:
    """A request of 4,096 + 100 tokens takes 4,096 + 50 + 512 when others are admitted."""
    _, row = planned(
        "qwen3-32b", engine="sglang", input_tokens=4096, output_tokens=100, requests_per_second=4, max_tpot_seconds=0.03
    )  # fmt: skip
    decode = row["disaggregated"]["decode"]
    largest = decode["max_requests_held"]
    for limit, most in ((largest, largest), (largest + 1, largest)):
        found: Any = kvcalc.estimate(
            "qwen3-32b", engine="sglang", devices=kvcalc.find_devices("h100x8"),
            tensor_parallel_size=decode["tensor_parallel_size"], context_tokens=4096 + 50 + 512,
            engine_settings={"disaggregation-mode": "decode", "max-running-requests": str(limit)},
        )  # fmt: skip
        assert found["fit"]["max_batch_size"] == most


def test_tensorrt_llm_has_two_buffers_on_each_device() -> None:
    _, row = planned(
        "qwen3-32b", engine="tensorrt-llm", input_tokens=4000, output_tokens=500, requests_per_second=4,
        max_tpot_seconds=0.02,
    )  # fmt: skip
    token = 2 * 8 * 128 * 2 * 64  # K and V of 8 heads, 64 layers
    for role in ("prefill", "decode"):
        pool = row["disaggregated"][role]
        # Prompts of 4,000 tokens on average end at 8,121, which are 254 blocks of 32. A buffer has one more.
        assert pool["transfer_buffer_bytes"] == 2 * 255 * 32 * token // pool["tensor_parallel_size"]
    command = row["disaggregated"]["commands"]["decode"]
    assert json.loads(shlex.split(command)[2])["cache_transceiver_config"]["max_tokens_in_buffer"] == 254 * 32


def test_engines_without_separate_instances_are_refused_by_name() -> None:
    for asked, message in (
        ({"engine": "llama.cpp"}, "llama.cpp has no separate prefill and decode instances"),
        ({"transfer": None}, "--disaggregate needs the link between the instances"),
        ({"disaggregate": False}, "--transfer-bandwidth needs --disaggregate"),
        ({"transfer": "carrier-pigeon"}, "neither a rate nor a link"),
    ):
        with pytest.raises(UsageError, match=message):
            planned(requests_per_second=3, **asked)


def test_nvlink_joins_no_more_devices_than_it_does() -> None:
    _, row = planned(requests_per_second=3, transfer="nvlink")
    assert row["reason"] == "two pools need more than the 8 devices that nvlink connects"
    _, row = planned("llama-3.1-8b", requests_per_second=3, transfer="nvlink")
    assert row["fits"]
    assert row["disaggregated"]["transfer"]["bandwidth_bytes_per_second"] == 450_000_000_000


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        # Too long for both pools: the first is named.
        (
            {"input_tokens": 120_000, "output_tokens": 100},
            "prefill instance: tp 1: a request of 120,001 tokens does not",
        ),
        ({"max_tpot_seconds": 1e-4}, "TPOT of one request is up to "),
    ],
)
def test_the_pool_that_cannot_serve_is_named(asked: dict[str, Any], reason: str) -> None:
    asked = {**SPLIT, "requests_per_second": 1, "max_devices": 1, **asked}
    document: Any = kvcalc.plan("llama-3.1-8b", ["rtx-4090"], **asked)
    assert document["plans"][-1]["reason"].startswith(reason)


def test_without_a_switch_a_cache_is_sent_over_one_link() -> None:
    assert link_bytes_per_second("nvlink", find_gpu("h100")) == 450_000_000_000
    assert link_bytes_per_second("nvlink", find_gpu("mi300x")) == 448_000_000_000 // 7


def test_a_model_that_cannot_be_split_keeps_its_other_row() -> None:
    document, row = planned("llama-3.2-11b-vision", requests_per_second=1)
    assert "encoder-decoders" in row["reason"]
    assert document["best"]["next_mode"].startswith("disaggregated: vLLM has no prefix cache")


def test_with_as_many_devices_a_given_rate_is_served_with_the_shorter_tpot() -> None:
    document, _ = planned(
        "gemma-3-27b", engine="tensorrt-llm@1.3.0rc28", input_tokens=4096, output_tokens=500, requests_per_second=4,
        confidence=50,
    )  # fmt: skip
    first, second = document["plans"]
    assert first["num_devices"] == second["num_devices"]
    assert first["tpot_seconds"] < second["tpot_seconds"]
    assert ": same number of devices, TPOT " in first["next_mode"]


@pytest.mark.parametrize(("kind", "engine"), [("vllm", "vllm"), ("sglang", "sglang"), ("trtllm", "tensorrt-llm")])
def test_emit_prints_every_command(kvcalc: Any, kind: str, engine: str) -> None:
    asked = ("plan", "qwen3-32b", "--input-tokens", "4k", "--output-tokens", "500", "--requests-per-second", "4",
             "--max-tpot", "20ms", "--gpu", "h100", "--engine", engine, "--disaggregate",
             "--transfer-bandwidth", "50GB/s")  # fmt: skip
    best = kvcalc(*asked, "--json").json["best"]
    printed = kvcalc(*asked, "--emit", kind).out
    for command in best["disaggregated"]["commands"].values():
        assert f"\n{command}\n" in printed
    assert kvcalc(*asked, "--emit", "llama-server").status == 2


PLAN = ("plan", "llama-3-70b", "--input-tokens", "2k", "--output-tokens", "500", "--requests-per-second", "3",
        "--max-tpot", "30ms", "--gpu", "h100", "--disaggregate", "--transfer-bandwidth", LINK)  # fmt: skip


def test_compose_names_the_services_that_the_router_asks(kvcalc: Any) -> None:
    pools = kvcalc(*PLAN, "--json").json["best"]["disaggregated"]
    services = yaml.safe_load(kvcalc(*PLAN, "--emit", "compose").out)["services"]
    numbers = {role: pools[role]["instances"] for role in ("prefill", "decode")}
    names = [f"{role}-{number}" for role, most in numbers.items() for number in range(most)]
    assert list(services) == [*names, "router"]
    assert all(f"http://{name}:8000" in services["router"]["command"][-1] for name in names)
    devices = [device for name in names for device in
               services[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]]  # fmt: skip
    assert devices == [
        str(number) for number in range(pools["prefill"]["num_devices"] + pools["decode"]["num_devices"])
    ]
    assert services["prefill-0"]["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "prefill-0"
    assert [name for name, service in services.items() if "ports" in service] == ["router"]
    assert "deploy" not in services["router"]


def test_kubernetes_gives_every_pod_the_name_that_the_router_asks(kvcalc: Any) -> None:
    pools = kvcalc(*PLAN, "--json").json["best"]["disaggregated"]
    found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(
        kvcalc(*PLAN, "--emit", "k8s").out)}  # fmt: skip
    router = found["Deployment", "llama-3-70b-router"]["spec"]["template"]["spec"]["containers"][0]
    assert "resources" not in router
    for role in ("prefill", "decode"):
        name, spec = f"llama-3-70b-{role}", found["StatefulSet", f"llama-3-70b-{role}"]["spec"]
        assert (spec["serviceName"], spec["replicas"]) == (name, pools[role]["instances"])
        assert found["Service", name]["spec"]["clusterIP"] == "None"
        for number in range(spec["replicas"]):
            assert f"http://{name}-{number}.{name}:8000" in router["args"][-1]
    env = found["StatefulSet", "llama-3-70b-prefill"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"fieldRef": {"fieldPath": "status.podIP"}} in [entry.get("valueFrom") for entry in env]


def test_the_screen_shows_both_pools(kvcalc: Any) -> None:
    out = kvcalc(*PLAN, "--format", "human").out
    for text in ("P: prefill instances, D: decode instances", "TTFT  ", " = host ", "h100-sxm, not ", "router:"):
        assert text in out
    assert kvcalc(*PLAN, "--format", "csv").out.splitlines()[0].endswith(",disaggregated,next_mode")


def test_only_dp_ranks_that_share_experts_are_planned() -> None:
    asked: dict[str, Any] = {"requests_per_second": 4.0, "data_parallel_size": 2, "input_tokens": 2000}
    _, row = planned("qwen3-30b-a3b", **asked)
    assert row["disaggregated"]["decode"]["data_parallel_size"] == 2
    with pytest.raises(UsageError, match="--dp: copies of a model without experts are instances of their own"):
        planned("llama-3.1-8b", **asked)


def test_the_only_pair_of_layouts_has_no_next_one() -> None:
    document: Any = kvcalc.plan("llama-3.1-8b", ["h100"], requests_per_second=0.1, max_devices=2, **SPLIT)  # type: ignore[arg-type]
    row = document["plans"][-1]
    assert (row["fits"], row["num_devices"], row["next_layout"]) == (True, 2, None)
