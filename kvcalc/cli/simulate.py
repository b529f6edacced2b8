"""`kvcalc simulate`: what do clients see when requests arrive at random, in bursts or as in a trace?"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.cli.drafting import hit_rate_of, speculation_of
from kvcalc.cli.question import (
    attention_replicas_of,
    calibration_of,
    devices_of,
    output_of,
    parsed,
    settings_of,
    stages_of,
)
from kvcalc.cli.report import check_report, write_report
from kvcalc.cli.reuse import reuse_of, transfer_of
from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.units import parse_count, parse_rate, parse_seconds, parse_size

if TYPE_CHECKING:
    from kvcalc.simulation.load import Load
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
    o.value("--requests-per-second", "R", "Requests per second. They arrive at random (a Poisson process)."),
    o.value(
        "--burstiness", "B",
        "Shape of the gamma distribution of the times between arrivals: 1 is Poisson, 0.25 comes in bursts, 4 is "
        "more regular.", "1",
    ),
    o.value("--concurrency", "N", "Clients, each with one request at a time, over all replicas."),
    o.value("--trace", "FILE", "File with a row per request. CSV, Azure, BurstGPT, Mooncake and others; - is stdin."),
    o.value("--trace-format", "NAME", "Format of --trace. Default: recognised by its first line."),
    o.value("--scale-rate", "F", "Divide the times between the arrivals of --trace by F.", "1"),
    o.value("--prompt-tokens --input-tokens", "LENGTH", _LENGTHS.format("prompt")),
    o.value("--answer-tokens --output-tokens", "LENGTH", _LENGTHS.format("answer")),
    o.value("--requests", "N", "Number of requests. Default: 1,000, 15 for each client, or all of --trace."),
    o.value("--seed", "N", "Seed of the arrivals and the lengths. The same seed gives the same answer.", "0"),
    o.value("--max-ttft", "TIME", "Longest time to first token of a good request: 1s."),
    o.value("--max-tpot", "TIME", "Longest time per output token of a good request: 50ms."),
    o.value(
        "--replicas", "N", "Number of replicas. They get the requests in turn. Default: as many as the devices hold."
    ),
    o.value(
        "--prefill-replicas", "N",
        "Prefill instances of their own, joined by --transfer-bandwidth. --replicas and --tp are then those of the "
        "decode instances.",
    ),
    o.value("--prefill-tp", "N", "Tensor-parallel size of a prefill instance. Default: --tp."),
    o.value("--prefill-dp", "N", "Attention replicas of a prefill instance. Default: --dp."),
    o.value("--prefill-gpu", "NAME", "Kind of device of the prefill instances. Default: that of --gpu."),
    *o.shared("transfer-bandwidth"),
    o.value("--step-factor", "F", "Multiply the times of all steps by F. step_range has the ends of their range.", "1"),
    o.engine("vllm, sglang, tensorrt-llm or llama.cpp.", "vllm", "NAME[@RELEASE]"),
    *o.shared("dtype kv-dtype tp pp dp"),
    o.value("--kv-memory", "SIZE", "Cache memory per device: 80G, 80GiB. Default: what the engine leaves on --gpu."),
    *o.shared(f"{o.DEVICE} {o.SPEED} {o.PREFIX} prefix-tokens {o.DRAFTING}"),
    *o.engine_settings(),
    *o.shared("report"),
    *o.output(path="results.requests_per_second"),
]  # fmt: skip


@app.command(epilog=EPILOG, cls=o.taking(*OPTIONS))
def simulate(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Simulate a server's requests: latencies, goodput and queues."""
    from kvcalc.cli.counting_bar import counting_bar
    from kvcalc.model.resolve import load_model
    from kvcalc.traces import BAD_ROWS

    given = ctx.params
    output = output_of(given, "simulate")
    check_report(given)
    with counting_bar("requests") as progress:
        document = answer(load_model(model), given, progress)
    write_report(ctx, document, "simulate")
    output.emit(document, "simulate")
    if any(warning["code"] == BAD_ROWS for warning in document["warnings"]):
        raise typer.Exit(1)


