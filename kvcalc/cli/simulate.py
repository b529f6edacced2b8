"""`kvcalc simulate`: what do clients see when requests arrive at random, in bursts or as in a trace?"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import ModelOf, output_of, question_of, value_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import KvcalcError, UsageError
from kvcalc.question.fields import FIELDS

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.answers.simulate_pools import Prefills
    from kvcalc.planning.plan.load_curve import Row
    from kvcalc.simulation.loads.load import Load

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(cls=o.taking(*o.declared("simulate")))
def simulate(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Simulate a server's requests: latencies, goodput and queues."""
    from kvcalc.cli.counting_bar import counting_bar
    from kvcalc.notes import BAD_ROWS

    given = ctx.params
    output = output_of(given, "simulate")
    check_report(given)
    with counting_bar("requests") as progress:
        document = answer(given, progress=progress)
    if given["report"] is not None:
        with counting_bar("loads of the report's curve") as report:
            write_report(ctx, {**document, "load_curve": _curve_of(given, report)}, "simulate")
    output.emit(document, "simulate")
    if any(warning["code"] == BAD_ROWS for warning in document["warnings"]):
        raise typer.Exit(1)


def answer(given: Mapping[str, Any], model_of: Optional[ModelOf] = None, progress: Any = None) -> "documents.Simulate":
    """The document that answers the parameters of the command."""
    from functools import partial

    from kvcalc.planning.answers.simulate import simulate
    from kvcalc.simulation.results import Limits

    prefills = _prefills_of(given)
    ask: Callable[..., documents.Simulate] = simulate
    if prefills is not None:
        from kvcalc.planning.answers.simulate_pools import simulate_pools

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


def _curve_of(given: Mapping[str, Any], report: Any) -> "list[Row]":
    """The times over the load, for the report. Empty if the load is too small to be divided."""
    from kvcalc.planning.plan.load_curve import curve_of_simulation

    done = 0

    def ask(share: float) -> "documents.Simulate":
        nonlocal done
        scaled = dict(given)
        clients = next((name for name in ("concurrency", "users") if given[name] is not None), None)
        if clients is not None:
            scaled[clients] = str(max(1, round(share * value_of(given, clients))))
        else:
            name = "scale_rate" if given["trace"] is not None else "requests_per_second"
            scaled[name] = f"{share * (value_of(given, name) or 1.0):.6g}"
        document = answer(scaled)
        done += 1
        if report is not None:
            report(done)
        return document

    if given["trace"] == "-":
        return []  # stdin has been read
    try:
        return curve_of_simulation(ask, is_open=given["concurrency"] is given["users"] is None)
    except KvcalcError:
        return []


def _prefills_of(given: Mapping[str, Any]) -> "Optional[Prefills]":
    """The prefill instances, or None. UsageError (exit 2) for an option that needs another one."""
    replicas, transfer = value_of(given, "prefill_replicas"), value_of(given, "transfer")
    if replicas is None:
        for name in ("prefill_tp", "prefill_dp", "prefill_ep", "prefill_gpu", "transfer_bandwidth"):
            if given[name] is not None:
                raise UsageError(f"--{name.replace('_', '-')} needs --prefill-replicas", "--prefill-replicas 2")
        return None
    if transfer is None:
        raise UsageError("--prefill-replicas needs the link between the instances", "--transfer-bandwidth nvlink")
    from kvcalc.model.layout import LayoutAsked
    from kvcalc.planning.answers.simulate_pools import Prefills
    from kvcalc.server.layout import find_gpu

    tensor, attention, experts = (
        value_of(given, f"prefill_{kind}_parallel_size") for kind in ("tensor", "data", "expert")
    )
    gpu = None if given["prefill_gpu"] is None else find_gpu(given["prefill_gpu"])
    return Prefills(replicas, transfer, LayoutAsked(tensor, 1, attention, experts), gpu=gpu)


def _engine_of(given: Mapping[str, Any]) -> str:
    name: str = given["engine"].casefold()
    if name == "all" or "," in name:
        raise UsageError(f"--engine {name[:60]}: simulate needs one engine", "for example --engine sglang")
    return name


def _load_of(given: Mapping[str, Any]) -> "Load":
    from kvcalc.question.lengths import parse_distribution
    from kvcalc.simulation.loads.load import Load

    burstiness, scale = value_of(given, "burstiness"), value_of(given, "scale_rate")
    prompt, answer = (
        None if given[name] is None else parse_distribution(given[name], FIELDS[name].long)
        for name in ("prompt_tokens", "answer_tokens")
    )
    trace = None
    if given["trace"] is not None:
        from kvcalc.traces import read_trace

        trace = read_trace(given["trace"], given["trace_format"])
    elif given["trace_format"] is not None:
        raise UsageError("--trace-format needs --trace")
    if given["cold"] and given["warm"]:
        raise UsageError("--cold and --warm cannot be combined", "use one")
    return Load(
        prompt,
        answer,
        value_of(given, "requests_per_second"),
        value_of(given, "concurrency"),
        1.0 if burstiness is None else burstiness,
        trace,
        given["trace"],
        1.0 if scale is None else scale,
        value_of(given, "requests"),
        value_of(given, "seed"),
        given["cold"] or (False if given["warm"] else None),
        distinct_prompts=value_of(given, "distinct_prompts"),
        router=value_of(given, "router"),
        is_benchmark=bool(given["benchmark"]),
        users=value_of(given, "users"),
        think_time=value_of(given, "think_seconds"),
        sessions=value_of(given, "sessions"),
    )
