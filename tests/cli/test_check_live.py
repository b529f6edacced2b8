"""`kvcalc check --live`: the screen, the document, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
TEXTS = ROOT / "tests" / "planning" / "live"
VLLM = ("check", "vllm", "serve", LLAMA, "--gpu", "h100", "--max-num-seqs", "64")
LENGTHS = ("--input-tokens", "2000", "--output-tokens", "250")


def saved(name: str) -> tuple[str, str]:
    return "--live", str(TEXTS / f"{name}.txt")


def test_a_server_beside_its_prediction(kvcalc: Any) -> None:
    shown = kvcalc(*VLLM, *saved("vllm-0.33.0"), "--format", "human")
    assert shown.status == 0, shown.err
    lines = [" ".join(line.split()) for line in shown.out.splitlines()]
    assert f"{LLAMA})" in " ".join(lines)
    assert "running requests 58 3 of the longest context fit at once" in lines
    assert "cache tokens 460,176 461,888 -0.4%, within the range" in lines
    assert "mean TTFT 521 ms - needs lengths and --requests-per-second" in " ".join(lines)
    document = kvcalc(*VLLM, *saved("vllm-0.33.0"), "--json").json
    tokens = next(row for row in document["live"]["rows"] if row["name"] == "cache_tokens")
    assert tokens["predicted"] == document["engine"]["kv_cache_tokens"]
    assert tokens["low"] < tokens["server"] < tokens["high"]
    assert "live" not in kvcalc(*VLLM, "--json").json
    assert kvcalc(*VLLM, *saved("vllm-0.33.0"), "--get", "live.ranks").out == "1\n"


def test_the_times_at_the_rate_of_a_server(kvcalc: Any) -> None:
    words = (*VLLM, *LENGTHS, "--prefix-hit-rate", "0.37", *saved("vllm-0.33.0"))
    rows = {}
    for rate in ("2", "6"):
        document = kvcalc(*words, "--requests-per-second", rate, "--json").json
        rows[rate] = {row["name"]: row for row in document["live"]["rows"]}
    for name in ("ttft_mean_seconds", "tpot_mean_seconds"):
        slow, fast = rows["2"][name], rows["6"][name]
        assert slow["low"] < slow["predicted"] < slow["high"]
        assert slow["predicted"] < fast["predicted"]
    assert rows["2"]["prefix_hit_rate"]["remark"] == "assumed"
    assert rows["2"]["running_requests"]["predicted"] == document["requests"]["max_requests"]
    overloaded = kvcalc(*words, "--requests-per-second", "500", "--json").json["live"]["rows"]
    assert {row["remark"] for row in overloaded if row["name"].startswith("t")} == {
        "the server does not keep up with this rate"
    }
    without = kvcalc(*words, "--json").json["live"]["rows"]
    assert {row["remark"] for row in without if row["name"].startswith("t")} == {"needs --requests-per-second"}


def test_sglang_and_its_ranks(kvcalc: Any) -> None:
    command = ("python", "-m", "sglang.launch_server", "--model", "deepseek-ai/DeepSeek-V2-Lite", "--tp", "2")
    attention = ("--dp", "2", "--enable-dp-attention", "--mem-fraction-static", "0.7")
    document = kvcalc("check", "--gpu", "h100x2", *saved("sglang-0.5.9"), "--json", "--", *command, *attention).json
    live = document["live"]
    assert (live["engine"], live["ranks"], live["differs"]) == ("sglang", 2, [])
    assert live["rows"][0]["server"] == 76


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ((*VLLM, *saved("sglang-0.5.9")), 2, "the metrics of SGLang, and the command is that of vLLM"),
        ((*VLLM, "--live", "nowhere.txt"), 2, "nowhere.txt: no such file"),
        ((*VLLM, "--live", "user:secret@localhost:8000"), 2, "localhost:8000: no such file the address of a server"),
        ((*VLLM, "--live", "file:///etc/hosts"), 2, "only http and https"),
        ((*VLLM, "--live", "http://user:secret@127.0.0.1:1/?secret"), 1, "http://127.0.0.1:1/metrics: "),
        ((*VLLM, "--requests-per-second", "3"), 2, "is the rate of the server in --live"),
        ((*VLLM, *saved("vllm-0.33.0"), "--requests-per-second", "3"), 2, "needs the lengths of requests"),
        (("check", "--gpu", "rtx-4090", *saved("vllm-0.33.0"), "llama-server", "-hf", "Qwen/Qwen3-8B-GGUF:Q8_0"), 2,
         "the metrics of llama.cpp are not compared"),
        (("check", "--gpu", "h100", *saved("vllm-0.33.0"), f"vllm serve {LLAMA}\nvllm serve {LLAMA} --enforce-eager"),
         2, "--live is for one server, and there are 2"),
    ],
)  # fmt: skip
def test_what_is_refused(kvcalc: Any, words: tuple[str, ...], status: int, told: str) -> None:
    result = kvcalc(*words)
    assert (result.status, result.out) == (status, "")
    assert told in " ".join(result.err.split())
    assert "secret" not in result.err


def test_a_page_with_hostile_names_is_printed_harmlessly(kvcalc: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.txt"
    page.write_text('vllm:num_requests_running{model_name="a\x1b[31mb\\nc"} 1\nvllm:num_preemptions_total 1e308\n')
    shown = kvcalc(*VLLM, "--live", str(page), "--format", "human")
    assert shown.status == 0
    assert "\x1b[31m" not in shown.out
    assert "Traceback" not in shown.err


def test_a_server_that_should_not_start_and_runs(kvcalc: Any) -> None:
    words = ("check", "vllm", "serve", LLAMA, "--gpu", "rtx-4090", *saved("vllm-0.33.0"))
    document = kvcalc(*words, "--json")
    assert document.status == 4
    assert document.json["live"]["rows"][0]["server"] == 58
