"""`kvcalc fit`: does it fit, and what is the most that fits?"""

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import output_of, question_of
from kvcalc.errors import DoesNotFitError, UsageError

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """\
The exit code is 4 if the model does not fit, and with --strict also if the fit is tight. The bytes of the weights
and the cache are exact. The bytes of activations, CUDA graphs and contexts are estimates, each on its own line.

Examples:
  kvcalc fit llama-3-70b --gpu h100x4 --context 8192
  kvcalc fit llama-3.1-8b --gpu rtx-4090 --engine vllm --context 32k
  kvcalc fit deepseek-v3 --gpu h200x8 --dtype fp8 --engine sglang --batch 32 --json
  kvcalc fit qwen3-8b --gpu-memory 24GiB --dtype int4
"""


OPTIONS = [
    *o.shared(o.WORKLOAD),
    o.option(
        "engine",
        "Engine whose memory rules to use: transformers, vllm, sglang, tensorrt-llm, llama.cpp or mlx. logical "
        "reserves a tenth of the memory; vllm@0.11 or sglang@0.5.9 is an older release.",
        metavar="NAME[@RELEASE]",
    ),
    *o.shared(f"kv-memory {o.WHAT_IF} {o.DEVICE} {o.SERVING} {o.SHARED} {o.OFFLOAD} {o.IMAGES} {o.DRAFTING}"),
    o.flag("--strict", "Exit with code 4 also if the fit is tight: the margin is within the range of the estimates."),
    *o.engine_settings(),
    *o.output(path="fit.free_bytes"),
]


@app.command(epilog=EPILOG, cls=o.taking(*OPTIONS))
def fit(ctx: typer.Context, model: o.RequiredModel) -> None:
    """Check whether a model fits on a device, and show the limits.

    The limits are the longest context and the largest batch that fit.
    """
    from kvcalc.planning.answers.fit import fit as ask

    output = output_of(ctx.params)
    question = question_of(ctx.params)
    if question.asks_several:
        raise UsageError("kvcalc fit needs one engine", "for several: kvcalc estimate MODEL --gpu h100 --engine all")
    if question.devices is None:
        raise UsageError("kvcalc fit needs a device", "for example --gpu h100x8, or describe one: --gpu-memory 80GB")
    document = ask(question)
    output.emit(document, "fit")
    if not document["fit"]["fits"] or (ctx.params["strict"] and document["fit"]["verdict"] == "tight"):
        raise typer.Exit(DoesNotFitError.exit_code)
