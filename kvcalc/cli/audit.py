"""`kvcalc audit`: can the numbers in an engine's log be computed from the model?"""

import sys
from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import context_of, output_of, value_of
from kvcalc.writing.terminal import one_line

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(cls=o.taking(*o.declared("audit")))
def audit(
    ctx: typer.Context,
    log: Annotated[str, typer.Argument(metavar="LOG", help="An engine's log, including its startup; - is stdin.")],
) -> None:
    """Check the cache figures in an engine's log against the model.

    The exit code is 5 if a figure cannot be explained, or if no figure of the cache was checked.
    """
    from kvcalc.errors import MismatchError, UsageError
    from kvcalc.model.files import chunks_of
    from kvcalc.model.resolve import load_model
    from kvcalc.planning.audit import audit as ask

    given, model, engine = ctx.params, ctx.params["model"], ctx.params["engine"]
    output = output_of(given, "audit")
    if log == "-" and model == "-":
        raise UsageError("LOG and --model cannot both be read from stdin")
    document = ask(
        chunks_of(log),
        "stdin" if log == "-" else log,
        model=None if model is None else load_model(model),
        engine=None if engine is None else engine.casefold(),
        tensor_parallel_size=value_of(given, "tensor_parallel_size"),
        kv_dtype=given["kv_dtype"],
        context_tokens=context_of(given),
    )
    output.emit(document, "audit")
    if document["unexplained"]:
        raise MismatchError(f"{document['unexplained']} of the log's numbers unexplained", document["explanation"])
    if not document["equal"]:
        for line in document["unread"]:
            print(one_line(f"line {line['line']} was not understood: {line['text']}"), file=sys.stderr)
        raise MismatchError("no number about the cache was checked", "give the engine's whole log from its start")
