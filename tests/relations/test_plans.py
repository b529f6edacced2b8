"""What must hold between a plan and the other answers about its layout, and of prefixes found in a trace.

Loads and traces are random. `pytest -m fuzz --cases 1000000 --fuzz-seed 7` is a long run.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.relations.drawing import asked, command_line, draw

pytestmark = pytest.mark.fuzz

MODELS = ("llama-3-8b", "qwen3-30b-a3b", "gpt-oss-120b", "gemma-3-27b", "qwen3-8b", "llama-3-70b", "deepseek-v3")
GPUS = ("h100", "h200", "a100-80gb", "l40s", "mi300x")
CASES_PER_PLAN = 1250
CASES_PER_TRACE = 250


def questions(pytestconfig: pytest.Config, name: str) -> list[tuple[Random, list[Any]]]:
    """The words of random plans."""
    random, found = Random(f"{name} {pytestconfig.getoption('--fuzz-seed')}"), []
    for _ in range(max(4, pytestconfig.getoption("--cases") // CASES_PER_PLAN)):
        words: list[Any] = [
            random.choice(MODELS), "--gpu", random.choice(GPUS), "--engine", random.choice(["vllm", "sglang"]),
            "--input-tokens", random.choice([100, 1000, 4000]), "--output-tokens", random.choice([10, 100, 500]),
            "--concurrency", random.choice([1, 8, 64, 200]),
        ]  # fmt: skip
        if random.random() < 0.6:
            words += ["--max-tpot", random.choice(["20ms", "30ms", "60ms"])]
        if random.random() < 0.4:
            words += ["--max-ttft", random.choice(["500ms", "2s"])]
        found.append((random, words))
    return found


def planned(kvcalc: Any, words: list[Any]) -> dict[str, Any] | None:
    """The best layout, or None if none keeps the targets. The exit code says which."""
    result = kvcalc("plan", *words, "--json")
    if not result.out:
        return None
    best: dict[str, Any] | None = result.json["best"]
    keeps = best is not None and best["fits"]
    assert result.status == (0 if keeps else 4), words
    return best if keeps else None


def test_a_plan_is_the_smallest_and_its_sizes_multiply(kvcalc: Any, pytestconfig: pytest.Config) -> None:
    checked = 0
    for _, words in questions(pytestconfig, "smallest"):
        best = planned(kvcalc, words)
        if best is None:
            continue
        checked += 1
        number, sizes = best["num_devices"], 1
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "replicas"):
            sizes *= best[name]
        assert sizes == number or best["decode_context_parallel_size"] > 1, f"{words}: {best}"
        for figure in ("tpot", "ttft"):
            low, value, high = (best[f"{figure}{part}_seconds"] for part in ("_low", "", "_high"))
            assert None in (low, high) or low <= value <= high, f"{words}: {figure}"
        if number > 1:
            fewer = planned(kvcalc, [*words, "--max-gpus", number - 1])
            assert fewer is None, f"{words}: {fewer and fewer['num_devices']} devices are enough, not {number}"
    assert checked


@pytest.mark.settled
def test_a_plans_layout_fits_in_an_estimate(kvcalc: Any, pytestconfig: pytest.Config) -> None:
    checked = 0
    for _, words in questions(pytestconfig, "estimate"):
        best = planned(kvcalc, words)
        if best is None:
            continue
        checked += 1
        named = dict(zip(words[1::2], words[2::2]))
        layout = ["--tp", best["tensor_parallel_size"], "--pp", best["pipeline_parallel_size"]]
        for name, option in (("data_parallel_size", "--dp"), ("expert_parallel_size", "--ep")):
            layout += [option, best[name]] if best[name] > 1 else []
        clients = -(-named["--concurrency"] // best["replicas"])
        found = kvcalc(
            "estimate", words[0], "--gpu", f"{named['--gpu']}x{best['num_devices'] // best['replicas']}",
            "--engine", named["--engine"], "--input-tokens", named["--input-tokens"], "--output-tokens",
            named["--output-tokens"], "--concurrency", clients, *layout, "--json",
        )  # fmt: skip
        assert found.out, f"{words}: {found.err}"
        assert found.json["fit"]["fits"], words
        served = (found.json["throughput"] or {}).get("serving")
        if served:
            # Several replicas get requests at random, and this one has as many clients all the time.
            for figure, off in (("tpot_seconds", 0.06), ("ttft_seconds", 0.4)):
                assert served[figure] == pytest.approx(best[figure], rel=off), f"{words}: {figure}"
    assert checked


def fewest_devices(plan: Mapping[str, Any]) -> dict[str, int]:
    """The fewest devices of each kind with which a layout keeps the targets."""
    found: dict[str, int] = {}
    for row in plan["plans"]:
        if row["fits"]:
            found[row["gpu"]] = min(row["num_devices"], found.get(row["gpu"], row["num_devices"]))
    return found


def test_twice_the_load_never_needs_fewer_devices(pytestconfig: pytest.Config) -> None:
    """Clients or requests per second, with any other options: several kinds of device, pools, drafts and reuse."""
    random, checked = Random(f"twice {pytestconfig.getoption('--fuzz-seed')}"), 0
    for _ in range(max(6, pytestconfig.getoption("--cases") // CASES_PER_PLAN)):
        model, options = draw(random, "plan")
        load = next((name for name in ("concurrency", "requests-per-second") if name in options), None)
        if load is None:  # a trace
            continue
        twice = {**options, load: f"{2 * float(options[load]):g}"}
        more, once = asked("plan", model, twice), asked("plan", model, options)
        if more is None:
            continue
        assert once is not None, command_line("plan", model, options)
        enough = fewest_devices(once)
        for gpu, number in fewest_devices(more).items():
            checked += 1
            assert gpu in enough, (
                f"{gpu} keeps the targets with twice the load only: {command_line('plan', model, options)}"
            )
            assert enough[gpu] <= number, (
                f"{enough[gpu]} {gpu}, {number} with twice: {command_line('plan', model, options)}"
            )
    assert checked


def prompts(random: Random) -> list[tuple[int, list[int], int, int]]:
    """Requests in the order of their times: blocks of 512 tokens that continue earlier ones, and the lengths."""
    found: list[tuple[int, list[int], int, int]] = []
    now, new = 0, iter(range(10**6))
    for _ in range(random.randint(3, 120)):
        now += random.randint(0, 5000)
        before = random.choice(found)[1] if found and random.random() < 0.7 else []
        blocks = [*before[: random.randint(1, len(before) or 1)], *(next(new) for _ in range(random.randint(1, 12)))]
        length = len(blocks) * 512 - random.choice([0, 0, 1, 200])
        found.append((now, blocks, length, random.randint(1, 50)))
    return found


def least_recently_used(requests: list[tuple[int, list[int], int, int]], capacity: int) -> float:
    """The share of prompt tokens in blocks that are still there, up to the first block that is not."""
    kept: OrderedDict[int, None] = OrderedDict()
    found = tokens = 0
    for _, blocks, length, _ in requests:
        tokens += length
        for place, block in enumerate(blocks):
            if block not in kept:
                break
            found += min(512, length - 512 * place)
        for block in reversed(blocks):
            kept.pop(block, None)
            kept[block] = None
        while len(kept) > capacity:
            kept.popitem(last=False)
    return found / tokens


def test_prefixes_are_those_of_a_plain_cache(kvcalc: Any, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    random, path = Random(pytestconfig.getoption("--fuzz-seed")), tmp_path / "trace.jsonl"
    for _ in range(max(2, pytestconfig.getoption("--cases") // CASES_PER_TRACE)):
        requests = prompts(random)
        rows = [{"timestamp": at, "input_length": length, "output_length": answer, "hash_ids": blocks}
                for at, blocks, length, answer in requests]  # fmt: skip
        path.write_text("\n".join(map(json.dumps, rows)))
        curve = kvcalc("prefix", path, "--cache-tokens", "512..512k", "--json").json["curve"]
        rates = [point["hit_rate"] for point in curve]
        assert rates == sorted(rates)
        for point in curve:
            assert point["hit_rate_low"] <= point["hit_rate"] <= point["hit_rate_high"]
            assert point["hit_rate"] == pytest.approx(least_recently_used(requests, point["cache_blocks"]), abs=0.02)
