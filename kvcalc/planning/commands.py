"""The words of the command that starts an engine with a layout.

Option names: vllm/engine/arg_utils.py in vLLM 0.33.0 and sglang/srt/arg_groups/fields in SGLang 0.5.23. A test compares
them with the engines' complete lists.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.options import OPTIONS
from kvcalc.engines.place import RAW_FP8
from kvcalc.engines.vllm.cache_dtypes import SINCE
from kvcalc.planning.checkpoint import Checkpoint
from kvcalc.planning.drafting_flags import Drafting, sglang_drafting, vllm_drafting
from kvcalc.records import NamedTuple
from kvcalc.releases import Release, split_engine
from kvcalc.units import parse_tokens

# vLLM takes the number of draft tokens inside --speculative-config, together with the draft model's name. The layers of
# pipeline stages are in a variable.
_NOT_FLAGS = ("num-speculative-tokens", "pp-layer-partition")
# Flags of which vLLM takes several words.
_LISTS = ("kv-cache-dtype-skip-layers",)
# SGLang counts attention replicas apart from whole copies since 0.5.22. --enable-dp-attention, which makes --dp-size
# the number of attention replicas, is deprecated since then (add_cli_args in srt/server_args.py,
# handle_deprecated_dp_attention in srt/arg_groups/parallel_hook.py; 0.5.21 has no --attn-dp-size).
_ATTENTION_REPLICAS = Release.of(0, 5, 22)
# Options without an effect, of which an engine says that they will be removed, and the release with which that began
# (vllm/engine/arg_utils.py; 0.32.0 does not say so).
_WITHOUT_EFFECT = {"vllm": {"mamba-cache-mode": Release.of(0, 33)}}
# kvcalc's name for a type with 16 or 32 bits -> the engines' name.
_FLOATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
# Without these variables the engines refuse a length beyond the model's limit (vllm/envs.py, sglang/srt/environ.py).
_LONGER = {"vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"}


class Layout(NamedTuple):
    """How a replica is started: it runs at most `max_running` requests at once, none longer than `context_tokens`.

    `settings` are the engine's own options by name. `beyond_limit` is true if the context exceeds the model's limit.
    `drafting` says how tokens are drafted, or is None if they are not.
    Each of the `data_parallel_size` attention replicas is split over `tensor_parallel_size` devices. `has_copies` is
    whether they are whole copies, because the model has no experts. `engine` is the engine of the plan, whose release
    its command has to suit; other engines' commands suit their newest release. `cp_strategy` is how SGLang divides
    prompts.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_tokens: int
    max_running: int
    kv_dtype: str
    settings: Mapping[str, str]
    beyond_limit: bool = False
    drafting: Drafting | None = None
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    has_copies: bool = False
    engine: str = ""

    def has_release(self, engine: str, since: Release) -> bool:
        """Whether the command starts an engine that is not older than `since`."""
        name, asked = split_engine(self.engine)
        return name != engine or asked is None or asked.release is None or asked.release >= since

    cp_strategy: str | None = None


