"""The commands that start SGLang.

Sources: sglang/srt/arg_groups/fields in SGLang 0.5.23, also disagg.py for separate instances and the --speculative
options for drafts, where a step drafts `num_steps` tokens and checks one more; sglang-router 0.3.2. Tests compare the
options with the complete lists.
"""

from __future__ import annotations

from kvcalc.engines.command import (
    NODE,
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
from kvcalc.engines.options import SettingsReader, has_adapters
from kvcalc.engines.place import RAW_FP8
from kvcalc.model.drafting import DFLASH, DRAFT, EAGLE, EAGLE1, MTP, NGRAM
from kvcalc.releases import Release
from kvcalc.units import parse_tokens

_SIZES = ("--tp-size", "--pp-size", "--context-length", "--max-running-requests")
_CACHE_TYPES = {"fp8": "fp8_e4m3", RAW_FP8.name: "fp8_e4m3"}
# SGLang counts DP ranks apart from whole copies since 0.5.22. --enable-dp-attention, which makes --dp-size
# the number of DP ranks, is deprecated since then (add_cli_args in srt/server_args.py,
# handle_deprecated_dp_attention in srt/arg_groups/parallel_hook.py; 0.5.21 has no --attn-dp-size).
_DP_RANKS = Release.of(0, 5, 22)
# Where prefill instances answer the decode instances (disaggregation_bootstrap_port).
_BOOTSTRAP_PORT = 8998
# Without --speculative-algorithm they have no effect. `_drafting` prints them.
_OF_DRAFTS = ("speculative-num-draft-tokens", "speculative-eagle-topk")
_NODES_PORT = 20000  # where the machines of a replica find each other, as in SGLang's own examples
ALGORITHMS = {
    MTP: "EAGLE", EAGLE: "EAGLE3", EAGLE1: "EAGLE", DFLASH: "DFLASH", DRAFT: "STANDALONE", NGRAM: "NGRAM",
}  # fmt: skip


class Command(StartCommand):
    """`python -m sglang.launch_server ...`."""

    program = "sglang"
    image = "lmsysorg/sglang:v0.5.23"
    router_package = "sglang-router==0.3.2"
    router_program = ("python", "-m", "sglang_router.launch_router")
    rank_option = "--node-rank"

    def words(self, checkpoint: Checkpoint, arguments: ServerArguments) -> list[str]:
        """Sizes are those of all DP ranks, or of one of several whole copies.

        With --attn-dp-size, or --enable-dp-attention before it, --tp-size counts the devices of all replicas, and
        --max-running-requests the requests of all (ServerArgs, and ModelRunner.max_running_requests divided by
        dp_size). Without it, --dp-size is the number of whole copies, each with --tp-size devices and these requests.
        """
        if "context-length" in arguments.settings:
            arguments = arguments._replace(
                context_tokens=parse_tokens(arguments.settings["context-length"], "--context-length")
            )
        layout, replicas = arguments.layout, arguments.layout.data_parallel_size
        if layout.has_whole_copies:
            names, division = ["--dp-size"], None
            whole = arguments._replace(max_running=arguments.running_of_rank)
        else:
            is_new = arguments.has_release("sglang", _DP_RANKS)
            names = ["--attn-dp-size"] if is_new else ["--enable-dp-attention", "--dp-size"]
            division = arguments.prompt_division
            whole = arguments._replace(layout=layout._replace(tensor_parallel_size=layout.ranks))
        more = [*names, str(replicas)] if replicas > 1 else []
        more += ["--ep-size", str(layout.expert_parallel_size)] if layout.expert_parallel_size > 1 else []
        more += ["--enable-prefill-cp", "--cp-strategy", division] if division else []
        flags = whole.flags(_SIZES, checkpoint, more, _CACHE_TYPES)
        for option in arguments.options("sglang", flags, _OF_DRAFTS):
            flags += [f"--{option.name}", *([arguments.settings[option.name]] if option.metavar is not None else [])]
        if has_adapters(arguments.settings):
            # Adapters that are loaded later need their largest rank and their layers (check_lora_server_args,
            # arg_groups/lora_hook.py). kvcalc counts all layers.
            flags += ["--enable-lora", "--lora-target-modules", "all"]
            if "max-lora-rank" not in arguments.settings:
                flags += ["--max-lora-rank", str(SettingsReader("sglang", arguments.settings).count("max-lora-rank"))]
        # Without the variable, SGLang refuses a length beyond the model's limit (srt/environ.py).
        variables = ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1"] if arguments.beyond_limit else []
        start = [*variables, "python", "-m", "sglang.launch_server", "--model-path", checkpoint.name]
        branches = arguments.settings.get("speculative-eagle-topk", "1")
        return [*start, *flags, *(_drafting(arguments.drafting, branches) if arguments.drafting else [])]

    def across(self, words: list[str], arguments: ServerArguments, nodes: int) -> list[str] | None:
        """Every machine runs the same command with its own rank (srt/arg_groups/fields/parallel.py)."""
        address = f"{host_of(NODE, 0)}:{_NODES_PORT}"
        return [*words, "--nnodes", str(nodes), "--node-rank", "0", "--dist-init-addr", address]

    def node_words(self, words: list[str]) -> list[list[str]]:
        nodes = int(value_of(words, "--nnodes") or "1")
        return [words, *(with_value(words, "--node-rank", str(rank)) for rank in range(1, nodes))]

    def pool_words(self, pools: Pools) -> dict[str, list[str]]:
        start = [*self.router_program, "--pd-disaggregation"]
        words = {ROUTER: [*start, *pools.router_flags([str(_BOOTSTRAP_PORT)])]}
        for role, arguments in pools.arguments.items():
            words[role] = [*self.words(pools.checkpoint, arguments), "--disaggregation-transfer-backend", "nixl"]
        return words


def _drafting(drafting: Drafting, branches: str) -> list[str]:
    """The options for a chain of tokens, or a tree with several branches."""
    number, flags = drafting.num_tokens, ["--speculative-algorithm", ALGORITHMS[drafting.method]]
    if drafting.checkpoint is not None:
        flags += ["--speculative-draft-model-path", drafting.checkpoint]
    if drafting.method not in (NGRAM, DFLASH):
        flags += ["--speculative-num-steps", str(number), "--speculative-eagle-topk", branches]
    return [*flags, "--speculative-num-draft-tokens", str(number + 1)]


COMMAND = Command()
