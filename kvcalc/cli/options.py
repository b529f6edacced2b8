"""Options more than one command has, and what their text becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Optional, TypeVar, Union

import typer

from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf
from kvcalc.units import parse_count, parse_tokens, parse_vllm_tokens

_Parsed = TypeVar("_Parsed")

_DESCRIBE = "Model by flags"
_OUTPUT = "Output"

Model = Annotated[
    Optional[str],
    typer.Argument(
        metavar="MODEL",
        help="A preset (`kvcalc models`), a config.json or .gguf file, a folder that holds one, - for stdin, or "
        "hf:org/name.",
    ),
]
RequiredModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A preset (`kvcalc models`), a config.json, a folder that holds one, - for stdin, or hf:org/name.",
    ),
]
EncoderTokens = Annotated[
    Optional[str],
    typer.Option(
        "--encoder-tokens",
        metavar="N",
        help="Tokens of the encoder's output (T5, BART) or of an image (Llama 3.2 Vision). Default: the model's "
        "own, else --context.",
    ),
]
Context = Annotated[
    Optional[str],
    typer.Option(
        "--context",
        "-c",
        metavar="N",
        help="Tokens per sequence: 8192, 8k, 1M (k is 1024). Default: 4096 or the model's maximum.",
    ),
]
MaxModelLen = Annotated[
    Optional[str],
    typer.Option("--max-model-len", metavar="N", help="--context as vLLM reads it: k is 1000, K is 1024."),
]
Batch = Annotated[str, typer.Option("--batch", "-b", metavar="B", help="Sequences.")]
Dtype = Annotated[
    Optional[str],
    typer.Option(
        "--dtype", metavar="TYPE", help="The weights' type: bf16, fp16, fp32, fp8, ... Default: the config's."
    ),
]
KvDtype = Annotated[
    str,
    typer.Option(
        "--kv-dtype",
        "--kv-cache-dtype",
        metavar="TYPE",
        help="The cache's type: bf16, fp8, q8_0, ... auto: --dtype where it has 16 or 32 bits, else the config's. "
        "Also --kv-cache-dtype.",
    ),
]
Tp = Annotated[
    str,
    typer.Option(
        "--tp",
        "--tensor-parallel-size",
        metavar="T",
        help="Devices the heads are split over. Also --tensor-parallel-size.",
    ),
]
OptionalTp = Annotated[
    Optional[str],
    typer.Option(
        "--tp",
        "--tensor-parallel-size",
        metavar="T",
        help="Devices the heads are split over: 1, or --num-gpus. Also --tensor-parallel-size.",
    ),
]
KvMemory = Annotated[
    Optional[str],
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        help="Memory for the cache on each device (80G, 80GiB): the longest context and largest batch it holds.",
    ),
]
Attention = Annotated[
    Optional[str], typer.Option("--attention", metavar="KIND", help="What if the model had mha, mqa, gqa or mla.")
]
KvHeads = Annotated[
    Optional[str],
    typer.Option("--kv-heads", metavar="G", help="KV heads: a what-if with MODEL, the model's own without."),
]
KvLoraRank = Annotated[
    Optional[str], typer.Option("--kv-lora-rank", metavar="R", help="MLA's latent width, for the what-if.")
]
QkRopeHeadDim = Annotated[
    Optional[str], typer.Option("--qk-rope-head-dim", metavar="D", help="MLA's rotary key width, for the what-if.")
]
_ENGINE = "The engine's own settings"
Cache = Annotated[
    Optional[str],
    typer.Option(
        "--cache",
        metavar="dynamic|static",
        help="transformers: which of its caches. Default: dynamic.",
        rich_help_panel=_ENGINE,
    ),
]
BlockSize = Annotated[
    Optional[str],
    typer.Option("--block-size", metavar="N", help="vllm: tokens a block. Default: 16.", rich_help_panel=_ENGINE),
]
MaxNumBatchedTokens = Annotated[
    Optional[str],
    typer.Option(
        "--max-num-batched-tokens",
        metavar="N",
        help="vllm: tokens of one step. Default: 8192, its own on H100.",
        rich_help_panel=_ENGINE,
    ),
]
NoAsyncScheduling = Annotated[
    bool,
    typer.Option(
        "--no-async-scheduling",
        help="vllm: one step in flight instead of two.",
        rich_help_panel=_ENGINE,
    ),
]
EnablePrefixCaching = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching",
        help="vllm: count the states prefix caching keeps.",
        rich_help_panel=_ENGINE,
    ),
]
NumSpeculativeTokens = Annotated[
    Optional[str],
    typer.Option("--num-speculative-tokens", metavar="N", help="vllm: tokens drafted a step.", rich_help_panel=_ENGINE),
]
PipelineParallelSize = Annotated[
    Optional[str],
    typer.Option("--pipeline-parallel-size", "--pp", metavar="P", help="Stages the layers are cut into. Also --pp."),
]


def _of_engine(*names: str, help: str, metavar: Optional[str] = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=_ENGINE)


PageSize = Annotated[
    Optional[str], _of_engine("--page-size", metavar="N", help="sglang: tokens a page. Default: 1, 64 with an indexer.")
]
SwaFullTokensRatio = Annotated[
    Optional[str],
    _of_engine("--swa-full-tokens-ratio", metavar="R", help="sglang: the window pool's share. Default: 0.8."),
]
MaxRunningRequests = Annotated[
    Optional[str], _of_engine("--max-running-requests", metavar="N", help="sglang: count the request table's rows.")
]
ContextLength = Annotated[
    Optional[str],
    _of_engine("--context-length", metavar="N", help="sglang: the request table's width. Default: the model's."),
]
MaxMambaCacheSize = Annotated[
    Optional[str], _of_engine("--max-mamba-cache-size", metavar="N", help="sglang: states. Default: one a sequence.")
]
TokensPerBlock = Annotated[
    Optional[str], _of_engine("--tokens-per-block", metavar="N", help="tensorrt-llm: tokens a block. Default: 32.")
]
MaxTokens = Annotated[
    Optional[str],
    _of_engine("--max-tokens", metavar="N", help="tensorrt-llm: tokens of the pool, whatever the memory."),
]
FreeGpuMemoryFraction = Annotated[
    Optional[str],
    _of_engine("--free-gpu-memory-fraction", metavar="F", help="tensorrt-llm: the pool's share of --kv-memory."),
]
MaxAttentionWindow = Annotated[
    Optional[str],
    _of_engine("--max-attention-window", metavar="W,W", help="tensorrt-llm: the layers' windows in turn, as 128,32k."),
]
CacheTypeK = Annotated[
    Optional[str],
    _of_engine("--cache-type-k", "-ctk", metavar="TYPE", help="llama.cpp: K's type. Default: f16. Also -ctk."),
]
CacheTypeV = Annotated[
    Optional[str],
    _of_engine("--cache-type-v", "-ctv", metavar="TYPE", help="llama.cpp: V's type. Default: f16. Also -ctv."),
]
Parallel = Annotated[
    Optional[str],
    _of_engine("--parallel", "-np", metavar="N", help="llama.cpp: slots where more than --batch. Also -np."),
]
KvUnified = Annotated[bool, _of_engine("--kv-unified", "-kvu", help="llama.cpp: slots share one stream. Also -kvu.")]
UbatchSize = Annotated[
    Optional[str],
    _of_engine("--ubatch-size", "-ub", metavar="N", help="llama.cpp: tokens of a step. Default: 512. Also -ub."),
]
SwaFull = Annotated[bool, _of_engine("--swa-full", help="llama.cpp: windows kept whole.")]
FlashAttn = Annotated[
    Optional[str],
    _of_engine("--flash-attn", "-fa", metavar="on|off|auto", help="llama.cpp: off pads V. Default: auto. Also -fa."),
]
BeforePull = Annotated[
    Optional[str],
    _of_engine(
        "--before-pull",
        metavar="N",
        help="llama.cpp: a build from before this pull request: 19067, 16812, 13194 or 12801.",
    ),
]
GpuMemoryUtilization = Annotated[
    Optional[str],
    _of_engine(
        "--gpu-memory-utilization", metavar="F", help="vllm: its share of the device. Default: 0.92, before 0.21 0.9."
    ),
]
MaxNumSeqs = Annotated[
    Optional[str], _of_engine("--max-num-seqs", metavar="N", help="vllm: requests at once. Default: the device's.")
]
EnforceEager = Annotated[bool, _of_engine("--enforce-eager", help="vllm: no CUDA graphs.")]
MemFractionStatic = Annotated[
    Optional[str],
    _of_engine("--mem-fraction-static", metavar="F", help="sglang: weights' and pool's share. Default: the device's."),
]
Heads = Annotated[
    Optional[str], typer.Option("--heads", metavar="H", help="Attention heads.", rich_help_panel=_DESCRIBE)
]
HeadDim = Annotated[
    Optional[str], typer.Option("--head-dim", metavar="D", help="Width of a head.", rich_help_panel=_DESCRIBE)
]
HiddenSize = Annotated[
    Optional[str], typer.Option("--hidden-size", metavar="D", help="Model width.", rich_help_panel=_DESCRIBE)
]
SlidingWindow = Annotated[
    Optional[str],
    typer.Option("--sliding-window", metavar="W", help="Window of every layer, in tokens.", rich_help_panel=_DESCRIBE),
]
Format = Annotated[
    Optional[str],
    typer.Option(
        "--format",
        metavar="human|tsv|csv|json",
        help="Default: human on a terminal, tsv elsewhere.",
        rich_help_panel=_OUTPUT,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Short for --format json.", rich_help_panel=_OUTPUT)]
Get = Annotated[
    Optional[str],
    typer.Option(
        "--get", metavar="PATH", help="Print one bare value, as kv_cache.total_bytes.", rich_help_panel=_OUTPUT
    ),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colour, terminal or not.", rich_help_panel=_OUTPUT)]


ModelOf = Callable[[Optional[str], WhatIf, dict[str, Optional[str]], bool], tuple[ModelSpec, WhatIf]]
"""The model a person means, as `model_of` finds it."""


def context_of(context: str | None, max_model_len: str | None) -> int | None:
    """--context, or --max-model-len as vLLM reads it; UsageError where both are given and differ."""
    asked = optional(parse_tokens, context, "--context")
    if max_model_len is None:
        return asked
    vllm = parse_vllm_tokens(max_model_len, "--max-model-len")
    if asked not in (None, vllm):
        raise UsageError(f"--context {asked} and --max-model-len {vllm} contradict each other")
    return vllm


def optional(parse: Callable[[str, str], _Parsed], text: str | None, option: str) -> _Parsed | None:
    """`parse(text, option)`, or None where the option was not given."""
    return None if text is None else parse(text, option)


def what_if_of(
    attention: str | None, kv_heads: str | None, kv_lora_rank: str | None, qk_rope_head_dim: str | None
) -> WhatIf:
    """The what-if the options ask for."""
    return WhatIf(
        attention.casefold() if attention else None,
        optional(parse_count, kv_heads, "--kv-heads"),
        optional(parse_count, kv_lora_rank, "--kv-lora-rank"),
        optional(parse_count, qk_rope_head_dim, "--qk-rope-head-dim"),
    )


def engine_settings(given: dict[str, Union[str, bool, None]]) -> dict[str, str]:
    """The engine's own options that were given, by name, as text."""
    return {name: str(value).casefold() for name, value in given.items() if value not in (None, False)}


