"""Reads results of benchmarks that users already have: vLLM, SGLang, GuideLLM and llama-bench.

The format is recognised by its content, not by the file's name. A file may hold one JSON document, a list, or one JSON
document per line.
"""

from __future__ import annotations

import json
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.throughput.bench_results.guidellm import is_guidellm, read_guidellm
from kvcalc.throughput.bench_results.llama_bench import is_llama_bench, read_llama_bench
from kvcalc.throughput.bench_results.point import Measured, Point
from kvcalc.throughput.bench_results.serving_clients import is_sglang, is_vllm, read_sglang, read_vllm

__all__ = ["KNOWN_RESULTS", "MAX_RESULT_BYTES", "Measured", "Point", "read_results"]

MAX_RESULT_BYTES = 64 * 1024 * 1024
"""GuideLLM writes every request and its text. 64 MiB hold several runs of a thousand requests."""

KNOWN_RESULTS = (
    "vllm bench serve --save-result, sglang.bench_serving --output-file, GuideLLM's benchmarks.json, "
    "llama-bench -o json"
)
"""The results that are read, for errors."""

_HINT = f"known: {KNOWN_RESULTS}"
_MOST_RUNS = 10_000


def read_results(content: str, name: str) -> list[Point]:
    """The runs in the text of a file called `name`, at least one.

    Raises UsageError (exit 2) if it is not the result of a benchmark that kvcalc knows.
    """
    points: list[Point] = []
    for document in _documents(content, name):
        points += _points(document, name, len(points) + 1)
        if len(points) > _MOST_RUNS:
            raise UsageError(f"{name}: more than {_MOST_RUNS:,} runs, the most that are read")
    if not points:
        raise UsageError(f"{name}: no results in it", _HINT)
    return points


def _points(document: object, name: str, run: int) -> list[Point]:
    if isinstance(document, dict):
        if is_guidellm(document):
            points = read_guidellm(document)
            return [point._replace(run=run + index) for index, point in enumerate(points)]
        # SGLang's first: its result has all the keys of vLLM's that name no model.
        if is_sglang(document):
            return [read_sglang(document, run)]
        if is_vllm(document):
            return [read_vllm(document, run)]
        if is_llama_bench(document):
            return [read_llama_bench(document, run)]
    raise UsageError(f"{name}: not the result of a benchmark that kvcalc knows", _HINT)


def _documents(content: str, name: str) -> list[object]:
    """The JSON documents of a file: the items of a list, one document, or one per line."""
    whole = _parsed(content)
    if isinstance(whole, list):
        return whole
    if whole is not None:
        return [whole]
    lines = [line for line in content.splitlines() if line.strip()]
    rows = [_parsed(line) for line in lines]
    if not lines or None in rows:
        raise UsageError(f"{name}: neither JSON nor JSON lines", _HINT)
    return rows


def _parsed(content: str) -> Any:
    """The JSON document, or None if it is not JSON. These tools write Infinity and NaN, which Python reads."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
