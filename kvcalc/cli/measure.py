"""`kvcalc measure`: run the real attention layers on this machine, count their bytes and time their steps."""

import contextlib
import gc
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Optional, cast

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import MODEL_FLAGS, context_of, flags_of, load_model_of, output_of, parsed, what_if_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import BrokenDeviceError, KvcalcError, RunError, UsageError

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.measure.progress import Progress
    from kvcalc.measure.record import Part
    from kvcalc.output.sink import Output

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

_LIST_OF_LENGTHS = re.compile(r"[\d_]+[kKmM]?(,[\d_]+[kKmM]?)*")
_WITH_COMPARE = ("compare", "format", "json", "get", "no_color")


@app.command(cls=o.taking(*o.declared("measure")))
def measure(
    ctx: typer.Context,
    model: o.Model = None,
    compare: Annotated[
        Optional[tuple[str, str]],
        typer.Option(
            "--compare", metavar="A B", help="Compare two records instead of running: the ratios B/A of their figures."
        ),
    ] = None,
) -> None:
    """Run a model's attention here to check bytes and time steps."""
    from kvcalc.units import parse_count, parse_size

    given = ctx.params
    save, trace = given["save"], given["trace"]
    with _reporting_once() as is_reporting:
        output = output_of(given)
        if compare is not None:
            _check_alone(ctx, "--compare only reads two records", _WITH_COMPARE)
            _compare(compare, output)
            return
        if given["profile"]:
            _profile(ctx, model, output)
            return
        if given["minutes"] is not None:
            raise UsageError("--minutes needs --profile", "for example --profile --minutes 5")
        output.check_path("measure")
        every = given["attention"] is not None and given["attention"].casefold() == "all"
        flags = (*MODEL_FLAGS[1:], *(() if model else MODEL_FLAGS[:1]))
        spec, what_if = load_model_of(
            model, what_if_of({**given, "attention": None} if every else given), flags_of(given, flags)
        )
        context_tokens, batch_size = context_of(given), parse_count(given["batch"], "--batch")
        lengths = () if given["lengths"] is None else _lengths_of(given["lengths"], batch_size)
        steps, num_layers = parse_count(given["steps"], "--steps"), parsed(given, "--layers", parse_count)
        seed, devices = parse_count(given["seed"], "--seed", least=0), parse_count(given["tp"], "--tp")
        if is_reporting:
            check_report(given)
        for path in (save, trace):
            if path is not None and is_reporting:
                from kvcalc.atomic_file import check_target

                check_target(path)
        points = None
        if given["sweep"] is not None:
            from kvcalc.measure.sweep import parse_sweep

            points = parse_sweep(given["sweep"], context_tokens, batch_size)
        limit = parsed(given, "--memory", parse_size)
        if limit is not None and given["until_full"] is None:
            raise UsageError("--memory needs --until-full", "for example --until-full context --memory 40GiB")
        without = tuple(map(str.casefold, o.names_of(given["without_backend"], "--without-backend")))
        ask, check_bytes = _load()
        with _keeping(save if is_reporting else None) as part:
            with _progress(is_reporting) as progress, _ending_on_ctrl_c(progress):
                document = ask(
                    spec, context_tokens=context_tokens, batch_size=batch_size, lengths=lengths, steps=steps,
                    num_layers=num_layers, what_if=what_if, all_variants=every, dtype=given["dtype"],
                    device=given["device"].casefold(),
                    seed=seed, tensor_parallel_size=devices, progress=progress, kv_dtype=given["kv_dtype"],
                    cache_scales=None if given["cache_scales"] is None else given["cache_scales"].casefold(),
                    cache=given["cache"].casefold(), block_size=parsed(given, "--block-size", parse_count),
                    mla=given["mla"].casefold(), backend=given["backend"].casefold(), sweep=points,
                    without_backends=without,
                    until_full=given["until_full"], memory_bytes=limit, trace=trace,
                    prefill=given["prefill"].casefold(), keep=None if part is None else part.keep,
                )  # fmt: skip
            if not is_reporting:
                return
            write_report(ctx, document, "measure")
            output.emit(document, "measure")
            try:
                check_bytes(document)
            except KvcalcError as error:
                if save is not None:
                    error.hint = f"{save} was not written"
                raise
            if save is not None:
                from kvcalc.measure.record import save as write

                write(document, save)


