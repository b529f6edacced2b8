"""`kvcalc sweep`: how do the bytes change with the context, the batch, the cache's type, the devices, the engine?"""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from kvcalc.cli import device_options as d
from kvcalc.cli import options as o

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

FORMATS = ("human", "tsv", "csv", "jsonl", "json")

# A person reads so many rows; the rest is for --format csv. A document to look a path up in is held in memory.
MOST_SHOWN = 40
MOST_HELD = 100_000

EPILOG = """Ranges: 1k..1M doubles from 1,024 up to 1,048,576; 4k..64k:4k adds 4k each time; commas make lists of both.

Examples:

  kvcalc sweep llama-3-70b --context 1k..128k

  kvcalc sweep gemma-3-27b --context 1k..128k --batch 1,8,64 --kv-dtype bf16,fp8 --tp 1..8 --format csv

  kvcalc sweep deepseek-v3 --context 4k..64k:4k --format jsonl

  kvcalc sweep gpt-oss-120b --context 8k,32k --engine vllm,sglang --kv-memory 40GiB

  kvcalc sweep llama-3.1-8b --context 8k..128k --batch 1..64 --gpu l40s,h100
"""


@app.command(epilog=EPILOG)
def sweep(
    model: o.RequiredModel,
    context: Annotated[
        Optional[str],
        typer.Option(
            "--context", "-c", metavar="RANGE", help="Tokens per sequence: 8k, 1k..1M, 4k..64k:4k, or a list of these."
        ),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="RANGE", help="Sequences: 1,8,64 or 1..64.")] = "1",
    kv_dtype: Annotated[
        str,
        typer.Option("--kv-dtype", "--kv-cache-dtype", metavar="LIST", help="The cache's types: bf16,fp8."),
    ] = "auto",
    tp: Annotated[
        str, typer.Option("--tp", "--tensor-parallel-size", metavar="RANGE", help="Devices the heads are split over.")
    ] = "1",
    engine: Annotated[
        str, typer.Option("--engine", metavar="LIST", help="Count as these engines do, by their defaults.")
    ] = "logical",
    dtype: o.Dtype = None,
    gpu: Annotated[
        Optional[str],
        typer.Option("--gpu", metavar="LIST", help="Devices: which points fit, and how fast they are. --tp of each."),
    ] = None,
    encoder_tokens: o.EncoderTokens = None,
    kv_memory: Annotated[
        Optional[str],
        typer.Option("--kv-memory", metavar="SIZE", help="Memory for the cache on each device: which points fit."),
    ] = None,
    attention: o.Attention = None,
    kv_heads: o.KvHeads = None,
    plot: Annotated[
        Optional[str],
        typer.Option(
            "--plot", metavar="FILE", help="Also draw memory over context to FILE.svg or .png (extra `plot`)."
        ),
    ] = None,
    format: Annotated[
        Optional[str],
        typer.Option(
            "--format",
            metavar="human|tsv|csv|jsonl|json",
            help="Default: human on a terminal, tsv elsewhere. jsonl: one object a line.",
            rich_help_panel="Output",
        ),
    ] = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """A grid of contexts, batches, cache types, devices and engines: one row a point, as fast as it can be written."""
    from kvcalc.errors import UsageError
    from kvcalc.model.resolve import load_model
    from kvcalc.output.sink import check_path, choose, emit, warn
    from kvcalc.planning.axis import parse_axis, parse_names
    from kvcalc.planning.combination import COLUMNS
    from kvcalc.planning.sweep import sweep as ask
    from kvcalc.units import parse_count, parse_size, parse_tokens

    output = choose(format, json, get, no_color, FORMATS)
    check_path(output, "sweep")
    if plot is not None:
        from kvcalc.output.plot import check_plot_file

        check_plot_file(plot)
    grid = ask(
        load_model(model),
        contexts=None if context is None else parse_axis(context, "--context", parse_tokens),
        batches=parse_axis(batch, "--batch", parse_count),
        kv_dtypes=parse_names(kv_dtype, "--kv-dtype"),
        tensor_parallel_sizes=parse_axis(tp, "--tp", parse_count),
        engines=parse_names(engine, "--engine"),
        gpus=d.kinds_of([] if gpu is None else parse_names(gpu, "--gpu")),
        dtype=dtype,
        encoder_tokens=o.optional(parse_tokens, encoder_tokens, "--encoder-tokens"),
        kv_memory_bytes=o.optional(parse_size, kv_memory, "--kv-memory"),
        what_if=o.what_if_of(attention, kv_heads, None, None),
    )
    if plot is not None:
        from kvcalc.output.plot import write_plot

        write_plot(plot, grid.chart(most_contexts=500, most_lines=12))
    if output.path is not None:
        if grid.num_points > MOST_HELD:
            raise UsageError(
                f"--get looks into a document held in memory, and {grid.num_points:,} points are too many",
                f"up to {MOST_HELD:,}; or --format jsonl, and pick from its lines",
            )
        emit({**grid.head(), "points": list(grid.points()), "warnings": grid.warnings}, output, "sweep")
    elif output.format == "human":
        from itertools import islice

        shown = {"points": list(islice(grid.points(), MOST_SHOWN)), "chart": grid.chart(most_contexts=60, most_lines=8)}
        emit({**grid.head(), **shown, "warnings": grid.warnings}, output, "sweep")
    elif output.format == "json":
        from kvcalc.output.rows import write_document

        write_document(grid.head(), "points", COLUMNS, grid.blocks(), {"warnings": grid.warnings})
    else:
        from kvcalc.output.rows import write_rows

        warn(grid.warnings)
        write_rows(COLUMNS, grid.blocks(), output.format)
