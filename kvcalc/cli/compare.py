"""`kvcalc compare`: which of these models takes how much?"""

from typing import Annotated, Optional

import typer

from kvcalc.cli import device_options as d
from kvcalc.cli import options as o

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """A model that is refused has its reason in its row; the status is 0 as long as one of them is answered.

Examples:

  kvcalc compare llama-3-70b deepseek-v3 gemma-3-27b --context 8192

  kvcalc compare llama-3-70b --attention all --context 8k

  kvcalc compare llama-3.3-70b qwen3-32b gpt-oss-120b --gpu h100x4 --context 32k --batch 16

  kvcalc compare gpt-oss-120b qwen3-30b-a3b --engine vllm --kv-memory 40GiB --json
"""


@app.command(epilog=EPILOG)
def compare(
    ctx: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Presets, config.json files, folders that hold one, hf:org/name."),
    ],
    context: o.Context = None,
    max_model_len: o.MaxModelLen = None,
    batch: o.Batch = "1",
    dtype: o.Dtype = None,
    kv_dtype: o.KvDtype = "auto",
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME[@RELEASE]", help="Count as this engine does, by its defaults.")
    ] = "logical",
    encoder_tokens: o.EncoderTokens = None,
    tp: o.OptionalTp = None,
    gpu: d.Gpu = None,
    num_gpus: d.NumGpus = None,
    gpu_memory: d.GpuMemory = None,
    gpu_bandwidth: d.GpuBandwidth = None,
    flops: d.Flops = None,
    kv_memory: o.KvMemory = None,
    attention: Annotated[
        Optional[str],
        typer.Option("--attention", metavar="KINDS", help="What if: all, or a list of mha, mqa, gqa and mla."),
    ] = None,
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """Models side by side at one workload, or one model as every kind of attention."""
    from kvcalc.output.sink import check_path, choose, emit
    from kvcalc.planning.compare import compare as ask
    from kvcalc.planning.compare import parse_attentions
    from kvcalc.units import parse_count, parse_size, parse_tokens

    output = choose(format, json, get, no_color)
    check_path(output, "compare")
    devices, size = d.layout_of({**ctx.params, "pipeline_parallel_size": None})
    document = ask(
        models,
        attentions=parse_attentions(attention),
        context_tokens=o.context_of(context, max_model_len),
        batch_size=parse_count(batch, "--batch"),
        dtype=dtype,
        kv_dtype=kv_dtype,
        engine=engine.casefold(),
        encoder_tokens=o.optional(parse_tokens, encoder_tokens, "--encoder-tokens"),
        tensor_parallel_size=size,
        devices=devices,
        kv_memory_bytes=o.optional(parse_size, kv_memory, "--kv-memory"),
    )
    emit(document, output, "compare")
