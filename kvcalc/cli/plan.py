"""`kvcalc plan`: how many devices does this traffic take, and how are they started?"""

from typing import Annotated, Optional

import typer

from kvcalc.cli import device_options as d
from kvcalc.cli import options as o

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """For each kind of device the smallest layout that fits and meets the targets: tensor parallelism within a
fast link, pipeline stages where that is not enough, and replicas. The status is 4 where no device will do.

Examples:

  kvcalc plan llama-3-70b --input-tokens 7k --output-tokens 1k --concurrency 64 --gpu h100

  kvcalc plan qwen3-32b --input-tokens 2k --output-tokens 500 --requests-per-second 20 --max-tpot 30ms --max-ttft 1s

  kvcalc plan gpt-oss-120b --input-tokens 2k --output-tokens 500 --concurrency 100 --price h100=2.5 --price l40s=0.9

  kvcalc plan llama-3.1-8b --lengths lengths.csv --concurrency 200 --gpu l40s --engine sglang --json
"""


@app.command(epilog=EPILOG)
def plan(
    model: o.RequiredModel,
    input_tokens: Annotated[
        Optional[str], typer.Option("--input-tokens", metavar="N", help="Tokens of a prompt: 2048, 2k.")
    ] = None,
    output_tokens: Annotated[
        Optional[str], typer.Option("--output-tokens", metavar="N", help="Tokens of an answer.")
    ] = None,
    lengths: Annotated[
        Optional[str],
        typer.Option("--lengths", metavar="CSV", help="In place of both: a file, a prompt's and an answer's a row."),
    ] = None,
    concurrency: Annotated[
        Optional[str], typer.Option("--concurrency", metavar="N", help="Requests in flight, all replicas together.")
    ] = None,
    requests_per_second: Annotated[
        Optional[str], typer.Option("--requests-per-second", metavar="R", help="In place of --concurrency: a rate.")
    ] = None,
    max_ttft: Annotated[
        Optional[str], typer.Option("--max-ttft", metavar="TIME", help="To the first token at most: 1s, 500ms.")
    ] = None,
    max_tpot: Annotated[
        Optional[str], typer.Option("--max-tpot", metavar="TIME", help="From one token to the next at most: 30ms.")
    ] = None,
    gpu: Annotated[
        Optional[list[str]],
        typer.Option("--gpu", metavar="NAME", help="A kind of device; again for more. Default: what is often rented."),
    ] = None,
    price: Annotated[
        Optional[list[str]],
        typer.Option("--price", metavar="NAME=P", help="Of one device for an hour: h100=2.5; again for more."),
    ] = None,
    max_gpus: Annotated[str, typer.Option("--max-gpus", metavar="N", help="Devices of a plan at most.")] = "1024",
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME[@RELEASE]", help="Whose memory and speed: vllm, sglang, ...")
    ] = "vllm",
    dtype: o.Dtype = None,
    kv_dtype: o.KvDtype = "auto",
    gpu_memory_utilization: o.GpuMemoryUtilization = None,
    mem_fraction_static: o.MemFractionStatic = None,
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """How many devices serve this traffic, at what cost, and with which flags?"""
    from kvcalc.errors import UsageError
    from kvcalc.model.files import read_text
    from kvcalc.model.resolve import load_model
    from kvcalc.output.sink import check_path, choose, emit
    from kvcalc.planning.lengths import MAX_LENGTHS_BYTES, one_length, parse_lengths
    from kvcalc.planning.plan import COMMON_GPUS, Targets, parse_price, refuse_empty
    from kvcalc.planning.plan import plan as ask
    from kvcalc.units import parse_count, parse_rate, parse_seconds, parse_tokens

    output = choose(format, json, get, no_color)
    check_path(output, "plan")
    if lengths is not None:
        if input_tokens is not None or output_tokens is not None:
            raise UsageError("--lengths stands in place of --input-tokens and --output-tokens")
        found = parse_lengths(read_text(lengths, MAX_LENGTHS_BYTES), lengths)
    elif input_tokens is None or output_tokens is None:
        raise UsageError("how long are the requests?", "--input-tokens 2k --output-tokens 500, or --lengths FILE.csv")
    else:
        found = one_length(parse_tokens(input_tokens, "--input-tokens"), parse_tokens(output_tokens, "--output-tokens"))
    if (concurrency is None) == (requests_per_second is None):
        raise UsageError("how many requests?", "one of --concurrency 64, in flight, and --requests-per-second 20")
    targets = Targets(
        o.optional(parse_count, concurrency, "--concurrency"),
        o.optional(parse_rate, requests_per_second, "--requests-per-second"),
        o.optional(parse_seconds, max_ttft, "--max-ttft"),
        o.optional(parse_seconds, max_tpot, "--max-tpot"),
    )
    prices = dict(map(parse_price, price or ()))
    names = gpu or list(dict.fromkeys((*prices, *(() if prices else COMMON_GPUS))))
    document = ask(
        load_model(model),
        d.kinds_of(names),
        found,
        targets,
        engine=engine.casefold(),
        engine_settings=o.engine_settings(
            {"gpu-memory-utilization": gpu_memory_utilization, "mem-fraction-static": mem_fraction_static}
        ),
        dtype=dtype,
        kv_dtype=kv_dtype,
        prices=prices,
        max_devices=parse_count(max_gpus, "--max-gpus"),
    )
    emit(document, output, "plan")
    refuse_empty(document)
