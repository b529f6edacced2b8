"""`kvcalc estimate`: how big is the cache?"""

from typing import TYPE_CHECKING, Any

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import output_of, question_of
from kvcalc.cli.report import check_report, write_report
from kvcalc.errors import UsageError

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.question.question import Question

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(cls=o.taking(*o.declared("estimate")))
def estimate(ctx: typer.Context, model: o.Model = None) -> None:
    """Compute the size of a model's KV cache.

    With a device, also check whether the model fits and how fast it decodes.
    """
    from kvcalc.model.variants import WhatIf

    output = output_of(ctx.params)
    check_report(ctx.params)
    question = question_of(ctx.params)
    shown: dict[str, Any] = {"variants": True} if ctx.params["variants"] and not question.asks_several else {}
    if ctx.params["check"]:
        if question.devices is None and question.kv_memory_bytes is None:
            raise UsageError("--check needs a device or a memory size", "for example --gpu h100, or --kv-memory 40GiB")
        if question.asks_several:
            raise UsageError("--check needs one engine", "for example --check --engine vllm")
    elif ctx.params["strict"]:
        raise UsageError("--strict needs --check", "add --check")
    document: Any
    with output.refusals():
        document, kind = answer(question)
    # A table of several engines has no sources.
    if ctx.params["explain"] and not question.asks_several:
        from kvcalc.planning.answers.sources import sources_of

        document["sources"] = sources_of(question, document)
    _write_report(ctx, question, document, kind)
    fit = document.get("fit")
    if output.format == "human" and output.path is None and question.devices is not None and fit and not fit["fits"]:
        from kvcalc.planning.answers.fit import fit as fit_alone

        shown["fit_alone"] = fit_alone(question)
    # A what-if changes the weights, which are then not counted: its cache is the whole answer.
    is_server = question.devices is not None and kind == "estimate" and question.what_if == WhatIf()
    lacks_fit = is_server and document["fit"] is None
    emitted = document
    if lacks_fit and output.format != "json":
        # The error at the end says it.
        told = [note for note in document["warnings"] if (note["part"], note["code"]) != ("fit", "unknown")]
        emitted = {**document, "warnings": told}
    output.emit(emitted, kind, **shown)
    if lacks_fit or ctx.params["check"]:
        from kvcalc.errors import DoesNotFitError
        from kvcalc.planning.answers.estimate import fit_of
        from kvcalc.planning.answers.fit import has_workload, is_refused

        fit_of(document)
        if is_refused(document, has_workload(question), ctx.params["strict"]):
            raise typer.Exit(DoesNotFitError.exit_code)


def _write_report(ctx: typer.Context, question: "Question", document: Any, kind: str) -> None:
    """Write the report, with the times over the number of clients if requests are served."""
    speed = document.get("throughput")
    if ctx.params["report"] is not None and question.speed is not None and speed and speed["serving"]:
        from kvcalc.planning.answers.estimate import answer as ask

        clients = document["workload"]["concurrency"] or speed["serving"]["concurrency"]
        rows = []
        for number in sorted({max(1, round(clients * share)) for share in (0.1, 0.25, 0.5, 1, 1.5, 2)}):
            throughput = ask(question._replace(speed=question.speed._replace(concurrency=number))).document[
                "throughput"
            ]
            served = throughput and throughput["serving"]
            if served:
                rows.append({
                    "load": number, "ttft_mean_seconds": served["ttft_seconds"],
                    "tpot_mean_seconds": served["tpot_seconds"],
                })  # fmt: skip
        document = {**document, "load_curve": rows}
    write_report(ctx, document, kind)


def answer(question: "Question") -> "tuple[documents.Estimate | documents.Engines, str]":
    """The document that answers a question, and its kind."""
    if question.asks_several:
        from kvcalc.planning.answers.compare import compare_engines

        return compare_engines(question), "engines"
    from kvcalc.planning.answers.document import estimate as ask

    return ask(question), "estimate"
