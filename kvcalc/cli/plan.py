"""`kvcalc plan`: how many devices does this traffic need, and which command starts the server?"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import typer

from kvcalc.cli import options as o
from kvcalc.cli.drafting import hit_rate_of, speculation_of
from kvcalc.cli.question import (
    attention_replicas_of,
    calibration_of,
    images_of,
    kinds_of,
    output_of,
    parsed,
    settings_of,
)
from kvcalc.cli.report import check_report, write_report
from kvcalc.cli.reuse import reuse_of, transfer_of
from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.units import parse_count, parse_rate, parse_tokens

if TYPE_CHECKING:
    from kvcalc.planning.devices import Devices, Gpu
    from kvcalc.planning.lengths import Lengths
    from kvcalc.planning.targets import Targets
    from kvcalc.simulation.planned import PlannedLoad

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """\
Finds the smallest layout that fits and meets the targets, for each kind of device: tensor parallelism within
a fast link, pipeline stages if that is not enough, and replicas. Exits with code 4 if nothing fits.

Examples:
  kvcalc plan llama-3-70b --input-tokens 7k --output-tokens 1k --concurrency 64 --gpu h100,h200
  kvcalc plan qwen3-32b --input-tokens 2k --output-tokens 500 --requests-per-second 20 --max-tpot 30ms --max-ttft 1s
  kvcalc plan qwen3-32b --input-tokens 2k --output-tokens 500 --requests-per-second 20 --max-ttft 1s@p99
  kvcalc plan llama-3.1-8b --trace trace.csv --scale-rate 2 --max-ttft 1s@p99 --gpu h100,l40s
  kvcalc plan gpt-oss-120b --input-tokens 2k --output-tokens 500 --concurrency 100 --price h100=2.5 --price l40s=0.9
  kvcalc plan llama-3.1-8b --lengths lengths.csv --concurrency 200 --gpu l40sx8 --engine sglang --json
  kvcalc plan qwen3-32b --input-tokens 2k --output-tokens 500 --concurrency 64 --gpu h100 --emit compose
  kvcalc plan llama-3-70b --input-tokens 7k --output-tokens 1k --requests-per-second 3 --max-tpot 30ms --gpu h100 \
    --disaggregate --transfer-bandwidth infiniband-400g
"""


OPTIONS = [
    o.value("--input-tokens", "N", "Tokens per prompt: 2048, 2k."),
    o.value("--output-tokens", "N", "Tokens per answer."),
    o.value(
        "--lengths", "FILE",
        "File with a row per request: prompt tokens, answer tokens; or a trace. Replaces --input-tokens and "
        "--output-tokens.",
    ),
    o.value(
        "--trace", "FILE",
        "File with the times and lengths of requests, as in kvcalc simulate. Layouts are simulated with it.",
    ),
    o.value("--trace-format", "NAME", "Format of --trace. Default: recognised by its first line."),
    o.value("--scale-rate", "F", "Divide the times between the arrivals of --trace by F.", "1"),
    o.value("--concurrency", "N", "Concurrent requests, over all replicas."),
    o.value("--requests-per-second", "R", "Requests per second. Replaces --concurrency."),
    o.value(
        "--max-ttft", "TIME[@pP]",
        "Longest time to first token: 1s, 1s@p99. A percentile (p50, p90, p95, p99) is simulated, else it is the mean.",
    ),
    o.value("--max-tpot", "TIME[@pP]", "Longest time per output token: 30ms, 40ms@p90."),
    o.value("--max-e2e", "TIME[@pP]", "Longest time of a whole request: 20s, 30s@p95."),
    o.value(
        "--confidence", "P",
        "Estimate that these times limit: 80 is the upper end of the 80% range, 50 the point estimate.",
        "80",
    ),
    o.flag("--strict", "Leave out layouts whose fit is tight."),
    o.flag("--allow-beyond-limit", "Plan requests that are longer than the model's limit."),
    o.flag(
        "--disaggregate",
        "Also plan prefill and decode on separate instances, joined by the link in --transfer-bandwidth.",
    ),
    *o.shared("transfer-bandwidth"),
    o.flag("--pareto", "Also list the layouts that are cheaper, or faster for one user, than every other."),
    o.flag(
        "--all-layouts",
        "Try every combination of tensor, pipeline, expert and context parallelism and attention replicas.",
    ),
    o.value("--max-gpus", "N", "Maximum number of devices in a layout.", "1024"),
    o.engine("Engines whose memory and speed to use: vllm,sglang or all.", "vllm"),
    *o.shared("dtype kv-dtype dp"),
    o.value(
        "--gpu", "LIST",
        "Kinds of device: h100,l40s. h100x8 means at most 8. Default: the most common kinds.",
        panel="Device", several=True,
    ),
    o.value(
        "--price", "LIST", "Price of one device per hour: h100=2.5,l40s=0.9.",
        panel="Device", several=True,
    ),
    o.value(
        "--simulate", "N",
        "Simulate the N best layouts of each kind of device. Default: 8 with a percentile, or --trace and a limit.",
        panel="Simulation",
    ),
    o.value(
        "--burstiness", "B",
        "Shape of the gamma distribution of the times between arrivals: 1 is Poisson, 0.25 comes in bursts.", "1",
        panel="Simulation",
    ),
    o.value(
        "--requests", "N", "Number of requests. Default: enough for the percentile, or all of --trace.",
        panel="Simulation",
    ),
    o.value("--seed", "N", "Seed of the arrivals and the lengths.", "0", panel="Simulation"),
    *o.shared(f"{o.DEVICE_FIGURES} {o.PREFIX} prefix-tokens {o.IMAGES} {o.DRAFTING} calibrate"),
    *o.engine_settings(),
    o.value(
        "--emit", "vllm|sglang|trtllm|llama-server|compose|k8s",
        "Print only how to start the best layout: a command, a compose file or a Kubernetes manifest.",
    ),
    o.value("--image", "NAME", "Container image for --emit compose and k8s. Default: the engine's own, on NVIDIA."),
    *o.shared("report"),
    *o.output(path="plans.0.num_devices"),
]  # fmt: skip


@app.command(epilog=EPILOG, cls=o.taking(*OPTIONS))
def plan(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Find how many devices a load needs, and at what cost."""
    from kvcalc.model.resolve import load_model
    from kvcalc.planning.plan import refuse_empty
    from kvcalc.traces import BAD_ROWS

    given = ctx.params
    output = output_of(given, "plan")
    kind = _emitted(given)
    check_report(given)
    document = answer(model, given, load_model)
    write_report(ctx, document, "plan")
    if kind is None:
        output.emit(document, "plan")
        refuse_empty(document)
    else:
        from kvcalc.planning.manifests import emit

        refuse_empty(document)
        output.emit_text(emit(document, kind, given["image"]), document["warnings"])
    if any(warning["code"] == BAD_ROWS for warning in document["warnings"]):
        raise typer.Exit(1)


