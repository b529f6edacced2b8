"""Forty commands of a newcomer, from the guides, and the golden screens of those whose figures never change.

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
OTHERS = f"""
estimate gemma-3-27b --context 32k --batch 8
estimate deepseek-v3 --context 128k --gpu h200x8 --engine vllm
estimate llama-3-70b {ON} --context 8k --explain
estimate llama-3-70b --context 8k --gpu h100x16 --engine vllm --batch 500
estimate gpt-oss-120b --context 32k --engine all
estimate qwen3-32b --gpu h200 --engine sglang --input-tokens 2k --output-tokens 500 --concurrency 32
estimate deepseek-v3 --gpu h200x8 --engine vllm --speculative mtp:3 --acceptance-length 2.4
estimate llama-3.1-8b --gpu h100 --engine vllm --context 32k --prefix-tokens 8000 --offload cpu=200GiB
estimate --layers 32 --heads 32 --kv-heads 8 --head-dim 128
estimate bert-large --context 9000
estimate llama-3-70b --context 8192 --get kv_cache.total_bytes
estimate llama-3-70b --context 8192 --json
fit llama-3-70b {ON} --context 8192 --batch 32
fit llama-3-70b --gpu h100 --engine vllm
fit llama-3.1-8b --gpu rtx-4090 --engine vllm --context 32k
fit gpt-oss-20b --gpu rtx-4090 --engine llama.cpp --context 128k
fit llama-3-70b
fit llama-3-70b --gpu h100 --engine vllm,sglang
check vllm serve meta-llama/Llama-3.1-70B-Instruct -tp 4 --max-model-len 32768 --gpu h100
check vllm serve meta-llama/Llama-3.1-70B-Instruct --gpu h100
check vllm serve Qwen/Qwen3-8B --gpu l40s --input-tokens 2k --output-tokens 250 --max-ttft 1s@p99
plan llama-3-70b --input-tokens 7k --output-tokens 1k --concurrency 64 --gpu h100,h200,l40s
plan qwen3-32b --input-tokens 2k --output-tokens 500 --requests-per-second 8 --max-ttft 1s@p99 --gpu h100
plan gpt-oss-120b --input-tokens 2k --output-tokens 500 --concurrency 100 --price h100=2.5 --price l40s=0.9
compare llama-3-70b --attention all --context 8k
compare llama-3.3-70b qwen3-32b gpt-oss-120b --gpu h100x4,h200x2 --context 32k --batch 16
sweep llama-3.1-8b --context 8k..128k --batch 1..64 --gpu l40s,h100
simulate llama-3.1-8b --gpu h100 --requests-per-second 4 --input-tokens 1000 --output-tokens 500
prefix docs/start/agents.jsonl llama-3.1-8b --gpu h100 --engine vllm --price h100=2.5
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


def main() -> None:
    """Print all screens, or write the golden ones."""
    if "--write" in sys.argv:
        for columns in COLUMNS:
            path_of(columns).write_text(golden(columns))
    else:
        for command in (*GOLDEN.values(), *OTHERS):
            print(screen(command, int(sys.argv[1]) if len(sys.argv) > 1 else 80))


if __name__ == "__main__":
    main()
