"""Read the commands that start vLLM.

Source: vllm/engine/arg_utils.py, entrypoints/common/cli_args.py and SpeculativeConfig (config/speculative.py) in vLLM
0.33.0; `disable-log-requests`, `enable-reasoning`, `guided-decoding-backend` and `swap-space` are options of older
releases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvcalc.engines.reading import Read, Reader, float_types, inverse, json_object, whole
from kvcalc.engines.vllm.command import METHODS
from kvcalc.model.drafting import DRAFT, MTP

# Methods of --quantization that convert a checkpoint while it is loaded. Others name what its config says anyway.
_CONVERTS = ("bitsandbytes", "experts_int8", "ptpc_fp8", "torchao")


class VllmReader(Reader):
    """`vllm serve ...`, and the module that it replaced."""

    engine = "vllm"
    programs = (("vllm", "serve"), ("vllm.entrypoints.openai.api_server",), ("vllm.entrypoints.api_server",))
    images = ("vllm-openai", "vllm-openai-rocm", "rocm/vllm", "vllm-tpu", "vllm/vllm")
    fields: ClassVar = {
        "tensor-parallel-size": "tensor_parallel_size", "tp": "tensor_parallel_size",
        "pipeline-parallel-size": "pipeline_parallel_size", "pp": "pipeline_parallel_size",
        "data-parallel-size": "data_parallel_size", "dp": "data_parallel_size",
        "max-model-len": "max_model_len", "kv-cache-dtype": "kv_dtype", "dtype": "dtype",
        "kv-cache-memory-bytes": "kv_memory_bytes",
    }  # fmt: skip
    values: ClassVar = {"kv_dtype": {"fp8_e4m3": "fp8"}, "dtype": float_types()}
    special = """
        enable-expert-parallel! ep! enable-lora! quantization q speculative-config sc nnodes n
        data-parallel-size-local dpl
    """
    limit_variable = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    limit_options = ("hf-overrides", "rope-scaling", "config")
    # How requests come in, are shown and are logged; where files are; and how the processes find each other.
    harmless = """
        host port api-key api-server-count asc uvicorn-log-level trust-remote-code! served-model-name chat-template
        chat-template-content-format default-chat-template-kwargs tool-call-parser enable-auto-tool-choice!
        tool-parser-plugin reasoning-parser reasoning-parser-plugin enable-reasoning! enable-log-requests!
        disable-log-requests! disable-log-stats! enable-log-outputs! max-log-len otlp-traces-endpoint root-path
        ssl-keyfile ssl-certfile ssl-ca-certs allowed-origins allowed-methods allowed-headers allow-credentials!
        middleware response-role return-tokens-as-token-ids! enable-prompt-tokens-details! enable-server-load-tracking!
        enable-force-include-usage! exclude-tools-when-tool-choice-none! enable-request-id-headers!
        trust-request-chat-template! disable-fastapi-docs! disable-uvicorn-access-log! generation-config
        override-generation-config hf-token hf-config-path revision code-revision tokenizer tokenizer-revision
        tokenizer-mode config-format download-dir load-format seed allowed-local-media-path
        allowed-media-domains guided-decoding-backend
        structured-outputs-config max-logprobs logprobs-mode distributed-executor-backend async-scheduling!
        headless! node-rank r master-addr master-port data-parallel-address data-parallel-rpc-port
        data-parallel-backend data-parallel-start-rank data-parallel-hybrid-lb! data-parallel-external-lb!
        safetensors-load-strategy ignore-patterns use-tqdm-on-load! disable-custom-all-reduce! shutdown-timeout
        enable-tokenizer-info-endpoint! show-hidden-metrics-for-version collect-detailed-traces
        kv-events-config profiler-config mm-processor-cache-type max-parallel-loading-workers enable-chunked-prefill!
        scheduling-policy stream-interval interleave-mm-strings! renderer-num-workers
        aggregate-engine-logging! allow-deprecated-quantization! convert cudagraph-metrics! custom-histogram-buckets
        disable-access-log-for-endpoints distributed-timeout-seconds enable-flashinfer-autotune!
        enable-log-deltas! enable-logging-iteration-details! enable-mfu-metrics! enable-offline-docs!
        enable-per-request-metrics! enable-ssl-refresh! fail-on-environ-validation! h11-max-header-count
        h11-max-incomplete-event-size io-processor-plugin kv-cache-metrics! kv-cache-metrics-sample log-config-file
        log-error-stack! logits-processors media-io-kwargs mm-hasher-algorithm mm-processor-cache-gb model-impl
        numa-bind!
        numa-bind-cpus numa-bind-nodes pooler-config prefix-caching-hash-algo ray-workers-use-nsight! reasoning-config
        reasoning-effort-map
        runner sse-keep-alive-interval ssl-cert-reqs ssl-ciphers swap-space tokens-only!
        tool-server tool-strict-level uds dpa dpb dpe! dph! dpp dpr data-parallel-rank
    """
    _lists = ("kv-cache-dtype-skip-layers", "served-model-name", "allowed-origins")

    def finish(self, found: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """--enable-expert-parallel distributes whole experts over all devices (ParallelConfig, config/parallel.py)."""
        left = found.left
        found.nodes = found.nodes if left.get("n") is None else whole(left["n"], "--nnodes")
        local = left.get("data-parallel-size-local") or left.get("dpl")
        if local is not None and whole(local, "--data-parallel-size-local") < found.size("data_parallel_size"):
            found.nodes = -(-found.size("data_parallel_size") // int(local))
        if left.get("enable-expert-parallel") or left.get("ep"):
            replicas = found.size("data_parallel_size") * found.size("tensor_parallel_size")
            found.fields["expert_parallel_size"] = str(replicas)
        if left.get("enable-lora"):
            found.settings.setdefault("max-loras", "1")  # LoRAConfig, config/lora.py
        quantization = left.get("quantization") or left.get("q")
        if quantization == "fp8":
            found.fields["dtype"] = quantization  # a checkpoint that is not quantized is converted while it is loaded
        elif quantization in _CONVERTS:
            found.unknown.append(f"quantization {quantization}")
        if "VLLM_PP_LAYER_PARTITION" in environment:
            found.settings["pp-layer-partition"] = environment["VLLM_PP_LAYER_PARTITION"]
        config = left.get("speculative-config") or left.get("sc")
        if config is not None:
            self._drafting(found, json_object(config, "speculative-config"))

    def _drafting(self, found: Read, config: Mapping[str, Any]) -> None:
        tokens, method, model = config.get("num_speculative_tokens", 1), config.get("method"), config.get("model")
        known = inverse(METHODS).get(str(method))
        # Names of the methods of single model types (MTPModelTypes, config/speculative.py), and a model alone.
        known = MTP if known is None and str(method).endswith("mtp") else known
        known = DRAFT if method is None and model else known
        if known is None:
            found.notes.append(f"drafting with {method} is not counted")
            return
        found.drafting = known, whole(str(tokens), "num_speculative_tokens"), None if known == MTP else model


READER = VllmReader()
