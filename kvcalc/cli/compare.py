"""`kvcalc compare`: how much memory does each of these models take?"""

from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import devices_of, output_of, question_of
from kvcalc.errors import UsageError
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """\
If a model is refused, its row has the reason. The exit code is 0 if at least one row has an answer.

Examples:
  kvcalc compare llama-3-70b deepseek-v3 gemma-3-27b --context 8192
  kvcalc compare llama-3-70b --attention all --context 8k
  kvcalc compare llama-3.3-70b qwen3-32b gpt-oss-120b --gpu h100x4,h200x2 --context 32k --batch 16
  kvcalc compare gpt-oss-120b qwen3-30b-a3b --engine vllm,sglang --kv-memory 40GiB --json
"""


OPTIONS = [
    *o.shared(o.WORKLOAD),
    o.option("engine", "Engines whose memory layout to use: vllm,sglang or all. logical is the formula."),
    *o.shared("kv-memory"),
    o.option("attention",
        "Compute the cache as if the models had this attention: mha,gqa or all.", metavar="LIST", several=True),
    o.option("gpu",
        "Devices, and how many of each: h100x4,h200x2. kvcalc gpus lists the names; local is the device in this "
        "machine.", metavar="LIST"),
    *o.shared(f"num-gpus {o.DEVICE_FIGURES} {o.SPEED} {o.PREFIX} {o.SHARED} {o.DRAFTING}"),
    *o.engine_settings(),
    *o.output(path="models.0.total_bytes"),
]  # fmt: skip


@app.command(epilog=EPILOG, cls=o.taking(*OPTIONS))
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
    from kvcalc.planning.answers.axis import parse_engines
    from kvcalc.planning.answers.compare import compare as ask
    from kvcalc.planning.answers.compare import first_of, load_each, parse_attentions

    given = ctx.params
    output = output_of(given, "compare")
    engines = parse_engines(o.names_of(given["engine"], "--engine"))
    names: list[str | None] = [*o.names_of(given["gpu"], "--gpu")] or [None]
    if len(names) > 1 and any(given[name] is not None for name in ("gpu_memory", "gpu_bandwidth", "flops")):
        raise UsageError("--gpu-memory, --gpu-bandwidth and --flops describe one device, but --gpu names several")
    asked = [{**given, "engine": engines[0], "gpu": name} for name in names]
    loaded = load_each(models)
    first = first_of(loaded)

    def model_of(name: str | None, *_: object) -> tuple[ModelSpec, WhatIf]:
        """The model that drafts, or the first one that is compared."""
        return (first if name is None else load_model(name)), WhatIf()

    document = ask(
        loaded,
        question_of({**asked[0], "model": None}, model_of, own="attention"),
        attentions=parse_attentions(given["attention"]),
        engines=engines,
        devices=[devices for devices in map(devices_of, asked) if devices is not None],
    )
    output.emit(document, "compare")
