"""Compare decode attention on this device with repeated K and V, the read roof, and Transformers.

    python benchmarks/speed/decode.py [--context 16k] [--runs N] [--json FILE]

There are three comparisons. Calls alternate (A B A B ...), so that changes in the machine's speed affect both sides in
the same way. Every figure is a median. The goals are for a CPU at 16k tokens.

1. Llama-3-70B's shape: the best grouped backend against K and V repeated for every query head. Goal: 15 times faster.
2. The bytes of K and V divided by the core's time, relative to the read roof, which is measured between the calls.
   Goals: 0.75 for LLaMA-7B's shape in fp32, and 0.38 in fp32 and 0.44 in bf16 for Llama-3-70B's shape.
3. One whole step of attention, including projections, against LlamaAttention of Transformers with its DynamicCache and
   its StaticCache, with the same weights and tokens. Goal: not slower; target: twice as fast. Skipped if Transformers
   is not installed (pip install 'kvcalc[oracle]').
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kvcalc.attention.backends import BACKENDS, Case
from kvcalc.attention.cache import TokenCache
from kvcalc.attention.grouped import GroupedAttention
from kvcalc.units import parse_tokens

CPU = torch.device("cpu")

# Name -> (hidden_size, query heads, KV heads, head_dim), from the published configs.
SHAPES = {"llama-7b": (4096, 32, 32, 128), "llama-3-70b": (8192, 64, 8, 128)}
ROOF_GOALS = {("llama-7b", "fp32"): 0.75, ("llama-3-70b", "fp32"): 0.38, ("llama-3-70b", "bf16"): 0.44}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def in_turn(calls: Mapping[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """The seconds of every call. Calls alternate for `runs` rounds, after two rounds that are not counted."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(runs + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= 2:
                taken[name].append(time.perf_counter() - start)
    return taken


def ratio(taken: dict[str, list[float]], above: str, below: str) -> float:
    """The median of the ratios within the same round."""
    return statistics.median(a / b for a, b in zip(taken[above], taken[below]))


def filled_cache(shape: tuple[int, int, int, int], context: int, dtype: torch.dtype) -> TokenCache:
    _, _, kv_heads, head_dim = shape
    cache = TokenCache(1, ((kv_heads, head_dim), (kv_heads, head_dim)), context, None, dtype, CPU)
    cache.append(tuple(torch.randn(1, kv_heads, context - 1, head_dim).to(dtype) for _ in range(2)))
    return cache


