"""Constants from a record of the user's own device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.errors import UsageError
from kvcalc.planning.calibration import read_calibration
from kvcalc.throughput.calibrate import Measured, Record, combine
from kvcalc.throughput.hardware import Devices, find_devices, find_gpu, own_gpu
from tests.throughput.conftest import MakeModel

# Attention in 32 layers on a device that reads 1e12 bytes per second: 1 GB of projections, and 0.5 GB of cache for a
# sequence of the shorter context. A layer's core takes FIXED seconds, and reads at half of the roof.
ROOF, LAYERS, PROJECTIONS, CACHE = 1e12, 32, 1e9, 0.5e9
FIXED, OVERHEAD, LAUNCHES = 20e-6, 2.0, 1e-3


def run_of(size: float, fixed: float = FIXED, overhead: float = OVERHEAD, roof: float = ROOF) -> dict[str, Any]:
    """A run whose cache is `size` times the smallest one."""
    core = LAYERS * fixed + overhead * size * CACHE / roof
    step = core + PROJECTIONS / roof + LAUNCHES
    return {
        "attention": "gqa",
        "num_layers": LAYERS,
        "decode_step_seconds": {"p50": step},
        "attention_core_seconds": {"p50": core},
        "fraction_of_roof": {
            "attention_core": size * CACHE / core / roof,
            "step": (PROJECTIONS + size * CACHE) / step / roof,
        },
    }


def record_of(*runs: dict[str, Any], kind: str = "cuda", roof: float = ROOF, name: str = "A device") -> dict[str, Any]:
    return {
        "schema_version": 1,
        "model": {"attention": "gqa"},
        "device": {"kind": kind, "name": name},
        "roof": {"read_bytes_per_second": roof, "buffer_bytes": 1 << 30},
        "runs": [*runs],
    }


RECORD = record_of(run_of(1), run_of(16), run_of(4), run_of(64))
A_DEVICE = find_gpu("a100-pcie-40gb")


def written(folder: Path, record: Any) -> str:
    path = folder / "record.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return str(path)


def read(path: str) -> Record:
    (record,) = read_calibration([path]).records
    return record


def constants(path: str) -> Measured:
    found = combine([read(path)], A_DEVICE).record
    assert found is not None
    return found


def test_a_record_gives_the_bandwidth_and_the_caches_rate(tmp_path: Path) -> None:
    found = constants(written(tmp_path, RECORD))
    assert found.read_bytes_per_second == ROOF
    assert found.kv_overhead == pytest.approx(OVERHEAD)
    assert found.kernel_seconds is None
    assert found.weight_overhead is None


def test_a_short_cache_does_not_make_every_load_slow(tmp_path: Path) -> None:
    """At batch 1 the kernel's fixed time is half of the core's. What it reads takes 1.08 times as long as the roof."""
    device = find_gpu("h200")
    roof = 0.92 * device.bandwidth_bytes_per_second
    fixed = 0.92 * CACHE / roof / LAYERS
    runs = [run_of(size, fixed, 1.08, roof) for size in (1, 16, 4, 64)]
    shares = [run["fraction_of_roof"]["attention_core"] for run in runs]
    assert [round(share, 2) for share in shares] == [0.5, 0.88, 0.76, 0.91]
    path = written(tmp_path, record_of(*runs, roof=roof, name="NVIDIA H200"))
    model, speed = kvcalc.load_model("llama-3.1-8b"), kvcalc.SpeedQuestion(calibration=kvcalc.read_calibration([path]))
    asked: Any = {"context_tokens": 32_768, "batch_size": 24, "engine": "vllm", "devices": kvcalc.find_devices("h200")}
    before: Any = kvcalc.estimate(model, **asked)["throughput"]
    after: Any = kvcalc.estimate(model, speed=speed, **asked)["throughput"]
    assert after["calibration"]["record"]["kv_overhead"] == pytest.approx(1.08)
    assert after["parts"]["overhead_seconds"] == pytest.approx(before["parts"]["overhead_seconds"], rel=0.01)
    assert before["low_seconds"] < after["decode_step_seconds"] < before["high_seconds"]


def test_one_size_of_cache_does_not_give_a_rate(tmp_path: Path, model_of: MakeModel) -> None:
    record = combine([read(written(tmp_path, record_of(run_of(1), run_of(1.5))))], A_DEVICE)
    assert record.record is not None
    assert record.record.kv_overhead is None
    assert [note.code for note in record.notes] == ["one-point"]
    assert "--sweep" in record.notes[0].text
    model = model_of("llama-3-8b", "h100", "vllm")
    found = record.record.apply(model)
    assert 1 <= found.constants.kv_overhead < model.constants.kv_overhead
    # Two records of different sizes are enough.
    pair = [read(written(tmp_path, record_of(run_of(size)))) for size in (1, 8)]
    both = combine(pair, A_DEVICE).record
    assert both is not None
    assert both.kv_overhead == pytest.approx(OVERHEAD)


def test_runs_that_multiplying_limits_do_not_count(tmp_path: Path) -> None:
    slow = run_of(32, overhead=9)
    slow["fraction_of_matmul_roof"] = {"attention_core": 0.9, "step": 0.9}
    assert constants(written(tmp_path, record_of(*RECORD["runs"], slow))).kv_overhead == pytest.approx(OVERHEAD)


def test_noise_does_not_give_a_negative_fixed_time(tmp_path: Path) -> None:
    runs = [run_of(size, fixed=-3e-6, overhead=1.5) for size in (1, 2, 4)]
    found = constants(written(tmp_path, record_of(*runs))).kv_overhead
    assert found is not None
    assert 1.0 < found < 1.5


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_without_cuda_only_the_read_roof_carries_over(tmp_path: Path, kind: str) -> None:
    """Torch reads the projections and the cache at half of the roof. llama.cpp has kernels of its own."""
    path = written(tmp_path, record_of(*RECORD["runs"], kind=kind))
    model, speed = kvcalc.load_model("llama-3.2-1b"), kvcalc.SpeedQuestion(calibration=kvcalc.read_calibration([path]))
    gpu = own_gpu(None, 16 << 30, int(ROOF), 10**14)
    for dtype in ("bf16", "q8_0"):
        asked: Any = {"context_tokens": 2048, "engine": "llama.cpp", "dtype": dtype, "devices": Devices(gpu, 1)}
        before: Any = kvcalc.estimate(model, **asked)["throughput"]
        answer: Any = kvcalc.estimate(model, speed=speed, **asked)
        after = answer["throughput"]
        for key in ("low_seconds", "decode_step_seconds", "high_seconds"):
            assert after[key] == pytest.approx(before[key], rel=1e-3)
        assert after["calibration"]["record"]["read_bytes_per_second"] == ROOF
        assert [note["code"] for note in answer["warnings"] if note["part"] == "calibration"] == ["read-roof-only"]


def test_it_replaces_what_it_knows_and_leaves_the_rest(tmp_path: Path, model_of: MakeModel) -> None:
    model = model_of("llama-3-8b", "h100", "logical")
    found = constants(written(tmp_path, RECORD)).apply(model)
    assert found.bandwidth == ROOF
    assert found.constants.kv_overhead == pytest.approx(OVERHEAD)
    assert found.constants.kernel_seconds == model.constants.kernel_seconds
    assert found.constants.step_seconds == model.constants.step_seconds
    assert found.constants.prefill_overhead == model.constants.prefill_overhead
    assert found.attention_flops == model.attention_flops
    step = found.decode(1, 4096)
    assert step.kv == pytest.approx(2 * 4096 * 131_072 / ROOF, rel=1e-2)
    assert step.seconds >= found.roofline(1, 4096)
    assert step.seconds > model.decode(1, 4096).seconds


def test_the_runs_of_the_models_own_attention_count(tmp_path: Path) -> None:
    other = {**RECORD["runs"][0], "attention": "mha", "attention_core_seconds": {"p50": 1.0}}
    both = {**RECORD, "runs": [other, *RECORD["runs"]]}
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
        (spoiled("runs.0.attention_core_seconds.p50", -1), "attention_core_seconds.p50"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused_in_one_line(tmp_path: Path, record: Any, why: str) -> None:
    path = written(tmp_path, record)
    with pytest.raises(UsageError, match=r"^--calibrate ") as caught:
        read(path)
    assert why in caught.value.message
    assert "\n" not in caught.value.message
    assert "kvcalc measure" in (caught.value.hint or "")


def test_of_several_records_the_median_rate_is_used(tmp_path: Path) -> None:
    records = [
        read(written(tmp_path, spoiled("roof.read_bytes_per_second", rate * 1e9))) for rate in (900, 1000, 1400, 5)
    ]
    found = combine(records, A_DEVICE)
    assert found.number == 3
    assert found.record is not None
    assert found.record.read_bytes_per_second == 1e12
    assert found.record.device == "A device"
    assert [note.code for note in found.notes] == ["other-device", "records-differ"]
    assert found.notes[0].text.endswith("; it is not used")
    assert "900 to 1,400 GB/s" in found.notes[1].text
    # If all of them are doubtful, none is left out.
    assert combine(records, find_gpu("t4")).number == 4
    assert combine((), find_gpu("t4")).record is None


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read(str(tmp_path / "none.json"))


def test_a_record_that_names_another_device_is_not_used(tmp_path: Path) -> None:
    """An H100 and an H200 read at rates which could both be of one device."""
    own, other = (read(written(tmp_path, record_of(run_of(1), run_of(8, overhead=x), roof=3e12, name=name)))
                  for name, x in (("NVIDIA H200", 2.0), ("NVIDIA H100 80GB HBM3", 5.0)))  # fmt: skip
    found = combine([own, other], find_gpu("h200"))
    assert found.number == 1
    assert found.record is not None
    assert found.record.device == "NVIDIA H200"
    assert "of NVIDIA H100 80GB HBM3, not of h200" in found.notes[0].text


@pytest.mark.parametrize(
    ("kind", "name", "ask"),
    [("cpu", "AMD EPYC", "--gpu-memory SIZE"), ("cuda", "NVIDIA H200", "--gpu h200-sxm")],
)
def test_records_of_another_device_alone_are_refused(tmp_path: Path, kind: str, name: str, ask: str) -> None:
    """The read roof could be the device's own, so only the name or the kind tells."""
    path = written(tmp_path, record_of(run_of(1), run_of(8), kind=kind, roof=3e12, name=name))
    model, speed = kvcalc.load_model("llama-3.1-8b"), kvcalc.SpeedQuestion(calibration=kvcalc.read_calibration([path]))
    with pytest.raises(UsageError) as caught:
        kvcalc.estimate(model, engine="vllm", devices=find_devices("h100"), speed=speed)
    assert caught.value.message == f"--calibrate: the record is of {name}, not of h100-sxm"
    assert ask in (caught.value.hint or "")
    assert "kvcalc measure --profile" in (caught.value.hint or "")


