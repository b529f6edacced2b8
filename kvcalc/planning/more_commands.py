"""The words of the commands that start TensorRT-LLM and llama.cpp with a layout.

Option names: `serve` in tensorrt_llm/commands/serve.py, and the fields of LlmArgs, KvCacheConfig and the decoding
configs in tensorrt_llm/llmapi/llm_args.py, TensorRT-LLM 1.3; tools/server/README.md of llama.cpp, 2026.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvcalc.engines.options import OPTIONS
from kvcalc.engines.place import RAW_FP8
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.drafting import DRAFT, EAGLE, MTP, NGRAM
from kvcalc.planning.checkpoint import Checkpoint
from kvcalc.planning.commands import Layout
from kvcalc.planning.drafting_flags import Drafting
from kvcalc.releases import Release
from kvcalc.writing.shell import written_first

# Where the settings are written that are no options of trtllm-serve. JSON is YAML too.
SETTINGS_FILE = "trtllm.yaml"

# With MTP, num_nextn_predict_layers was the number of drafted tokens. Pull request 12341 of NVIDIA/TensorRT-LLM (2026)
# replaces it by max_draft_len and leaves it for the model's own layers; in 1.3.0rc16 it is deprecated.
_MTP_LENGTH = Release.of(1, 3)._replace(phase=-1, of_phase=16)
_DECODING = {MTP: "MTP", EAGLE: "Eagle3", DRAFT: "Draft_Target", NGRAM: "NGram"}
# kvcalc's option -> the key in KvCacheConfig, and how its text is read.
_KV_CACHE_CONFIG = {"tokens-per-block": "tokens_per_block", "max-tokens": "max_tokens"}
_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SPEC_TYPES = {MTP: "draft-mtp", EAGLE: "draft-eagle3", DRAFT: "draft-simple", NGRAM: "ngram-mod"}
# kvcalc's options that are no options of llama-server, and one that it has under another name.
_NOT_FLAGS = ("before-pull", "host-memory", "host-bandwidth")
_RENAMED = {"draft-max": "spec-draft-n-max"}
_GGML_FLOATS = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}


def tensorrt_llm_words(
    checkpoint: Checkpoint, layout: Layout, more: Mapping[str, object] | None = None, file: str = SETTINGS_FILE
) -> list[str] | None:
    """`trtllm-serve ...` for one replica, or None for whole copies behind one server, which it does not have.

    Settings without an option go into `file`, which the command writes first.

    With attention replicas, --tp_size counts the devices of all, and --max_batch_size is per replica (LlmArgs). `more`
    are settings of the file besides those of the layout.
    """
    if layout.has_copies:
        return None
    replicas = layout.data_parallel_size
    words = ["trtllm-serve", checkpoint.name]
    words += [] if checkpoint.revision is None else ["--revision", checkpoint.revision]
    words += ["--tp_size", str(layout.tensor_parallel_size * replicas)]
    if layout.pipeline_parallel_size > 1:
        words += ["--pp_size", str(layout.pipeline_parallel_size)]
    if layout.expert_parallel_size > 1:
        words += ["--ep_size", str(layout.expert_parallel_size)]
    words += ["--max_seq_len", str(layout.context_tokens), "--max_batch_size", str(-(-layout.max_running // replicas))]
    if "free-gpu-memory-fraction" in layout.settings:
        words += ["--free_gpu_memory_fraction", layout.settings["free-gpu-memory-fraction"]]
    settings = {**_tensorrt_llm_settings(checkpoint, layout), **(more or {})}
    return written_first(json.dumps(settings), file, [*words, "--config", file]) if settings else words


def _tensorrt_llm_settings(checkpoint: Checkpoint, layout: Layout) -> dict[str, object]:
    settings: dict[str, object] = {} if checkpoint.dtype is None else {"dtype": _FLOATS[checkpoint.dtype]}
    cache: dict[str, object] = {"dtype": "fp8"} if layout.kv_dtype in ("fp8", RAW_FP8.name) else {}
    cache.update((key, int(layout.settings[name])) for name, key in _KV_CACHE_CONFIG.items() if name in layout.settings)
    if "max-attention-window" in layout.settings:
        windows = layout.settings["max-attention-window"].split(",")
        cache["max_attention_window"] = [_tokens(window) for window in windows]
    if "avg-seq-len" in layout.settings:
        cache["avg_seq_len"] = _tokens(layout.settings["avg-seq-len"])
    if cache:
        settings["kv_cache_config"] = cache
    if layout.data_parallel_size > 1:
        settings["enable_attention_dp"] = True
    if layout.drafting is not None:
        settings["speculative_config"] = _decoding(layout, layout.drafting)
    return settings


def _tokens(text: str) -> int:
    from kvcalc.units import parse_tokens

    return parse_tokens(text, "--engine tensorrt-llm")


def _decoding(layout: Layout, drafting: Drafting) -> dict[str, object]:
    is_old = drafting.method == MTP and not layout.has_release("tensorrt-llm", _MTP_LENGTH)
    length = "num_nextn_predict_layers" if is_old else "max_draft_len"
    config: dict[str, object] = {"decoding_type": _DECODING[drafting.method], length: drafting.num_tokens}
    return config if drafting.checkpoint is None else {**config, "speculative_model": drafting.checkpoint}


def llama_cpp_words(checkpoint: Checkpoint, layout: Layout) -> list[str] | None:
    """`llama-server ...` for one replica, or None if llama.cpp has no such layout.

    It divides the context among its slots, so --ctx-size holds all requests. Pipeline stages are llama.cpp's default
    split over devices, by layers.
    """
    types = [_ggml_type(name) for name in layout.kv_dtype.split("/")]  # of K and V, or one of both
    k, v = types[0], types[-1]
    if k is None or v is None or layout.data_parallel_size > 1:
        return None
    words = ["llama-server", "--model", checkpoint.name if checkpoint.name.endswith(".gguf") else "<your GGUF file>"]
    slots = layout.max_running
    words += ["--ctx-size", str(layout.context_tokens * slots), "--parallel", str(slots)]
    words += ["--n-gpu-layers", layout.settings.get("n-gpu-layers", "all")]
    if layout.tensor_parallel_size > 1:
        words += ["--split-mode", "tensor"]
    return [*words, *_llama_cpp_settings(layout.settings, k, v, words), *_llama_cpp_drafting(layout.drafting)]


def _llama_cpp_drafting(drafting: Drafting | None) -> list[str]:
    if drafting is None:
        return []
    words = ["--spec-type", _SPEC_TYPES[drafting.method]]
    if drafting.checkpoint is not None:
        own = drafting.checkpoint if drafting.checkpoint.endswith(".gguf") else "<your draft's GGUF file>"
        words += ["--spec-draft-model", own]
    number = "--spec-ngram-mod-n-max" if drafting.method == NGRAM else "--spec-draft-n-max"
    return [*words, number, str(drafting.num_tokens)]


def _ggml_type(kv_dtype: str) -> str | None:
    """llama.cpp's name for a type of the cache, or None if it has no such type. Its names for blocks are kvcalc's."""
    if kv_dtype in _GGML_FLOATS:
        return _GGML_FLOATS[kv_dtype]
    return kv_dtype if kv_dtype in DTYPES and kv_dtype[:1] in "qi" and "_" in kv_dtype else None


def _llama_cpp_settings(settings: Mapping[str, str], k: str, v: str, before: Sequence[str]) -> list[str]:
    """The options that were given and are not in the words `before`, and the types of K and V if one is not f16."""
    values = {"--cache-type-k": k, "--cache-type-v": v} if {k, v} != {"f16"} else {}
    flags = []
    for option in OPTIONS["llama.cpp"]:
        name = f"--{_RENAMED.get(option.name, option.name)}"
        if option.name not in settings or name in before or option.name in _NOT_FLAGS:
            continue
        if option.metavar is None:
            flags.append(name)
        else:
            values[name] = settings[option.name]
    return [*(word for pair in values.items() for word in pair), *flags]
