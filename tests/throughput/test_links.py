"""The links between devices of a machine, and the network between machines."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.layout import Layout
from kvcalc.throughput.hardware import find_gpu, own_gpu
from kvcalc.throughput.links import all_reduce, link_bytes_per_second, nodes, stage_network
from kvcalc.units import network_bytes_per_second, network_names


def test_devices_beyond_a_fast_link_talk_over_the_network() -> None:
    h100, l40s = find_gpu("h100"), find_gpu("l40s")
    assert h100.interconnect is not None
    assert link_bytes_per_second(h100, 8) == h100.interconnect.bytes_per_second
    assert link_bytes_per_second(h100, 16) < link_bytes_per_second(h100, 8)
    assert link_bytes_per_second(l40s, 2) == l40s.pcie_bytes_per_second


@pytest.mark.parametrize("name", ["mi300x", "mi355x", "gaudi3"])
def test_without_a_switch_fewer_devices_use_fewer_links(name: str) -> None:
    """Each of eight devices has a link to each of the seven others: two devices share one, four have three each."""
    gpu = find_gpu(name)
    assert gpu.interconnect is not None
    whole = gpu.interconnect.bytes_per_second
    assert [link_bytes_per_second(gpu, n) for n in (1, 2, 4, 8)] == [pytest.approx(whole * k / 7) for k in (1, 1, 3, 7)]
    # So a device sends the same bytes of an all-reduce over each link, however many take part: 1 / n twice.
    assert [all_reduce(gpu, n).link for n in (2, 4, 8)] == [pytest.approx(14 / n / whole) for n in (2, 4, 8)]


def test_a_bridge_joins_some_devices_of_a_machine_and_pcie_the_others() -> None:
    pair = find_gpu("h100-nvl")
    assert pair.interconnect is not None
    assert link_bytes_per_second(pair, 2) == pair.interconnect.bytes_per_second
    assert link_bytes_per_second(pair, 8) == pair.pcie_bytes_per_second
    assert link_bytes_per_second(pair, 16) == pair.network_bytes_per_second


@pytest.mark.parametrize(
    ("name", "devices", "number"),
    [
        ("h100", 8, 1), ("h100", 9, 2), ("l40s", 8, 1), ("l40s", 16, 2), ("h100-nvl", 8, 1), ("gb200", 72, 1),
        ("gb200", 73, 2), ("dgx-spark", 1, 1), ("dgx-spark", 2, 2), ("dgx-spark", 4, 4), ("m3-ultra", 2, 2),
    ],
)  # fmt: skip
def test_the_network_joins_machines(name: str, devices: int, number: int) -> None:
    gpu = find_gpu(name)
    assert nodes(gpu, devices) == number
    assert (all_reduce(gpu, devices).network > 0) == (all_reduce(gpu, devices).sends > 0) == (number > 1)


def test_two_dgx_spark_exchange_half_of_the_bytes_each_way() -> None:
    """A ring of two sends every byte once. The port of a DGX Spark has 200 Gbit/s, and there is no faster link."""
    route = all_reduce(find_gpu("dgx-spark"), 2)
    assert (route.devices, route.sends, route.link) == (1, 2, 0)
    assert route.network == pytest.approx(1 / 25e9)


def test_a_network_of_your_own_replaces_the_usual_one() -> None:
    """Each of 16 devices sends a quarter of what it would over a network with a quarter of the rate."""
    h100 = find_gpu("h100")
    slow = own_gpu(h100, None, None, None, 12_500_000_000)
    assert all_reduce(slow, 16).network == pytest.approx(4 * all_reduce(h100, 16).network)
    assert all_reduce(slow, 8) == all_reduce(h100, 8)
    assert own_gpu(None, 80 * 2**30, 10**12, 10**14, 10**9).network_bytes_per_second == 10**9


@pytest.mark.parametrize("given", ["ethernet-100g", "12.5GB/s", "Ethernet-100G"])
def test_the_option_takes_a_rate_or_a_name(kvcalc: Any, given: str) -> None:
    asked = ("estimate", "llama-3.1-405b", "--gpu", "h100x16", "--tp", "16", "--engine", "vllm", "-b", "64", "-c", "4k",
             "--json")  # fmt: skip
    usual, slow = kvcalc(*asked).json, kvcalc(*asked, "--network", given).json
    assert usual["hardware"]["network_bytes_per_second"] == 50_000_000_000
    assert slow["hardware"]["network_bytes_per_second"] == 12_500_000_000
    fast, long = (found["throughput"]["parts"]["communication_seconds"] for found in (usual, slow))
    assert long > 1.5 * fast
    assert slow["kv_cache"] == usual["kv_cache"]


def test_inside_a_machine_the_network_makes_no_difference(kvcalc: Any) -> None:
    asked = ("estimate", "llama-3.1-70b", "--gpu", "h100x8", "--engine", "vllm", "--json")
    usual, slow = kvcalc(*asked).json, kvcalc(*asked, "--network", "ethernet-10g").json
    assert slow["throughput"] == usual["throughput"]


def test_an_unknown_network_is_named_with_the_known_ones(kvcalc: Any) -> None:
    found = kvcalc("estimate", "llama-3-8b", "--gpu", "h100x16", "--network", "omnipath-100g")
    assert found.status == 2
    assert "--network 'omnipath-100g'" in found.err
    assert "infiniband-400g" in found.err
    assert kvcalc("estimate", "llama-3-8b", "--network", "ethernet-10g").status == 2


def test_a_plan_over_machines_is_slower_over_a_slow_network(kvcalc: Any) -> None:
    asked = (
        "plan", "gpt-oss-120b", "--gpu", "dgx-spark,h100", "--input-tokens", "2k", "--output-tokens", "300",
        "--concurrency", "8", "--max-gpus", "2", "--max-tpot", "65ms", "--confidence", "50", "--json",
    )  # fmt: skip
    usual, slow = kvcalc(*asked).json, kvcalc(*asked, "--network", "1GB/s").json
    first, second = ({row["gpu"]: row for row in found["plans"]} for found in (usual, slow))
    assert second["gb10"]["tpot_seconds"] > first["gb10"]["tpot_seconds"]
    assert second["h100-sxm"] == first["h100-sxm"]


def test_each_dgx_spark_is_a_machine(kvcalc: Any) -> None:
    """A command for four devices of one machine would not start: there is no such machine."""
    asked = ("--gpu", "dgx-spark", "--input-tokens", "2k", "--output-tokens", "300", "--concurrency", "8")
    (command,) = kvcalc("plan", "qwen3-235b-a22b", "--dtype", "fp8", *asked, "--json").json["commands"]
    assert len(command["nodes"]) > 1
    assert f"--nnodes {len(command['nodes'])} " in command["nodes"][0]


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("infiniband-400g", 50e9),
        ("infiniband-800g", 100e9),
        ("InfiniBand-200g", 25e9),
        ("ethernet-50g", 6.25e9),
        ("ethernet-10g", 1.25e9),
    ],
)
def test_networks(name: str, rate: float) -> None:
    assert network_bytes_per_second(name) == rate


@pytest.mark.parametrize(
    "name", ["infiniband", "ethernet-100", "ethernet-77g", "token-ring-100g", "50GB/s", "-100g", "ethernet-fastg", ""]
)
def test_other_names_are_no_networks(name: str) -> None:
    assert network_bytes_per_second(name) is None


def test_all_listed_networks_are_known() -> None:
    assert all(network_bytes_per_second(name) for name in network_names())


def test_stages_in_other_nodes_get_the_hidden_states_over_the_network() -> None:
    """Two nodes have one boundary, four have three; each device of a stage sends its part. None within a node."""
    h100 = find_gpu("h100")
    port = h100.network_bytes_per_second
    assert stage_network(h100, Layout(4, 2)) == 0.0
    assert stage_network(h100, Layout(8, 2)) == pytest.approx(1 / 8 / port)
    assert stage_network(h100, Layout(8, 4)) == pytest.approx(3 / 8 / port)
    # Of eight stages in two nodes, only one has its successor in the other node.
    assert stage_network(h100, Layout(2, 8)) == pytest.approx(1 / 2 / port)
    assert stage_network(h100, Layout(16, 1)) == 0.0


def test_a_slow_network_between_stages_makes_long_prompts_slower() -> None:
    """8,192 tokens of 5,120 numbers, twice in 16 bits: 168 MB, which take 14 ms at 12.5 GB/s and 107 % of that."""
    model = kvcalc.load_model("qwen3-32b")

    def prefill(network: str) -> float:
        devices = kvcalc.find_devices("dgx-sparkx2")
        gpu = devices.gpu._replace(network_bytes_per_second=network_bytes_per_second(network) or 0)
        found = kvcalc.estimate(
            model, devices=devices._replace(gpu=gpu), engine="vllm", pipeline_parallel_size=2, context_tokens=8192
        )
        assert found["throughput"] is not None
        return found["throughput"]["prefill_seconds"]

    sent = 8192 * 5120 * 2 * 2 * 1.07
    rates = network_bytes_per_second("ethernet-100g"), network_bytes_per_second("ethernet-25g")
    assert rates[0]
    assert rates[1]
    expected = sent / rates[1] - sent / rates[0]
    assert prefill("ethernet-25g") - prefill("ethernet-100g") == pytest.approx(expected, rel=1e-6)


def test_a_link_of_your_own_replaces_the_devices(kvcalc: Any) -> None:
    asked = (
        "estimate",
        "qwen3-32b",
        "--gpu",
        "rtx-3090x4",
        "--tp",
        "4",
        "--engine",
        "vllm",
        "--dtype",
        "int4",
        "--json",
    )
    usual, same, half = (
        kvcalc(*asked, *more).json["throughput"]["parts"]["communication_seconds"]
        for more in ((), ("--link", "pcie-4x16"), ("--link", "PCIe-3x16"))
    )
    assert same == usual
    sent = kvcalc(*asked, "--link", "pcie-3x8").json["throughput"]["parts"]["communication_seconds"] - half
    assert sent == pytest.approx(2 * (half - usual)), "a quarter of the rate adds what half of it adds, and twice that"
    # Devices that NVLink joins are taken to have none.
    fast, slow = (
        kvcalc("estimate", "qwen3-32b", "--gpu", "h100x4", "--tp", "4", *more, "--json").json["throughput"]["parts"]
        for more in ((), ("--link", "64GB/s"))
    )
    assert slow["communication_seconds"] > 2 * fast["communication_seconds"]


@pytest.mark.parametrize("link", ["nvlink", "pcie-3", "pcie-2x16", "pcie-4x12"])
def test_an_unknown_link_is_refused_with_examples(kvcalc: Any, link: str) -> None:
    refused = kvcalc("estimate", "llama-3-8b", "--gpu", "l40sx2", "--link", link)
    assert refused.status == 2
    assert f"--link '{link}': not a link" in refused.err
    assert "pcie-3x8" in refused.err
    assert kvcalc("estimate", "llama-3-8b", "--link", "pcie-3x8").status == 2
