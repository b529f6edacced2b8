"""`--calibrate` with results of benchmarks: what changes, how far it carries over, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc as library
from kvcalc.errors import UsageError
from kvcalc.model.resolve import load_model
from kvcalc.planning.answers.load import at_load
from kvcalc.planning.answers.throughput import describe_speed
from kvcalc.planning.calibration import read_calibration
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.server.case import make_case
from kvcalc.server.speed import Speed, speed_of
from kvcalc.throughput.factors import Factors, scaled
from kvcalc.throughput.hardware import find_devices
from tests.conftest import ROOT
from tests.documents import texts
from tests.throughput.test_calibrate import RECORD

LOGS = ROOT / "tests" / "logs"
MODEL = "llama-3.1-8b"
LOADS = ((1000, 200, 1), (1000, 200, 16), (4000, 200, 32), (1000, 1000, 128))
OTHER_LOAD = (2000, 300, 64)


def served(model: str, gpu: str, load: tuple[int, int, int], factors: Factors) -> Any:
    """The seconds of a server whose constants differ from vLLM's by the factors."""
    question = Question(load_model(model), engine="vllm", devices=find_devices(gpu), speed=SpeedQuestion(1, *load))
    case = at_load(make_case(question))
    speed = speed_of(case, [])
    assert isinstance(speed, Speed)
    changed = speed._replace(model=scaled(speed.model, factors))
    return describe_speed(case, changed, [])["serving"]


def results(path: Path, factors: Factors, model: str = MODEL, gpu: str = "h100", **more: Any) -> Path:
    """The file that `vllm bench serve --append-result` would write on such a server."""
    row = json.loads((LOGS / "vllm-bench.json").read_text().splitlines()[0])
    lines = []
    for prompt, answer, concurrency in LOADS:
        found = served(model, gpu, (prompt, answer, concurrency), factors)
        times = {
            f"{kind}_{key}_ms": 1e3 * found[f"{key}_seconds"] for kind in ("mean", "median") for key in ("tpot", "ttft")
        }
        tokens = {"total_input_tokens": 100 * prompt, "total_output_tokens": 100 * answer, "completed": 100}
        name = {"model_id": load_model(model).name, "tokenizer_id": None, "max_concurrency": concurrency}
        lines.append(json.dumps({**row, **times, **tokens, **name, **more}))
    path.write_text("\n".join(lines))
    return path


def estimate(kvcalc: Any, *words: object) -> Any:
    """The estimate of `OTHER_LOAD` on an H100."""
    asked = [f"--{name}={value}" for name, value in zip(("input-tokens", "output-tokens", "concurrency"), OTHER_LOAD)]
    engine = () if "--engine" in words else ("--engine", "vllm")
    result = kvcalc("estimate", MODEL, "--gpu", "h100", *asked, *engine, *words, "--json")
    assert result.status == 0, result.err
    return result.json


@pytest.fixture
def slower(tmp_path: Path) -> Path:
    return results(tmp_path / "slower.jsonl", Factors(step=1.7, prefill=1.4))


@pytest.mark.settled
def test_a_load_that_was_not_measured_is_predicted(kvcalc: Any, slower: Path) -> None:
    truth = served(MODEL, "h100", OTHER_LOAD, Factors(step=1.7, prefill=1.4))["tpot_seconds"]
    plain, own = (estimate(kvcalc, *more)["throughput"]["serving"] for more in ((), ("--calibrate", slower)))
    assert plain["tpot_seconds"] < 0.85 * truth
    assert own["tpot_seconds"] == pytest.approx(truth, rel=0.05)
    assert own["tpot_low_seconds"] < truth < own["tpot_high_seconds"]
    width = [part["tpot_high_seconds"] / part["tpot_low_seconds"] for part in (plain, own)]
    assert width[1] <= width[0] * (1 + 1e-9)  # the range of such questions may already be as narrow as the noise


