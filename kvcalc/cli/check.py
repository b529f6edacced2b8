"""`kvcalc check`: does my command start, how much memory does it take, and what load does it sustain?"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional

import typer
from typer.core import TyperCommand

from kvcalc.cli import options as o
from kvcalc.cli.question import calibration_of, devices_of, output_of, value_of, values_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import DoesNotFitError, KvcalcError, RunError, UsageError

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.planning.check.servers import Server
    from kvcalc.planning.plan.targets import Targets
    from kvcalc.question.question import SpeedQuestion

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
_LARGEST_FILE = 8 << 20


class TakesCommand(TyperCommand):
    """A command among whose options another command stands."""

    more_usage = "COMMAND..."  # in the help

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse kvcalc's own options, and keep the other words."""
        own_words, ctx.meta["kvcalc.command"] = _divided(args, self.params)
        return super().parse_args(ctx, own_words)


def _divided(args: list[str], params: list[Any]) -> tuple[list[str], list[str]]:
    """kvcalc's own options, and the words of the command. A name that both have is the engine's, and -- separates."""
    from kvcalc.engines.reading import readers
    from kvcalc.planning.check.servers import program_end

    takes_value = {"-h": False, "--help": False}
    takes_value.update({name: not param.is_flag for param in params for name in param.opts if name.startswith("-")})
    reader = next((reader for reader in readers() if program_end(reader, args) is not None), None)
    end = 0 if reader is None else program_end(reader, args) or 0
    # Before its program, a command has no options of its engine.
    own_words, words, place = list[str](), list[str](), 0
    while place < len(args):
        word = args[place]
        name = word.partition("=")[0]
        if word == "--":
            words += args[place + 1 :]
            break
        is_engines = reader is not None and place >= end and reader.arguments.takes(word)
        if name in takes_value and not is_engines:
            number = 2 if takes_value[name] and "=" not in word else 1
            own_words += args[place : place + number]
            place += number
            continue
        words.append(word)
        place += 1
    return own_words, words


@app.command(cls=o.taking(*o.declared("check"), base=TakesCommand))
def check(ctx: typer.Context) -> None:
    """Check whether the command of a server starts.

    It also shows the server's memory, and the load that it sustains. The command is that of vLLM, SGLang, TensorRT-LLM,
    llama.cpp or mlx_lm.server.
    """
    from kvcalc.cli.counting_bar import counting_bar, of_all_runs
    from kvcalc.cli.live import live_metrics, live_part
    from kvcalc.planning.check.answer import runs

    given = ctx.params
    output = output_of(given, "check")
    check_report(given)
    servers = _servers(ctx.meta["kvcalc.command"], given["file"], given["release"])
    for option in ("report", "live"):
        if given[option] is not None and len(servers) > 1:
            told = f"--{option} is for one server, and there are {len(servers)}"
            raise UsageError(told, "check one of the commands alone")
    metrics = live_metrics(given, servers[0])
    shown = _shown_targets(given)
    failed: Optional[KvcalcError] = None
    starts = True
    for server in servers:
        try:
            with counting_bar("simulated requests") as progress:
                document = answer(given, server, progress=of_all_runs(progress))
                if given["advise"]:
                    document["advice"] = _advice(given, server, document)
                if metrics is not None:
                    document["live"] = live_part(given, server, document, metrics, _speed_of(given))
        except KvcalcError as error:
            refusal = error.document if isinstance(error, DoesNotFitError) else None
            if refusal is not None:
                output.emit_refusal(refusal, "check_refusal")
            if len(servers) == 1:
                raise
            print(f"kvcalc: {server.name or server.reader.engine}: {error.message}", file=sys.stderr)
            starts, failed = False, failed or (error if refusal is None else None)
            continue
        requests, capacity = document["requests"], document["capacity"]
        refused = requests is not None and requests["refused"]
        sustains = capacity is None or capacity["requests_per_second"] > 0
        starts = starts and runs(document, given["strict"]) and not refused and sustains
        if given["report"] is not None:
            write_report(ctx, {**document, **_curve_of(given, server, document)}, "check")
        output.emit(document, "check", **shown)
    if failed is not None:
        raise RunError(f"not all of the {len(servers)} servers were answered", None)
    if not starts:
        raise typer.Exit(DoesNotFitError.exit_code)


