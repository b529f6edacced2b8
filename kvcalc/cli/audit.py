"""`kvcalc audit`: do the numbers in an engine's log follow from the model?"""

from typing import Annotated, Optional

import typer

from kvcalc.cli import options as o

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

# A log from an engine's start on is some hundred kilobytes; a day's is more than anyone means to audit.
MAX_LOG_BYTES = 64 * 1024 * 1024

EPILOG = """Examples:

  kvcalc audit vllm.log

  kvcalc audit vllm.log --json

  kvcalc audit sglang.log --model llama-3-8b --tp 1 --get unexplained
"""


@app.command(epilog=EPILOG)
def audit(
    log: Annotated[str, typer.Argument(metavar="LOG", help="An engine's log from its start on, or - for stdin.")],
    model: Annotated[
        Optional[str],
        typer.Option(
            "--model",
            metavar="MODEL",
            help="A preset, a config.json or a .gguf file, where the log names none kvcalc knows.",
        ),
    ] = None,
    engine: Annotated[
        Optional[str],
        typer.Option(
            "--engine", metavar="NAME", help="Whose log it is: vllm, sglang, tensorrt-llm, llama.cpp. Default: seen."
        ),
    ] = None,
    tp: Annotated[
        Optional[str],
        typer.Option(
            "--tp",
            "--tensor-parallel-size",
            metavar="T",
            help="Devices, whatever the log says. Default: the log's, or 1.",
        ),
    ] = None,
    kv_dtype: Annotated[
        Optional[str],
        typer.Option(
            "--kv-dtype",
            "--kv-cache-dtype",
            metavar="TYPE",
            help="The cache's type, whatever the log says. Also --kv-cache-dtype.",
        ),
    ] = None,
    context: Annotated[
        Optional[str],
        typer.Option(
            "--context", "-c", metavar="N", help="Tokens a sequence may have, whatever the log says: 8192, 8k (8,192)."
        ),
    ] = None,
    max_model_len: o.MaxModelLen = None,
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """Does what an engine printed of its cache follow from the model, by the engine's own rules?"""
    from kvcalc.errors import MismatchError, UsageError
    from kvcalc.model.files import read_stdin, read_text
    from kvcalc.model.resolve import load_model
    from kvcalc.output.sink import check_path, choose, emit
    from kvcalc.planning.audit import audit as ask
    from kvcalc.units import parse_count

    output = choose(format, json, get, no_color)
    check_path(output, "audit")
    if log == "-" and model == "-":
        raise UsageError("LOG and --model cannot both be read from stdin")
    text = read_stdin(MAX_LOG_BYTES) if log == "-" else read_text(log, MAX_LOG_BYTES)
    document = ask(
        text,
        "stdin" if log == "-" else log,
        model=None if model is None else load_model(model),
        engine=None if engine is None else engine.casefold(),
        tensor_parallel_size=o.optional(parse_count, tp, "--tp"),
        kv_dtype=kv_dtype,
        context_tokens=o.context_of(context, max_model_len),
    )
    emit(document, output, "audit")
    if document["unexplained"]:
        raise MismatchError(f"{document['unexplained']} of the log's numbers unexplained", document["explanation"])
