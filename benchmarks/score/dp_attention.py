"""Compare the throughput of DP ranks (--dp) with published maxima of TensorRT-LLM.

    python benchmarks/score/dp_attention.py --data FOLDER

FOLDER has trtllm_1_2.jsonl: one JSON object per line with the fields of TensorRT-LLM 1.2's perf-overview.md: `model`,
`device`, `num_devices`, `tp`, `ep`, `dp`, `weight_dtype`, `isl`, `osl` and `value`, the most output tokens per second
and device. The document does not say how many requests ran, so each maximum is compared with the best prediction over
a range of concurrent requests. Rows on one device are the reference: their error is not that of DP ranks.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import kvcalc
from kvcalc.errors import KvcalcError
from kvcalc.question.question import SpeedQuestion
from kvcalc.throughput.hardware import find_devices

CONCURRENT = (256, 512, 1024, 2048, 4096, 8192, 16384)


def predicted(row: dict[str, Any]) -> float | None:
    """The most output tokens per second and device over `CONCURRENT`, or None if the question is refused."""
    found = []
    for requests in CONCURRENT:
        try:
            answer = kvcalc.estimate(
                row["model"],
                engine="tensorrt-llm",
                # The checkpoint's own type is given by the preset.
                dtype=None if row["weight_dtype"] == "mxfp4" else row["weight_dtype"],
                kv_dtype="fp8",
                devices=find_devices(f"{row['device']}x{row['num_devices']}"),
                tensor_parallel_size=row["tp"],
                data_parallel_size=row["dp"],
                speed=SpeedQuestion(row["ep"], row["isl"], row["osl"], requests),
            )
        except KvcalcError:
            return None
        throughput = answer["throughput"]
        if throughput is None or throughput["serving"] is None:
            return None
        found.append(throughput["serving"]["tokens_per_second_per_device"])
    return max(found)


def main() -> None:
    """Print the ratio of predicted to published throughput by model and device, and its medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    lines = (parser.parse_args().data / "trtllm_1_2.jsonl").read_text().splitlines()
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in map(json.loads, lines):
        is_split = row["dp"] > 1
        if not is_split and row["num_devices"] > 1:
            continue
        rate = predicted(row)
        if rate is not None:
            ratios["DP ranks" if is_split else "one device", f"{row['model']}, {row['device']}"].append(
                rate / row["value"]
            )
    for (kind, name), found in ratios.items():
        print(f"{kind:20}{name:45}{len(found):3} rows, median {median(found):.2f}")
    for kind in dict.fromkeys(kind for kind, _ in ratios):
        every = [ratio for (found, _), values in ratios.items() if found == kind for ratio in values]
        print(f"{kind}: {len(every)} rows, predicted / published {median(every):.2f} at the median")


if __name__ == "__main__":
    main()