def vllm_words(checkpoint: Checkpoint, layout: Layout) -> list[str]:
    """`vllm serve ...` for one replica.

    Each attention replica has its own scheduler with --max-num-seqs requests. --enable-expert-parallel distributes
    whole experts over all devices (ParallelConfig, config/parallel.py).
    """
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size", "--max-model-len", "--max-num-seqs")
    replicas = layout.data_parallel_size
    more = ["--data-parallel-size", str(replicas)] if replicas > 1 else []
    more += ["--enable-expert-parallel"] if layout.expert_parallel_size > 1 else []
    each = layout._replace(max_running=-(-layout.max_running // replicas))
    types = {"fp8": "fp8", RAW_FP8.name: "fp8", **{name: name for name in SINCE}}
    flags = _flags("vllm", checkpoint, each, sizes, types, more)
    flags += vllm_drafting(layout.drafting)
    return [*_environment("vllm", layout), "vllm", "serve", checkpoint.name, *flags]


def sglang_words(checkpoint: Checkpoint, layout: Layout) -> list[str]:
    """`python -m sglang.launch_server ...` for one replica.

    With --attn-dp-size, or --enable-dp-attention before it, --tp-size counts the devices of all attention replicas, and
    --max-running-requests the requests of all (ServerArgs, and ModelRunner.max_running_requests divided by dp_size).
    Without it, --dp-size is the number of whole copies, each with --tp-size devices and these requests.
    """
    sizes = ("--tp-size", "--pp-size", "--context-length", "--max-running-requests")
    if "context-length" in layout.settings:
        layout = layout._replace(context_tokens=parse_tokens(layout.settings["context-length"], "--context-length"))
    replicas = layout.data_parallel_size
    names = ["--dp-size"]
    if not layout.has_copies:
        is_new = layout.has_release("sglang", _ATTENTION_REPLICAS)
        names = ["--attn-dp-size"] if is_new else ["--enable-dp-attention", "--dp-size"]
    more = [*names, str(replicas)] if replicas > 1 else []
    more += ["--ep-size", str(layout.expert_parallel_size)] if layout.expert_parallel_size > 1 else []
    if layout.has_copies:
        whole = layout._replace(max_running=-(-layout.max_running // replicas))
    else:
        copies = int(layout.settings.get("attn-cp-size", "1"))
        whole = layout._replace(tensor_parallel_size=layout.tensor_parallel_size * replicas * copies)
        more += ["--enable-prefill-cp", "--cp-strategy", layout.cp_strategy] if layout.cp_strategy else []
    flags = _flags("sglang", checkpoint, whole, sizes, {"fp8": "fp8_e4m3", RAW_FP8.name: "fp8_e4m3"}, more)
    flags += sglang_drafting(layout.drafting)
    start = [*_environment("sglang", layout), "python", "-m", "sglang.launch_server"]
    return [*start, "--model-path", checkpoint.name, *flags]


def _environment(engine: str, layout: Layout) -> list[str]:
    partition = layout.settings.get("pp-layer-partition")
    found = [_LONGER[engine]] if layout.beyond_limit else []
    return [*found, f"VLLM_PP_LAYER_PARTITION={partition}"] if partition and engine == "vllm" else found


def _flags(
    engine: str,
    checkpoint: Checkpoint,
    layout: Layout,
    sizes: tuple[str, ...],
    cache_names: Mapping[str, str],
    more: list[str],
) -> list[str]:
    """The options for a layout. `sizes` are the engine's option names for its first four fields. One pipeline stage
    needs no option. `more` are the options for attention replicas."""  # fmt: skip
    given = [(name, str(size)) for name, size in zip(sizes, layout) if name != sizes[1] or size != 1]
    flags = [] if checkpoint.revision is None else ["--revision", checkpoint.revision]
    flags += [word for pair in given for word in pair] + more + _types(checkpoint, layout, cache_names)
    return flags + _settings(engine, layout, flags)


def _settings(engine: str, layout: Layout, flags: list[str]) -> list[str]:
    """The engine's own options that were given, except those that the layout has set."""
    found = []
    useless = _WITHOUT_EFFECT.get(engine, {})
    for option in OPTIONS[engine]:
        name = f"--{option.name}"
        if option.name in useless and layout.has_release(engine, useless[option.name]):
            continue
        if option.name in layout.settings and name not in flags and option.name not in _NOT_FLAGS:
            text = layout.settings[option.name]
            words = text.split(",") if option.name in _LISTS else [text]
            found += [name] if option.metavar is None else [name, *words]
    return found


def _types(checkpoint: Checkpoint, layout: Layout, cache_names: Mapping[str, str]) -> list[str]:
    """The flags for the types of the weights and the cache. The engine's defaults need no flags."""
    flags = []
    if checkpoint.dtype is not None:
        flags += ["--dtype", _FLOATS[checkpoint.dtype]]
    if layout.kv_dtype in cache_names:
        flags += ["--kv-cache-dtype", cache_names[layout.kv_dtype]]
    return flags
