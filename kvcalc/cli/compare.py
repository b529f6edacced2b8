"""`kvcalc compare`: how much memory does each of these models take?"""

from typing import Annotated

import typer

from kvcalc.cli import options as o
from kvcalc.cli.question import devices_of, output_of, settings_of, workload_of
from kvcalc.errors import UsageError

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
    o.engine("Engines whose memory layout to use: vllm,sglang or all. logical is the formula."),
    *o.shared("kv-memory"),
    o.value(
        "--attention", "LIST", "Compute the cache as if the models had this attention: mha,gqa or all.", several=True
    ),
    o.value(
        "--gpu", "LIST",
        "Devices, and how many of each: h100x4,h200x2. kvcalc gpus lists the names; local is the device in this "
        "machine.",
        panel="Device", several=True,
    ),
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
    from kvcalc.planning.axis import parse_engines
    from kvcalc.planning.compare import compare as ask
    from kvcalc.planning.compare import parse_attentions

    given = ctx.params
    output = output_of(given, "compare")
    engines = parse_engines(o.names_of(given["engine"], "--engine"))
    names: list[str | None] = [*o.names_of(given["gpu"], "--gpu")] or [None]
    if len(names) > 1 and any(given[name] is not None for name in ("gpu_memory", "gpu_bandwidth", "flops")):
        raise UsageError("--gpu-memory, --gpu-bandwidth and --flops describe one device, but --gpu names several")
    asked = [{**given, "engine": engines[0], "gpu": name} for name in names]
    # Each row has its own engine and devices.
    own = ("engine", "engine_settings", "devices")
    shared = {name: value for name, value in workload_of(asked[0]).items() if name not in own}
    document = ask(
        models,
        attentions=parse_attentions(given["attention"]),
        engines=engines,
        devices=[devices for devices in map(devices_of, asked) if devices is not None],
        engine_settings=settings_of(given),
        **shared,
    )
    output.emit(document, "compare")
