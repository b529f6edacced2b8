"""The commands that start prefill instances, decode instances, and the router between them.

Options: KVTransferConfig (config/kv_transfer.py) of vLLM 0.33.0, whose NixlConnector wants a role for each instance
(NixlBaseConnector, nixl/connector.py); arg_groups/fields/disagg.py of SGLang 0.5.23; cache_transceiver_config and
disable_overlap_scheduler of LlmArgs, and extract_disagg_cfg (llmapi/disagg_utils.py) of TensorRT-LLM 1.3; vllm-router
0.1.17 and sglang-router 0.3.2. Tests compare them with the tools' own lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from kvcalc.planning.checkpoint import Checkpoint
from kvcalc.planning.commands import Layout, sglang_words, vllm_words
from kvcalc.planning.more_commands import tensorrt_llm_words
from kvcalc.records import NamedTuple
from kvcalc.writing.shell import join, written_first

PREFILL, DECODE, ROUTER = "prefill", "decode", "router"
ROLES = (PREFILL, DECODE, ROUTER)
PORT = 8000
# Where SGLang's prefill instances answer the decode instances (disaggregation_bootstrap_port).
BOOTSTRAP_PORT = 8998
# The environment variable with which a prefill instance of vLLM says where its cache can be read (vllm/envs.py).
SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_HOST"
# The plan assumes that instances are asked in turn, which is trtllm-serve's default (extract_router_config).
_IN_TURN = ("--policy", "round_robin")
_SETTINGS = {PREFILL: "prefill.yaml", DECODE: "decode.yaml", ROUTER: "router.yaml"}


class Pools(NamedTuple):
    """What the commands depend on: the layouts of both kinds of instance and their numbers.

    `buffer_tokens` are those of a transfer buffer, for TensorRT-LLM.
    """

    checkpoint: Checkpoint
    prefill: Layout
    decode: Layout
    prefills: int
    decodes: int
    buffer_tokens: int


def host_of(role: str, number: int) -> str:
    """The name of an instance's machine in the commands."""
    return f"{role}-{number}"


def commands_of(engine: str, pools: Pools) -> dict[str, str]:
    """The command of each role. Instances of a role differ in the name of their machine only."""
    return {role: join(words) for role, words in _WORDS[engine.partition("@")[0]](pools).items()}


def _vllm(pools: Pools) -> dict[str, list[str]]:
    def serve(layout: Layout, role: str) -> list[str]:
        config = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
        return [*vllm_words(pools.checkpoint, layout), "--kv-transfer-config", config]

    router = ["vllm-router", "--vllm-pd-disaggregation", "--kv-connector", "nixl", *_IN_TURN]
    return {
        PREFILL: [f"{SIDE_CHANNEL}={host_of(PREFILL, 0)}", *serve(pools.prefill, "kv_producer")],
        DECODE: serve(pools.decode, "kv_consumer"),
        ROUTER: [*router, *_urls(pools, []), *_listening()],
    }


def _sglang(pools: Pools) -> dict[str, list[str]]:
    def serve(layout: Layout, mode: str) -> list[str]:
        words = ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", "nixl"]
        return [*sglang_words(pools.checkpoint, layout), *words]

    router = ["python", "-m", "sglang_router.launch_router", "--pd-disaggregation", *_IN_TURN]
    return {
        PREFILL: serve(pools.prefill, "prefill"),
        DECODE: serve(pools.decode, "decode"),
        ROUTER: [*router, *_urls(pools, [str(BOOTSTRAP_PORT)]), *_listening()],
    }


def _tensorrt_llm(pools: Pools) -> dict[str, list[str]]:
    transfer: dict[str, object] = {
        "cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": pools.buffer_tokens}
    }
    # Context servers do not support the overlap scheduler (examples/disaggregated/README.md).
    more: dict[str, dict[str, object]] = {PREFILL: {"disable_overlap_scheduler": True, **transfer}, DECODE: transfer}
    found = {
        role: tensorrt_llm_words(pools.checkpoint, layout, more[role], _SETTINGS[role]) or []
        for role, layout in ((PREFILL, pools.prefill), (DECODE, pools.decode))
    }
    servers = {
        name: {"num_instances": number, "urls": [f"{host_of(role, each)}:{PORT}" for each in range(number)]}
        for name, role, number in (
            ("context_servers", PREFILL, pools.prefills), ("generation_servers", DECODE, pools.decodes),
        )
    }  # fmt: skip
    settings = {"hostname": "0.0.0.0", "port": PORT, **servers}  # noqa: S104 - clients are on other machines
    words = ["trtllm-serve", "disaggregated", "-c", _SETTINGS[ROUTER]]
    return {**found, ROUTER: written_first(json.dumps(settings), _SETTINGS[ROUTER], words)}


def _urls(pools: Pools, after_prefill: list[str]) -> list[str]:
    words = []
    for number in range(pools.prefills):
        words += ["--prefill", f"http://{host_of(PREFILL, number)}:{PORT}", *after_prefill]
    for number in range(pools.decodes):
        words += ["--decode", f"http://{host_of(DECODE, number)}:{PORT}"]
    return words


def _listening() -> list[str]:
    return ["--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104 - clients are on other machines


_WORDS: dict[str, Callable[[Pools], dict[str, list[str]]]] = {
    "vllm": _vllm, "sglang": _sglang, "tensorrt-llm": _tensorrt_llm,
}  # fmt: skip
