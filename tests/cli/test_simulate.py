"""`kvcalc simulate` on the command line, in batch and in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

import kvcalc as library
from kvcalc.model.drafting import Speculation
from tests.test_schema import check

MODEL = "llama-3.1-8b"
LENGTHS = ("--input-tokens", "fixed:1000", "--output-tokens", "fixed:200")
ASK = ("simulate", MODEL, "--gpu", "h100", "--requests", "200", *LENGTHS)
ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
CSV = "arrival_seconds,prompt_tokens,answer_tokens\n0,1000,100\n2,500,50\n4,2000,10\n"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("load", [("--requests-per-second", "5"), ("--concurrency", "16")])
def test_every_engine_answers_with_a_document_of_the_schema(kvcalc: Any, engine: str, load: tuple[str, str]) -> None:
    document = kvcalc(*ASK, *load, "--benchmark", "--engine", engine, "--max-ttft", "1s", "--json").json
    check(document, "simulate")
    results, times = document["results"], {row["metric"]: row for row in document["times"]}
    assert results["requests"] == 200
    assert results["requests_per_second"] == pytest.approx(200 / results["duration_seconds"])
    assert results["tokens_per_second"] == pytest.approx(200 * 200 / results["duration_seconds"])
    for row in times.values():
        assert row["p50_seconds"] <= row["p90_seconds"] <= row["p99_seconds"] <= row["max_seconds"]
    assert times["e2e"]["mean_seconds"] == pytest.approx(
        times["ttft"]["mean_seconds"] + 199 * times["tpot"]["mean_seconds"]
    )
    assert times["itl"]["mean_seconds"] == pytest.approx(times["tpot"]["mean_seconds"])
    assert len(document["timeline"]) == 60


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(kvcalc: Any) -> None:
    words = (*ASK[:-4], "--input-tokens", "lognormal:500,1", "--output-tokens", "uniform:1..200", "--json")
    first, again, other = (kvcalc(*words, "--requests-per-second", "8", "--seed", seed).out for seed in ("3", "3", "4"))
    assert first == again
    assert json.loads(first)["results"] != json.loads(other)["results"]


def test_lengths_have_the_names_of_other_commands_too(kvcalc: Any, tmp_path: Path) -> None:
    load = ("--requests-per-second", "5", "--json")
    expected = kvcalc(*ASK, *load).json
    assert kvcalc(*ASK[:-4], "--prompt-tokens", "fixed:1000", "--answer-tokens", "fixed:200", *load).json == expected
    question = {"command": "simulate", "model": MODEL, "gpu": "h100", "requests": 200, "requests_per_second": 5}
    path = tmp_path / "question.jsonl"
    path.write_text(json.dumps({**question, "input_tokens": "fixed:1000", "output_tokens": "fixed:200"}))
    assert kvcalc("batch", path).json == expected


# What estimate has, and a simulation has not, by the reason.
NOT_SIMULATED = {
    "the load is the number of requests": "batch",
    "tiers and sessions are not simulated, and kvcalc prefix answers for a trace": ("offload offload_bandwidth turns"),
    "a model described by options has no known weights, and so no speed": (
        "layers heads head_dim hidden_size sliding_window assume_full_attention"
    ),
    "they change what is printed": "check strict variants explain",
    "its times are estimates, which nothing judges": "confidence",
}


def test_every_option_of_estimate_that_changes_the_memory_or_the_schedule_is_an_option_here() -> None:
    from kvcalc.cli import estimate, simulate

    here, there = ({one.name for one in typer.main.get_command(module.app).params} for module in (simulate, estimate))
    here |= {"input_tokens", "output_tokens"}  # other names of --prompt-tokens and --answer-tokens
    assert there - here == {name for names in NOT_SIMULATED.values() for name in names.split()}


def test_the_engines_options_change_the_simulation(kvcalc: Any) -> None:
    load = ("--requests-per-second", "5")
    plain = kvcalc(*ASK, *load, "--json").json["engine"]

    def changed(*words: str) -> dict[str, Any]:
        found = kvcalc(*ASK, *load, *words, "--json").json["engine"]
        return {key: value for key, value in found.items() if value != plain[key]}

    assert changed("--max-num-batched-tokens", "2048")["step_tokens"] == 2048
    assert changed("--max-num-seqs", "7")["max_running_requests"] == 7
    assert changed("--gpu-memory-utilization", "0.5")["blocks"] < plain["blocks"] / 1.5
    sglang = changed("--engine", "sglang", "--chunked-prefill-size", "1024", "--max-running-requests", "9")
    assert (sglang["step_tokens"], sglang["max_running_requests"]) == (1024, 9)


@pytest.mark.parametrize("pools", [(), ("--prefill-replicas", "1", "--transfer-bandwidth", "nvlink")])
def test_longer_requests_than_the_context_are_refused(kvcalc: Any, tmp_path: Path, pools: tuple[str, ...]) -> None:
    asked = (*ASK[:-4], "--input-tokens", "uniform:500..2000", "--output-tokens", "50", "--requests-per-second", "5")
    plain = kvcalc(*asked, *pools, "--json").json
    found = kvcalc(*asked, *pools, "--max-model-len", "1200", "--json").json
    refused = found["load"]["refused_requests"]
    assert plain["load"]["refused_requests"] == 0 < refused < 200
    assert found["results"]["requests"] == 200 - refused
    assert any(f"{refused} of 200 requests refused: longer than the context of 1,200" in w["text"]
               for w in found["warnings"])  # fmt: skip
    assert kvcalc(*asked, *pools, "--context", "9000", "--json").json["results"] == plain["results"]
    if not pools:
        lengths: dict[str, Any] = {
            "prompt_tokens": "uniform:500..2000",
            "answer_tokens": 50,
            "requests_per_second": 5,
            "requests": 200,
        }
        path = tmp_path / "question.jsonl"
        path.write_text(json.dumps({"command": "simulate", "model": MODEL, "gpu": "h100", "context": 1200, **lengths}))
        assert kvcalc("batch", path).json == found
        assert library.simulate(MODEL, "h100", context_tokens=1200, **lengths) == found


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--context", "100"), "no request is as short as the context of 100 tokens: the shortest has 1,001"),
        (("--max-model-len", "auto"), "remove --context"),
        (("--max-model-len", "2048", "--context", "4096"), "contradict each other"),
    ],
)
def test_a_context_that_takes_no_request_is_refused(kvcalc: Any, words: tuple[str, ...], why: str) -> None:
    result = kvcalc(*ASK, "--requests-per-second", "5", *words)
    assert result.status == 2
    assert why in result.err


def test_a_higher_rate_waits_longer_and_keeps_fewer_limits(kvcalc: Any) -> None:
    found = [
        kvcalc(*ASK, "--requests-per-second", rate, "--max-tpot", "9ms", "--json").json for rate in ("2", "20", "60")
    ]
    ttft = [document["times"][0]["p99_seconds"] for document in found]
    good = [document["results"]["good_requests"] for document in found]
    assert ttft == sorted(ttft)
    assert good == sorted(good, reverse=True)
    assert good[0] > good[-1]


def test_more_clients_than_requests_send_them_all_at_once(kvcalc: Any) -> None:
    many, enough = (kvcalc(*ASK, "--concurrency", clients, "--json").json for clients in ("2000000000", "200"))
    assert many["results"] == enough["results"]


def test_replicas_share_the_requests(kvcalc: Any) -> None:
    one = kvcalc(*ASK, "--requests-per-second", "40", "--json").json
    four = kvcalc(*ASK, "--requests-per-second", "40", "--replicas", "4", "--json").json
    assert (four["hardware"]["num_devices"], four["hardware"]["replicas"]) == (4, 4)
    assert four["times"][1]["mean_seconds"] < one["times"][1]["mean_seconds"]
    held = kvcalc(*ASK[:3], "h100x4", *ASK[4:], "--tp", "1", "--requests-per-second", "40", "--json").json
    assert held == four


def test_a_trace_has_its_own_times_and_lengths(kvcalc: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(CSV + "x,1,1\n6,10,0\n")
    result = kvcalc("simulate", MODEL, "--gpu", "h100", "--trace", trace, "--json")
    document = result.json
    check(document, "simulate")
    assert document["load"]["requests"] == 3
    assert document["load"]["mean_prompt_tokens"] == pytest.approx(3500 / 3)
    assert {warning["code"] for warning in document["warnings"]} == {"bad-rows", "without-answer"}
    assert "line 5" in result.out
    twice = kvcalc("simulate", MODEL, "--gpu", "h100", "--trace", trace, "--scale-rate", "2", "--json").json
    assert twice["results"]["duration_seconds"] < document["results"]["duration_seconds"] - 1.9


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_dp_ranks_and_drafts_are_simulated(kvcalc: Any, engine: str) -> None:
    words = ("simulate", "deepseek-v3", "--gpu", "h200x8", "--engine", engine, "--requests", "60", *LENGTHS)
    split = kvcalc(*words, "--dp", "8", "--concurrency", "32", "--json").json
    check(split, "simulate")
    # The blocks, the tokens of a step and the running requests are those of one DP rank.
    whole = kvcalc(*words, "--tp", "8", "--concurrency", "32", "--json").json
    assert split["engine"]["data_parallel_size"] == split["hardware"]["num_devices"] == 8
    assert (split["hardware"]["replicas"], split["results"]["requests"]) == (1, 60)
    if engine == "sglang":
        assert split["engine"]["step_tokens"] == whole["engine"]["step_tokens"] // 8
    assert split["results"]["most_used_blocks"] <= split["engine"]["blocks"]
    drafts = ("--speculative", "ngram:3", "--acceptance-length", "2.5")
    drafted = kvcalc(*words, "--tp", "8", "--concurrency", "4", *drafts, "--json").json
    plain = kvcalc(*words, "--tp", "8", "--concurrency", "4", "--json").json
    check(drafted, "simulate")
    assert drafted["engine"]["tokens_per_step"] == 2.5
    tpot, slower = (document["times"][1]["mean_seconds"] for document in (drafted, plain))
    assert tpot < slower < 2.5 * tpot
    assert drafted["times"][2]["mean_seconds"] == pytest.approx(2.5 * tpot, rel=0.01)
    assert "2.5 tokens per step" in kvcalc(*words, "--tp", "8", "--concurrency", "4", *drafts, "--format", "human").out


def test_a_part_of_the_model_in_host_memory_is_simulated(kvcalc: Any) -> None:
    words = ("simulate", MODEL, "--gpu", "rtx-4090", "--engine", "llama.cpp", "--requests", "8", "--concurrency", "2",
             "--input-tokens", "500", "--output-tokens", "50", "--json")  # fmt: skip
    found = [kvcalc(*words, "-ngl", layers).json for layers in ("33", "20", "5")]
    check(found[0], "simulate")
    for metric in (0, 1):
        seconds = [document["times"][metric]["mean_seconds"] for document in found]
        assert seconds == sorted(seconds)
    # As many layers as fit are on the device.
    assert kvcalc(*words, "-ngl", "auto").json["times"] == kvcalc(*words).json["times"] == found[0]["times"]


def test_requests_too_long_for_the_cache_are_refused_and_counted(kvcalc: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(CSV + "5,900000,10\n")
    document = kvcalc("simulate", MODEL, "--gpu", "h100", "--trace", trace, "--json").json
    assert (document["load"]["requests"], document["load"]["refused_requests"]) == (4, 1)
    assert document["results"]["requests"] == 3
    assert "refused" in {warning["code"] for warning in document["warnings"]}


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (ASK, 2, "--requests-per-second"),
        (
            (*ASK, "--requests-per-second", "1", "--concurrency", "2"),
            2,
            "--requests-per-second and --concurrency cannot be combined\n  use one",
        ),
        (
            (*ASK[:2], "--gpu", "h100x4", "--tp", "2", "--replicas", "3", *LENGTHS, "--concurrency", "9"),
            2,
            "they need 6 devices, and there are 4",
        ),
        ((*ASK[:-4], "--trace", "/dev/null"), 2, "write - for the file, and add < FILE"),
        ((*ASK[:-2], "--concurrency", "2"), 2, "--output-tokens"),
        ((*ASK, "--concurrency", "2", "--burstiness", "2"), 2, "--burstiness"),
        ((*ASK, "--concurrency", "2", "--scale-rate", "2"), 2, "--scale-rate"),
        ((*ASK, "--concurrency", "2", "--engine", "mlx"), 2, "mlx"),
        ((*ASK, "--concurrency", "2", "--engine", "vllm,sglang"), 2, "one engine"),
        ((*ASK, "--concurrency", "2", "--replicas", "3"), 2, "replicas"),
        ((*ASK[:-4], "--concurrency", "2", "--input-tokens", "normal:5", "--output-tokens", "5"), 2, "normal:5"),
        ((*ASK[:-4], "--concurrency", "2", "--input-tokens", "uniform:9..5", "--output-tokens", "5"), 2, "uniform"),
        ((*ASK, "--trace", "none.csv"), 2, "--input-tokens"),
        ((*ASK[:-4], "--trace", "none.csv"), 2, "none.csv"),
        ((*ASK[:2], *ASK[4:], "--concurrency", "2"), 2, "--gpu"),
        (
            ("simulate", MODEL, "--gpu", "h100", *LENGTHS, "--concurrency", "2", "--requests", "10000000"),
            2,
            "10,000,000",
        ),
        (("simulate", "llama-3-70b", *ASK[2:], "--concurrency", "2"), 4, "llama-3-70b"),
        ((*ASK[:-4], "--concurrency", "2", "--input-tokens", "fixed:900000", "--output-tokens", "5"), 2, "900,001"),
        (("simulate", "nope", *ASK[2:], "--concurrency", "2"), 3, "nope"),
    ],
)
def test_errors_say_what_is_wrong(kvcalc: Any, words: tuple[str, ...], status: int, named: str) -> None:
    result = kvcalc(*words)
    assert result.status == status
    assert named in result.err
    assert not result.out


def test_batch_and_python_give_the_same_document(kvcalc: Any, tmp_path: Path) -> None:
    words = (*ASK, "--concurrency", "8", "--engine", "sglang", "--json")
    expected = kvcalc(*words).json
    questions = tmp_path / "questions.jsonl"
    asked = {"model": MODEL, "gpu": "h100", "requests": 200}
    asked |= {"prompt_tokens": "fixed:1000", "answer_tokens": "fixed:200"}
    question = {"command": "simulate", **asked, "concurrency": 8, "engine": "sglang"}
    drafting = {"speculative": "ngram:2", "acceptance_length": 1.5}
    split = {"model": "deepseek-v3", "gpu": "h200x8", "dp": 8}
    lines = [
        question,
        {"command": "estimate", "model": MODEL},
        {"model": MODEL},
        {**question, "trace": "x"},
        {"command": "fit"},
        {**question, **drafting},
        {**question, **split},
    ]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers = [json.loads(line) for line in kvcalc("batch", questions).out.splitlines()]
    assert answers[0] == expected
    assert answers[1] == answers[2]
    assert "trace" in answers[3]["error"]["message"]
    assert "fit" in answers[4]["error"]["message"]
    assert _in_python() == expected
    drafts = Speculation("ngram", 2, 1.5)
    assert answers[5] == _in_python(speculative=drafts)
    assert answers[6] == _in_python("deepseek-v3", "h200x8", data_parallel_size=8)


def test_rows_that_cannot_be_read_are_counted_and_the_exit_code_is_1(kvcalc: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(CSV + "5,10,0\nx,1,1\n6,900000000,1\n")
    result = kvcalc(*ASK[:4], "--trace", trace, "--format", "human")
    assert result.status == 1
    assert "4 requests, trace" in result.out
    for text in (
        "warning: 1 row without an answer skipped\n",
        "warning: 1 row skipped; line 6: arrival_seconds is 'x', not a time\n",
        "warning: 1 of 4 requests refused: longer than the context of 131,072 tokens; the longest has 900,000,001 ",
    ):
        assert text in result.err


def test_one_request_is_not_called_requests(kvcalc: Any) -> None:
    out = kvcalc(*ASK[:4], "--requests", "1", *LENGTHS, "--concurrency", "1", "--format", "human").out
    assert "1 request, 1 client, 1,000 tokens in" in out


def _in_python(model: str = MODEL, gpu: str = "h100", **more: Any) -> Any:
    lengths: dict[str, Any] = {"requests": 200, "prompt_tokens": "fixed:1000", "answer_tokens": "fixed:200"}
    return library.simulate(model, gpu, **lengths, concurrency=8, engine="sglang", **more)


def test_the_screen_shows_times_and_charts(kvcalc: Any) -> None:
    words = (*ASK, "--requests-per-second", "60", "--max-ttft", "1s")
    blocks = kvcalc(*words, "--json").json["engine"]["blocks"]
    out = kvcalc(*words, "--format", "human").out
    for text in ("TTFT", "p99", "meet TTFT <= 1 s", "blocks used", "running", f"of {blocks:,} blocks are"):
        assert text in out
    two = kvcalc(*ASK, "--replicas", "2", "--requests-per-second", "60", "--format", "human").out
    assert f"of {blocks:,} blocks of a replica are used" in two


def test_the_tokens_of_a_prefill_step_are_those_that_are_given(kvcalc: Any) -> None:
    for engine, option in (("vllm", "--max-num-batched-tokens"), ("sglang", "--chunked-prefill-size")):
        words = ("--gpu", "h100", "--requests-per-second", "1", "--input-tokens", "4000", "--output-tokens", "10",
                 "--requests", "5", "--engine", engine, option, "2048", "--get", "engine.step_tokens")  # fmt: skip
        assert kvcalc("simulate", "llama-3.1-8b", *words).out == "2048\n"


@pytest.mark.parametrize(
    ("given", "missing"), [("--output-tokens", "--input-tokens"), ("--input-tokens", "--output-tokens")]
)
def test_the_missing_length_is_named(kvcalc: Any, given: str, missing: str) -> None:
    result = kvcalc("simulate", "llama-3-8b", "--gpu", "h100", "--requests-per-second", "5", given, "100")
    assert result.status == 2
    assert f"{missing} is missing" in result.err
