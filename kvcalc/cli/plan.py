"""`kvcalc plan`: how many devices does this traffic need, and which command starts the server?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Optional, Union

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import ModelOf, kinds_of, output_of, question_of, value_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import UsageError
from kvcalc.question.fields import OPTIONS as OF_FIELDS

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.plan.planned import PlannedLoad
    from kvcalc.planning.plan.targets import Targets
    from kvcalc.question.request_lengths import Lengths
    from kvcalc.server.layout import Devices, Gpu

    _Pairs = Callable[[], Iterable[tuple[int, int]]]

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(cls=o.taking(*o.declared("plan")))
def plan(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Find how many devices a load needs, and at what cost."""
    from kvcalc.cli.counting_bar import counting_bar, of_all_runs
    from kvcalc.notes import BAD_ROWS
    from kvcalc.planning.plan.document import refuse_empty

    given: Mapping[str, Any] = ctx.params
    output = output_of(given, "plan")
    kind = _emitted(given)
    source = ctx.get_parameter_source("engine")
    given = _of_emitted(given, kind, is_default=source is None or source.name == "DEFAULT")
    check_report(given)
    jobs = value_of(given, "jobs")
    with counting_bar("kinds of device") as of_kinds, counting_bar("simulated requests") as of_requests:
        document = answer(given, progress=of_all_runs(of_requests), jobs=jobs, of_kinds=of_kinds)
    if given["report"] is not None:
        write_report(ctx, {**document, **_curve_of(given, document)}, "plan")
    if kind is None:
        output.emit(document, "plan")
        refuse_empty(document)
    else:
        from kvcalc.planning.manifests import emit

        refuse_empty(document)
        output.emit_text(emit(document, kind, given["image"]), document["warnings"])
    if any(warning["code"] == BAD_ROWS for warning in document["warnings"]):
        raise typer.Exit(1)


def answer(
    given: Mapping[str, Any],
    model_of: Optional[ModelOf] = None,
    progress: Any = None,
    jobs: Optional[int] = 1,
    of_kinds: Any = None,
) -> "documents.Plan":
    """The document that answers the parameters of the command.

    `jobs` is the number of processes, None for one of each core. One alone calls `progress` with the simulated
    requests, several call `of_kinds` with the kinds of device that are done.
    """
    from kvcalc.parallel import processes
    from kvcalc.planning.answers.axis import parse_engines
    from kvcalc.planning.plan.document import COMMON_GPUS, parse_price
    from kvcalc.planning.plan.document import plan as ask

    simulated = value_of(given, "simulate")
    if given["trace"] is not None:
        simulation, targets = _load_of_trace(given, _targets_of(given))
        lengths, pairs = simulation.lengths, None
    else:
        (lengths, pairs), targets = _lengths_of(given), _targets_of(given)
        _check_trace(given)
        simulation = _load_of(given, pairs, lengths)
    prices = dict(map(parse_price, o.names_of(given["price"], "--price")))
    names = o.names_of(given["gpu"], "--gpu") or list(prices)
    gpus = _gpus_of(given, names) or _gpus_of(given, COMMON_GPUS)
    engines = parse_engines(o.names_of(given["engine"], "--engine"))
    num_dtypes = len(o.names_of(given["dtype"], "--dtype")) or 1
    jobs = processes(jobs, len(gpus) * len(engines) * num_dtypes)
    return ask(
        # The link is that of --disaggregate here, and no cache that is used again.
        question_of(
            {**given, "gpu": ",".join(names or COMMON_GPUS)},
            model_of,
            f"gpu {o.GROUPS['DEVICE_FIGURES']} engine input-tokens output-tokens concurrency transfer-bandwidth",
        ),
        gpus,
        lengths,
        targets,
        engines=engines,
        disaggregate=given["disaggregate"],
        transfer=value_of(given, "transfer"),
        prices=prices,
        max_devices=value_of(given, "max_devices"),
        allow_beyond_limit=given["allow_beyond_limit"],
        with_front=given["pareto"],
        strict=given["strict"],
        all_layouts=given["all_layouts"],
        simulation=simulation._replace(progress=progress if jobs == 1 else None),
        jobs=jobs,
        progress=None if jobs == 1 else of_kinds,
        num_simulated=simulated,
        headroom=value_of(given, "headroom"),
        spare_replicas=value_of(given, "spare_replicas"),
    )


