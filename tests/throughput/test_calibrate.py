"""Constants from a record of the user's own device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcalc.errors import UsageError
from kvcalc.planning.calibration import read_calibration
from kvcalc.throughput.calibrate import Record, combine
from kvcalc.throughput.hardware import find_gpu
from tests.throughput.conftest import MakeModel

# Attention in 32 layers: 1 GB of projections and 0.5 GB of cache, on a device that reads 1e12 bytes per second.
ROOF = 1e12
STEP, CORE = 4e-3, 1e-3
RECORD: dict[str, Any] = {
    "schema_version": 1,
    "model": {"attention": "gqa"},
    "device": {"kind": "cuda", "name": "A device"},
    "roof": {"read_bytes_per_second": ROOF, "buffer_bytes": 1 << 30},
    "runs": [
        {
            "attention": "gqa",
            "num_layers": 32,
            "decode_step_seconds": {"p50": STEP},
            "attention_core_seconds": {"p50": CORE},
            "fraction_of_roof": {"attention_core": 0.5e9 / CORE / ROOF, "step": 1.5e9 / STEP / ROOF},
        }
    ],
}


def written(folder: Path, record: Any) -> str:
    path = folder / "record.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return str(path)


def read(path: str) -> Record:
    (record,) = read_calibration([path]).records
    return record


def test_a_record_gives_the_bandwidth_the_caches_rate_and_the_launches(tmp_path: Path) -> None:
    found = read(written(tmp_path, RECORD))
    assert found.read_bytes_per_second == ROOF
    assert found.kv_overhead == pytest.approx(2)
    # 4 ms in total. The core takes 1 ms, and 1 GB of projections at the roof another; the rest is the six kernels of
    # attention in 32 layers.
    assert found.kernel_seconds == pytest.approx(2e-3 / 32 / 6)
    assert found.weight_overhead is None


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_no_part_of_a_step_is_counted_twice(tmp_path: Path, kind: str) -> None:
    """The constants of a record give back the step that was measured."""
    found = read(written(tmp_path, {**RECORD, "device": {"kind": kind, "name": "A device"}}))
    cache = 0.5e9 / ROOF * found.kv_overhead
    projections = 1e9 / ROOF * (found.weight_overhead or 1.0)
    launches = 32 * 6 * (found.kernel_seconds or 0.0)
    assert cache + projections + launches == pytest.approx(STEP)


def test_on_a_cpu_what_is_left_is_the_projections_own_slowness(tmp_path: Path) -> None:
    found = read(written(tmp_path, {**RECORD, "device": {"kind": "cpu"}}))
    assert found.kernel_seconds is None
    # 1 GB in 3 ms at a roof of 1e12 bytes per second is three times the ideal time.
    assert found.weight_overhead == pytest.approx(3)


def test_it_replaces_what_it_knows_and_leaves_the_rest(tmp_path: Path, model_of: MakeModel) -> None:
    model = model_of("llama-3-8b", "h100", "logical")
    found = read(written(tmp_path, RECORD)).apply(model, "bf16")
    assert found.bandwidth == ROOF
    assert found.constants.kv_overhead == pytest.approx(2)
    assert found.constants.kernel_seconds == pytest.approx(2e-3 / 32 / 6)
    assert found.constants.prefill_overhead == model.constants.prefill_overhead
    assert found.attention_flops == model.attention_flops
    step = found.decode(1, 4096)
    assert step.kv == pytest.approx(2 * 4096 * 131_072 / ROOF, rel=1e-2)
    assert step.seconds >= found.roofline(1, 4096)
    assert step.seconds > model.decode(1, 4096).seconds


def test_the_run_of_the_models_own_attention_counts(tmp_path: Path) -> None:
    other = {**RECORD["runs"][0], "attention": "mha", "attention_core_seconds": {"p50": 1.0}}
    both = {**RECORD, "runs": [other, RECORD["runs"][0]]}
    assert read(written(tmp_path, both)) == read(written(tmp_path, RECORD))


def spoiled(path: str, value: Any) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(RECORD))
    where: Any = record
    *parents, last = path.split(".")
    for key in parents:
        where = where[int(key) if key.isdigit() else key]
    where[last] = value
    return record


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ("", "neither"), ("[1]", "neither"), ("[" * 100_000, "neither"), ("{}", "neither a record of kvcalc measure"),
        (spoiled("roof.read_bytes_per_second", 0), "roof.read_bytes_per_second"),
        (spoiled("roof.read_bytes_per_second", True), "roof.read_bytes_per_second"),
        (spoiled("roof.read_bytes_per_second", float("inf")), "roof.read_bytes_per_second"),
        (spoiled("runs", []), "no runs"), (spoiled("runs", [3]), "no runs"),
        (spoiled("runs.0.num_layers", 0), "num_layers"), (spoiled("runs.0.fraction_of_roof", None), "fraction_of_roof"),
        (spoiled("runs.0.decode_step_seconds.p50", -1), "decode_step_seconds.p50"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused_in_one_line(tmp_path: Path, record: Any, why: str) -> None:
    path = written(tmp_path, record)
    with pytest.raises(UsageError, match=r"^--calibrate ") as caught:
        read(path)
    assert why in caught.value.message
    assert "\n" not in caught.value.message
    assert "kvcalc measure" in (caught.value.hint or "")


def test_of_several_records_the_medians_are_used(tmp_path: Path) -> None:
    records = [
        read(written(tmp_path, spoiled("roof.read_bytes_per_second", rate * 1e9))) for rate in (900, 1000, 1400, 5)
    ]
    found = combine(records, find_gpu("a100-pcie-40gb"))
    assert found.number == 3
    assert found.record is not None
    assert found.record.read_bytes_per_second == 1e12
    assert found.record.device == "A device"
    assert [note.code for note in found.notes] == ["other-device", "records-differ"]
    assert found.notes[0].text.endswith("it is not used")
    assert "900 to 1,400 GB/s" in found.notes[1].text
    # If all of them are doubtful, none is left out.
    assert combine(records, find_gpu("t4")).number == 4
    assert combine((), find_gpu("t4")).record is None


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read(str(tmp_path / "none.json"))


def test_a_record_of_another_device_is_doubted(tmp_path: Path) -> None:
    found = read(written(tmp_path, RECORD))
    assert found.doubts(find_gpu("a100-pcie-40gb")) == []
    (doubt,) = found.doubts(find_gpu("h100"))
    assert "A device in the record reads 1,000 GB/s, but h100-sxm has 3,350 GB/s" in doubt.text
    assert found.doubts(find_gpu("t4"))
