"""`kvcalc check --live`: the values in the metrics of several releases, and how they compare with a prediction.

The texts in `live` have the names, labels and buckets of the engines' own collectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcalc.engines.declarations import ENGINES, has_table, table
from kvcalc.errors import UsageError
from kvcalc.planning.check.live import Metrics, check_engine, compare, metrics_of
from kvcalc.reading.metrics import samples_in

TEXTS = Path(__file__).with_name("live")
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def shown(name: str) -> Metrics:
    return metrics_of(name.partition("-")[0], (TEXTS / f"{name}.txt").read_text(), name)


def answered(**more: Any) -> Any:
    """The parts of a check document that are compared."""
    fit = {
        "kv_cache_memory_bytes": 100, "free_bytes": 50, "free_low_bytes": 40, "free_high_bytes": 55,
        "max_batch_size": 3,
    }  # fmt: skip
    requests = {"input_tokens": 2000, "output_tokens": 250, "max_requests": 64, "memory_requests": 200}
    engine = {
        "data_parallel_size": 1, "kv_cache_tokens": 450_000, "num_gpu_blocks": 28_000, "gpu_memory_utilization": 0.92,
        "enable_prefix_caching": True,
    }  # fmt: skip
    return {"engine": engine, "fit": fit, "requests": requests, "command": {"copies": 1}, **more}


def rows(document: Any, text: str, hit_rate: float | None = None, times: Any = "needs a rate") -> dict[str, Any]:
    live = compare(document, metrics_of("vllm", text, "page"), hit_rate, times)
    return {row["name"]: row for row in live["rows"]}


@pytest.mark.parametrize(
    ("name", "ranks", "values"),
    [
        ("vllm-0.33.0", 1, {
            "running_requests": 58, "waiting_requests": 3, "cache_usage": 0.2731, "cache_tokens": 460_176,
            "cache_blocks": 28_761, "prefix_hit_rate": 0.37, "finished_requests": 18_214, "preemptions": 0,
            "input_tokens": 2101.3, "output_tokens": 247.9, "ttft_mean_seconds": 0.5213, "tpot_mean_seconds": 0.0219,
        }),
        # Two engines, and two processes of the API, each of which shows cache usage.
        ("vllm-0.10.0", 2, {
            "running_requests": 58, "waiting_requests": 0, "cache_usage": 0.14, "cache_tokens": None,
            "cache_blocks": 50_210, "prefix_hit_rate": 1.1 / 2.3, "finished_requests": 1200, "preemptions": 6,
            "input_tokens": 1916.5, "output_tokens": 424.5, "ttft_mean_seconds": 0.15, "tpot_mean_seconds": 0.012,
        }),
        ("vllm-0.8.5", 1, {
            "running_requests": 2, "cache_usage": 0.01, "cache_blocks": 27_900, "prefix_hit_rate": 0.25,
            "preemptions": 0, "ttft_mean_seconds": None, "tpot_mean_seconds": 0.009, "finished_requests": None,
        }),
        # DP attention: two schedulers, hits in the device's and in the host's cache.
        ("sglang-0.5.9", 2, {
            "running_requests": 76, "waiting_requests": 0, "cache_usage": 0.105, "cache_tokens": 1_352_103,
            "prefix_hit_rate": 0.4, "finished_requests": 1600, "preemptions": 3, "input_tokens": 2000,
            "output_tokens": 381.25, "ttft_mean_seconds": 0.31, "tpot_mean_seconds": 0.0223,
        }),
        # Both ranks of --tp 2 show the same requests, in all and by priority. Nothing was by_name in the cache.
        ("sglang-0.5.23", 1, {
            "running_requests": 12, "waiting_requests": 0, "cache_usage": 0.02, "cache_tokens": 922_391,
            "prefix_hit_rate": 0, "finished_requests": 400, "preemptions": 0, "input_tokens": 2000,
            "output_tokens": 300, "ttft_mean_seconds": 0.075, "tpot_mean_seconds": 0.0063,
        }),
    ],
)  # fmt: skip
def test_the_values_of_a_server(name: str, ranks: int, values: dict[str, float | None]) -> None:
    metrics = shown(name)
    assert metrics.ranks == ranks
    for row, value in values.items():
        assert metrics.value(row) == (None if value is None else pytest.approx(value, rel=1e-4)), row


def test_an_expression_of_an_engine_names_metrics_of_its_texts() -> None:
    """A misspelt name would look like a server that does not show the metric."""
    for engine in ("vllm", "sglang"):
        names = {
            sample.name.removeprefix(table(engine, "live")["prefix"])
            for path in TEXTS.glob(f"{engine}-*.txt")
            for sample in samples_in(path.read_text())
        }
        for row, texts in table(engine, "live")["metrics"].items():
            for text in texts:
                first = text.partition(" / ")[0].partition("{")[0]
                # A gauge that 0.5.9 replaced by a counter, and a hit that this server did not have.
                assert first in names | {"total_retracted_reqs", "cached_tokens_total"}, (engine, row, text)


def test_every_engine_with_metrics_declares_the_same_keys() -> None:
    for engine in filter(lambda name: has_table(name, "live"), ENGINES):
        declared = table(engine, "live")
        if "metrics" in declared:
            assert {"prefix", "rank", "copies", "settings"} <= declared.keys()


def test_a_prediction_beside_a_server() -> None:
    metrics = shown("vllm-0.33.0")
    times = {"ttft_mean_seconds": (0.4, 0.6), "tpot_mean_seconds": (0.01, 0.012)}
    live = compare(answered(), metrics, None, times)
    assert (live["engine"], live["model"], live["ranks"], live["differs"]) == ("vllm", LLAMA, 1, [])
    by_name = {row["name"]: row for row in live["rows"]}
    assert "cache_blocks" not in by_name
    assert by_name["running_requests"]["predicted"] == 64
    assert by_name["waiting_requests"]["remark"] == "the server is full"
    assert by_name["cache_usage"]["predicted"] == pytest.approx(58 / 200)
    tokens = by_name["cache_tokens"]
    assert (tokens["low"], tokens["high"]) == pytest.approx((405_000, 472_500))
    assert tokens["remark"] == "+2.3%, within the range"
    assert by_name["prefix_hit_rate"]["remark"] == "assumed; --prefix-hit-rate 37%"
    assert by_name["input_tokens"]["remark"] == "+5%"
    assert by_name["output_tokens"]["remark"] == ""
    assert by_name["ttft_mean_seconds"]["remark"] == "+30%, within the range"
    assert by_name["tpot_mean_seconds"]["remark"] == "+119%, above the range"
    assert by_name["tpot_mean_seconds"]["low"] == pytest.approx(0.01**2 / 0.012)


def test_without_lengths_the_memory_is_compared() -> None:
    document = answered(requests=None, command={"copies": 2})
    document["engine"]["num_gpu_blocks"] = 20_000
    live = compare(document, shown("vllm-0.10.0"), None, "needs a rate")
    by_name = {row["name"]: row for row in live["rows"]}
    assert (by_name["running_requests"]["predicted"], by_name["cache_blocks"]["predicted"]) == (6, 40_000)
    assert by_name["cache_blocks"]["remark"] == "+26%, above the range"
    assert by_name["preemptions"]["remark"] == "the cache was full: 0.005 per request"
    assert [by_name[name]["predicted"] for name in ("cache_usage", "prefix_hit_rate", "input_tokens")] == [None] * 3
    assert by_name["ttft_mean_seconds"]["remark"] == "needs a rate"
    assert live["differs"] == ["--gpu-memory-utilization is 0.85 there, and 0.92 in the command"]


def test_a_page_of_one_rank_of_two() -> None:
    document = answered()
    document["engine"]["data_parallel_size"] = 2
    by_name = rows(document, "vllm:num_requests_running 25\nvllm:kv_cache_usage_perc 0.2\n")
    assert by_name["running_requests"]["predicted"] == 32
    assert by_name["cache_usage"]["predicted"] == pytest.approx(0.25)


def test_what_a_difference_means() -> None:
    text = "vllm:num_requests_running 20\nvllm:num_requests_waiting 9\nvllm:kv_cache_usage_perc 0.4\n"
    by_name = rows(answered(), text)
    assert by_name["waiting_requests"]["remark"] == "fewer run than fit"
    assert by_name["cache_usage"]["remark"] == "requests are longer than given"
    hits = "vllm:prefix_cache_hits_total 52\nvllm:prefix_cache_queries_total 100\n"
    assert rows(answered(), hits, 0.5)["prefix_hit_rate"]["remark"] == "assumed"
    document = answered()
    document["fit"]["free_low_bytes"] = document["fit"]["max_batch_size"] = document["requests"] = None
    by_name = rows(document, text + 'vllm:cache_config_info{kv_cache_size_tokens="450000"} 1')
    assert by_name["running_requests"]["predicted"] is None
    assert (by_name["cache_tokens"]["low"], by_name["cache_tokens"]["remark"]) == (None, "")
    # A server without a number yet: no request has finished, and the cache has no size.
    empty = 'vllm:cache_config_info{num_gpu_blocks="None"} 1\nvllm:prefix_cache_queries_total 0\n'
    assert [*rows(answered(), empty + "vllm:num_preemptions_total 0\n")] == ["preemptions"]
    with pytest.raises(UsageError, match="none of the metrics"):
        rows(answered(), empty)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("sglang:num_running_reqs 3\n", "the metrics of SGLang, and the command is that of vLLM"),
        ("llamacpp:requests_processing 1\n", "the metrics of llama.cpp, and the command is that of vLLM"),
        ("trtllm_request_success_total 1\n", "the metrics of TensorRT-LLM, and"),
        ("tgi_queue_size 0\n", "the metrics of Text Generation Inference, and"),
        ("node_load1 0.5\n", "no metrics of vLLM"),
        ("<!doctype html><p>vllm:num_requests_running 1</p>", "no metrics of vLLM"),
        ('{"detail": "Not Found"}', "no metrics of vLLM"),
        ("", "no metrics of vLLM"),
        ('vllm:x{model_name="a"} 1\nvllm:x{model_name="b"} 1\n', "the metrics of 2 models: 'a', 'b'"),
    ],
)
def test_other_metrics_are_named(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as raised:
        metrics_of("vllm", text, "page")
    assert raised.value.message.startswith("page: ")
    assert raised.value.hint


def test_engines_that_are_not_compared() -> None:
    with pytest.raises(UsageError, match=r"the metrics of llama\.cpp are not compared") as raised:
        check_engine("llama.cpp")
    assert raised.value.hint == "those of vLLM and SGLang are"
    with pytest.raises(UsageError, match="no metrics of SGLang") as raised:
        metrics_of("sglang", "", "page")
    assert raised.value.hint is not None
    assert raised.value.hint.endswith("it needs --enable-metrics")