def _curve_of(given: Mapping[str, Any], document: "documents.Plan") -> dict[str, Any]:
    """The memory of the best layout and its times over the load, for the report: its own command is simulated.

    Empty for separate instances, and if the command does not name the model.
    """
    from kvcalc.errors import KvcalcError
    from kvcalc.planning.answers.estimate import answer as answer_of
    from kvcalc.planning.check.servers import servers_of_words
    from kvcalc.planning.plan.load_curve import curve_of_server, question_of_command
    from kvcalc.planning.plan.traffic import kept_tokens
    from kvcalc.server.case import make_case
    from kvcalc.server.layout import Devices, find_gpu
    from kvcalc.writing import shell

    best = document["best"]
    if best is None or best.get("disaggregated") is not None:
        return {}
    targets = _targets_of(given)
    if given["trace"] is not None:
        load, targets = _load_of_trace(given, targets)
    else:
        lengths, pairs = _lengths_of(given)
        load = _load_of(given, pairs, lengths)
    row = next((command for command in document["commands"] if command["engine"] == best["engine"]), None)
    try:
        asked = question_of(given, own="gpu num-gpus concurrency input-tokens output-tokens transfer-bandwidth engine")
        servers = servers_of_words(shell.split(row["command"] if row else ""))
        devices = Devices(find_gpu(best["gpu"]), (best["num_devices"] or 1) // (best["replicas"] or 1))
        accepted = None if asked.speculative is None else asked.speculative.acceptance_length
        speed = asked.speed_asked
        question = question_of_command(servers[0], devices, asked.model, speed, accepted)
        replicas = (best["replicas"] or 1) - document["spare_replicas"]
        curve = curve_of_server(load, question, targets.larger(document["headroom"]), replicas)
        kept = kept_tokens(make_case(question), document["lengths"]["held_tokens"], question.context_tokens or 1)
        full = question._replace(batch_size=best["requests_per_replica"] or 1, context_tokens=kept)
        return {"fit": answer_of(full).document["fit"], "load_curve": curve}
    except (KvcalcError, IndexError):
        return {}


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


def _of_emitted(given: Mapping[str, Any], kind: Optional[str], *, is_default: bool) -> Mapping[str, Any]:
    """The parameters for the engine whose command --emit prints, if no engine was named (`is_default`).

    Raises UsageError (exit 2) if others were named.
    """
    if kind is None:
        return given
    from kvcalc.planning.answers.axis import parse_engines
    from kvcalc.planning.manifests import COMMANDS, check_engine

    if is_default and kind in COMMANDS:
        return {**given, "engine": COMMANDS[kind]}
    check_engine(kind, parse_engines(o.names_of(given["engine"], "--engine")))
    return given


def _lengths_of(given: Mapping[str, Any]) -> "tuple[Lengths, Optional[_Pairs]]":
    """The lengths of the requests, and a function for those of each request. None if all are alike."""
    from kvcalc.model.files import read_text
    from kvcalc.question.request_lengths import MAX_LENGTHS_BYTES, drawn_lengths, one_length, pairs_of, parse_lengths

    prompt, answer = (value_of(given, name) for name in ("input_tokens", "output_tokens"))
    if given["lengths"] is not None:
        if prompt is not None or answer is not None:
            raise UsageError(
                "--lengths cannot be combined with --input-tokens or --output-tokens",
                "use --lengths or the other two",
            )
        text = read_text(given["lengths"], MAX_LENGTHS_BYTES)
        return parse_lengths(text, given["lengths"]), partial(pairs_of, text, given["lengths"])
    if prompt is None or answer is None:
        missing = "--input-tokens" if prompt is None else "--output-tokens"
        raise UsageError(f"{missing} is missing", "--input-tokens 2k --output-tokens 500, or --lengths FILE.csv")
    if isinstance(prompt, str) or isinstance(answer, str):
        lengths, pairs = drawn_lengths(prompt, answer)
        return lengths, lambda: pairs
    return one_length(prompt, answer), None


def _load_of(given: Mapping[str, Any], pairs: "Optional[_Pairs]", lengths: "Lengths") -> "PlannedLoad":
    from kvcalc.planning.plan.planned import PlannedLoad

    burstiness, seed, number = (value_of(given, name) for name in ("burstiness", "seed", "requests"))
    if given["deadline"] is not None:
        number = None  # --requests is the size of the job
    each = None if pairs is None else list(pairs())
    return PlannedLoad(lengths, each, burstiness, seed, number, router=value_of(given, "router"))


# Options that say what the trace says.
_SAID = (
    "concurrency", "requests_per_second", "users", "think_time", "sessions", "deadline", "input_tokens",
    "output_tokens", "lengths", "burstiness", "seed",
)  # fmt: skip


def _load_of_trace(given: Mapping[str, Any], targets: "Targets") -> "tuple[PlannedLoad, Targets]":
    """The requests of --trace, and the targets with its rate. Raises UsageError (exit 2)."""
    from kvcalc.planning.plan.planned import planned_trace

    for name in _SAID:
        if given[name] != (OF_FIELDS[name].default if name in OF_FIELDS else None):
            raise UsageError(
                f"--trace cannot be combined with --{name.replace('_', '-')}",
                "the trace has the times and the lengths of its requests; --scale-rate changes its rate",
            )
    scale, requests = value_of(given, "scale_rate"), value_of(given, "requests")
    load = planned_trace(given["trace"], given["trace_format"], scale, requests)
    load = load._replace(router=value_of(given, "router"))
    return load, load.rated(targets)


def _targets_of(given: Mapping[str, Any]) -> "Targets":
    from kvcalc.planning.plan.targets import Targets, limits_in, of_job

    targets = Targets(
        value_of(given, "concurrency"),
        value_of(given, "requests_per_second"),
        users=value_of(given, "users"),
        think_time=value_of(given, "think_seconds"),
        sessions=value_of(given, "sessions"),
        **limits_in(given),
    )
    deadline = value_of(given, "deadline_seconds")
    return targets if deadline is None else of_job(targets, value_of(given, "requests"), deadline)


def _check_trace(given: Mapping[str, Any]) -> None:
    """Raise UsageError (exit 2) for an option of --trace without one."""
    for name in ("trace_format", "scale_rate"):
        if given[name] != OF_FIELDS[name].default:
            raise UsageError(f"--{name.replace('_', '-')} needs --trace", "another rate: --requests-per-second")


def _gpus_of(given: Mapping[str, Any], names: Sequence[str]) -> "list[Union[Gpu, Devices]]":
    """The kinds of device. A number in a name, such as h100x8, is the most that a plan may use."""
    kinds = kinds_of(names, given)
    limited = any(name.casefold().endswith("x1") or name.casefold().startswith("1x") for name in names)
    return [kind if kind.num_devices > 1 or limited else kind.gpu for kind in kinds]
