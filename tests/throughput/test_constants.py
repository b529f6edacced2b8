"""The constants: well formed, physically possible, and with their sources."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcalc.engines import ENGINES
from kvcalc.memory.dtypes import DTYPES, FILE_TYPES
from kvcalc.throughput import constants
from kvcalc.throughput.constants import Constants, constants_kind, device_kind, load_constants, regions, weight_class
from kvcalc.throughput.hardware import all_gpus, find_gpu
from kvcalc.throughput.speed import hide_wide_ranges, known_range
from tests.conftest import ROOT

with open(constants.__file__.replace("constants.py", "constants.json"), encoding="utf-8") as file:
    TABLE: dict[str, Any] = json.load(file)


def test_every_engine_has_constants() -> None:
    assert set(TABLE["engines"]) == set(ENGINES)


def test_the_file_says_how_when_and_from_what_it_was_made() -> None:
    provenance = TABLE["provenance"]
    assert provenance["written_by"] == "benchmarks/fit/throughput.py"
    assert provenance["date"] > "2026"
    assert set(provenance["rows"]) < {*provenance["sources"], "kernels"}
    assert sum(provenance["rows"].values()) > 1500


@pytest.mark.parametrize("engine", TABLE["engines"])
def test_an_engines_constants_are_physical_and_its_errors_stated(engine: str) -> None:
    entry = TABLE["engines"][engine]
    for gpu in all_gpus():
        found, regime = load_constants(engine, gpu)
        assert isinstance(found, Constants)
        values = found._asdict()
        factors = [v for k, v in values.items() if k.endswith("_overhead") and isinstance(v, float)]
        for overheads in (found.weight_overhead, found.compute_overhead):
            assert "bf16" in overheads
            factors += overheads.values()
        assert all(1 <= f < 10 for f in factors)
        firsts = values.pop("first_seconds"), values.pop("cold_seconds")
        assert all(0 <= v < 0.5 for k, v in values.items() if k.endswith("_seconds"))
        assert all(0 <= v < 20 for v in firsts)
        assert found.token_overlap >= 1
        for ranges in (regime.ranges, regime.ttft_ranges):
            assert "" in ranges
            assert all(0.1 < low < 1 < high < 10 for low, high in ranges.values())
    if engine == "transformers":
        assert entry["fitted"]["rows"] == 0
        return
    assert entry["fitted"]["rows"] > 10
    inside, family = entry["error"]["in_sample"], entry["error"]["family"]
    assert 0 < inside["median"] <= family["median"] < 0.5


def test_every_type_of_weights_has_a_class_that_was_fitted() -> None:
    fitted = {"fp32", *TABLE["engines"]["vllm"]["constants"]["weight_overhead"]}
    for name in (*DTYPES, *FILE_TYPES):
        assert weight_class(name) in fitted
    assert weight_class("mxfp4") == "mxfp4"
    assert weight_class("q4_k_m") == weight_class("iq4_nl") == weight_class("int4") == "int4"
    assert weight_class("q8_0") == "int8"
    assert weight_class("fp16") == "bf16"


def test_hbm_and_gddr_of_one_generation_are_two_kinds() -> None:
    assert device_kind(find_gpu("a100")) == "ampere-hbm"
    assert device_kind(find_gpu("rtx-3090")) == "ampere"
    assert device_kind(find_gpu("h100")) == "hopper"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rtx-3090", "ampere-half"), ("a40", "ampere"), ("rtx-a6000", "ampere"), ("rtx-4090", "ada-half"),
        ("l40s", "ada"), ("rtx-6000-ada", "ada"), ("rtx-5090", "blackwell-rtx-half"), ("rtx-pro-6000", "blackwell-rtx"),
        ("a100", "ampere-hbm"), ("h100", "hopper"), ("m3-max", "apple-m"),
    ],
)  # fmt: skip
def test_geforce_cards_multiply_at_half_rate(name: str, kind: str) -> None:
    assert constants_kind(find_gpu(name)) == kind
    assert device_kind(find_gpu(name)) == kind.removesuffix("-half")


def test_half_the_rate_is_reached_and_the_full_one_is_not() -> None:
    half, full = (load_constants("vllm", find_gpu(name))[0] for name in ("rtx-4090", "rtx-6000-ada"))
    assert half.compute_overhead["bf16"] < 1.1 < 1.5 < full.compute_overhead["bf16"]
    assert half.kernel_seconds == full.kernel_seconds
    # A kind without constants of its own has those of the whole kind.
    assert load_constants("llama.cpp", find_gpu("rtx-4090"))[0] == load_constants("llama.cpp", find_gpu("l40s"))[0]


def test_the_regions_of_a_question_go_from_the_narrowest_to_the_whole_engine() -> None:
    assert regions("hopper", "fp8", 8) == ["hopper fp8 1-8", "hopper fp8", "hopper", ""]
    assert [regions("hopper", "fp8", batch)[0][-4:] for batch in (9, 64, 65)] == ["9-64", "9-64", " 65+"]


def test_a_range_that_is_too_wide_is_not_known() -> None:
    assert known_range(1.0, 4.0) == (1.0, 4.0)
    assert known_range(1.0, 4.1) == (None, None)
    serving = {"ttft_low_seconds": 1.0, "ttft_high_seconds": 5.0, "tpot_low_seconds": 1.0, "tpot_high_seconds": 2.0,
               "tokens_per_second_low": 1.0, "tokens_per_second_high": 2.0}  # fmt: skip
    document: Any = {"low_seconds": 1.0, "high_seconds": 3.0, "serving": dict(serving)}
    hide_wide_ranges(document)
    assert (document["low_seconds"], document["high_seconds"]) == (1.0, 3.0)
    assert document["serving"] == {**serving, "ttft_low_seconds": None, "ttft_high_seconds": None}
    document["serving"]["tpot_high_seconds"] = 9.0
    hide_wide_ranges(document)
    assert {value for key, value in document["serving"].items() if "t" in key} == {None}


def test_without_a_range_of_the_step_the_energy_has_none() -> None:
    energy = {"joules_per_token": 1.0, "low_joules_per_token": 0.5, "high_joules_per_token": 2.0}
    document: Any = {"low_seconds": 1.0, "high_seconds": 4.1, "serving": None, "energy": energy}
    hide_wide_ranges(document)
    assert energy == {"joules_per_token": 1.0, "low_joules_per_token": None, "high_joules_per_token": None}


def test_the_screen_says_that_a_range_is_not_known(kvcalc: Any) -> None:
    words = ("estimate", "llama-3.1-8b", "--gpu", "b200", "--engine", "tensorrt-llm", "--dtype", "fp8",
             "--input-tokens", "1k", "--output-tokens", "200", "--concurrency", "32")  # fmt: skip
    serving = kvcalc(*words, "--json").json["throughput"]["serving"]
    assert serving["ttft_high_seconds"] is None
    assert serving["tpot_low_seconds"] < serving["tpot_seconds"] < serving["tpot_high_seconds"]
    assert "range unknown" in kvcalc(*words, "--format", "human").out


@pytest.mark.parametrize("engine", ["vllm", "vllm@0.13", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("name", ["rtx-3090", "rtx-4090"])
def test_geforce_cards_beyond_two_reduce_through_host_memory(engine: str, name: str) -> None:
    """NCCL uses no P2P between more than two devices on host bridges (ncclTopoCheckP2p, src/graph/paths.cc).

    Two cards reach as much of PCIe as others do. Four reach as much as NCCL does with four L40S in two sockets.
    """
    tables = json.loads((ROOT / "benchmarks" / "results" / "kernel_tables.json").read_text())["collectives"]
    (row,) = (row for row in tables["rows"]["l40s nccl 2.27.3"] if row[:3] == ["all_reduce", "NCCL", 4])
    card, server = (load_constants(engine, find_gpu(gpu))[0] for gpu in (name, "l40s"))
    assert card.pcie_overhead == server.pcie_overhead
    four = card.pcie_overhead + 2 * card.pcie_overhead_per_device
    assert 1 / four == pytest.approx(row[tables["columns"].index("link_share")], rel=0.02)
    assert four > 2 * (server.pcie_overhead + 2 * server.pcie_overhead_per_device)
