"""Save the answers to many questions, and compare two saved files.

    python benchmarks/compare_answers.py save before.jsonl.gz [--configs FOLDER ...]
    python benchmarks/compare_answers.py save before.jsonl.gz --random 5000 [--seed N]
    python benchmarks/compare_answers.py save after.jsonl.gz --questions before.jsonl.gz
    python benchmarks/compare_answers.py diff before.jsonl.gz after.jsonl.gz [--examples 2]

Without --random, the questions are every preset x engine x tp 1, 2, 8 x pp 1, 2, without a device and on h100x8 with
serving options, and every config.json in the given folders. They go through one `kvcalc batch`.

With --random N, they are N random ones about every command and engine: loads, layouts, types, the engines' own options
as the help lists them, prefixes, drafts, parts in host memory, pools, batches, and the same questions in Python. There
are also `plan --emit`, screens of 80 columns, every help screen, and the signatures of the Python API. Refusals are
recorded too. `save --questions OLD` asks the questions that are stored in another recording again.

To ask another checkout, put it on the path: PYTHONPATH=OTHER python benchmarks/compare_answers.py save ... Only its
command line and its public Python API are used, so it also works if the structure of the code changes. `diff` groups
the differences by command, engine and JSON path. A change that should not change figures must print no differences.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.answers.recording import compare, record

ENGINES = ("logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp")
SERVED: dict[str, Any] = {"gpu": "h100x8", "input_tokens": 6000, "output_tokens": 2192, "concurrency": 32}


def questions(folders: list[Path]) -> Iterator[dict[str, Any]]:
    listed = subprocess.run(
        [sys.executable, "-m", "kvcalc", "models", "--format", "json"], capture_output=True, text=True, check=True
    )
    names = [row["name"] for row in json.loads(listed.stdout)["models"]]
    for name, engine, tp, pp, served in product(names, ENGINES, (1, 2, 8), (1, 2), ({}, SERVED)):
        layout = {"tp": tp} if pp == 1 else {"tp": tp, "pp": pp}
        yield {"model": name, "engine": engine, "context": 8192, **layout, **served}
    for folder in folders:
        for path in sorted(folder.glob("*.json")):
            for engine in ENGINES:
                yield {"model": str(path), "engine": engine, "context": 8192}
            for engine in ("vllm", "sglang"):
                yield {"model": str(path), "engine": engine, "context": 8192, "tp": 8, **SERVED}


def save(target: Path, folders: list[Path]) -> None:
    asked = list(questions(folders))
    lines = "".join(json.dumps(question) + "\n" for question in asked)
    ran = subprocess.run([sys.executable, "-m", "kvcalc", "batch"], input=lines, capture_output=True, text=True)
    answers = ran.stdout.splitlines()
    if len(answers) != len(asked):
        raise SystemExit(f"{len(asked)} questions, {len(answers)} answers: {ran.stderr}")
    with gzip.open(target, "wt", compresslevel=3) as stream:
        for question, answer in zip(asked, answers):
            stream.write(json.dumps({"question": question, "answer": json.loads(answer)}) + "\n")
    errors = sum('{"error"' in answer[:10] for answer in answers)
    print(f"{len(asked):,} questions, {errors:,} refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save")
    saving.add_argument("target", type=Path)
    saving.add_argument("--configs", type=Path, action="append", default=[])
    saving.add_argument("--random", type=int, metavar="N")
    saving.add_argument("--seed", type=int, default=0)
    saving.add_argument("--questions", type=Path, metavar="OLD")
    comparing = commands.add_parser("diff")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--examples", type=int, default=1)
    given = parser.parse_args()
    if given.command == "diff":
        raise SystemExit(compare(given.before, given.after, given.examples))
    if given.random is None and given.questions is None:
        save(given.target, given.configs)
    else:
        record(given.target, given.random or 0, given.seed, given.questions)


if __name__ == "__main__":
    main()