def model_of(
    reference: str | None, what_if: WhatIf, flags: dict[str, str | None], assume_full_attention: bool = False
) -> tuple[ModelSpec, WhatIf]:
    """The model by name or path, or by flags alone; and the what-if that is left.

    `flags` maps option to text. They fill the same mapping a config.json does, with model_type `generic`; then
    --kv-heads is the model's own number and no what-if. UsageError (exit 2) where both ways are mixed.
    """
    from kvcalc.model.resolve import load_model

    given = [option for option, text in flags.items() if text is not None]
    if reference is not None:
        if given:
            raise UsageError(f"{given[0]} describes a model without MODEL; {reference!r} is given too")
        return load_model(reference, assume_full_attention=assume_full_attention), what_if
    if not given:
        raise UsageError(
            "no MODEL", "name a preset (kvcalc models), or describe one: --layers 32 --heads 32 --head-dim 128"
        )
    return _generic(flags, what_if.num_kv_heads), what_if._replace(num_kv_heads=None)


def _generic(flags: dict[str, str | None], num_kv_heads: int | None) -> ModelSpec:
    from kvcalc.errors import ModelError
    from kvcalc.model.hf_config import read_config

    keys = {
        "--layers": "num_hidden_layers",
        "--heads": "num_attention_heads",
        "--head-dim": "head_dim",
        "--hidden-size": "hidden_size",
        "--sliding-window": "sliding_window",
    }
    config: dict[str, object] = {keys[o]: parse_count(text, o) for o, text in flags.items() if text is not None}
    for option in ("--layers", "--heads"):
        if keys[option] not in config:
            raise UsageError(
                f"a model by flags needs {option}", "for example: --layers 32 --heads 32 --kv-heads 8 --head-dim 128"
            )
    if num_kv_heads is not None:
        config["num_key_value_heads"] = num_kv_heads
    try:
        return read_config({"model_type": "generic", **config}, "generic", "flags")
    except ModelError as error:
        # What is wrong here was typed as an option, so it is a usage error.
        raise UsageError(error.message.removeprefix("generic: "), error.hint) from None
