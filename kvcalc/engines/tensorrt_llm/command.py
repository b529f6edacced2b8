"""The commands that start TensorRT-LLM.

Sources: `serve` in tensorrt_llm/commands/serve.py; the fields of LlmArgs, KvCacheConfig and the decoding configs in
tensorrt_llm/llmapi/llm_args.py; for separate instances, cache_transceiver_config and disable_overlap_scheduler of
LlmArgs, and extract_disagg_cfg (llmapi/disagg_utils.py), TensorRT-LLM 1.3. Tests compare the options with the complete
list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvcalc.engines.command import (
    DECODE,
    NODE,
    PORT,
    PREFILL,
    ROUTER,
    Checkpoint,
    Pools,
    ServerArguments,
    StartCommand,
    host_of,
)
from kvcalc.engines.options import SettingsReader
from kvcalc.engines.place import RAW_FP8
from kvcalc.model.drafting import DRAFT, EAGLE, MTP, NGRAM
from kvcalc.releases import Release
from kvcalc.units import parse_tokens
from kvcalc.writing.shell import written_first

# Where the settings are written that are not options of trtllm-serve. JSON is YAML too.
_FILE = "trtllm.yaml"
_FILES = {PREFILL: "prefill.yaml", DECODE: "decode.yaml", ROUTER: "router.yaml"}
# With MTP, num_nextn_predict_layers was the number of drafted tokens. Pull request 12341 of NVIDIA/TensorRT-LLM (2026)
# replaces it by max_draft_len and leaves it for the model's own layers; in 1.3.0rc16 it is deprecated.
_MTP_LENGTH = Release.of(1, 3)._replace(phase=-1, of_phase=16)
DECODING = {MTP: "MTP", EAGLE: "Eagle3", DRAFT: "Draft_Target", NGRAM: "NGram"}
# kvcalc's option -> the key in KvCacheConfig.
KV_CACHE_CONFIG = {"tokens-per-block": "tokens_per_block", "max-tokens": "max_tokens"}
# The same for attention_dp_config.
_BALANCE = {"timeout-iters": "timeout_iters", "batching-wait-iters": "batching_wait_iters"}


class Command(StartCommand):
    """`trtllm-serve ...`."""

    program = "trtllm"

    def words(
        self,
        checkpoint: Checkpoint,
        arguments: ServerArguments,
        more: Mapping[str, object] | None = None,
        file: str = _FILE,
    ) -> list[str] | None:
        """None for whole copies behind one server, which trtllm-serve does not have.

        Settings without an option go into `file`, which the command writes first. `more` are settings of the file
        besides those of the layout. With DP ranks, --tp_size counts the devices of all, and --max_batch_size
        is per replica (LlmArgs).
        """
        if arguments.layout.has_whole_copies:
            return None
        layout = arguments.layout
        words = ["trtllm-serve", checkpoint.name]
        words += [] if checkpoint.revision is None else ["--revision", checkpoint.revision]
        if layout.ranks > 1:
            words += ["--tp_size", str(layout.ranks)]
        if layout.pipeline_parallel_size > 1:
            words += ["--pp_size", str(layout.pipeline_parallel_size)]
        if layout.expert_parallel_size > 1:
            words += ["--ep_size", str(layout.expert_parallel_size)]
        limits = {"--max_seq_len": arguments.context_tokens, "--max_batch_size": arguments.running_of_rank}
        words += [word for option, most in limits.items() if most is not None for word in (option, str(most))]
        if "max-num-tokens" in arguments.settings:
            words += ["--max_num_tokens", arguments.settings["max-num-tokens"]]
        words += ["--enable_chunked_prefill"] if "enable-chunked-prefill" in arguments.settings else []
        if "free-gpu-memory-fraction" in arguments.settings:
            words += ["--free_gpu_memory_fraction", arguments.settings["free-gpu-memory-fraction"]]
        settings = {**_settings(checkpoint, arguments), **(more or {})}
        return written_first(json.dumps(settings), file, [*words, "--config", file]) if settings else words

    def across(self, words: list[str], arguments: ServerArguments, nodes: int) -> list[str] | None:
        """MPI starts a process for each device, of which the first is the server (trtllm-llmapi-launch)."""
        ranks = arguments.layout.num_devices
        hosts = ",".join(f"{host_of(NODE, number)}:{ranks // nodes}" for number in range(nodes))
        place = words.index("trtllm-serve")
        return [*words[:place], "mpirun", "-n", str(ranks), "-H", hosts, "trtllm-llmapi-launch", *words[place:]]

    def pool_words(self, pools: Pools) -> dict[str, list[str]]:
        """trtllm-serve asks the instances in turn by default (extract_router_config), as the plan assumes."""
        buffers = {"backend": "NIXL", "max_tokens_in_buffer": pools.buffer_tokens}
        decode: dict[str, object] = {"cache_transceiver_config": buffers}
        # Context servers do not support the overlap scheduler (examples/disaggregated/README.md).
        more = {PREFILL: {"disable_overlap_scheduler": True, **decode}, DECODE: decode}
        commands = {
            role: self.words(pools.checkpoint, arguments, more[role], _FILES[role]) or []
            for role, arguments in pools.arguments.items()
        }
        servers = {
            name: {"num_instances": len(pools.hosts(role)), "urls": pools.hosts(role)}
            for name, role in (("context_servers", PREFILL), ("generation_servers", DECODE))
        }
        settings = {"hostname": "0.0.0.0", "port": PORT, **servers}  # noqa: S104 - clients are on other machines
        words = ["trtllm-serve", "disaggregated", "-c", _FILES[ROUTER]]
        return {**commands, ROUTER: written_first(json.dumps(settings), _FILES[ROUTER], words)}


def _settings(checkpoint: Checkpoint, arguments: ServerArguments) -> dict[str, object]:
    settings: dict[str, object] = {} if checkpoint.torch_dtype is None else {"dtype": checkpoint.torch_dtype}
    cache: dict[str, object] = {"dtype": "fp8"} if arguments.kv_dtype in ("fp8", RAW_FP8.name) else {}
    given = SettingsReader("tensorrt-llm", arguments.settings)
    cache.update((key, given.count(name)) for name, key in KV_CACHE_CONFIG.items() if name in arguments.settings)
    if "max-attention-window" in arguments.settings:
        windows = arguments.settings["max-attention-window"].split(",")
        cache["max_attention_window"] = [parse_tokens(window, "--engine tensorrt-llm") for window in windows]
    if "avg-seq-len" in arguments.settings:
        cache["avg_seq_len"] = parse_tokens(arguments.settings["avg-seq-len"], "--engine tensorrt-llm")
    if cache:
        settings["kv_cache_config"] = cache
    if "disable-overlap-scheduler" in arguments.settings:
        settings["disable_overlap_scheduler"] = True
    if arguments.layout.data_parallel_size > 1:
        settings["enable_attention_dp"] = True
    balance: dict[str, object] = {"enable_balance": True} if "enable-balance" in arguments.settings else {}
    balance.update((key, given.count(name, least=0)) for name, key in _BALANCE.items() if name in arguments.settings)
    if balance:
        settings["attention_dp_config"] = balance
    if arguments.drafting is not None:
        method, number, model = arguments.drafting
        is_old = method == MTP and not arguments.has_release("tensorrt-llm", _MTP_LENGTH)
        length = "num_nextn_predict_layers" if is_old else "max_draft_len"
        named = {} if model is None else {"speculative_model": model}
        settings["speculative_config"] = {"decoding_type": DECODING[method], length: number, **named}
    return settings


COMMAND = Command()
