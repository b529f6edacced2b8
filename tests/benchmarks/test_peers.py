"""Comparisons with other calculators: each is asked the measured question, and only common points are compared."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvcalc.releases import Release
from tests.conftest import ROOT

for needed in ("numpy", "scipy"):
    pytest.importorskip(needed)
RESULT = ROOT / "benchmarks" / "results" / "peers.json"
ABOUT = {
    "release": "1.0",
    "models": ["deepseek-ai/DeepSeek-V3", "meta-llama/Meta-Llama-3.1-8B"],
    "databases": {"h200_sxm": {"sglang": ["0.5.10", "0.5.6.post2", "0.5.9"]}, "h100_sxm": {"trtllm": ["1.2.0rc5"]}},
}


@pytest.fixture
def peers() -> ModuleType:
    return importlib.import_module("benchmarks.score.peers")


@pytest.fixture
def ask() -> ModuleType:
    return importlib.import_module("benchmarks.score.ask_aiconfigurator")


def row(**changes: Any) -> Any:
    """A measured run of DeepSeek-R1 with SGLang on eight H200, whose experts are whole on two devices each."""
    question = {
        "model": "deepseek-r1", "gpu": "h200", "engine": "sglang", "input_tokens": 1024, "output_tokens": 512,
        "concurrency": 64, "tp": 8, "ep": 4, "dtype": "fp8", **changes.pop("question", {}),
    }  # fmt: skip
    given = {
        "source": "silicon", "family": "deepseek-v3", "engine": question["engine"], "version": "0.5.9", "date": None,
        "release": Release.of(0, 5, 9), "question": question, "seconds": 0.02, "ttft_seconds": 0.5, **changes,
    }  # fmt: skip
    return SimpleNamespace(**given)


def test_a_question_has_the_deployment_of_the_measurement(peers: ModuleType) -> None:
    asked = peers.peer_question(row(), ABOUT)
    assert asked["versions"] == ["0.5.9", "0.5.6.post2", "0.5.10"]
    assert asked["arguments"] == {
        "model_path": "deepseek-ai/DeepSeek-V3", "system_name": "h200_sxm", "backend_name": "sglang", "mode": "agg",
        "isl": 1024, "osl": 512, "batch_size": 64, "tp_size": 8, "moe_tp_size": 2, "moe_ep_size": 4,
    }  # fmt: skip


def test_gpt_oss_on_blackwell_has_the_experts_of_its_kernels(peers: ModuleType) -> None:
    about = {
        "models": ["openai/gpt-oss-120b"],
        "databases": {name: {"trtllm": ["1.2.0rc5"], "vllm": ["0.19.0"]} for name in ("b200_sxm", "h200_sxm")},
    }

    def experts(gpu: str, engine: str) -> Any:
        question = {"model": "gpt-oss-120b", "gpu": gpu, "engine": engine, "dtype": None}
        return peers.peer_question(row(question=question), about)["arguments"].get("moe_quant_mode")

    assert experts("b200", "tensorrt-llm") == "w4a8_mxfp4_mxfp8"
    assert experts("h200", "tensorrt-llm") is None
    assert experts("b200", "vllm") is None


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"gpu": "mi300x"}, "no tables for mi300x with sglang"),
        ({"gpu": "h100"}, "no tables for h100 with sglang"),
        ({"dtype": "nvfp4"}, "no checkpoint for deepseek-r1 in nvfp4"),
        ({"model": "gpt-oss-120b", "dtype": None}, "no checkpoint for gpt-oss-120b in its own dtype"),
    ],
)
def test_a_question_that_the_peer_cannot_answer_has_a_reason(
    peers: ModuleType, question: dict[str, Any], reason: str
) -> None:
    assert peers.peer_question(row(question=question), ABOUT) == reason


@pytest.mark.parametrize(
    ("measured", "order"),
    [
        (Release.of(0, 18), ["0.14.1", "0.12.0", "0.19.0", "0.24.0"]),
        (Release.of(0, 11), ["0.12.0", "0.14.1", "0.19.0", "0.24.0"]),
        (Release.of(0, 19), ["0.19.0", "0.14.1", "0.12.0", "0.24.0"]),
        (None, ["0.24.0", "0.19.0", "0.14.1", "0.12.0"]),
    ],
)
def test_the_nearest_older_release_is_tried_first(peers: ModuleType, measured: Any, order: list[str]) -> None:
    assert peers.nearest("vllm", ["0.19.0", "0.12.0", "0.24.0", "0.14.1"], measured) == order


def test_a_release_without_the_tables_is_passed_over(ask: ModuleType) -> None:
    def estimate(tp_size: int, backend_version: str) -> Any:
        if backend_version == "2":
            raise ValueError("no table of experts\nin this release")
        return SimpleNamespace(tpot=20.0, ttft=500.0, kv_cache_warning="too many" if tp_size == 1 else None)

    found = ask.answer({"arguments": {"tp_size": 8}, "versions": ["2", "1"]}, estimate)
    assert found == {"tpot_seconds": 0.02, "ttft_seconds": 0.5, "version": "1", "beyond_cache": False}
    assert ask.answer({"arguments": {"tp_size": 1}, "versions": ["1"]}, estimate)["beyond_cache"]
    refused = ask.answer({"arguments": {"tp_size": 8}, "versions": ["2"]}, estimate)
    assert refused == {"error": "ValueError: no table of experts"}


def test_answers_are_kept_and_asked_once(peers: ModuleType, tmp_path: Path) -> None:
    asked: list[Any] = []

    def answers(questions: list[Any]) -> list[Any]:
        asked.extend(questions)
        return [{"tpot_seconds": question["arguments"]["batch_size"] / 1e3} for question in questions]

    peer = SimpleNamespace(about=ABOUT, ask=answers)
    rows = [row(), row(question={"concurrency": 9}), row(seconds=0.03), row(question={"gpu": "mi300x"})]
    first = peers.ask_all(peer, rows, tmp_path)
    assert [found.get("tpot_seconds") for found in first] == [0.064, 0.009, 0.064, None]
    assert len(asked) == 2  # two runs ask the same
    assert peers.ask_all(peer, rows, tmp_path) == first
    assert len(asked) == 2


def test_only_points_with_both_predictions_are_compared(peers: ModuleType) -> None:
    given = {"tpot_seconds": 0.03, "ttft_seconds": 0.5, "version": "0.5.9", "beyond_cache": False}
    rows = [row(), row(ttft_seconds=None), row()]
    points = peers.compare(rows, [given, given, {"error": "no"}], [(0.02, 1.0)] * 3, [(0.018, 0.4)] * 3)
    assert [point.metric for point in points] == ["tpot", "ttft", "tpot"]
    each_token, first_token = peers.tables(points, ["metric"])  # "tpot" is before "ttft"
    assert (first_token["points"], each_token["points"]) == (1, 2)
    assert first_token["kvcalc"] == {"mean": 1.0, "median": 1.0, "within_25_percent": 0.0, "bias": 1.0}
    assert each_token["peer"] == {"mean": 0.5, "median": 0.5, "within_25_percent": 0.0, "bias": 0.5}
    assert each_token["kvcalc_family_left_out"]["within_25_percent"] == 1.0


def test_kvcalc_is_asked_for_the_measured_release(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(case: Any, notes: Any) -> Any:
        return {"serving": {"tpot_seconds": case.question.engine, "ttft_seconds": case.workload.batch_size}}

    monkeypatch.setattr(peers, "describe_throughput", described)
    rows = [row(), row(version=None, date="2026-01-15"), row(version="an image"), row(version=None)]
    assert peers.shipped(rows) == [("sglang@0.5.9", 64), ("sglang@2026-01-15", 64), ("sglang", 64), ("sglang", 64)]


def test_kvcalc_answers_with_seconds(peers: ModuleType) -> None:
    ((each_token, first_token),) = peers.shipped([row()])
    assert 0 < each_token < first_token


def test_a_reason_is_the_kind_of_error(peers: ModuleType) -> None:
    assert peers.reason("no tables for mi300x with sglang") == "no tables for mi300x with sglang"
    assert peers.reason("RuntimeError: OOM: the model 'a/b' does not fit") == "RuntimeError: OOM"
    assert peers.reason("KeyError: no experts for num_tokens=8") == "KeyError: no experts"


def test_the_peer_runs_in_its_own_environment(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "import json, os, sys\n"
        "assert 'PYTHONPATH' not in os.environ\n"
        "sys.stdout.write(json.dumps({'release': '1.0'}) if sys.argv[1] == 'about' else sys.stdin.read())\n"
    )
    monkeypatch.setattr(peers, "_ASK", script)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    peer = peers.Peer(sys.executable)
    assert peer.about == {"release": "1.0"}
    assert peer.ask([{"a": 1}, {"b": 2}]) == [{"a": 1}, {"b": 2}]


def test_a_peer_that_does_not_start_is_an_error(peers: ModuleType) -> None:
    with pytest.raises(SystemExit) as stopped:
        peers.Peer(sys.executable)  # this environment does not have aiconfigurator
    assert "No module named 'aiconfigurator'" in str(stopped.value)


def test_the_shipped_comparison_is_complete() -> None:
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    assert document["peers"]
    for peer in document["peers"]:
        for part in ("by_engine", "by_family"):
            assert sum(table["points"] for table in peer[part]) == sum(table["points"] for table in peer["all"])
        assert peer["runs_answered"] + sum(peer["not_answered"].values()) == peer["runs_asked"]
        assert sum(peer["releases"].values()) == peer["runs_answered"]