def answer(model: ModelSpec, given: Mapping[str, Any], progress: Any = None) -> dict[str, Any]:
    """The document that answers the parameters of the command."""
    from functools import partial

    from kvcalc.model.resolve import load_model
    from kvcalc.planning.layout import SpeedQuestion
    from kvcalc.simulation.results import Limits
    from kvcalc.simulation.simulate import simulate

    prefills = _prefills_of(given)
    ask: Callable[..., dict[str, Any]] = simulate
    if prefills is not None:
        from kvcalc.simulation.pools import simulate_pools

        ask = partial(simulate_pools, prefills=prefills)
    return ask(
        model,
        _load_of(given),
        limits=Limits(parsed(given, "--max-ttft", parse_seconds), parsed(given, "--max-tpot", parse_seconds)),
        replicas=parsed(given, "--replicas", parse_count),
        step_factor=parse_rate(given["step_factor"], "--step-factor"),
        progress=progress,
        engine=_engine_of(given),
        engine_settings=settings_of(given),
        dtype=given["dtype"],
        kv_dtype=given["kv_dtype"],
        tensor_parallel_size=parsed(given, "--tp", parse_count),
        pipeline_parallel_size=stages_of(given),
        data_parallel_size=attention_replicas_of(given),
        speculative=speculation_of(given, load_model),
        kv_memory_bytes=parsed(given, "--kv-memory", parse_size),
        devices=devices_of(given),
        # The link is that of --prefill-replicas here, and no cache that is used again.
        reuse=reuse_of({**given, "transfer_bandwidth": None}),
        speed=SpeedQuestion(
            parsed(given, "--ep", parse_count), prefix_hit_rate=hit_rate_of(given), calibration=calibration_of(given)
        ),
    )


def _prefills_of(given: Mapping[str, Any]) -> "Optional[Prefills]":
    """The prefill instances, or None. UsageError (exit 2) for an option that needs another one."""
    replicas, transfer = parsed(given, "--prefill-replicas", parse_count), transfer_of(given)
    if replicas is None:
        for name in ("prefill_tp", "prefill_dp", "prefill_gpu", "transfer_bandwidth"):
            if given[name] is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs --prefill-replicas", "--prefill-replicas 2")
        return None
    if transfer is None:
        raise UsageError("--prefill-replicas needs the link between the instances", "--transfer-bandwidth nvlink")
    from kvcalc.planning.devices import find_gpu
    from kvcalc.simulation.pools import Prefills

    tensor, attention = (parsed(given, option, parse_count) for option in ("--prefill-tp", "--prefill-dp"))
    gpu = None if given["prefill_gpu"] is None else find_gpu(given["prefill_gpu"])
    return Prefills(replicas, transfer, tensor, attention, gpu=gpu)


def _engine_of(given: Mapping[str, Any]) -> str:
    name: str = given["engine"].casefold()
    if name == "all" or "," in name:
        raise UsageError(f"--engine {name[:60]}: simulate needs one engine", "for example --engine sglang")
    return name


def _load_of(given: Mapping[str, Any]) -> "Load":
    from kvcalc.simulation.load import Load
    from kvcalc.simulation.requests import parse_distribution

    burstiness, scale = parsed(given, "--burstiness", parse_rate), parsed(given, "--scale-rate", parse_rate)
    trace = _trace_of(given["trace"], given["trace_format"])
    return Load(
        parsed(given, "--prompt-tokens", parse_distribution),
        parsed(given, "--answer-tokens", parse_distribution),
        parsed(given, "--requests-per-second", parse_rate),
        parsed(given, "--concurrency", parse_count),
        1.0 if burstiness is None else burstiness,
        trace,
        given["trace"],
        1.0 if scale is None else scale,
        parsed(given, "--requests", parse_count),
        parse_count(given["seed"], "--seed", least=0),
    )


def _trace_of(path: Optional[str], format: Optional[str]) -> Any:
    """The trace at `path`, or None."""
    if path is None:
        if format is not None:
            raise UsageError("--trace-format needs --trace")
        return None
    from kvcalc.traces import read_trace

    return read_trace(path, format)
