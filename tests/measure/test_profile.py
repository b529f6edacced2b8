"""`kvcalc measure --profile`: one record of a device, which goes on, is scored, and calibrates."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcalc as library
from kvcalc.measure import profile, runner
from kvcalc.planning.calibration import read_calibration
from kvcalc.planning.calibration.attention_rows import attention_rows
from kvcalc.planning.calibration.measured import Given
from kvcalc.throughput.hardware import find_devices
from tests.documents import validate
from tests.simulated_cuda import simulated_cuda

TINY: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 100,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
}  # fmt: skip
LOADS = ("--context", "64,256", "--batch", "1,4")


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """`tiny(name, **changes)`: the path of a small model's config."""

    def write(name: str = "tiny", **changes: Any) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
        return str(folder)

    return write


def run(kvcalc: Any, path: Path, *options: str, device: str = "cpu", status: int = 0) -> Any:
    result = kvcalc("measure", *options, "--profile", "--device", device, "--save", path, "--json")
    assert result.status == status, result.err
    if not status:
        validate(json.loads(result.out), "measure_profile")
        assert json.loads(result.out) == json.loads(path.read_text())
    return result


def test_it_measures_every_model_and_load_on_a_cpu(kvcalc: Any, tiny: Any, tmp_path: Path) -> None:
    models = f"{tiny()},{tiny('wide', num_key_value_heads=8)}"
    result = run(kvcalc, tmp_path / "p.json", models, *LOADS, "--kv-dtype", "auto,int8")
    found = json.loads(result.out)
    assert found["not_measured"] == 0
    assert found["skipped"] == []
    assert len(found["records"]) == 4
    assert len(found["points"]) == 2 * 2 * 2 * 2
    assert {(row["context_tokens"], row["batch_size"]) for row in found["points"]} == {
        (tokens, batch) for tokens in (64, 256) for batch in (1, 4)
    }
    assert all(row["layer_seconds"] > 0 for row in found["points"])
    assert found["launch"]["replayed_seconds"] is None
    for record in found["records"]:
        assert [run["held_bytes"] for run in record["runs"]] == [run["predicted_bytes"] for run in record["runs"]]
    assert f"--calibrate {tmp_path / 'p.json'}" in result.err.splitlines()[-1]
    # A CPU has no preset, so the line describes it by its figures. It runs as it is printed.
    _, _model, *options = result.err.splitlines()[-1].partition("kvcalc ")[2].split()
    assert "llama.cpp" in options
    calibration = json.loads(kvcalc("estimate", tiny(), *options, "--json").out)["throughput"]["calibration"]
    assert calibration["record"]["read_bytes_per_second"] == found["roof"]["read_bytes_per_second"]
    human = kvcalc("measure", models, *LOADS, "--profile", "--device", "cpu", "--save", tmp_path / "p.json")
    assert "a launch takes" in human.out


