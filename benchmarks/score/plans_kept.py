"""Do plans keep their targets when the server that they print is simulated?

    python benchmarks/score/plans_kept.py [--plans 24] [--seed 11] [--seeds 5] [--skip N] [--each]

Plans are drawn at random: by rate or by clients, with a mean or a percentile as target, of one pool or of two. The
servers are those of the printed commands, as `kvcalc check` reads them: layout, limits and all. They are simulated with
the lengths of the plan and `--seeds` other seeds, for 20 minutes of requests (2,000 at least, 30,000 at most). A router
picks replicas at random, as a Kubernetes Service does; separate pools take turns. The servers of clients are warm. A
plan keeps its target if all runs but one do. Prints the plans that do not, those whose own command `check` refuses, and
the counts. `--skip N` leaves out the first N plans of a seed, so that they can be tried in slices.
"""

from __future__ import annotations

import argparse
import random
from typing import TYPE_CHECKING, Any

import kvcalc
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.asked import asked_by
from kvcalc.planning.check.servers import Server, servers_in
from kvcalc.throughput.hardware import find_devices

if TYPE_CHECKING:
    from kvcalc.question.question import Question

MODELS = (
    "llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "gemma-3-27b", "gpt-oss-120b", "llama-3.3-70b", "deepseek-v3",
    "qwen3-235b-a22b", "mixtral-8x7b", "qwen3.6-27b", "qwen3-next-80b-a3b",
)  # fmt: skip
DEVICES = ("h100", "h200", "a100-80gb", "b200")
ENGINES = ("vllm", "sglang", "tensorrt-llm")
_LINK = "infiniband-400g"
_SECONDS, _FEWEST, _MOST = 1200, 2000, 30_000


def drawn(source: random.Random) -> dict[str, Any]:
    """The question of a random plan."""
    split = source.random() < 0.15
    by_clients = not split and source.random() < 0.3
    load = (
        {"concurrency": source.choice((8, 32, 64, 200))}
        if by_clients
        else {"requests_per_second": float(source.choice((2, 6, 12, 25)))}
    )
    metric = source.choice(("ttft", "ttft", "tpot"))
    limits = (0.5, 1.0, 2.0) if metric == "ttft" else (0.02, 0.04, 0.08)
    return {
        "model": source.choice(MODELS), "gpus": [source.choice(DEVICES)], "engine": source.choice(ENGINES),
        "input_tokens": source.choice((500, 1500, 3000)), "output_tokens": source.choice((120, 300)), **load,
        f"{metric}_percentile": source.choice((None, 90, 95, 99)), f"max_{metric}_seconds": source.choice(limits),
        **({"disaggregate": True, "transfer": _LINK} if split else {}),
    }  # fmt: skip


def server_asked(server: Server, gpu: str, number: int) -> Question:
    """The question about the server of a printed command on `number` devices."""
    return asked_by(server.read(), server.reader, find_devices(f"{gpu}x{number}"), None, None)[0]


def kept(asked: dict[str, Any], best: Any, command: str, seed: int) -> bool:
    """Whether the servers of a plan keep its target in one simulation."""
    metric = "ttft" if "max_ttft_seconds" in asked else "tpot"
    rate, statistic = asked.get("requests_per_second"), asked[f"{metric}_percentile"]
    pools, servers = best.get("disaggregated"), servers_in(command)
    number = min(max(rate * _SECONDS, _FEWEST), _MOST) if rate else max(_FEWEST, 20 * asked["concurrency"])
    load = {"requests_per_second": rate} if rate else {"concurrency": asked["concurrency"], "cold": False}
    more: dict[str, Any] = {"router": "random", "replicas": best["replicas"]}
    gpu, server, devices = best["gpu"], servers[0], best["num_devices"]
    if pools:
        prefill, decode = pools["prefill"], pools["decode"]
        own = server_asked(servers[0], prefill["gpu"], prefill["num_devices"])
        more = {
            "replicas": decode["instances"], "prefill_replicas": prefill["instances"], "transfer": _LINK,
            "prefill_gpu": prefill["gpu"], "prefill_tensor_parallel_size": own.tensor_parallel_size,
            "prefill_data_parallel_size": own.data_parallel_size,
            "prefill_expert_parallel_size": own.speed_asked.expert_parallel_size or 1,
        }  # fmt: skip
        gpu, server, devices = decode["gpu"], servers[1], decode["num_devices"]
    question = server_asked(server, gpu, devices)
    settings = dict(question.engine_settings or {})
    if pools:
        # The pools have limits of their own, and the simulation has one for both.
        settings.pop("max-running-requests", None)
    sizes = {name: getattr(question, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    found: Any = kvcalc.simulate(
        asked["model"], gpu if pools else f"{gpu}x{devices}", engine=asked["engine"], seed=seed, requests=int(number),
        prompt_tokens=asked["input_tokens"], answer_tokens=asked["output_tokens"], **load, **more, **sizes,
        data_parallel_size=question.data_parallel_size, speed=question.speed_asked,
        engine_settings=settings or None, dtype=question.dtype, kv_dtype=question.kv_dtype or "auto",
    )  # fmt: skip
    (times,) = (row for row in found["times"] if row["metric"] == metric)
    seconds = times["mean_seconds" if statistic is None else f"p{statistic}_seconds"]
    return bool(seconds is not None and seconds <= asked[f"max_{metric}_seconds"])


def refused(best: Any, command: str) -> str | None:
    """Why `check` says that a printed command does not start. None if it starts."""
    pools = best.get("disaggregated")
    parts = [pools["prefill"], pools["decode"]] if pools else [best]
    for server, part in zip(servers_in(command), parts, strict=True):
        each = part["tensor_parallel_size"] * part["pipeline_parallel_size"] * part["data_parallel_size"]
        answer = check(server, find_devices(f"{part['gpu']}x{each}"))
        if not answer["starts"]:
            return answer["reason"]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=24)
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="print every plan")
    given = parser.parse_args()
    source, plans, good, not_started = random.Random(given.seed), 0, 0, 0
    while plans < given.skip + given.plans:
        asked = drawn(source)
        try:
            document: Any = kvcalc.plan(**asked)
        except kvcalc.KvcalcError:
            continue
        rows = [
            row for row in document["plans"] if row["fits"] and bool(row.get("disaggregated")) == ("transfer" in asked)
        ]
        if document["best"] is None or not rows:
            continue
        plans += 1
        if plans <= given.skip:
            continue
        best = rows[0]
        pools = best.get("disaggregated")
        command = (
            "\n".join(pools["commands"][role] for role in ("prefill", "decode"))
            if pools
            else best[asked["engine"].replace("-", "_")]
        )
        reason = refused(best, command)
        passed = missed = 0
        while passed < given.seeds - 1 and missed < 2:  # until it is decided
            is_kept = kept(asked, best, command, 1000 * given.seed + 7 * (passed + missed))
            passed, missed = passed + is_kept, missed + (not is_kept)
        good, not_started = good + (missed < 2), not_started + (reason is not None)
        if given.each or missed > 1 or reason:
            print(f"{passed} runs keep the target, {missed} miss it: {asked} {reason or ''}", flush=True)
    tried = plans - given.skip
    print(f"{good} of {tried} plans keep their target; check refuses {not_started}")


if __name__ == "__main__":
    main()
