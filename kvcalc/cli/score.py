"""`kvcalc score`: how far is the predicted speed from the results of a benchmark?"""

from typing import Annotated, Optional

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import calibration_of, devices_of, output_of, settings_of, values_of

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(cls=o.taking(*o.declared("score")))
def score(
    ctx: typer.Context,
    files: Annotated[
        Optional[list[str]], typer.Argument(metavar="FILE...", help="Results of a benchmark; - is stdin.")
    ] = None,
) -> None:
    """Compare the predicted speed with the results of a benchmark."""
    from kvcalc.cli.counting_bar import counting_bar
    from kvcalc.errors import UsageError
    from kvcalc.model.files import read_stdin, read_text
    from kvcalc.model.layout import LayoutAsked
    from kvcalc.model.resolve import load_model
    from kvcalc.planning.calibration.measured import Given
    from kvcalc.planning.calibration.score import MAX_RESULT_BYTES
    from kvcalc.planning.calibration.score import score as ask

    given, engine = ctx.params, ctx.params["engine"]
    output = output_of(given, "score")
    if not files:
        raise UsageError("no FILE", "for example: kvcalc score vllm-bench.json --gpu h100")
    if [*files, given["model"]].count("-") > 1:
        raise UsageError("only one FILE or --model can be read from stdin")
    if engine is not None and ("," in engine or engine.casefold() == "all"):
        raise UsageError(f"--engine {engine[:60]}: a result comes from one engine", "for example --engine vllm")
    texts = [
        ("stdin", read_stdin(MAX_RESULT_BYTES)) if file == "-" else (file, read_text(file, MAX_RESULT_BYTES))
        for file in files
    ]
    setup = Given(
        model=None if given["model"] is None else load_model(given["model"]),
        devices=devices_of(given),
        engine_settings=settings_of(given),
        calibration=calibration_of(given),
        layout=LayoutAsked(**values_of(LayoutAsked, given)),
        **values_of(Given, given),
    )
    with counting_bar("runs") as progress:
        document = ask(texts, setup, progress)
    output.emit(document, "score")
