"""Compare the predicted power of serving with ML.ENERGY's measurements.

    python benchmarks/score/power.py

power_points.tsv has the mean power of all devices in steady serving with vLLM: ml-energy/leaderboard, version 3, its
commit 0cd52dab of February 2026 (public/data/models). The contexts are means of prompt and answer.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, quantiles

import kvcalc
from kvcalc.question.question import Question, SpeedQuestion
from kvcalc.server.case import make_case
from kvcalc.server.speed import speed_of
from kvcalc.throughput.hardware import Devices, find_gpu
from kvcalc.throughput.power import energy_per_token

POINTS = Path(__file__).parent / "power_points.tsv"
# The models whose points on an H100 the utilization was fitted to.
FITTED = ("llama-3.1-8b", "qwen3-32b", "gpt-oss-20b")


def predicted_watts(row: Mapping[str, str]) -> float:
    """The power of all devices for a row of power_points.tsv."""
    gpu, batch, tokens = find_gpu(row["gpu"]), float(row["batch_size"]), int(row["context_tokens"])
    case = make_case(
        Question(
            kvcalc.load_model(row["model"]), tokens, max(1, round(batch)),
            dtype=None if row["dtype"] == "mxfp4" else row["dtype"], tensor_parallel_size=int(row["tp"]),
            devices=Devices(gpu, int(row["tp"])), engine="vllm", speed=SpeedQuestion(int(row["ep"])),
        )
    )  # fmt: skip
    found = speed_of(case, [])
    if isinstance(found, str):
        raise ValueError(f"{row['model']}: {found}")
    step = found.model.decode(batch, tokens)
    energy = energy_per_token(gpu, int(row["tp"]), step.compute / step.seconds, batch / step.seconds, (1.0, 1.0))
    if energy is None:
        raise ValueError(f"{row['gpu']}: no TDP")
    return energy.watts


def _line(name: str, rows: Sequence[tuple[str, float]]) -> str:
    ratios = [ratio for _, ratio in rows]
    tenths = quantiles([1 / ratio for ratio in ratios], n=10)
    error = mean(abs(math.log(ratio)) for ratio in ratios)
    models = len({model for model, _ in rows})
    return f"| {name} | {models} | {len(rows)} | {error:.0%} | {tenths[0]:.2f} to {tenths[-1]:.2f} |".replace("%", " %")


def main() -> None:
    """Print the table of docs/concepts/energy.md."""
    groups: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    with POINTS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            is_fitted = row["gpu"] == "h100" and row["model"] in FITTED
            kind = f"{row['gpu'].upper()}, {'fitted models' if is_fitted else 'other models'}"
            kind = row["gpu"].upper() if row["gpu"] != "h100" else kind
            groups[kind].append((row["model"], predicted_watts(row) / float(row["watts"])))
    print("| device | models | points | mean error of the power | measured / predicted, 10 % to 90 % |")
    print("|---|---|---|---|---|")
    for kind in sorted(groups, key=lambda kind: (kind[:1] != "H", kind.endswith("other models"))):
        print(_line(kind, groups[kind]))


if __name__ == "__main__":
    main()