def candidates(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[str]:
    """The backends that can run the shape here and are tried automatically."""
    case = Case(CPU, dtype, shape[1], shape[2], shape[3], shape[3])
    return [name for name, b in BACKENDS.items() if not (b.why_not_unasked(case) or b.why_not(case))]


def against_repetition(context: int, runs: int) -> list[dict[str, Any]]:
    """Compare the grouped backends with repeated copies of K and V."""
    rows = []
    for name, dtype in DTYPES.items():
        shape = SHAPES["llama-3-70b"]
        cache, query = filled_cache(shape, context, dtype), torch.randn(1, shape[1], 1, shape[3]).to(dtype)
        names = [*candidates(shape, dtype), "repeat-kv"]
        calls = {n: partial(BACKENDS[n].decode, query, cache) for n in names}
        taken = in_turn(calls, runs)
        best = min(names[:-1], key=lambda n: statistics.median(taken[n]))
        found = {n: round(ratio(taken, "repeat-kv", n), 2) for n in names[:-1]}
        rows.append({"shape": "llama-3-70b", "dtype": name, "backend": best, "times_faster": found[best],
                     "all": found, "goal": 15.0 if name == "fp32" else None})  # fmt: skip
    return rows


def against_roof(context: int, runs: int) -> list[dict[str, Any]]:
    """The rate at which the core reads K and V, as a fraction of the read roof."""
    buffer = torch.ones(1 << 28)
    matrix, vector = buffer.view(-1, 1024), torch.ones(1024)
    rows = []
    for (model, name), goal in ROOF_GOALS.items():
        shape, dtype = SHAPES[model], DTYPES[name]
        cache, query = filled_cache(shape, context, dtype), torch.randn(1, shape[1], 1, shape[3]).to(dtype)
        names = candidates(shape, dtype)
        calls: dict[str, Callable[[], object]] = {n: partial(BACKENDS[n].decode, query, cache) for n in names}
        taken = in_turn({"sum": buffer.sum, "mv": lambda: torch.mv(matrix, vector), **calls}, runs)
        # The faster of the two reads in each round, which is the memory's rate at that moment.
        roof = [buffer.nbytes / min(pair) for pair in zip(taken["sum"], taken["mv"])]
        size = sum(t[:, :, : cache.held].nbytes for t in cache.tensors)
        found = {n: round(statistics.median(size / s / r for s, r in zip(taken[n], roof)), 3) for n in names}
        best = max(found, key=lambda n: found[n])
        # On a busy machine, the fastest calls are more reliable than the medians, because they were not interrupted.
        fastest = size / min(taken[best]) / max(roof)
        rows.append({"shape": model, "dtype": name, "backend": best, "fraction_of_roof": found[best], "all": found,
                     "fastest_over_fastest": round(fastest, 3),
                     "roof_bytes_per_second": statistics.median(roof), "goal": goal})  # fmt: skip
    return rows


def against_transformers(context: int, runs: int) -> list[dict[str, Any]] | None:
    """Compare one step of one layer with LlamaAttention. None if Transformers is not installed."""
    try:
        from transformers import DynamicCache, LlamaConfig, StaticCache
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
    except ImportError:
        return None
    rows = []
    for model, name in (("llama-7b", "fp32"), ("llama-3-70b", "fp32"), ("llama-3-70b", "bf16")):
        (hidden, heads, kv_heads, head_dim), dtype = SHAPES[model], DTYPES[name]
        config = LlamaConfig(
            hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=1,
            max_position_embeddings=context, intermediate_size=8, vocab_size=8,
        )  # fmt: skip
        config._attn_implementation = "sdpa"
        theirs = LlamaAttention(config, 0).to(dtype).eval()
        rope = LlamaRotaryEmbedding(config)
        ours = GroupedAttention(hidden, heads, kv_heads, head_dim, rope_dim=head_dim, dtype=dtype).eval()
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(ours, part).weight.data.copy_(getattr(theirs, part).weight.data)
        cache = filled_cache(SHAPES[model], context, dtype)
        past = cache.views()
        dynamic, static = DynamicCache(config=config), StaticCache(config=config, max_cache_len=context)
        for held in (dynamic, static):
            held.update(past[0], past[1], 0)
        x = torch.randn(1, 1, hidden).to(dtype)
        cos_sin = rope(x, torch.tensor([[context - 1]]))
        names = candidates(SHAPES[model], dtype)
        query = torch.randn(1, heads, 1, head_dim).to(dtype)
        trial = in_turn({n: partial(BACKENDS[n].decode, query, cache) for n in names}, 5)
        ours.core = BACKENDS[min(names, key=lambda n: statistics.median(trial[n]))]

        def step_ours() -> torch.Tensor:
            out = ours(x, cache)
            cache.rewind(context - 1)
            return out

        def step_theirs(held: Any) -> torch.Tensor:
            out = theirs(x, cos_sin, None, past_key_values=held)[0]
            take_back(held, context - 1)
            return out

        with torch.inference_mode():
            difference = (step_ours() - step_theirs(dynamic)).abs().max().item()
            taken = in_turn(
                {"ours": step_ours, "dynamic": lambda: step_theirs(dynamic), "static": lambda: step_theirs(static)},
                runs,
            )
        rows.append({"shape": model, "dtype": name, "backend": ours.core.name,
                     "times_faster_than_dynamic_cache": round(ratio(taken, "dynamic", "ours"), 2),
                     "times_faster_than_static_cache": round(ratio(taken, "static", "ours"), 2),
                     "max_abs_difference": difference, "goal": 1.0, "target": 2.0})  # fmt: skip
    return rows


def take_back(held: Any, length: int) -> None:
    """Make a Transformers cache forget the last token without copying.

    For a dynamic cache, use views. For a static cache, reset its length.
    """
    layer = held.layers[0]
    if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
        layer.cumulative_length.fill_(length)
    else:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


def main() -> None:
    """Run the comparisons, print one line per figure, and write all figures to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", default="16k", help="cached tokens (default 16k)")
    parser.add_argument("--runs", type=int, default=15, help="counted runs of each call (default 15)")
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    context = parse_tokens(options.context, "--context")
    print(f"{context:,} tokens, batch 1, one layer, {torch.get_num_threads()} threads, torch {torch.__version__}")
    torch.manual_seed(0)
    with torch.inference_mode():
        repetition = against_repetition(context, options.runs)
        for row in repetition:
            print(f"{row['shape']} {row['dtype']}: {row['backend']} {row['times_faster']} times faster than repetition"
                  f"{_goal(row['times_faster'], row['goal'])}   {row['all']}")  # fmt: skip
        roof = against_roof(context, options.runs)
        for row in roof:
            print(f"{row['shape']} {row['dtype']}: {row['backend']} {row['fraction_of_roof']} of the read roof "
                  f"({row['roof_bytes_per_second'] / 1e9:.1f} GB/s; fastest call over fastest read "
                  f"{row['fastest_over_fastest']}){_goal(row['fraction_of_roof'], row['goal'])}   "
                  f"{row['all']}")  # fmt: skip
    steps = against_transformers(context, options.runs)
    for row in steps or []:
        least = min(row["times_faster_than_dynamic_cache"], row["times_faster_than_static_cache"])
        print(f"{row['shape']} {row['dtype']}: a step is {row['times_faster_than_dynamic_cache']} times faster than "
              f"with DynamicCache, {row['times_faster_than_static_cache']} than with StaticCache"
              f"{_goal(least, row['goal'])} (target 2; differ by {row['max_abs_difference']:.1e})")  # fmt: skip
    if steps is None:
        print("Transformers is not installed, so its step is not compared")
    if options.json:
        found = {"context_tokens": context, "threads": torch.get_num_threads(), "repetition": repetition,
                 "roof": roof, "transformers": steps}  # fmt: skip
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


def _goal(value: float, goal: float | None) -> str:
    return "" if goal is None else f" (goal {goal:g}: {'met' if value >= goal else 'missed'})"


if __name__ == "__main__":
    main()
