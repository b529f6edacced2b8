"""`kvcalc sweep`: how do the bytes change with the context, the batch, the cache's type, the devices and the engine?"""

from itertools import islice

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import kinds_of, output_of, question_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import ModelError, UsageError
from kvcalc.units import parse_count, parse_tokens

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

FORMATS = ("human", "tsv", "csv", "jsonl", "json")

# The most rows of a human table (--format csv prints all rows), of a report, and held in memory for --get.
MOST_SHOWN = 40
MOST_REPORTED = 1000
MOST_HELD = 100_000


@app.command(cls=o.taking(*o.declared("sweep")))
def sweep(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Compute a grid of contexts, batches, devices and engines."""
    from kvcalc.model.variants import WhatIf
    from kvcalc.notes import describe_notes
    from kvcalc.output.sink import warn
    from kvcalc.planning.answers.axis import parse_axis, parse_engines
    from kvcalc.planning.answers.combination import COLUMNS
    from kvcalc.planning.answers.sweep import sweep as ask

    given, plot = ctx.params, ctx.params["plot"]
    output = output_of(given, "sweep", FORMATS, is_list=True)
    check_report(given)
    if plot is not None:
        from kvcalc.output.plot import check_plot_file

        check_plot_file(plot)
    question = question_of(given, own=f"context batch kv-dtype tp engine gpu {o.GROUPS['DEVICE_FIGURES']}")
    grid = ask(
        question,
        contexts=None if given["context"] is None else parse_axis(given["context"], "--context", parse_tokens),
        batches=parse_axis(given["batch"], "--batch", parse_count),
        kv_dtypes=[name.casefold() for name in o.names_of(given["kv_dtype"], "--kv-dtype")],
        tensor_parallel_sizes=None if given["tp"] is None else parse_axis(given["tp"], "--tp", parse_count),
        engines=parse_engines(o.names_of(given["engine"], "--engine")),
        gpus=kinds_of(o.names_of(given["gpu"], "--gpu"), given),
    )
    warnings = describe_notes(grid.notes)
    if plot is not None:
        from kvcalc.output.plot import write_plot

        write_plot(plot, grid.chart(most_contexts=500, most_lines=12))
    if given["report"] is not None:
        points = list(islice(grid.points(), MOST_REPORTED))
        chart = grid.chart(most_contexts=60, most_lines=7)
        write_report(ctx, {**grid.head(), "points": points, "chart": chart, "warnings": warnings}, "sweep")
    if output.path is not None:
        if grid.num_points > MOST_HELD:
            raise UsageError(
                f"--get: {grid.num_points:,} points are too many to hold in memory",
                f"use at most {MOST_HELD:,}, or use --format jsonl and filter its lines",
            )
        output.emit({**grid.head(), "points": list(grid.points()), "warnings": warnings}, "sweep")
    elif output.format == "human":
        shown = {"points": list(islice(grid.points(), MOST_SHOWN)), "chart": grid.chart(most_contexts=60, most_lines=8)}
        output.emit({**grid.head(), **shown, "warnings": warnings}, "sweep")
    elif output.format == "json":
        from kvcalc.output.rows import write_document

        write_document(grid.head(), "points", COLUMNS, grid.blocks(), {"warnings": warnings})
    else:
        from kvcalc.output.rows import write_rows

        warn(warnings)
        write_rows(COLUMNS, grid.blocks(), output.format)
    if question.what_if == WhatIf() and ("fit", "unknown") in {(note.part, note.code) for note in grid.notes}:
        raise typer.Exit(ModelError.exit_code)