def answer(model: str, given: Mapping[str, Any], load: Callable[[str], ModelSpec]) -> dict[str, Any]:
    """The document that answers the parameters of the command. `load` reads a model."""
    from kvcalc.planning.axis import parse_engines
    from kvcalc.planning.layout import SpeedQuestion
    from kvcalc.planning.plan import COMMON_GPUS, parse_price
    from kvcalc.planning.plan import plan as ask

    simulated = parsed(given, "--simulate", parse_count)
    simulation: Optional[PlannedLoad]
    if given["trace"] is not None:
        from kvcalc.cli.plan_trace import load_of_trace

        simulation, targets = load_of_trace(given, _targets_of(given))
        lengths = simulation.lengths
    else:
        (lengths, text), targets = _lengths_of(given), _targets_of(given)
        _check_load(given, targets)
        simulation = _simulation_of(given, text, lengths, targets, is_asked=simulated is not None)
    prices = dict(map(parse_price, o.names_of(given["price"], "--price")))
    names = o.names_of(given["gpu"], "--gpu") or list(prices)
    gpus = _gpus_of(given, names) or _gpus_of(given, COMMON_GPUS)
    calibration = calibration_of({**given, "gpu": ",".join(names or COMMON_GPUS)})
    return ask(
        load(model),
        gpus,
        lengths,
        targets,
        engines=parse_engines(o.names_of(given["engine"], "--engine")),
        engine_settings=settings_of(given),
        dtype=given["dtype"],
        kv_dtype=given["kv_dtype"],
        speculative=speculation_of(given, load),
        prefix_hit_rate=hit_rate_of(given),
        data_parallel_size=attention_replicas_of(given),
        # The link is that of --disaggregate here, and no cache that is used again.
        reuse=reuse_of({**given, "transfer_bandwidth": None}),
        disaggregate=given["disaggregate"],
        transfer=transfer_of(given),
        speed=SpeedQuestion(calibration=calibration),
        prices=prices,
        max_devices=parse_count(given["max_gpus"], "--max-gpus"),
        allow_beyond_limit=given["allow_beyond_limit"],
        with_front=given["pareto"],
        strict=given["strict"],
        images=images_of(given),
        all_layouts=given["all_layouts"],
        simulation=simulation,
        num_simulated=simulated,
    )


