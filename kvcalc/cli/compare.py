"""`kvcalc compare`: how much memory does each of these models take?"""

from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import calibration_of, devices_of, output_of, question_of
from kvcalc.errors import KvcalcError, RunError, UsageError

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(cls=o.taking(*o.declared("compare")))
def compare(
    ctx: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Model names (kvcalc models lists them), paths to a config.json, or hf:org/name.",
        ),
    ],
) -> None:
    """Compare models, or one model with each kind of attention."""
    from kvcalc.model.resolve import load_model
    from kvcalc.model.spec import ModelSpec
    from kvcalc.model.variants import WhatIf
    from kvcalc.planning.answers.axis import parse_engines
    from kvcalc.planning.answers.compare import compare as ask
    from kvcalc.planning.answers.compare import first_of, load_each, parse_attentions

    given = ctx.params
    output = output_of(given, "compare", is_list=True)
    engines = parse_engines(o.names_of(given["engine"], "--engine"))
    names: list[str | None] = [*o.names_of(given["gpu"], "--gpu")] or [None]
    if len(names) > 1 and any(given[name] is not None for name in ("gpu_memory", "gpu_bandwidth", "flops")):
        raise UsageError("--gpu-memory, --gpu-bandwidth and --flops describe one device, but --gpu names several")
    calibration_of(given)  # refused if it is of one engine or device, and several are compared
    questions = [{**given, "engine": engines[0], "gpu": name} for name in names]
    loaded = load_each(models)
    first = first_of(loaded)

    def model_of(name: str | None, *_: object) -> tuple[ModelSpec, WhatIf]:
        """The model that drafts, or the first one that is compared."""
        return (first if name is None else load_model(name)), WhatIf()

    document = ask(
        loaded,
        question_of({**questions[0], "model": None}, model_of, own="attention"),
        attentions=parse_attentions(given["attention"]),
        engines=engines,
        devices=[devices for devices in map(devices_of, questions) if devices is not None],
    )
    answered = {row["model"] for row in document["models"] if row["reason"] is None}
    without = [row for row in document["models"] if row["model"] not in answered]
    if without and output.format != "json":
        # The error at the end says it.
        told = [note for note in document["warnings"] if note["text"] != without[0]["reason"]]
        document = {**document, "warnings": told}
    output.emit(document, "compare")
    if without:
        hint = next((error.hint for _, error in loaded if isinstance(error, KvcalcError)), None)
        raise RunError(f"no answer for {without[0]['model']}: {without[0]['reason']}", hint)
