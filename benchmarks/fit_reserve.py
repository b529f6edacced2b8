"""Compare the memory that kvcalc reserves for an engine with public logs, and compute its 80 % range.

    python benchmarks/fit_reserve.py [ENGINE]             # a row per log, the range, and how many logs it covers
    python benchmarks/fit_reserve.py [ENGINE] --markdown  # the table of docs/guides/fit.md

The constants in kvcalc/engines follow from the engine's source, and from the rows of the tables that are marked
`report` or `used`; the range comes from the other logs. For each release and family, the range is computed without its
logs and then checked with them.
"""

from __future__ import annotations

import argparse
from statistics import median

from benchmarks.reserve_logs import (
    covered,
    is_within,
    range_of,
    read_llama_cpp_logs,
    read_sglang_logs,
    read_tensorrt_llm_logs,
    read_vllm_logs,
    release_and_family,
)
from kvcalc.engines.llama_cpp import reserve as llama_cpp
from kvcalc.engines.sglang import reserve as sglang
from kvcalc.engines.tensorrt_llm import reserve as tensorrt_llm
from kvcalc.engines.vllm import reserve as vllm

ENGINES = {
    "vllm": (read_vllm_logs, (vllm._LOW, vllm._HIGH)),
    "sglang": (read_sglang_logs, (sglang._LOW, sglang._HIGH)),
    "tensorrt-llm": (read_tensorrt_llm_logs, (tensorrt_llm._LOW, tensorrt_llm._HIGH)),
    "llama.cpp": (read_llama_cpp_logs, (llama_cpp._LOW, llama_cpp._HIGH)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="?", choices=ENGINES, default="vllm")
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    read, used = ENGINES[asked.engine]
    logs = read()
    held_out = [log for log in logs if log.is_held_out]
    if asked.markdown:
        print("| model | release | device | reserved | estimate | error, share of the device |")
        print("|---|---|---|---|---|---|")
    for log in held_out if asked.markdown else logs:
        error = 100 * (log.estimate - log.actual) / log.memory
        fields = [
            log.model,
            log.release,
            log.device,
            f"{log.actual:.2f} GiB",
            f"{log.estimate:.2f} GiB",
            f"{error:+.1f} %",
        ]
        print(
            f"| {' | '.join(fields)} |"
            if asked.markdown
            else "  ".join(f"{field:20}" for field in [*fields, f"{log.ratio:.2f}"])
        )
    if not asked.markdown:
        low, high = range_of(held_out)
        print(f"\nrange {low:.2f} to {high:.2f} times the estimate; used {used[0]} to {used[1]}")
        within = sum(is_within(log, used) for log in held_out)
        print(f"{len(held_out)} logs that set no constant: {within} within the range used;")
        print(f"{covered(held_out, release_and_family)} within the range of other releases and families;")
        print(f"{covered(held_out, lambda log: log.family)} within the range of the other families")
        errors = [abs(log.estimate - log.actual) / log.memory for log in held_out]
        print(f"error, share of the device: median {100 * median(errors):.1f} %, largest {100 * max(errors):.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