def test_the_document_says_what_changed(kvcalc: Any, slower: Path) -> None:
    found = estimate(kvcalc, "--calibrate", slower)["throughput"]["calibration"]
    assert (found["applied"], found["runs"], found["record"]) == ("all", len(LOADS), None)
    factors = {row["name"]: row for row in found["factors"]}
    assert factors["step"]["changed"]
    assert factors["step"]["low_factor"] < 1.7 < factors["step"]["high_factor"]
    assert not factors["communication"]["changed"]
    assert factors["communication"]["factor"] == 1
    assert len(found["residuals"]) == 2 * len(LOADS)
    tpot, ttft = found["errors"]
    assert (tpot["metric"], tpot["times"], ttft["metric"]) == ("tpot", len(LOADS), "ttft")
    assert tpot["mean_error"] < 0.05 < tpot["uncalibrated_mean_error"]
    assert tpot["mean_error"] <= tpot["left_out_mean_error"]


def test_files_may_be_repeated_and_a_folder_stands_for_its_files(kvcalc: Any, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    whole = results(tmp_path / "all.jsonl", Factors(step=1.5))
    parts = []
    for number, line in enumerate(whole.read_text().splitlines()):
        parts.append(folder / f"run{number}.json")
        parts[-1].write_text(line)
    (folder / "notes.txt").write_text("not read")
    expected = estimate(kvcalc, "--calibrate", whole)["throughput"]["serving"]
    repeated = [word for part in parts for word in ("--calibrate", part)]
    assert estimate(kvcalc, *repeated)["throughput"]["serving"] == expected
    (folder / "config.json").write_text("{}")
    found = estimate(kvcalc, "--calibrate", folder)
    assert found["throughput"]["serving"] == expected
    assert any("config.json: neither a record" in text for text in texts(found))


def test_a_record_and_results_calibrate_together(kvcalc: Any, slower: Path, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps(RECORD))
    found = estimate(kvcalc, "--calibrate", record, "--calibrate", slower)["throughput"]
    assert found["calibration"]["record"]["device"] == "A device"
    assert found["calibration"]["applied"] == "all"
    assert estimate(kvcalc, "--calibrate", record)["throughput"]["calibration"]["applied"] == "record"
    other = tmp_path / "other,one.json"
    other.write_text(json.dumps({**RECORD, "device": {"kind": "cuda", "name": "B device"}}))
    more = estimate(kvcalc, "--calibrate", f"{record},{slower}", "--calibrate", other)["throughput"]["calibration"]
    assert (more["record"]["device"], more["records"], more["runs"]) == ("A device, B device", 2, 4)
    twice = estimate(kvcalc, "--calibrate", f"{record},{slower}", "--calibrate", tmp_path / "." / "record.json")
    assert twice["throughput"] == found


@pytest.mark.parametrize("text", ["none.json,{slower}", "{slower},", "{slower},,{slower}"])
def test_a_list_with_a_path_that_is_not_there_is_refused(kvcalc: Any, slower: Path, text: str) -> None:
    result = kvcalc("estimate", MODEL, "--gpu", "h100", "--calibrate", text.format(slower=slower))
    assert result.status == 2
    assert "none.json" in result.err or "an empty name in the list" in result.err


@pytest.mark.parametrize("clients", [("openai", "openai-chat", "vllm", "sglang"), ("lmdeploy",) * len(LOADS)])
def test_the_engine_is_the_questions_whatever_the_client(kvcalc: Any, slower: Path, clients: tuple[str, ...]) -> None:
    rows = [json.loads(line) for line in slower.read_text().splitlines()]
    named = [{**row, "backend": name, "endpoint_type": name} for row, name in zip(rows, clients)]
    assert len(named) == len(rows) == len(LOADS)
    slower.write_text("\n".join(map(json.dumps, named)))
    found = estimate(kvcalc, "--engine", "sglang", "--calibrate", slower)
    assert found["throughput"]["calibration"]["applied"] == "all"
    assert not any("not used" in text for text in texts(found))
    scored = kvcalc("score", slower, "--gpu", "h100", "--engine", "sglang", "--calibrate", slower, "--json").json
    assert {row["engine"] for row in scored["scores"]} == {"sglang"}
    assert all(setup["calibration"]["applied"] == "all" for setup in scored["setups"])


def test_the_client_of_sglang_measures_other_servers(kvcalc: Any, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (LOGS / "sglang-bench.jsonl").read_text().splitlines()]
    path = tmp_path / "client.jsonl"
    path.write_text("\n".join(json.dumps({**row, "backend": "sglang-oai", "server_info": None}) for row in rows))
    found = estimate(kvcalc, "--engine", "vllm", "--calibrate", path)
    assert found["throughput"]["calibration"]["applied"] == "all"


def test_another_engine_or_device_is_not_used(kvcalc: Any) -> None:
    plain = estimate(kvcalc)["throughput"]
    found = estimate(kvcalc, "--calibrate", LOGS / "sglang-bench.jsonl")
    assert found["throughput"]["calibration"]["applied"] == "none"
    assert {**found["throughput"], "calibration": None} == plain
    assert any("not used: measured with sglang, not vllm" in text for text in texts(found))
    found = kvcalc("estimate", "Qwen2.5-7B-Instruct", "--gpu", "rtx-4090", "--engine", "llama.cpp", "--dtype", "q4_k_m",
                   "--calibrate", LOGS / "llama-bench.json", "--json").json  # fmt: skip
    assert found["throughput"]["calibration"]["applied"] == "none"
    assert any("measured on rtx-4080, not rtx-4090" in text for text in texts(found))


@pytest.mark.long
def test_another_model_takes_over_what_belongs_to_the_engine(kvcalc: Any, tmp_path: Path) -> None:
    slower = results(tmp_path / "slower.jsonl", Factors(step=5.0))
    # A few runs of one model do not say what belongs to the engine.
    few = kvcalc("estimate", "qwen3-8b", "--gpu", "h100", "--engine", "vllm", "--calibrate", slower, "--json").json
    assert not any(row["changed"] for row in few["throughput"]["calibration"]["factors"])
    slower.write_text("\n".join([slower.read_text()] * 5))
    asked = ("estimate", "qwen3-8b", "--gpu", "h100", "--engine", "vllm", "--json")
    plain = kvcalc(*asked).json["throughput"]
    found = kvcalc(*asked, "--calibrate", slower)
    own = found.json["throughput"]
    assert own["calibration"]["applied"] == "partly"
    changed = {row["name"]: row["factor"] for row in own["calibration"]["factors"] if row["changed"]}
    assert {*changed} <= {"step", "sequence", "communication"}
    assert max(changed.values()) > 1.1
    assert own["parts"]["overhead_seconds"] > plain["parts"]["overhead_seconds"]
    ratios = [part["high_seconds"] / part["decode_step_seconds"] for part in (plain, own)]
    assert ratios[0] == pytest.approx(ratios[1])
    assert any("of another model" in text for text in texts(found.json))
    eight = kvcalc(*asked, "--dtype", "fp8", "--calibrate", slower).json
    assert "reading" not in {r["name"] for r in eight["throughput"]["calibration"]["factors"] if r["changed"]}
    assert any("another type of weights" in text for text in texts(eight))


def test_an_unknown_name_is_taken_to_be_the_models(kvcalc: Any, tmp_path: Path, slower: Path) -> None:
    path = results(tmp_path / "mine.jsonl", Factors(step=1.7, prefill=1.4), model_id="/data/mine")
    found = estimate(kvcalc, "--calibrate", path)
    expected = estimate(kvcalc, "--calibrate", slower)
    assert found["throughput"]["serving"] == expected["throughput"]["serving"]
    assert any("unknown model, '/data/mine', which is taken to be llama-3.1-8b" in text for text in texts(found))


def test_a_run_that_kvcalc_does_not_predict_is_left_out(kvcalc: Any, tmp_path: Path) -> None:
    path = results(tmp_path / "drafts.jsonl", Factors(), spec_decode_acceptance_length=2.5)
    found = estimate(kvcalc, "--calibrate", path)
    assert found["throughput"]["calibration"]["applied"] == "none"
    assert any("drafts tokens" in text for text in texts(found))


def test_a_file_that_does_not_name_the_device_needs_one_device(kvcalc: Any, slower: Path) -> None:
    result = kvcalc("sweep", MODEL, "--gpu", "h100,a100", "--engine", "vllm", "--calibrate", slower)
    assert result.status == 2
    assert "does not name the device, and --gpu names several" in result.err
    both = kvcalc("estimate", MODEL, "--gpu", "h100", "--engine", "vllm,sglang", "--calibrate", LOGS / "guidellm.json")
    assert both.status == 2
    assert "does not name the engine" in both.err
    both = kvcalc("compare", MODEL, "--gpu", "h100", "--engine", "vllm,sglang", "--calibrate", slower)
    assert both.status == 2
    assert "does not name the engine" in both.err


def test_a_sweep_has_the_calibrated_step_and_range(kvcalc: Any, slower: Path) -> None:
    options = ("--gpu", "h100", "--engine", "vllm", "--calibrate", slower, "--json")
    (point,) = kvcalc("sweep", MODEL, "--context", "4096", "--batch", "8", *options).json["points"]
    found = kvcalc("estimate", MODEL, "--context", "4096", "--batch", "8", *options).json["throughput"]
    assert point["decode_step_seconds"] == pytest.approx(found["decode_step_seconds"])
    assert point["decode_step_low_seconds"] == pytest.approx(found["low_seconds"])
    assert point["decode_step_high_seconds"] == pytest.approx(found["high_seconds"])


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"a": 1}'])
def test_a_file_that_is_neither_is_refused_in_one_line(kvcalc: Any, tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    result = kvcalc("estimate", MODEL, "--gpu", "h100", "--calibrate", path)
    assert result.status == 2
    first, second = result.err.splitlines()
    assert "neither a record of kvcalc measure nor the result of a benchmark" in first
    for name in ("kvcalc measure --json", "vllm bench serve", "bench_serving", "GuideLLM", "llama-bench"):
        assert name in second


def test_an_empty_folder_is_refused(kvcalc: Any, tmp_path: Path) -> None:
    result = kvcalc("estimate", MODEL, "--gpu", "h100", "--calibrate", tmp_path)
    assert result.status == 2
    assert "no .json or .jsonl files" in result.err


def test_a_changed_file_is_read_again(kvcalc: Any, tmp_path: Path) -> None:
    path = results(tmp_path / "file.jsonl", Factors(step=1.5))
    first = estimate(kvcalc, "--calibrate", path)["throughput"]["serving"]["tpot_seconds"]
    results(path, Factors(step=0.7))
    assert estimate(kvcalc, "--calibrate", path)["throughput"]["serving"]["tpot_seconds"] < first


def test_the_screen_names_the_factors_and_the_errors(kvcalc: Any, slower: Path) -> None:
    out = kvcalc("estimate", MODEL, "--gpu", "h100", "--engine", "vllm", "--calibrate", slower, "--format", "human").out
    for text in ("calibrated with 4 runs", "  step", "launches and host time", "TPOT: mean error", "on held-out runs"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.long
def test_score_shows_the_error_with_and_without_the_calibration(kvcalc: Any, slower: Path) -> None:
    (before, after) = (
        kvcalc("score", slower, "--gpu", "h100", *more, "--json").json for more in ((), ("--calibrate", slower))
    )
    for plain, own in zip(before["scores"], after["scores"]):
        assert plain["uncalibrated_seconds"] is None
        assert own["uncalibrated_seconds"] == pytest.approx(plain["predicted_seconds"])
        assert own["left_out_seconds"] is not None
    tpot = next(found for found in after["summary"] if found["metric"] == "tpot")
    assert tpot["mean_error"] < 0.05 < tpot["uncalibrated_mean_error"]
    assert tpot["mean_error"] <= tpot["left_out_mean_error"] < tpot["uncalibrated_mean_error"]
    out = kvcalc("score", slower, "--gpu", "h100", "--calibrate", slower, "--format", "human").out
    assert "before" in out
    assert "left out" in out


def test_score_says_what_is_off_from_the_same_fit(kvcalc: Any, slower: Path) -> None:
    (setup,) = kvcalc("score", slower, "--gpu", "h100", "--json").json["setups"]
    calibrated = estimate(kvcalc, "--calibrate", slower)["throughput"]["calibration"]
    assert setup["explained"]["factors"] == calibrated["factors"]
    assert setup["calibration"] is None
    few = slower.with_name("few.jsonl")
    few.write_text("\n".join(slower.read_text().splitlines()[:2]))
    assert kvcalc("score", few, "--gpu", "h100", "--get", "setups.0.explained").out.strip() == "null"


def test_the_release_in_the_file_is_the_one_predicted(kvcalc: Any) -> None:
    def engines(*words: object) -> set[str]:
        return {row["engine"] for row in kvcalc("score", *words, "--gpu", "h100", "--json").json["scores"]}

    assert engines(LOGS / "sglang-bench.jsonl") == {"sglang@0.5.9"}
    assert engines(LOGS / "sglang-bench.jsonl", "--engine", "sglang") == {"sglang@0.5.9"}
    assert engines(LOGS / "sglang-bench.jsonl", "--engine", "sglang@0.4") == {"sglang@0.4"}
    assert engines(LOGS / "vllm-bench.json") == {"vllm"}
    rows = kvcalc("score", LOGS / "llama-bench.json", "--json").json["scores"]
    assert {row["engine"] for row in rows} == {"llama.cpp@b5163"}


def test_a_release_that_has_no_place_is_not_used(kvcalc: Any, tmp_path: Path) -> None:
    row = json.loads((LOGS / "sglang-bench.jsonl").read_text().splitlines()[0])
    row["server_info"]["version"] = "our own build"
    path = tmp_path / "own.json"
    path.write_text(json.dumps(row))
    (first, *_) = kvcalc("score", path, "--gpu", "h100", "--json").json["scores"]
    assert first["engine"] == "sglang"


def test_a_name_in_a_file_is_never_opened_as_a_path(kvcalc: Any, tmp_path: Path, slower: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    path = results(tmp_path / "mine.jsonl", Factors(), model_id=str(config))
    result = kvcalc("score", path, "--gpu", "h100")
    assert result.status == 3
    assert "unknown model" in result.err


@pytest.mark.long
def test_a_plan_takes_the_calibrated_speed(kvcalc: Any, slower: Path) -> None:
    asked = ("plan", MODEL, "--gpu", "h100", "--input-tokens", 2000, "--output-tokens", 300, "--concurrency", 64)
    plain, own = (kvcalc(*asked, *more, "--json").json for more in ((), ("--calibrate", slower)))
    before, after = plain["plans"][0], own["plans"][0]
    assert after["tensor_parallel_size"] == before["tensor_parallel_size"] == 1
    assert after["tpot_seconds"] > 1.15 * before["tpot_seconds"]
    served = estimate(kvcalc, "--calibrate", slower)["throughput"]["serving"]
    assert after["tpot_high_seconds"] == pytest.approx(served["tpot_high_seconds"])


def test_a_plan_for_several_devices_refuses_runs_that_name_none(kvcalc: Any, slower: Path) -> None:
    load = ("--input-tokens", 2000, "--output-tokens", 300, "--concurrency", 64)
    for more in ((), ("--gpu", "h100,h200")):
        result = kvcalc("plan", MODEL, *load, *more, "--calibrate", slower)
        assert result.status == 2
        assert "does not name the device" in result.err


def test_python_reads_a_calibration(kvcalc: Any, slower: Path) -> None:
    speed = library.SpeedQuestion(1, *OTHER_LOAD, calibration=library.read_calibration([str(slower)]))
    own = library.estimate(MODEL, engine="vllm", devices=library.find_devices("h100"), speed=speed)
    assert own["throughput"] == estimate(kvcalc, "--calibrate", slower)["throughput"]


@pytest.mark.parametrize("text", ["a\0.json", "a.json,b\0.json", "\udcff\ud800.json"])
def test_text_that_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a path"):
        read_calibration([text])
