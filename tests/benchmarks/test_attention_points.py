"""The measured times of one layer's attention, beside what the estimate says of them."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from kvcalc.planning.calibration.attention_rows import add_predictions
from tests.conftest import ROOT

_LINES = (ROOT / "benchmarks" / "attention_points.tsv").read_text(encoding="utf-8").splitlines()
POINTS = [*csv.DictReader((line for line in _LINES if not line.startswith("#")), delimiter="\t")]
# Contexts and batches of this many tokens together are read at the rate of the memory.
_MANY_TOKENS = 200_000


@pytest.mark.parametrize(("device", "preset"), [("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H200", "h200-sxm")])
def test_the_estimate_of_attention_is_what_was_measured_where_memory_binds(device: str, preset: str) -> None:
    measured = [point for point in POINTS if point["device"] == device]
    points = [
        {**point, "context_tokens": int(point["context_tokens"]), "batch_size": int(point["batch_size"])}
        for point in measured
    ]
    document: Any = {"device": {"name": device}, "points": points}
    assert add_predictions(document) == preset
    compared = 0
    for point in points:
        share = float(point["predicted_layer_seconds"]) * 1e6 / float(str(point["layer_microseconds"]))
        # A step takes launches and a kernel, which the estimate of attention alone does not have.
        assert share <= 1.03, point
        many = int(point["context_tokens"]) * int(point["batch_size"]) >= _MANY_TOKENS
        if many and point["kv_dtype"] in ("bf16", "fp16") and point["model"] != "deepseek-v3":
            assert share == pytest.approx(1, abs=0.03), point
            compared += 1
    assert len(points) >= 68
    assert compared >= 7
