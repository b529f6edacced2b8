"""Compare the predicted decode speed of models with a part in host memory with published figures.

    python benchmarks/score/host_memory.py           the table of docs/concepts/offload.md
    python benchmarks/score/host_memory.py --fit     the efficiency that each figure implies, for throughput/host.py

Only figures whose host memory is stated are used. Devices without a preset are described by their data sheet.
"""

from __future__ import annotations

import sys
from statistics import median
from typing import NamedTuple

import kvcalc
from kvcalc.question.question import Question
from kvcalc.server.case import make_case
from kvcalc.server.speed import speed_of
from kvcalc.throughput import host
from kvcalc.throughput.hardware import Devices, Gpu, find_gpu, own_gpu
from kvcalc.throughput.host import HostedModel

GB, TERA = 10**9, 10**12
RTX_2080 = own_gpu(find_gpu("rtx-2080-ti"), 8 * 2**30, 448 * GB, 80 * TERA)._replace(name="RTX 2080")
RTX_5080 = own_gpu(find_gpu("rtx-5090"), 16 * 2**30, 960 * GB, 112 * TERA)._replace(name="RTX 5080")
RX_6900_XT = own_gpu(find_gpu("rx-6700-xt"), 16 * 2**30, 512 * GB, 46 * TERA)._replace(name="RX 6900 XT")


class Figure(NamedTuple):
    """A published figure: tokens per second of one sequence."""

    model: str
    dtype: str | None
    gpu: Gpu
    host_gb_per_second: float
    option: str
    value: str
    tokens_per_second: float
    source: str


_LLMFIT, _QWEN = "AlexsJones/llmfit, pull request {}", "r/LocalLLaMA 1rei65v"
FIGURES = (
    Figure("qwen3-30b-a3b", "q4_k_m", RTX_2080, 102.4, "n-cpu-moe", "36", 36.7, _LLMFIT.format(755)),
    Figure("gpt-oss-20b", None, RTX_2080, 102.4, "n-cpu-moe", "12", 36.4, _LLMFIT.format(775)),
    Figure("deepseek-v2-lite", "q4_k_m", RTX_2080, 102.4, "n-cpu-moe", "16", 49.6, _LLMFIT.format(778)),
    Figure("gemma-2-9b", "q4_k_m", RTX_2080, 102.4, "n-gpu-layers", "36", 23.7, _LLMFIT.format(778)),
    Figure("qwen2.5-14b", "q4_k_m", RTX_2080, 102.4, "n-gpu-layers", "42", 20.8, _LLMFIT.format(778)),
    Figure("qwen3.5-35b-a3b", "q8_0", RTX_5080, 76.8, "cpu-moe", "", 35.7, _QWEN),
    Figure("qwen3.5-35b-a3b", "q4_k_m", RTX_5080, 76.8, "cpu-moe", "", 51.0, _QWEN),
    Figure("qwen3.5-35b-a3b", "q4_k_m", RTX_5080, 76.8, "n-cpu-moe", "24", 69.6, _QWEN),
    Figure("gpt-oss-120b", None, RX_6900_XT, 89.6, "n-cpu-moe", "28", 19.0, "r/LocalLLaMA 1ofxt6s"),
)
# The lengths are not stated. They are short, and the cache is a small part of these steps.
CONTEXT_TOKENS = 512


def hosted_model(figure: Figure) -> HostedModel:
    """The speed of a figure's deployment."""
    settings = {figure.option: figure.value, "host-bandwidth": f"{figure.host_gb_per_second}GB/s"}
    case = make_case(
        Question(
            kvcalc.load_model(figure.model), CONTEXT_TOKENS, dtype=figure.dtype, devices=Devices(figure.gpu, 1),
            engine="llama.cpp", engine_settings=settings,
        )
    )  # fmt: skip
    found = speed_of(case, [])
    if isinstance(found, str) or not isinstance(found.model, HostedModel):
        raise ValueError(f"{figure.model}: {found}")
    return found.model


def implied_efficiency(figure: Figure) -> float:
    """The efficiency of the host's memory with which the prediction is the published figure."""
    model = hosted_model(figure)
    on_host = model.host_seconds(1, CONTEXT_TOKENS)
    on_device = model.decode(1, CONTEXT_TOKENS).seconds - on_host
    return host.EFFICIENCY * on_host / (1 / figure.tokens_per_second - on_device)


def main() -> None:
    """Print the table, or the efficiencies."""
    if "--fit" in sys.argv[1:]:
        found = [implied_efficiency(figure) for figure in FIGURES]
        for figure, efficiency in zip(FIGURES, found):
            print(f"{figure.model:20} {figure.gpu.name:12} {efficiency:.2f}")
        print(f"median {median(found):.2f}")
        return
    print("| model | device | host memory | options | published | predicted | error | source |")
    print("|---|---|---|---|---|---|---|---|")
    errors = []
    for figure in FIGURES:
        predicted = 1 / hosted_model(figure).decode(1, CONTEXT_TOKENS).seconds
        error = predicted / figure.tokens_per_second - 1
        errors.append(abs(error))
        option = f"`--{figure.option} {figure.value}`".replace(" `", "`")
        print(
            f"| {figure.model} {figure.dtype or 'mxfp4'} | {figure.gpu.name} | {figure.host_gb_per_second:g} GB/s "
            f"| {option} | {figure.tokens_per_second} | {predicted:.1f} | {error:+.0%} | {figure.source} |".replace(
                "%", " %"
            )
        )
    print(f"\nmean error {sum(errors) / len(errors):.0%}".replace("%", " %"))


if __name__ == "__main__":
    main()
