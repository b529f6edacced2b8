"""`kvcalc estimate`: how big is the cache?"""

from collections.abc import Mapping
from typing import Annotated, Any, Optional

import typer

from kvcalc.cli import device_options as d
from kvcalc.cli import options as o
from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

EPILOG = """Examples:

  kvcalc estimate llama-3-70b --context 8192

  kvcalc estimate deepseek-v3 --context 128k --batch 16 --json

  kvcalc estimate llama-7b --attention gqa --kv-heads 4

  kvcalc estimate --layers 32 --heads 32 --kv-heads 8 --head-dim 128

  kvcalc estimate mistral-7b-v0.1 --context 32k --get kv_cache.total_bytes

  kvcalc estimate llama-3-8b --context 8k --kv-memory 40GiB

  kvcalc estimate gpt-oss-120b --context 32k --engine all

  kvcalc estimate llama-3-70b --context 8k --gpu h100x4 --engine vllm --check

  kvcalc estimate llama-3-70b --gpu h100x4 --dtype fp8 --engine vllm --batch 16

  kvcalc estimate qwen3-32b --gpu h200 --engine sglang --input-tokens 2k --output-tokens 500 --concurrency 32
"""


@app.command(epilog=EPILOG)
def estimate(
    ctx: typer.Context,
    model: o.Model = None,
    context: o.Context = None,
    max_model_len: o.MaxModelLen = None,
    batch: o.Batch = "1",
    dtype: o.Dtype = None,
    kv_dtype: o.KvDtype = "auto",
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="NAME[@RELEASE]",
            help="Count as this engine does: logical (the formula), transformers, vllm, sglang, tensorrt-llm, "
            "llama.cpp; all: side by side. vllm@0.11 counts as that release did.",
        ),
    ] = "logical",
    cache: o.Cache = None,
    block_size: o.BlockSize = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    no_async_scheduling: o.NoAsyncScheduling = False,
    enable_prefix_caching: o.EnablePrefixCaching = False,
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    pipeline_parallel_size: o.PipelineParallelSize = None,
    page_size: o.PageSize = None,
    swa_full_tokens_ratio: o.SwaFullTokensRatio = None,
    max_running_requests: o.MaxRunningRequests = None,
    context_length: o.ContextLength = None,
    max_mamba_cache_size: o.MaxMambaCacheSize = None,
    tokens_per_block: o.TokensPerBlock = None,
    max_tokens: o.MaxTokens = None,
    free_gpu_memory_fraction: o.FreeGpuMemoryFraction = None,
    max_attention_window: o.MaxAttentionWindow = None,
    cache_type_k: o.CacheTypeK = None,
    cache_type_v: o.CacheTypeV = None,
    parallel: o.Parallel = None,
    kv_unified: o.KvUnified = False,
    ubatch_size: o.UbatchSize = None,
    swa_full: o.SwaFull = False,
    flash_attn: o.FlashAttn = None,
    before_pull: o.BeforePull = None,
    gpu_memory_utilization: o.GpuMemoryUtilization = None,
    max_num_seqs: o.MaxNumSeqs = None,
    enforce_eager: o.EnforceEager = False,
    mem_fraction_static: o.MemFractionStatic = None,
    encoder_tokens: o.EncoderTokens = None,
    tp: o.OptionalTp = None,
    gpu: d.Gpu = None,
    num_gpus: d.NumGpus = None,
    gpu_memory: d.GpuMemory = None,
    gpu_bandwidth: d.GpuBandwidth = None,
    flops: d.Flops = None,
    ep: d.Ep = None,
    input_tokens: d.InputTokens = None,
    output_tokens: d.OutputTokens = None,
    concurrency: d.Concurrency = None,
    calibrate: d.Calibrate = None,
    kv_memory: o.KvMemory = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Leave with status 4 where it does not fit; needs --gpu or --kv-memory."),
    ] = False,
    assume_full_attention: Annotated[
        bool,
        typer.Option(
            "--assume-full-attention", help="Of a config not understood: an upper bound, K and V of all in every layer."
        ),
    ] = False,
    attention: o.Attention = None,
    kv_heads: o.KvHeads = None,
    kv_lora_rank: o.KvLoraRank = None,
    qk_rope_head_dim: o.QkRopeHeadDim = None,
    layers: Annotated[
        Optional[str], typer.Option("--layers", metavar="L", help="Layers.", rich_help_panel="Model by flags")
    ] = None,
    heads: o.Heads = None,
    head_dim: o.HeadDim = None,
    hidden_size: o.HiddenSize = None,
    sliding_window: o.SlidingWindow = None,
    format: o.Format = None,
    json: o.Json = False,
    get: o.Get = None,
    no_color: o.NoColor = False,
) -> None:
    """How big is the KV cache of a model, and what would it be as MHA, MQA, GQA and MLA?"""
    from kvcalc.output.sink import choose, emit

    output = choose(format, json, get, no_color)
    document, kind = answer(ctx.params)
    emit(document, output, kind)
    if check:
        raise typer.Exit(check_fit(document))


