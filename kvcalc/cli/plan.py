"""`kvcalc plan`: how many devices does this traffic need, and which command starts the server?"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import ModelOf, kinds_of, output_of, parsed, question_of, value_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import UsageError
from kvcalc.question.fields import OPTIONS as OF_FIELDS

if TYPE_CHECKING:
    from kvcalc.planning.cases.lengths import Lengths
    from kvcalc.planning.device.devices import Devices, Gpu
    from kvcalc.planning.plan.targets import Targets
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
    o.option("input-tokens", "Tokens per prompt: 2048, 2k.", panel=None),
    o.option("output-tokens", panel=None),
    o.value(
        "--lengths",
        "FILE",
        "File with a row per request: prompt tokens, answer tokens; or a trace. Replaces --input-tokens and "
        "--output-tokens.",
    ),
    o.option(
        "trace", "File with the times and lengths of requests, as in kvcalc simulate. Layouts are simulated with it."
    ),
    o.option("trace-format"),
    o.option("scale-rate"),
    o.option("concurrency", "Concurrent requests, over all replicas.", panel=None),
    o.option("requests-per-second", "Requests per second. Replaces --concurrency."),
    o.option(
        "max-ttft",
        "Longest time to first token: 1s, 1s@p99. A percentile (p50, p90, p95, p99) is simulated, else it is the mean.",
        metavar="TIME[@pP]",
    ),
    o.option("max-tpot", "Longest time per output token: 30ms, 40ms@p90.", metavar="TIME[@pP]"),
    o.option("max-e2e", "Longest time of a whole request: 20s, 30s@p95.", metavar="TIME[@pP]"),
    o.option(
        "confidence", "Estimate that these times limit: 80 is the upper end of the 80% range, 50 the point estimate."
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
    o.option("max-gpus", "Maximum number of devices in a layout."),
    o.option("engine", "Engines whose memory and speed to use: vllm,sglang or all.", default="vllm"),
    *o.shared("dtype kv-dtype dp"),
    o.option(
        "gpu", "Kinds of device: h100,l40s. h100x8 means at most 8. Default: the most common kinds.", metavar="LIST"
    ),
    o.option("price", "Price of one device per hour: h100=2.5,l40s=0.9."),
    o.option(
        "simulate",
        "Simulate the N best layouts of each kind of device. Default: 8 with a percentile, or --trace and a limit.",
        panel="Simulation",
    ),
    o.option(
        "burstiness",
        "Shape of the gamma distribution of the times between arrivals: 1 is Poisson, 0.25 comes in bursts.",
        panel="Simulation",
    ),
    o.option(
        "requests", "Number of requests. Default: enough for the percentile, or all of --trace.", panel="Simulation"
    ),
    o.option("seed", "Seed of the arrivals and the lengths.", panel="Simulation"),
    *o.shared(f"{o.DEVICE_FIGURES} {o.PREFIX} prefix-tokens {o.IMAGES} {o.DRAFTING} calibrate"),
    *o.engine_settings(),
    o.value(
        "--emit",
        "vllm|sglang|trtllm|llama-server|compose|k8s",
        "Print only how to start the best layout: a command, a compose file or a Kubernetes manifest.",
    ),
    o.value("--image", "NAME", "Container image for --emit compose and k8s. Default: the engine's own, on NVIDIA."),
    *o.shared("report"),
    *o.output(path="plans.0.num_devices"),
]


@app.command(epilog=EPILOG, cls=o.taking(*OPTIONS))
def plan(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Find how many devices a load needs, and at what cost."""
    from kvcalc.planning.plan.document import refuse_empty
    from kvcalc.traces import BAD_ROWS

    given = ctx.params
    output = output_of(given, "plan")
    kind = _emitted(given)
    check_report(given)
    document = answer(given)
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


