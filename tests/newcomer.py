"""Commands of a newcomer, from the guides, and their golden screens: forty first ones, and some at three widths.

python -m tests.newcomer [COLUMNS]      print all of them in a pipe, to read line by line
python -m tests.newcomer --write        write the golden screens again (tests/screens)
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conftest import ROOT, spawn

FOLDER = ROOT / "tests" / "screens"
ON = "--gpu h100x4 --engine vllm"
# Bytes by the formula, lists and errors: nothing that a measurement or an engine's release changes.
GOLDEN = {
    "estimate": "estimate llama-3-70b --context 8192",
    "compare": "compare llama-3-70b deepseek-v3 gemma-3-27b gpt-oss-120b --context 8192",
    "sweep": "sweep llama-3-70b --context 1k..128k",
    "audit": "audit tests/logs/vllm.log",
    "gpus": "gpus h100",
    "unknown": "estimate lama-3-70b",
    "prefix": "prefix docs/start/agents.jsonl",
}
# What a newcomer types first. Their figures change with the engines' rules and the fitted constants; a change is read.
FIRST = f"""
fit llama-3.1-8b --gpu h100
fit llama-3.1-8b --gpu l4
fit llama-3.1-8b --gpu l4 --context 16k
fit llama-3.1-8b --gpu rtx-4090 --context 32k
fit llama-3-70b --gpu h100
fit llama-3-70b --gpu h100x4
fit llama-3-70b {ON} --context 8192 --batch 32
fit Qwen/Qwen3-235B-A22B-FP8 --gpu h100x4 --context 40k
fit qwen3-32b --gpu h100
fit qwen3-32b --gpu h100 --engine sglang
fit gpt-oss-120b --gpu h100
fit qwen3:32b --gpu rtx-4090
fit qwen3-8b --dtype q4_k_m --gpu rtx-4090
fit mlx-community/Qwen3-8B-4bit --gpu m4-max
fit llama-3.1-8b --gpu-memory 24GB
fit qwen3-8b --gpu h100 --context 100k
fit qwen3-8b --gpu h100 --batch 40
fit qwen3-8b --gpu h100 --engine logical
fit llama-3-70b
fit llama-3-70b --gpu h100 --engine vllm,sglang
estimate llama-3.1-8b --gpu h100
estimate llama-3.1-8b --gpu l4
estimate gemma-3-27b --context 32k --batch 8
estimate deepseek-v3 --context 128k --gpu h200x8
estimate gpt-oss-120b --context 32k --engine all
estimate qwen3-32b --gpu h200 --input-tokens 2k --output-tokens 500 --concurrency 32
estimate --layers 32 --heads 32 --kv-heads 8 --head-dim 128
estimate bert-large --context 9000
estimate llama-3-70b --context 8192 --get kv_cache.total_bytes
compare llama-3.1-8b qwen3-32b llama-3-70b --gpu h100
compare llama-3.3-70b qwen3-32b gpt-oss-120b --gpu h100x4,h200x2 --context 32k --batch 16
sweep llama-3.1-8b --gpu h100,l4
models --gpu l4 --most 8
models --gpu m4-max --most 8
check vllm serve meta-llama/Llama-3.1-8B --gpu l4
check vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4 --max-model-len 32768 --gpu h100
check vllm serve Qwen/Qwen3-8B --gpu l40s --input-tokens 2k --output-tokens 250 --max-ttft 1s@p99
plan qwen3-32b --input-tokens 2k --output-tokens 500 --requests-per-second 8 --max-ttft 1s@p99 --gpu h100
plan llama-3-70b --input-tokens 7k --output-tokens 1k --concurrency 64 --gpu h100
simulate llama-3.1-8b --gpu h100 --requests-per-second 4 --input-tokens 1000 --output-tokens 500
""".strip().splitlines()
OTHERS = f"""
estimate llama-3-70b {ON} --context 8k --explain
estimate llama-3-70b --context 8k --gpu h100x16 --engine vllm --batch 500
estimate deepseek-v3 --gpu h200x8 --context 4k --speculative mtp:3 --acceptance-length 2.4
estimate llama-3.1-8b --gpu h100 --context 32k --prefix-tokens 8000 --offload cpu=200GiB
estimate llama-3-70b --context 8192 --json
fit gpt-oss-20b --gpu rtx-4090 --engine llama.cpp --context 128k
plan gpt-oss-120b --input-tokens 2k --output-tokens 500 --concurrency 100 --price h100=2.5 --price l40s=0.9
compare llama-3-70b --attention all --context 8k
sweep llama-3.1-8b --context 8k..128k --batch 1..64 --gpu l40s,h100
prefix docs/start/agents.jsonl llama-3.1-8b --gpu h100 --price h100=2.5
score tests/logs/vllm-bench.json --gpu h100
models --family gemma
models deepseek-v3
gpus --vendor AMD
""".strip().splitlines()
COLUMNS = (50, 80, 160)


def screen(command: str, columns: int) -> str:
    """What a command prints in a pipe with COLUMNS: stdout, then stderr. Lists are asked for as a screen."""
    words = command.split()
    human = ("--format", "human") if words[0] in ("models", "gpus", "compare", "sweep") else ()
    result = spawn(*words, *human, env={"COLUMNS": str(columns), "KVCALC_FORMAT": ""}, cwd=ROOT)
    shown = "\n".join(line.rstrip() for line in (result.out + result.err).splitlines())
    return f"$ kvcalc {command}\n{shown}\n"


def golden(columns: int) -> str:
    """The golden screens of one width."""
    return "\n".join(screen(command, columns) for command in GOLDEN.values())


def path_of(columns: int) -> Path:
    """The file of the golden screens of one width."""
    return FOLDER / f"{columns}.txt"


def first() -> str:
    """The screens of the first commands at 80 columns."""
    return "\n".join(screen(command, 80) for command in FIRST)


def main() -> None:
    """Print all screens, or write the golden ones."""
    if "--write" in sys.argv:
        for columns in COLUMNS:
            path_of(columns).write_text(golden(columns))
        (FOLDER / "first.txt").write_text(first())
    else:
        for command in (*GOLDEN.values(), *FIRST, *OTHERS):
            print(screen(command, int(sys.argv[1]) if len(sys.argv) > 1 else 80))


if __name__ == "__main__":
    main()