def _emitted(given: Mapping[str, Any]) -> Optional[str]:
    """The value of --emit, or None. Raises UsageError (exit 2) beside another option that chooses the output."""
    if given["emit"] is None:
        if given["image"] is not None:
            raise UsageError("--image needs --emit compose or --emit k8s", "--emit compose")
        return None
    from kvcalc.planning.manifests import check_kind

    if given["image"] is not None and (not given["image"] or any(map(str.isspace, given["image"]))):
        raise UsageError(f"--image {given['image'][:40]!a}: not the name of an image", "--image NAME:TAG")
    kind: str = given["emit"].casefold()
    check_kind(kind)
    other = next((name for name in ("json", "get", "format") if given[name]), None)
    if other is not None:
        raise UsageError(f"--emit prints a file of its own and cannot be combined with --{other}")
    return kind


def _lengths_of(given: Mapping[str, Any]) -> "tuple[Lengths, Optional[str]]":
    """The lengths of the requests, and the text of the file that has them, or None."""
    from kvcalc.model.files import read_text
    from kvcalc.planning.lengths import MAX_LENGTHS_BYTES, one_length, parse_lengths

    prompt, answer = (parsed(given, option, parse_tokens) for option in ("--input-tokens", "--output-tokens"))
    if given["lengths"] is not None:
        if prompt is not None or answer is not None:
            raise UsageError(
                "--lengths cannot be combined with --input-tokens or --output-tokens",
                "use --lengths or the other two",
            )
        text = read_text(given["lengths"], MAX_LENGTHS_BYTES)
        return parse_lengths(text, given["lengths"]), text
    if prompt is None or answer is None:
        missing = "--input-tokens" if prompt is None else "--output-tokens"
        raise UsageError(f"{missing} is missing", "--input-tokens 2k --output-tokens 500, or --lengths FILE.csv")
    return one_length(prompt, answer), None


def _simulation_of(
    given: Mapping[str, Any], text: Optional[str], lengths: "Lengths", targets: "Targets", is_asked: bool
) -> "Optional[PlannedLoad]":
    """The requests to simulate if a target has a percentile or --simulate is given, else None.

    UsageError (exit 2) for an option of the simulation without one.
    """
    burstiness, seed = parsed(given, "--burstiness", parse_rate) or 1.0, parse_count(given["seed"], "--seed", least=0)
    number = parsed(given, "--requests", parse_count)
    if targets.highest_percentile is None and not is_asked:
        options = {"--burstiness": burstiness != 1, "--requests": number is not None, "--seed": seed != 0}
        unused = next((option for option, is_given in options.items() if is_given), None)
        if unused is not None:
            raise UsageError(f"{unused}: nothing is simulated", "add a percentile, --max-ttft 1s@p99, or --simulate 1")
        return None
    if burstiness != 1 and targets.requests_per_second is None:
        raise UsageError("--burstiness needs --requests-per-second")
    from kvcalc.planning.lengths import pairs_of
    from kvcalc.simulation.planned import PlannedLoad

    pairs = None if text is None else list(pairs_of(text, given["lengths"]))
    return PlannedLoad(lengths, pairs, burstiness, seed, number)


def _targets_of(given: Mapping[str, Any]) -> "Targets":
    from kvcalc.planning.plan import parse_confidence
    from kvcalc.planning.targets import Target, Targets, parse_target

    ttft, tpot, e2e = (
        parsed(given, option, parse_target) or Target(None, None)
        for option in ("--max-ttft", "--max-tpot", "--max-e2e")
    )
    targets = Targets(
        parsed(given, "--concurrency", parse_count),
        parsed(given, "--requests-per-second", parse_rate),
        ttft.seconds,
        tpot.seconds,
        parse_confidence(given["confidence"]),
        e2e.seconds,
        ttft.percentile,
        tpot.percentile,
        e2e.percentile,
    )
    return targets


def _check_load(given: Mapping[str, Any], targets: "Targets") -> None:
    """Raise UsageError (exit 2) for no load or two, or an option of --trace."""
    from kvcalc.cli.plan_trace import check_no_trace

    check_no_trace(given)
    if (targets.concurrency is None) == (targets.requests_per_second is None):
        both = "are both given" if targets.concurrency is not None else ": one of them is needed"
        raise UsageError(
            f"--concurrency and --requests-per-second {both}".replace(" :", ":"),
            "--concurrency 64, or --requests-per-second 20",
        )


def _gpus_of(given: Mapping[str, Any], names: Sequence[str]) -> "list[Union[Gpu, Devices]]":
    """The kinds of device. A number in a name, such as h100x8, is the most that a plan may use."""
    kinds = kinds_of(names, given)
    limited = any(name.casefold().endswith("x1") or name.casefold().startswith("1x") for name in names)
    return [kind if kind.num_devices > 1 or limited else kind.gpu for kind in kinds]