def test_in_a_comparison_only_the_row_of_the_other_device_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, record_of(run_of(1), run_of(8), roof=3e12, name="NVIDIA H200"))
    devices, speed = ["h100", "h200"], kvcalc.SpeedQuestion(calibration=kvcalc.read_calibration([path]))
    found: Any = kvcalc.compare(["llama-3.1-8b"], devices=list(map(find_devices, devices)), engine="vllm", speed=speed)
    reasons = [row["reason"] for row in found["models"]]
    assert reasons == ["--calibrate: the record is of NVIDIA H200, not of h100-sxm", None]


@pytest.mark.parametrize("gpu", ["h100", "h100-sxm", "NVIDIA H100 80GB HBM3"])
def test_a_device_may_have_other_names_or_figures(tmp_path: Path, gpu: str) -> None:
    found = read(written(tmp_path, record_of(run_of(1), run_of(8), roof=3e12, name="NVIDIA H100 80GB HBM3")))
    for device in (find_gpu(gpu), own_gpu(find_gpu(gpu), 94 << 30, None, None), own_gpu(None, 80 << 30, 3 * 10**12, 1)):
        assert found.doubts(device) == []
        assert combine([found], device).number == 1


def test_a_record_of_another_device_is_doubted(tmp_path: Path) -> None:
    found = read(written(tmp_path, RECORD))
    assert found.doubts(find_gpu("a100-pcie-40gb")) == []
    (doubt,) = found.doubts(find_gpu("h100"))
    assert "A device in the record reads 1,000 GB/s, but h100-sxm has 3,350 GB/s" in doubt.text
    assert found.doubts(find_gpu("t4"))