def _lengths_of(text: str, batch_size: int) -> tuple[int, ...]:
    """The lengths in `text`, such as 1k,8k,32k, or those of the first `batch_size` requests of the trace at that path.

    The length of a request is that of its prompt and its answer. Raises UsageError (exit 2) for anything else.
    """
    from itertools import islice

    from kvcalc.traces import read_trace
    from kvcalc.units import parse_tokens

    if _LIST_OF_LENGTHS.fullmatch(listed := text.replace(" ", "")):
        return tuple(parse_tokens(piece, "--lengths") for piece in listed.split(","))
    lengths = tuple(each.prompt_tokens + each.answer_tokens for each in islice(read_trace(text), batch_size))
    if len(lengths) < batch_size:
        raise UsageError(f"--batch {batch_size}: {text} has {len(lengths)} requests", f"at most --batch {len(lengths)}")
    return lengths


@contextlib.contextmanager
def _keeping(path: Optional[str]) -> Iterator[Optional["Part"]]:
    """Keep the runs that have ended beside `path`. If the others fail, the error says where they are."""
    if path is None:
        yield None
        return
    from kvcalc.measure.record import Part

    part = Part(path)
    try:
        yield part
    except KvcalcError as error:
        if part.is_kept:
            error.hint = "; ".join(filter(None, (error.hint, f"the runs before the last one are in {part.path}")))
        raise
    part.remove()


# torch 2.13 for CPUs maps 700 MiB when it is imported and multiplies two matrices.
_LEAST_ADDRESS_SPACE = 768 * 1024 * 1024


def _check_alone(ctx: typer.Context, mode: str, allowed: tuple[str, ...]) -> None:
    """Raise UsageError (exit 2) if `mode` is given with options of a run that it does not take."""
    for parameter in ctx.command.params:
        name = parameter.name or ""
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in allowed:
            given = parameter.opts[0] if parameter.opts[0].startswith("-") else "MODEL"
            raise UsageError(f"{mode}: {given} has no effect", f"remove {given}")


def _compare(files: tuple[str, str], output: "Output") -> None:
    """Compare two records. This does not need torch."""
    from kvcalc.measure.compare import compare
    from kvcalc.measure.record import load

    output.check_path("measure_compare")
    a, b = map(load, files)
    output.emit(compare(a, b, files), "measure_compare")


# The options of a run that a profile takes too.
_WITH_PROFILE = (
    "model", "profile", "minutes", "save", "device", "dtype", "without_backend", "context", "batch", "kv_dtype",
    "format", "json", "get", "no_color",
)  # fmt: skip


def _profile(ctx: typer.Context, models: Optional[str], output: "Output") -> None:
    """Measure a profile, keep it in a file after each point, and print it beside the estimate."""
    from kvcalc.atomic_file import check_target
    from kvcalc.measure.devices.ranks import find_place
    from kvcalc.measure.record import save as write
    from kvcalc.model.resolve import load_model
    from kvcalc.units import parse_count, parse_tokens

    given, place = ctx.params, find_place()
    _check_alone(ctx, "--profile", _WITH_PROFILE)
    output.check_path("measure_profile")
    try:
        minutes = float(given["minutes"] or _MINUTES)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes <= 24 * 60:
        raise UsageError(f"--minutes {given['minutes'][:40]!a} is not a number of minutes", "for example --minutes 10")
    if place.rank > 0:
        _load()
        from kvcalc.measure.all_reduces import time_all_reduces

        time_all_reduces(given["device"].casefold(), place)
        return
    path = given["save"] or "profile.json"
    check_target(path)
    known = _known_profile(path)
    _, check_bytes = _load()
    from kvcalc.measure.profile import measure_profile
    from kvcalc.planning.calibration.attention_rows import add_predictions

    def several(option: str, parse: "Callable[[str, str], int]") -> "Optional[list[int]]":
        text = given[option]
        is_given = ctx.get_parameter_source(option).name == "COMMANDLINE"  # type: ignore[union-attr]
        return [parse(each, f"--{option}") for each in str(text).split(",")] if is_given and text else None

    kv_dtypes = (
        None
        if given["kv_dtype"] is None
        else [None if name == "auto" else name for name in o.names_of([given["kv_dtype"]], "--kv-dtype")]
    )
    with _progress(True) as progress, _ending_on_ctrl_c(progress):
        document = measure_profile(
            [load_model(name) for name in o.names_of([models], "MODEL")] if models else None,
            minutes=minutes, device=given["device"].casefold(), dtype=given["dtype"], kv_dtypes=kv_dtypes,
            contexts=several("context", parse_tokens), batches=several("batch", parse_count),
            without_backends=tuple(map(str.casefold, o.names_of(given["without_backend"], "--without-backend"))),
            progress=progress, known=known, keep=lambda document: write(document, path),
        )  # fmt: skip
    gpu = add_predictions(document)
    write(document, path)
    output.emit(document, "measure_profile")
    for record in document["records"]:
        check_bytes(record)
    name = document["points"][0]["model"]
    device, roof = document["device"], document["roof"]
    where = f"--gpu {gpu or 'DEVICE'} --engine vllm"
    if gpu is None and device["kind"] == "cpu":
        figures = device["memory_bytes"], roof["read_bytes_per_second"], roof["matmul_flop_per_second"]
        where = "--gpu-memory {:.0f} --gpu-bandwidth {:.0f} --flops {:.0f} --engine llama.cpp".format(*figures)
    print(f"use it: kvcalc estimate {name} {where} --calibrate {path}", file=sys.stderr)


