"""`kvcalc simulate`: what do clients see when requests arrive at random, in bursts or as in a trace?"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import ModelOf, output_of, parsed, question_of, value_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import UsageError

if TYPE_CHECKING:
    from kvcalc.simulation.loads.load import Load
    from kvcalc.simulation.pools import Prefills

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """\
Simulates every scheduling decision of the engine, and counts every block of its cache. Lengths are fixed (1000), or
drawn: uniform:100..2000, lognormal:1000,0.5 (the mean, and the deviation relative to the mean). Attention replicas
(--dp) run in lock step, and drafted tokens (--speculative) make each step give several tokens.

Examples:
  kvcalc simulate llama-3.1-8b --gpu h100 --requests-per-second 4 --prompt-tokens 1000 --answer-tokens 500
  kvcalc simulate qwen3-32b --gpu h100x2 --concurrency 64 --prompt-tokens uniform:500..4k --answer-tokens 500
  kvcalc simulate qwen3-32b --gpu h100 --requests-per-second 8 --prompt-tokens 4k --answer-tokens 500 \
    --prefill-replicas 4 --prefill-tp 1 --replicas 1 --tp 8 --transfer-bandwidth infiniband-400g
  kvcalc simulate deepseek-v3 --gpu h200x8 --dp 8 --concurrency 256 --prompt-tokens 2k --answer-tokens 500
  kvcalc simulate llama-3.1-8b --gpu h100 --trace trace.csv --scale-rate 2 --max-ttft 1s --report answer.html
"""

# The options whose values are text in batch too.
_LENGTHS = "Tokens per {}: 1000 or uniform:100..2000. lognormal:1000,0.5 has a mean and a relative deviation."

OPTIONS = [
    o.option("requests-per-second", "Requests per second. They arrive at random (a Poisson process)."),
    o.option("burstiness",
        "Shape of the gamma distribution of the times between arrivals: 1 is Poisson, 0.25 comes in bursts, 4 is "
        "more regular."),
    o.option("concurrency", "Clients, each with one request at a time, over all replicas.", panel=None),
    o.option("trace", "File with a row per request. CSV, Azure, BurstGPT, Mooncake and others; - is stdin."),
    o.option("trace-format"),
    o.option("scale-rate"),
    o.option("prompt-tokens", _LENGTHS.format("prompt")),
    o.option("answer-tokens", _LENGTHS.format("answer")),
    o.option("requests", "Number of requests. Default: 1,000, 15 for each client, or all of --trace."),
    o.option("seed", "Seed of the arrivals and the lengths. The same seed gives the same answer."),
    o.option("max-ttft", "Longest time to first token of a good request: 1s."),
    o.option("max-tpot", "Longest time per output token of a good request: 50ms."),
    o.option("replicas", "Number of replicas. They get the requests in turn. Default: as many as the devices hold."),
    o.option("prefill-replicas",
        "Prefill instances of their own, joined by --transfer-bandwidth. --replicas and --tp are then those of the "
        "decode instances."),
    o.option("prefill-tp", "Tensor-parallel size of a prefill instance. Default: --tp."),
    o.option("prefill-dp", "Attention replicas of a prefill instance. Default: --dp."),
    o.option("prefill-gpu", "Kind of device of the prefill instances. Default: that of --gpu."),
    *o.shared("transfer-bandwidth"),
    o.option("step-factor", "Multiply the times of all steps by F. step_range has the ends of their range."),
    o.option("engine", "vllm, sglang, tensorrt-llm or llama.cpp.", default="vllm", metavar="NAME[@RELEASE]"),
    *o.shared("dtype kv-dtype tp pp dp"),
    o.option("kv-memory", "Cache memory per device: 80G, 80GiB. Default: what the engine leaves on --gpu."),
    *o.shared(f"{o.DEVICE} {o.SPEED} {o.PREFIX} prefix-tokens {o.DRAFTING}"),
    *o.engine_settings(),
    *o.shared("report"),
    *o.output(path="results.requests_per_second"),
]  # fmt: skip


@app.command(epilog=EPILOG, cls=o.taking(*OPTIONS))
def simulate(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Simulate a server's requests: latencies, goodput and queues."""
    from kvcalc.cli.counting_bar import counting_bar
    from kvcalc.traces import BAD_ROWS

    given = ctx.params
    output = output_of(given, "simulate")
    check_report(given)
    with counting_bar("requests") as progress:
        document = answer(given, progress=progress)
    write_report(ctx, document, "simulate")
    output.emit(document, "simulate")
    if any(warning["code"] == BAD_ROWS for warning in document["warnings"]):
        raise typer.Exit(1)


