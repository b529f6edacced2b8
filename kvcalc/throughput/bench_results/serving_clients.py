"""Results of the benchmark clients of vLLM and SGLang. Both write one flat object per run.

Sources: vllm/benchmarks/serve.py (`vllm bench serve --save-result`, `--append-result`) of vLLM at 009e6d4, and
python/sglang/bench_serving.py (`--output-file`) of SGLang at 0033168 and later, which adds `server_info`: what the
server's /get_server_info returns, with its `version` (srt/entrypoints/http_server.py at 0025436). vLLM's client does
not ask the server for its release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.model.layout import LayoutAsked
from kvcalc.throughput.bench_results.point import (
    Measured,
    Point,
    checked,
    littles_concurrency,
    measured,
    number,
    rounded,
    table,
    text,
    whole,
)

# The client's --backend begins with one of these, and the server is then probably this engine. It is only the client's
# protocol: `vllm` is the OpenAI API that every engine has.
_LIKELY = {
    "vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "tensorrt-llm", "trt": "tensorrt-llm", "llama.cpp": "llama.cpp",
}  # fmt: skip


def is_vllm(row: Mapping[str, Any]) -> bool:
    """Whether an object is a result of `vllm bench serve`."""
    return "model_id" in row and "request_throughput" in row and "total_input_tokens" in row


def is_sglang(row: Mapping[str, Any]) -> bool:
    """Whether an object is a result of SGLang's bench_serving. Only SGLang counts the answers' tokens twice."""
    return "total_output_tokens_retokenized" in row and "request_throughput" in row and "backend" in row


def read_vllm(row: Mapping[str, Any], run: int) -> Point:
    """One result of `vllm bench serve`.

    It never names the server's engine. Its default backend is `openai`; the server is then probably vLLM, whose client
    it is.
    """
    backend = text(row, "backend") or text(row, "endpoint_type") or ""
    models = tuple(name for key in ("model_id", "tokenizer_id") if (name := text(row, key)))
    likely = _likely_engine(backend) or ("vllm" if backend.startswith("openai") else None)
    drafted = number(row, "spec_decode_acceptance_length")
    return _serving(row, Point("vllm", run, models=models, likely_engine=likely), "mean_e2el_ms", drafted)


def read_sglang(row: Mapping[str, Any], run: int) -> Point:
    """One line of SGLang's bench_serving.

    Newer releases have the server's own arguments in `server_info`, which only SGLang's servers give.
    """
    server = table(row, "server_info")
    tensor, replicas = whole(server, "tp_size"), whole(server, "dp_size") or 1
    refusal = None
    if replicas > 1 and server.get("enable_dp_attention") is True:
        # --tp-size counts the devices of all DP ranks.
        tensor = None if tensor is None else max(1, tensor // replicas)
    elif replicas > 1:
        refusal = f"dp_size is {replicas} without enable_dp_attention, and kvcalc predicts one replica"
    point = Point(
        "sglang", run, "sglang" if server else None, text(server, "version"),
        tuple(name for key in ("model_path", "served_model_name") if (name := text(server, key))),
        layout=LayoutAsked(tensor, whole(server, "pp_size"), replicas, whole(server, "ep_size")),
        refusal=refusal,
        likely_engine=_likely_engine(text(row, "backend") or ""),
    )  # fmt: skip
    return _serving(row, point, "mean_e2e_latency_ms", number(row, "accept_length"))


def _serving(row: Mapping[str, Any], point: Point, latency: str, accepted: float | None) -> Point:
    completed = whole(row, "completed")
    lengths = [
        rounded(total / completed) if total is not None and completed is not None else None
        for total in (number(row, "total_input_tokens"), number(row, "total_output_tokens"))
    ]
    tpot = measured("tpot", number(row, "mean_tpot_ms"), number(row, "median_tpot_ms"))
    ttft = measured("ttft", number(row, "mean_ttft_ms"), number(row, "median_ttft_ms"))
    concurrency, is_average = _concurrency(row, completed, latency, (*tpot, *ttft), lengths[1])
    if point.refusal is None and completed is None:
        point = point._replace(refusal="no request was completed")
    if point.refusal is None and accepted is not None and accepted > 1:
        reason = f"it drafts tokens ({accepted:.3g} accepted per step), but the result does not say how"
        point = point._replace(refusal=reason)
    return checked(
        point._replace(
            input_tokens=lengths[0], output_tokens=lengths[1], concurrency=concurrency, is_average=is_average,
            times=tpot + ttft,
        )
    )  # fmt: skip


def _concurrency(
    row: Mapping[str, Any], completed: int | None, latency: str, times: tuple[Measured, ...], output: int | None
) -> tuple[int | None, bool]:
    """The number of requests at the same time, and whether Little's law gave it.

    --max-concurrency is the load itself if nothing else slows the requests, and an upper limit if they come at a rate.
    """
    limit = whole(row, "max_concurrency")
    if limit is not None and row.get("request_rate") in ("inf", float("inf"), None):
        return min(limit, completed or limit), False
    known = number(row, "concurrency")
    if known is not None:
        return rounded(known), True
    milliseconds, means = number(row, latency), {time.metric: time.mean_seconds for time in times}
    tpot, ttft = means.get("tpot"), means.get("ttft")
    if milliseconds is not None:
        request_seconds: float | None = milliseconds / 1e3
    elif tpot is not None and ttft is not None and output is not None:
        request_seconds = ttft + (output - 1) * tpot
    else:
        request_seconds = None
    duration, rate = number(row, "duration"), number(row, "request_throughput")
    if rate is None and duration is not None and completed is not None:
        rate = completed / duration
    return littles_concurrency(rate, request_seconds), True


def _likely_engine(backend: str) -> str | None:
    return next((engine for name, engine in _LIKELY.items() if backend.startswith(name)), None)