def test_it_goes_on_where_it_ended(kvcalc: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, calls, real = tmp_path / "p.json", [0], runner.measure

    def failing(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(runner, "measure", failing)
    run(kvcalc, path, tiny(), *LOADS, status=130)
    kept = json.loads(path.read_text())
    validate(kept, "measure_profile")
    assert (len(kept["points"]), kept["not_measured"]) == (2, 2)
    found = json.loads(run(kvcalc, path, tiny(), *LOADS).out)
    assert calls[0] == 3 + 2
    assert (len(found["points"]), found["not_measured"]) == (4, 0)
    assert found["roof"] == kept["roof"]
    assert found["records"][0]["runs"][:2] == kept["records"][0]["runs"]


def test_it_ends_in_time_and_says_what_is_left(kvcalc: Any, tiny: Any, tmp_path: Path) -> None:
    """The first point always runs. The others are expected to take seconds each."""
    result = run(kvcalc, tmp_path / "p.json", tiny(), *LOADS, "--minutes", "0.0001")
    found = json.loads(result.out)
    assert (len(found["points"]), found["not_measured"]) == (1, 3)
    assert [note["code"] for note in found["warnings"]] == ["not-measured"]


def test_a_point_that_fails_is_skipped(kvcalc: Any, tiny: Any, tmp_path: Path) -> None:
    found = json.loads(run(kvcalc, tmp_path / "p.json", tiny(), "--context", "64,900M", "--batch", "1").out)
    assert [row["context_tokens"] for row in found["points"]] == [64]
    ((skipped),) = found["skipped"]
    assert "needs" in skipped["reason"]
    run(kvcalc, tmp_path / "q.json", tiny(), "--context", "900M", status=4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--profile", "--minutes", "0"), "--minutes"), (("--minutes", "5"), "--minutes needs --profile"),
        (("--profile", "--sweep", "batch=1..2"), "--profile: --sweep has no effect"),
    ],
)  # fmt: skip
def test_what_a_profile_does_not_take(kvcalc: Any, tiny: Any, options: tuple[str, ...], said: str) -> None:
    result = kvcalc("measure", tiny(), *options)
    assert result.status == 2
    assert said in result.err


def test_another_file_is_not_replaced(kvcalc: Any, tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    assert "is not a profile" in run(kvcalc, path, tiny(), status=2).err
    assert path.read_text() == '{"mine": 1}'


def test_a_profile_of_another_device_does_not_go_on(kvcalc: Any, tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    run(kvcalc, path, tiny(), "--context", "64", "--batch", "1")
    document = json.loads(path.read_text())
    document["device"]["name"] = "Another"
    path.write_text(json.dumps(document))
    assert "the profile is of Another" in run(kvcalc, path, tiny(), status=2).err


def test_on_a_simulated_device_it_is_scored_and_calibrates(kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    real = torch.set_num_threads
    real(1)
    with simulated_cuda():
        result = run(kvcalc, path, "qwen2.5-0.5b", "--context", "64,512", "--batch", "1,8", device="cuda")
    found = json.loads(result.out)
    assert "--gpu h200" in result.err.splitlines()[-1]
    assert {row["kv_dtype"] for row in found["points"]} == {"bf16", "fp8"}
    assert all(row["predicted_layer_seconds"] > 0 for row in found["points"])
    assert 0 < found["launch"]["replayed_seconds"] < found["launch"]["launched_seconds"] * 50
    scored = json.loads(kvcalc("score", path, "--json").out)
    validate(scored, "score")
    assert {row["metric"] for row in scored["scores"]} == {"attention"}
    assert len(scored["scores"]) == len(found["points"]) == 8
    assert "attention" in kvcalc("score", path).out
    asked = ("estimate", "qwen2.5-0.5b", "--gpu", "h200", "--context", "512", "--json", "--calibrate", path)
    assert json.loads(kvcalc(*asked).out)["throughput"]["calibration"]["record"]["device"] == "NVIDIA H200"


def synthetic(roof: float, fixed: float, overhead: float, noise: random.Random) -> list[dict[str, Any]]:
    """The runs of an 8B model on a device with known constants."""
    model = library.load_model("llama-3.1-8b")
    runs = []
    for tokens in (4096, 16_384, 65_536):
        for batch in (1, 4, 16, 32):
            cache, layers = 4096.0 * tokens * batch, 2
            core = layers * (fixed + overhead * cache / roof) * noise.uniform(0.97, 1.03)
            step = core + layers * 84e6 / roof
            runs.append({
                "attention": model.attention.kind, "num_layers": layers, "context_tokens": tokens, "batch_size": batch,
                "decode_step_seconds": {"p50": step}, "attention_core_seconds": {"p50": core},
                "fraction_of_roof": {
                    "attention_core": layers * cache / core / roof,
                    "step": layers * (cache + 84e6) / step / roof,
                },
            })  # fmt: skip
    return runs


@pytest.mark.parametrize("seed", range(12))
def test_on_points_left_out_a_calibration_is_not_worse(tmp_path: Path, seed: int) -> None:
    """Synthetic devices: an H200 whose roof, fixed time and rate differ. Half of the points predict the others."""
    noise = random.Random(seed)
    vendor = find_devices("h200").gpu.bandwidth_bytes_per_second
    roof = vendor * noise.uniform(0.75, 0.97)
    runs = synthetic(roof, noise.uniform(0, 6e-6), noise.uniform(1.0, 1.6), noise)
    noise.shuffle(runs)
    record: dict[str, Any] = {
        "schema_version": 2, "model": {"attention": "gqa", "name": "llama-3.1-8b"}, "workload": {"kv_dtype": "bf16"},
        "device": {"kind": "cuda", "name": "NVIDIA H200"}, "roof": {"read_bytes_per_second": roof}, "runs": runs[:6],
    }  # fmt: skip
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    rows = attention_rows({**record, "runs": runs[6:]}, "record", Given(calibration=read_calibration([str(path)])))
    errors = {"predicted_seconds": 0.0, "uncalibrated_seconds": 0.0}
    for row in rows:
        given: dict[str, Any] = {**row}
        for key in errors:
            errors[key] += abs(given[key] / given["measured_seconds"] - 1)
    # Both may be right by chance: the engine's constants were fitted on such a device.
    assert errors["predicted_seconds"] <= errors["uncalibrated_seconds"] + 0.01 * len(rows)


def test_the_models_of_a_profile_have_all_kinds_of_attention() -> None:
    kinds = {library.load_model(name).attention.kind for name in profile.DEFAULT_MODELS["cuda"]}
    assert kinds == {"mha", "gqa", "mla"}