def answer(given: Mapping[str, Any], model_of: Optional[ModelOf] = None, progress: Any = None) -> dict[str, Any]:
    """The document that answers the parameters of the command."""
    from functools import partial

    from kvcalc.simulation.results import Limits
    from kvcalc.simulation.simulate import simulate

    prefills = _prefills_of(given)
    ask: Callable[..., dict[str, Any]] = simulate
    if prefills is not None:
        from kvcalc.simulation.pools import simulate_pools

        ask = partial(simulate_pools, prefills=prefills)
    return ask(
        # The link is that of --prefill-replicas here, and no cache that is used again.
        question_of({**given, "engine": _engine_of(given)}, model_of, "concurrency transfer-bandwidth"),
        _load_of(given),
        limits=Limits(value_of(given, "max_ttft_seconds"), value_of(given, "max_tpot_seconds")),
        replicas=value_of(given, "replicas"),
        step_factor=value_of(given, "step_factor"),
        progress=progress,
    )


def _prefills_of(given: Mapping[str, Any]) -> "Optional[Prefills]":
    """The prefill instances, or None. UsageError (exit 2) for an option that needs another one."""
    replicas, transfer = value_of(given, "prefill_replicas"), value_of(given, "transfer")
    if replicas is None:
        for name in ("prefill_tp", "prefill_dp", "prefill_gpu", "transfer_bandwidth"):
            if given[name] is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs --prefill-replicas", "--prefill-replicas 2")
        return None
    if transfer is None:
        raise UsageError("--prefill-replicas needs the link between the instances", "--transfer-bandwidth nvlink")
    from kvcalc.planning.device.devices import find_gpu
    from kvcalc.simulation.pools import Prefills

    tensor, attention = (value_of(given, f"prefill_{kind}_parallel_size") for kind in ("tensor", "data"))
    gpu = None if given["prefill_gpu"] is None else find_gpu(given["prefill_gpu"])
    return Prefills(replicas, transfer, tensor, attention, gpu=gpu)


def _engine_of(given: Mapping[str, Any]) -> str:
    name: str = given["engine"].casefold()
    if name == "all" or "," in name:
        raise UsageError(f"--engine {name[:60]}: simulate needs one engine", "for example --engine sglang")
    return name


def _load_of(given: Mapping[str, Any]) -> "Load":
    from kvcalc.simulation.loads.load import Load
    from kvcalc.simulation.loads.requests import parse_distribution

    burstiness, scale = value_of(given, "burstiness"), value_of(given, "scale_rate")
    trace = _trace_of(given["trace"], given["trace_format"])
    return Load(
        parsed(given, "--prompt-tokens", parse_distribution),
        parsed(given, "--answer-tokens", parse_distribution),
        value_of(given, "requests_per_second"),
        value_of(given, "concurrency"),
        1.0 if burstiness is None else burstiness,
        trace,
        given["trace"],
        1.0 if scale is None else scale,
        value_of(given, "requests"),
        value_of(given, "seed"),
    )


def _trace_of(path: Optional[str], format: Optional[str]) -> Any:
    """The trace at `path`, or None."""
    if path is None:
        if format is not None:
            raise UsageError("--trace-format needs --trace")
        return None
    from kvcalc.traces import read_trace

    return read_trace(path, format)
