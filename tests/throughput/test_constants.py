"""The constants: well formed, physically possible, and with their sources."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcalc.memory.dtypes import DTYPES, FILE_TYPES
from kvcalc.memory.engines import ENGINES
from kvcalc.throughput import constants
from kvcalc.throughput.constants import Constants, device_kind, load_constants, weight_class
from kvcalc.throughput.hardware import all_gpus, find_gpu

with open(constants.__file__.replace("constants.py", "constants.json"), encoding="utf-8") as file:
    TABLE: dict[str, Any] = json.load(file)


def test_every_engine_has_constants() -> None:
    assert set(TABLE["engines"]) == set(ENGINES)


def test_the_file_says_how_when_and_from_what_it_was_made() -> None:
    provenance = TABLE["provenance"]
    assert provenance["written_by"] == "benchmarks/fit_throughput.py"
    assert provenance["date"] > "2026"
    assert set(provenance["sources"]) == set(provenance["rows"])
    assert sum(provenance["rows"].values()) > 1500


@pytest.mark.parametrize("engine", TABLE["engines"])
def test_an_engines_constants_are_physical_and_its_errors_stated(engine: str) -> None:
    entry = TABLE["engines"][engine]
    for gpu in all_gpus():
        found, regime = load_constants(engine, gpu)
        assert isinstance(found, Constants)
        factors = [v for k, v in found._asdict().items() if k.endswith("_overhead") and k != "weight_overhead"]
        assert all(1 <= f < 10 for f in [*factors, *found.weight_overhead.values()])
        assert all(0 <= v < 0.1 for k, v in found._asdict().items() if k.endswith("_seconds"))
        assert 0 < found.prefill_interference <= 1
        assert 0.5 < regime.low < 1 < regime.high < 2
    if not entry["fitted"]["rows"]:
        assert engine in ("transformers", "mlx")
        assert not regime.device_kinds
        return
    assert entry["fitted"]["rows"] > 10
    for how in ("in_sample", "family", "device"):
        assert 0 < entry["error"][how]["median"] <= entry["error"][how]["mean"] < 0.5
    assert entry["error"]["in_sample"]["mean"] <= min(entry["error"][k]["mean"] for k in ("family", "device"))


def test_every_type_of_weights_has_a_class_that_was_fitted() -> None:
    fitted = set(TABLE["engines"]["vllm"]["constants"]["weight_overhead"])
    for name in (*DTYPES, *FILE_TYPES):
        assert weight_class(name) in fitted
    assert weight_class("mxfp4") == weight_class("nvfp4") == "nvfp4"
    assert weight_class("q4_k_m") == weight_class("iq4_nl") == weight_class("int4") == "int4"
    assert weight_class("q8_0") == "int8"
    assert weight_class("fp16") == weight_class("fp32") == "bf16"


def test_hbm_and_gddr_of_one_generation_are_two_kinds() -> None:
    assert device_kind(find_gpu("a100")) == "ampere-hbm"
    assert device_kind(find_gpu("rtx-3090")) == "ampere"
    assert device_kind(find_gpu("h100")) == "hopper"