def answer(
    given: Mapping[str, Any], server: "Server", progress: Any = None, least_rate: Optional[float] = None
) -> "documents.Check":
    """The document that answers the parameters of the command for one server."""
    from kvcalc.planning.check.answer import check as ask
    from kvcalc.planning.plan.planned import PlannedLoad
    from kvcalc.question.request_lengths import one_length

    lengths = [value_of(given, name) for name in ("input_tokens", "output_tokens")]
    if (lengths[0] is None) != (lengths[1] is None):
        raise UsageError("--input-tokens and --output-tokens belong together", "--input-tokens 2k --output-tokens 250")
    targets = _targets_of(given)
    if lengths[0] is None and given["advise"]:
        raise UsageError("--advise needs the lengths of requests", "--input-tokens 2k --output-tokens 250")
    if lengths[0] is None and (targets.limits or given["confidence"] is not None):
        raise UsageError("a target needs the lengths of requests", "--input-tokens 2k --output-tokens 250")
    speed = _speed_of(given)
    devices = devices_of(given)
    if devices is None:
        raise UsageError("kvcalc check needs a device", "for example --gpu h100, or describe one: --gpu-memory 80GB")
    simulation = None
    if lengths[0] is not None:
        seed, tokens = value_of(given, "seed"), one_length(*lengths)
        simulation = PlannedLoad(tokens, seed=seed, router="round-robin", progress=progress)
    return ask(
        server, devices, input_tokens=lengths[0], output_tokens=lengths[1], targets=targets, simulation=simulation,
        speed=speed, acceptance_length=value_of(given, "acceptance_length"),
        weights_bytes=value_of(given, "weights_bytes"), least_rate=least_rate,
    )  # fmt: skip


def _advice(given: Mapping[str, Any], server: "Server", document: "documents.Check") -> "documents.Advice":
    """What to change in the command, each change judged by `answer`."""
    from kvcalc.cli.counting_bar import counting_bar
    from kvcalc.parallel import each
    from kvcalc.planning.check.advice import advise

    jobs = value_of(given, "jobs")

    def judge(servers: "Sequence[Server]", least_rate: float) -> "list[Optional[documents.Check]]":
        def judged(changed: "Server") -> "Optional[documents.Check]":
            try:
                return answer(given, changed, least_rate=least_rate)
            except KvcalcError:  # the engine refuses it, or it does not run this model
                return None

        return each(judged, servers, jobs, progress)

    with counting_bar("changes tried") as progress:
        return advise(server, document, judge)


def _targets_of(given: Mapping[str, Any]) -> "Targets":
    from kvcalc.planning.plan.targets import Targets, limits_in

    return Targets(None, None, **limits_in(given))


def _shown_targets(given: Mapping[str, Any]) -> dict[str, Any]:
    """The targets as text, for the screen. Empty without any."""
    from kvcalc.output.human.layouts import targets_text

    targets = _targets_of(given)
    return {"within": targets_text(targets.describe(50))} if targets.limits else {}


def _speed_of(given: Mapping[str, Any]) -> "SpeedQuestion":
    from kvcalc.question.question import SpeedQuestion

    speed = SpeedQuestion(**values_of(SpeedQuestion, {**given, "input_tokens": None, "output_tokens": None}))
    return speed._replace(calibration=calibration_of(given))


def _curve_of(given: Mapping[str, Any], server: "Server", document: "documents.Check") -> dict[str, Any]:
    """The targets, and the times over the rate around the largest one, for the report. Empty without lengths."""
    from kvcalc.planning.plan.load_curve import curve_of_server, question_of_command
    from kvcalc.planning.plan.planned import PlannedLoad
    from kvcalc.question.request_lengths import one_length

    capacity, devices = document["capacity"], devices_of(given)
    if capacity is None or devices is None or not capacity["requests_per_second"]:
        return {}
    targets = _targets_of(given)
    lengths = one_length(*(value_of(given, name) for name in ("input_tokens", "output_tokens")))
    load = PlannedLoad(lengths, seed=value_of(given, "seed"), router="round-robin")
    speed = _speed_of(given)
    question = question_of_command(server, devices, None, speed, value_of(given, "acceptance_length"))
    around = targets._replace(requests_per_second=capacity["requests_per_second"])
    rows = curve_of_server(load, question, around, 1)
    return {"targets": targets.describe(question.speed_asked.confidence), "load_curve": rows}


def _servers(words: list[str], file: Optional[str], release: Optional[str]) -> "list[Server]":
    """The servers in the words or in the file. UsageError (exit 2) if there is none."""
    from kvcalc.planning.check.servers import no_server, of_release, servers_in, servers_of_words

    if file is not None and words:
        raise UsageError(f"--file and a command cannot be combined: {words[0][:40]!a}", "use one")
    if file is None and len(words) == 1 and os.path.exists(words[0]):
        file = words[0]
    if file is not None:
        servers = servers_in(_text_of(file))
    elif len(words) == 1 and any(c.isspace() for c in words[0]):
        servers = servers_in(words[0])
    else:
        servers = servers_of_words(words)
    if not servers:
        raise no_server()
    return [of_release(server, release) for server in servers]


def _text_of(file: str) -> str:
    from kvcalc.model.files import read_stdin, read_text

    if file == "-":
        data = read_stdin(_LARGEST_FILE)
    elif not os.path.exists(file):
        raise UsageError(f"{file}: no such file")
    else:
        data = read_text(file, _LARGEST_FILE)
    return data if isinstance(data, str) else data.decode(errors="replace")
