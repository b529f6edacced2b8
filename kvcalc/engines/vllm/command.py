"""The commands that start vLLM.

Sources: vllm/engine/arg_utils.py, KVTransferConfig (config/kv_transfer.py) and SpeculativeConfig
(config/speculative.py) in vLLM 0.33.0, whose NixlConnector wants a role for each instance (NixlBaseConnector,
nixl/connector.py); vllm-router 0.1.17. Tests compare the options with the complete lists.
"""

from __future__ import annotations

import json

from kvcalc.engines.command import (
    DECODE,
    NODE,
    PREFILL,
    ROUTER,
    Checkpoint,
    Drafting,
    Pools,
    ServerArguments,
    StartCommand,
    host_of,
    value_of,
    with_value,
)
from kvcalc.engines.declarations import table
from kvcalc.engines.options import has_adapters
from kvcalc.engines.place import RAW_FP8
from kvcalc.engines.vllm.cache_dtypes import SINCE
from kvcalc.model.drafting import DFLASH, DRAFT, EAGLE, EAGLE1, MTP, NGRAM
from kvcalc.releases import Release

_SIZES = ("--tensor-parallel-size", "--pipeline-parallel-size", "--max-model-len", "--max-num-seqs")
_CACHE_TYPES = {"fp8": "fp8", RAW_FP8.name: "fp8", **{name: name for name in SINCE}}
VARIABLES = ("pp-layer-partition", "flashinfer-sampler", "graph-estimate")
"""Options that are variables of vLLM, which `variables` in reading.yaml names."""

# The number of draft tokens is inside --speculative-config, together with the draft model's name.
_NOT_FLAGS = ("num-speculative-tokens", "cudagraph-mode", *VARIABLES)
_LISTS = ("kv-cache-dtype-skip-layers",)  # flags that take several words
# An option without an effect, of which vLLM says that it will be removed, and the release with which that began
# (0.32.0 does not say so).
_WITHOUT_EFFECT, _WITHOUT_EFFECT_SINCE = "mamba-cache-mode", Release.of(0, 33)
_NODES_SINCE = Release.of(0, 12)  # 0.11.0 has no --nnodes
METHODS = {
    MTP: "mtp", EAGLE: "eagle3", EAGLE1: "eagle", DFLASH: "dflash", DRAFT: "draft_model", NGRAM: "ngram",
}  # fmt: skip


class Command(StartCommand):
    """`vllm serve ...`."""

    program = "vllm"
    image = "vllm/vllm-openai:v0.33.0"
    router_package = "vllm-router==0.1.17"
    router_program = ("vllm-router",)
    rank_option = "--node-rank"
    address_variable = "VLLM_NIXL_SIDE_CHANNEL_HOST"  # where an instance's cache can be read (vllm/envs.py)

    def words(self, checkpoint: Checkpoint, arguments: ServerArguments) -> list[str]:
        """Each DP rank has its own scheduler with --max-num-seqs requests.

        --enable-expert-parallel distributes whole experts over all devices (ParallelConfig, config/parallel.py).
        """
        replicas = arguments.layout.data_parallel_size
        more = ["--data-parallel-size", str(replicas)] if replicas > 1 else []
        more += ["--enable-expert-parallel"] if arguments.layout.expert_parallel_size > 1 else []
        each = arguments._replace(max_running=arguments.running_of_rank)
        flags = each.flags(_SIZES, checkpoint, more, _CACHE_TYPES)
        is_gone = arguments.has_release("vllm", _WITHOUT_EFFECT_SINCE)
        for option in arguments.options("vllm", flags, (*_NOT_FLAGS, _WITHOUT_EFFECT) if is_gone else _NOT_FLAGS):
            text = arguments.settings[option.name]
            values = text.split(",") if option.name in _LISTS else [text]
            flags += [f"--{option.name}", *(values if option.metavar is not None else [])]
        # Without it, vLLM ignores the options of adapters (create_engine_config, engine/arg_utils.py).
        flags += ["--enable-lora"] if has_adapters(arguments.settings) else []
        mode = arguments.settings.get("cudagraph-mode")
        flags += ["--compilation-config", json.dumps({"cudagraph_mode": mode.upper()})] if mode else []
        # Without the variable, vLLM refuses a length beyond the model's limit (vllm/envs.py).
        variables = ["VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"] if arguments.beyond_limit else []
        for name, option in table("vllm", "reading")["variables"].items():
            if option in VARIABLES and arguments.settings.get(option):
                variables.append(f"{name}={arguments.settings[option]}")
        flags += _drafting(arguments.drafting) if arguments.drafting else []
        return [*variables, "vllm", "serve", checkpoint.name, *flags]

    def across(self, words: list[str], arguments: ServerArguments, nodes: int) -> list[str] | None:
        """The ranks of one replica have --nnodes since 0.12, and whole DP ranks their own options (config/parallel.py).

        The other machines are --headless: they have no API server (entrypoints/cli/serve.py).
        """
        head, replicas = host_of(NODE, 0), arguments.layout.data_parallel_size
        if replicas > 1:
            local, rest = divmod(replicas, nodes)
            if rest or not local:
                return None
            return [*words, "--data-parallel-size-local", str(local), "--data-parallel-address", head]
        if not arguments.has_release("vllm", _NODES_SINCE):
            return None
        return [*words, "--nnodes", str(nodes), "--node-rank", "0", "--master-addr", head]

    def node_words(self, words: list[str]) -> list[list[str]]:
        nodes, local = value_of(words, "--nnodes"), value_of(words, "--data-parallel-size-local")
        commands = [words]
        if nodes is not None:
            ranks = (with_value(words, "--node-rank", str(rank)) for rank in range(1, int(nodes)))
            commands += [[*of_rank, "--headless"] for of_rank in ranks]
        elif local is not None:
            starts = range(int(local), int(value_of(words, "--data-parallel-size") or "1"), int(local))
            commands += [[*words, "--data-parallel-start-rank", str(start), "--headless"] for start in starts]
        return commands

    def pool_words(self, pools: Pools) -> dict[str, list[str]]:
        def serve(role: str, kv_role: str) -> list[str]:
            config = json.dumps({"kv_connector": "NixlConnector", "kv_role": kv_role})
            return [*self.words(pools.checkpoint, pools.arguments[role]), "--kv-transfer-config", config]

        return {
            PREFILL: [f"{self.address_variable}={host_of(PREFILL, 0)}", *serve(PREFILL, "kv_producer")],
            DECODE: serve(DECODE, "kv_consumer"),
            ROUTER: [*self.router_program, "--vllm-pd-disaggregation", "--kv-connector", "nixl", *pools.router_flags()],
        }


def _drafting(drafting: Drafting) -> list[str]:
    """The values are one JSON object."""
    model = {} if drafting.checkpoint is None else {"model": drafting.checkpoint}
    config = {"method": METHODS[drafting.method], **model, "num_speculative_tokens": drafting.num_tokens}
    return ["--speculative-config", json.dumps(config)]


COMMAND = Command()