def check_fit(document: Mapping[str, Any]) -> int:
    """The status of a document's fit: 0, or 4. ModelError (exit 3) where whether it fits is not known."""
    from kvcalc.errors import DoesNotFitError, ModelError

    fit = document["fit"]
    if fit is None:
        reason = next((text for text in document["warnings"] if text.startswith("fit: ")), "fit: not known")
        raise ModelError(reason.removeprefix("fit: "), "--kv-memory SIZE asks of the cache alone")
    return 0 if fit["fits"] else DoesNotFitError.exit_code


# The options that go to the engine as text, by their parameters' names; they are its own where their name is.
ENGINE_OPTIONS = (
    "cache", "block_size", "max_num_batched_tokens", "no_async_scheduling", "enable_prefix_caching",
    "num_speculative_tokens", "page_size", "swa_full_tokens_ratio", "max_running_requests", "context_length",
    "max_mamba_cache_size", "tokens_per_block", "max_tokens", "free_gpu_memory_fraction", "max_attention_window",
    "cache_type_k", "cache_type_v", "parallel", "kv_unified", "ubatch_size", "swa_full", "flash_attn", "before_pull",
    "gpu_memory_utilization", "max_num_seqs", "enforce_eager", "mem_fraction_static",
)  # fmt: skip


def question_of(given: Mapping[str, Any], model_of: o.ModelOf = o.model_of) -> tuple[ModelSpec, str, dict[str, Any]]:
    """The model, the engine's name, and the rest of what these options ask `planning.estimate`.

    `given` holds every parameter of `estimate` by its name, as text, None or a flag.
    """
    from kvcalc.units import parse_count, parse_size, parse_tokens

    what_if = o.what_if_of(given["attention"], given["kv_heads"], given["kv_lora_rank"], given["qk_rope_head_dim"])
    flags = {
        "--layers": given["layers"],
        "--heads": given["heads"],
        "--head-dim": given["head_dim"],
        "--hidden-size": given["hidden_size"],
        "--sliding-window": given["sliding_window"],
    }
    spec, what_if = model_of(given["model"], what_if, flags, given["assume_full_attention"])
    devices, tp = d.layout_of(given)
    if given["check"] and devices is None and given["kv_memory"] is None:
        raise UsageError("--check: into what?", "name a device, --gpu h100, or a memory, --kv-memory 40GiB")
    encoder_tokens, kv_memory, engine = given["encoder_tokens"], given["kv_memory"], given["engine"].casefold()
    question: dict[str, Any] = {
        "context_tokens": o.context_of(given["context"], given["max_model_len"]),
        "batch_size": parse_count(given["batch"], "--batch"),
        "dtype": given["dtype"],
        "kv_dtype": given["kv_dtype"],
        "engine_settings": o.engine_settings({name.replace("_", "-"): given[name] for name in ENGINE_OPTIONS}),
        "encoder_tokens": o.optional(parse_tokens, encoder_tokens, "--encoder-tokens"),
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": d.stages_of(given),
        "kv_memory_bytes": o.optional(parse_size, kv_memory, "--kv-memory"),
        "devices": devices,
        "speed": d.speed_of(given),
        "what_if": what_if,
    }
    return spec, engine, question


def answer(given: Mapping[str, Any], model_of: o.ModelOf = o.model_of) -> tuple[dict[str, Any], str]:
    """The document these options ask for, and its kind; `kvcalc batch` asks the same of every line.

    `given` is `question_of`'s.
    """
    spec, engine, question = question_of(given, model_of)
    if engine == "all":
        if given["check"]:
            raise UsageError("--check asks one engine", "for example: --check --engine vllm")
        from kvcalc.planning.engines import compare_engines

        return compare_engines(spec, **question), "engines"
    from kvcalc.planning.estimate import estimate as ask

    return ask(spec, engine=engine, **question), "estimate"
