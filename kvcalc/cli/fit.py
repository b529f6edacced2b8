"""`kvcalc fit`: does it fit, how fast is it, and how is it started?"""

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import output_of, question_of
from kvcalc.errors import DoesNotFitError, UsageError

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(cls=o.taking(*o.declared("fit")))
def fit(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Check whether a model's server starts on a device.

    It also shows one user's speed, the command, and the longest context and the largest batch that fit.
    """
    from kvcalc.planning.answers.fit import fit as ask
    from kvcalc.planning.answers.fit import has_workload, is_refused

    output = output_of(ctx.params)
    question = question_of(ctx.params)
    if question.asks_several:
        words = f"{ctx.params['model']} --gpu {ctx.params['gpu'] or 'h100'} --engine {ctx.params['engine']}"
        raise UsageError("kvcalc fit needs one engine", f"for several: kvcalc compare {words}")
    if question.devices is None:
        raise UsageError("kvcalc fit needs a device", "for example --gpu h100x8, or describe one: --gpu-memory 80GB")
    with output.refusals():
        document = ask(question)
    if ctx.params["explain"]:
        from kvcalc.planning.answers.sources import sources_of

        document["sources"] = sources_of(question, document)
    output.emit(document, "fit")
    if is_refused(document, has_workload(question), ctx.params["strict"]):
        raise typer.Exit(DoesNotFitError.exit_code)
