"""`kvcalc fit`: does it fit, and what at most?"""

from typing import Annotated

import typer

from kvcalc.cli import device_options as d
from kvcalc.cli import options as o
from kvcalc.errors import DoesNotFitError, UsageError

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

# What `estimate` asks and `fit` does not: no what-ifs, no model by flags, no memory for the cache alone, no speed.
_NOT_ASKED = (
    "attention", "kv_heads", "kv_lora_rank", "qk_rope_head_dim", "layers", "heads", "head_dim", "hidden_size",
    "sliding_window", "assume_full_attention", "kv_memory", "check", "ep", "input_tokens", "output_tokens",
    "concurrency", "calibrate",
)  # fmt: skip

EPILOG = """The status is 4 where it does not fit. Weights and cache are counted; activations, graphs and contexts are
estimates (each a named line).

Examples:

  kvcalc fit llama-3-70b --gpu h100x4 --context 8192

  kvcalc fit llama-3.1-8b --gpu rtx-4090 --engine vllm --context 32k

  kvcalc fit deepseek-v3 --gpu h200x8 --dtype fp8 --engine sglang --batch 32 --json

  kvcalc fit qwen3-8b --gpu-memory 24GiB --dtype int4
"""


@app.command(epilog=EPILOG)
def fit(
    ctx: typer.Context,
    model: o.RequiredModel,
    gpu: d.Gpu = None,
    num_gpus: d.NumGpus = None,
    gpu_memory: d.GpuMemory = None,
    gpu_bandwidth: d.GpuBandwidth = None,
    flops: d.Flops = None,
    context: o.Context = None,
    max_model_len: o.MaxModelLen = None,
    batch: o.Batch = "1",
    dtype: o.Dtype = None,
    kv_dtype: o.KvDtype = "auto",
    tp: o.OptionalTp = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="NAME[@RELEASE]",
            help="Divide the memory as this engine does: logical (a tenth kept back), transformers, vllm, sglang, "
            "tensorrt-llm, llama.cpp.",
        ),
    ] = "logical",
    pipeline_parallel_size: o.PipelineParallelSize = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    gpu_memory_utilization: o.GpuMemoryUtilization = None,
    max_num_seqs: o.MaxNumSeqs = None,
    enforce_eager: o.EnforceEager = False,
    mem_fraction_static: o.MemFractionStatic = None,
    free_gpu_memory_fraction: o.FreeGpuMemoryFraction = None,
    cache_type_k: o.CacheTypeK = None,
    cache_type_v: o.CacheTypeV = None,
    ubatch_size: o.UbatchSize = None,
    flash_attn: o.FlashAttn = None,
    encoder_tokens: o.EncoderTokens = None,
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """Does a model fit on these devices, with how long a context and how large a batch?"""
    from kvcalc.cli.estimate import ENGINE_OPTIONS, question_of
    from kvcalc.output.sink import choose, emit
    from kvcalc.planning.fit import fit as ask

    output = choose(format, json, get, no_color)
    given = {**dict.fromkeys((*ENGINE_OPTIONS, *_NOT_ASKED)), **ctx.params}
    if engine.casefold() == "all":
        raise UsageError("kvcalc fit asks one engine", "side by side: kvcalc estimate MODEL --gpu h100 --engine all")
    spec, name, question = question_of(given)
    devices = question.pop("devices")
    if devices is None:
        raise UsageError("fit into what?", "name a device, --gpu h100x8, or describe one, --gpu-memory 80GB")
    document = ask(spec, devices, engine=name, **question)
    emit(document, output, "fit")
    if not document["fit"]["fits"]:
        raise typer.Exit(DoesNotFitError.exit_code)