def answer(given: Mapping[str, Any], model_of: Optional[ModelOf] = None) -> dict[str, Any]:
    """The document that answers the parameters of the command."""
    from kvcalc.planning.answers.axis import parse_engines
    from kvcalc.planning.plan.document import COMMON_GPUS, parse_price
    from kvcalc.planning.plan.document import plan as ask

    simulated = value_of(given, "simulate")
    simulation: Optional[PlannedLoad]
    if given["trace"] is not None:
        simulation, targets = _load_of_trace(given, _targets_of(given))
        lengths = simulation.lengths
    else:
        (lengths, text), targets = _lengths_of(given), _targets_of(given)
        _check_load(given, targets)
        simulation = _simulation_of(given, text, lengths, targets, is_asked=simulated is not None)
    prices = dict(map(parse_price, o.names_of(given["price"], "--price")))
    names = o.names_of(given["gpu"], "--gpu") or list(prices)
    gpus = _gpus_of(given, names) or _gpus_of(given, COMMON_GPUS)
    return ask(
        # The link is that of --disaggregate here, and no cache that is used again.
        question_of(
            {**given, "gpu": ",".join(names or COMMON_GPUS)},
            model_of,
            f"gpu {o.DEVICE_FIGURES} engine input-tokens output-tokens concurrency transfer-bandwidth",
        ),
        gpus,
        lengths,
        targets,
        engines=parse_engines(o.names_of(given["engine"], "--engine")),
        disaggregate=given["disaggregate"],
        transfer=value_of(given, "transfer"),
        prices=prices,
        max_devices=value_of(given, "max_devices"),
        allow_beyond_limit=given["allow_beyond_limit"],
        with_front=given["pareto"],
        strict=given["strict"],
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
    from kvcalc.planning.cases.lengths import MAX_LENGTHS_BYTES, one_length, parse_lengths

    prompt, answer = (value_of(given, name) for name in ("input_tokens", "output_tokens"))
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
    burstiness, seed, number = (value_of(given, name) for name in ("burstiness", "seed", "requests"))
    if targets.highest_percentile is None and not is_asked:
        options = {"--burstiness": burstiness != 1, "--requests": number is not None, "--seed": seed != 0}
        unused = next((option for option, is_given in options.items() if is_given), None)
        if unused is not None:
            raise UsageError(f"{unused}: nothing is simulated", "add a percentile, --max-ttft 1s@p99, or --simulate 1")
        return None
    if burstiness != 1 and targets.requests_per_second is None:
        raise UsageError("--burstiness needs --requests-per-second")
    from kvcalc.planning.cases.lengths import pairs_of
    from kvcalc.simulation.planned import PlannedLoad

    pairs = None if text is None else list(pairs_of(text, given["lengths"]))
    return PlannedLoad(lengths, pairs, burstiness, seed, number)


# Options that say what the trace says.
_SAID = ("concurrency", "requests_per_second", "input_tokens", "output_tokens", "lengths", "burstiness", "seed")


def _load_of_trace(given: Mapping[str, Any], targets: "Targets") -> "tuple[PlannedLoad, Targets]":
    """The requests of --trace, and the targets with its rate. Raises UsageError (exit 2)."""
    from kvcalc.simulation.planned import planned_trace

    for name in _SAID:
        if given[name] != (OF_FIELDS[name].default if name in OF_FIELDS else None):
            raise UsageError(
                f"--trace cannot be combined with --{name.replace('_', '-')}",
                "the trace has the times and the lengths of its requests; --scale-rate changes its rate",
            )
    scale, requests = value_of(given, "scale_rate"), value_of(given, "requests")
    load = planned_trace(given["trace"], given["trace_format"], scale, requests)
    return load, load.rated(targets)


def _check_no_trace(given: Mapping[str, Any]) -> None:
    """Raise UsageError (exit 2) for an option that needs --trace."""
    for name in ("trace_format", "scale_rate"):
        if given[name] != OF_FIELDS[name].default:
            raise UsageError(f"--{name.replace('_', '-')} needs --trace", "another rate: --requests-per-second")


def _targets_of(given: Mapping[str, Any]) -> "Targets":
    from kvcalc.planning.plan.document import parse_confidence
    from kvcalc.planning.plan.targets import Target, Targets, parse_target

    ttft, tpot, e2e = (
        parsed(given, option, parse_target) or Target(None, None)
        for option in ("--max-ttft", "--max-tpot", "--max-e2e")
    )
    targets = Targets(
        value_of(given, "concurrency"),
        value_of(given, "requests_per_second"),
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
    _check_no_trace(given)
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