_MINUTES = 10


def _known_profile(path: str) -> "Optional[documents.MeasureProfile]":
    """The profile in the file, which goes on. None if there is no file. UsageError (exit 2) if it is something else."""
    import json
    import os

    from kvcalc.model.files import read_text
    from kvcalc.schema import READABLE_VERSIONS

    if not os.path.exists(path) or not os.path.getsize(path):
        return None
    try:
        document = json.loads(read_text(path, 64 << 20))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or not {"records", "launch"} <= {*document}:
        raise UsageError(f"{path} is not a profile, and is not replaced", "use another --save FILE")
    if document.get("schema_version") not in READABLE_VERSIONS:
        raise UsageError(f"{path} is a profile of another version", "use another --save FILE")
    return cast("documents.MeasureProfile", document)


@contextlib.contextmanager
def _reporting_once() -> Iterator[bool]:
    """Yield whether this process prints the results. If torchrun started several, only rank 0 does.

    An error that every process raises is reported by one process per machine. The others exit silently with the same
    code. Ctrl-C is reported in one line.
    """
    from kvcalc.measure.devices.ranks import RankError, find_place

    place = find_place()
    try:
        yield place.rank == 0
    except RankError as error:
        if error.is_quiet:
            raise typer.Exit(error.exit_code) from None
        raise
    except BrokenDeviceError as error:
        if error.backend is not None and place.size == 1:
            from kvcalc.cli.interrupts import again

            again(
                "--without-backend", error.backend, f"kvcalc: {error.message}; starting again without {error.backend}"
            )
        raise
    except KvcalcError as error:
        if not place.speaks:
            raise typer.Exit(error.exit_code) from None
        raise
    except KeyboardInterrupt:
        if place.rank == 0:
            print("kvcalc: interrupted", file=sys.stderr)
        raise


def _load() -> "tuple[Callable[..., documents.Measure], Callable[[documents.Measure], None]]":
    """The functions that run and check. If a package is missing, raises RunError (exit 1) with the install command."""
    from kvcalc.cli.interrupts import exiting_on_ctrl_c

    _check_address_space()
    is_first = "torch" not in sys.modules
    try:
        with exiting_on_ctrl_c():
            from kvcalc.measure import runner
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "psutil"):
            raise
        raise RunError(
            f"kvcalc measure needs {error.name}, which is not installed: pip install 'kvcalc[measure]'"
        ) from None
    except (ImportError, OSError, MemoryError) as error:
        reason = str(error) or "out of memory"
        hint = "check that there is enough memory, and the installation: python -c 'import torch'"
        raise RunError(f"torch cannot be loaded: {reason}", hint) from None
    if is_first:
        # The garbage collection at the end of every run need not scan torch's modules.
        gc.freeze()
    return runner.measure, runner.check_bytes


def _check_address_space() -> None:
    """Raise RunError (exit 1) if the process may not map what torch needs. Its libraries abort in that case."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESS_SPACE:
        from kvcalc.units import format_size

        allowed, needed = format_size(limit, capacity=True), format_size(_LEAST_ADDRESS_SPACE)
        raise RunError(f"this process may map {allowed} (ulimit -v), but torch needs {needed}", "ulimit -v unlimited")


@contextlib.contextmanager
def _progress(is_wanted: bool) -> Iterator["Progress"]:
    """Progress on stderr: a bar if it is a terminal, else one line for each run."""
    from kvcalc.measure.progress import Progress

    if not is_wanted:
        yield Progress()
    elif sys.stderr.isatty():
        from kvcalc.cli.progress import Bar

        with Bar() as bar:
            yield bar
    else:
        from kvcalc.cli.progress import Lines

        yield Lines()


def _ending_on_ctrl_c(progress: "Progress") -> contextlib.AbstractContextManager[None]:
    """End at once on Ctrl-C. If torchrun started several processes, they handle it themselves."""
    from kvcalc.cli.interrupts import ending_on_ctrl_c
    from kvcalc.measure.devices.ranks import find_place

    return ending_on_ctrl_c(progress.stop) if find_place().size == 1 else contextlib.nullcontext()
