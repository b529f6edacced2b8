"""Read the commands that start SGLang.

Source: sglang/srt/arg_groups/fields in SGLang 0.5.23, and its parsers of tools and reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kvcalc.engines.reading import Read, Reader, float_types, inverse, whole
from kvcalc.engines.sglang.command import ALGORITHMS
from kvcalc.model.drafting import EAGLE1, MTP, NGRAM


class SglangReader(Reader):
    """`python -m sglang.launch_server ...` and `sglang serve ...`."""

    engine = "sglang"
    programs = (("sglang.launch_server",), ("sglang", "serve"))
    images = ("lmsysorg/sglang",)
    model_options = ("model-path", "model")
    fields: ClassVar = {
        "tensor-parallel-size": "tensor_parallel_size", "tp-size": "tensor_parallel_size", "tp": "tensor_parallel_size",
        "pipeline-parallel-size": "pipeline_parallel_size", "pp-size": "pipeline_parallel_size",
        "pp": "pipeline_parallel_size", "expert-parallel-size": "expert_parallel_size",
        "ep-size": "expert_parallel_size", "ep": "expert_parallel_size", "kv-cache-dtype": "kv_dtype", "dtype": "dtype",
    }  # fmt: skip
    values: ClassVar = {"kv_dtype": {"fp8_e4m3": "fp8", "bfloat16": "bf16"}, "dtype": float_types()}
    special = """
        dp-size data-parallel-size dp attn-dp-size enable-dp-attention! quantization enable-prefill-cp! cp-strategy
        speculative-algorithm speculative-algo speculative-num-steps speculative-draft-model-path
        speculative-draft-model nnodes
    """
    limit_variable = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
    limit_options = ("json-model-override-args",)
    # How requests come in, are shown and are logged; where files are; and how the processes find each other.
    harmless = """
        host port api-key served-model-name trust-remote-code! chat-template tool-call-parser reasoning-parser
        log-level log-level-http log-requests! log-requests-level enable-metrics! show-time-cost! decode-log-interval
        tokenizer-path tokenizer-mode tokenizer-worker-num skip-tokenizer-init! revision load-format download-dir
        random-seed watchdog-timeout nccl-port dist-init-addr node-rank dist-timeout base-gpu-id
        enable-cache-report! hf-chat-template-name completion-template file-storage-path sampling-defaults
        schedule-policy stream-interval grammar-backend sampling-backend
        model-loader-extra-config warmups skip-server-warmup! enable-multimodal!
        allow-auto-truncate! weight-version fastapi-root-path device admin-api-key enable-request-time-stats-logging!
        allowed-media-domains bucket-e2e-request-latency bucket-inter-token-latency bucket-time-to-first-token
        crash-dump-folder default-chat-template-kwargs enable-http2! enable-metrics-for-all-schedulers!
        enable-mfu-metrics!
        enable-ssl-refresh! enable-trace! export-metrics-to-file! export-metrics-to-file-dir
        extra-metric-labels gc-threshold gc-warning-threshold-secs generation-tokens-buckets gpu-id-step grpc-mode!
        grpc-port incremental-streaming-output! kv-events-config log-requests-format log-requests-target model-checksum
        model-impl nccl-init-addr numa-node otlp-service-name otlp-traces-endpoint preferred-sampling-params
        prompt-tokens-buckets sleep-on-idle! soft-watchdog-timeout ssl-ca-certs ssl-certfile ssl-keyfile
        ssl-keyfile-password stream-response-default-include-usage! tokenizer-backend
        tokenizer-metrics-allowed-custom-labels tokenizer-metrics-custom-labels-header tool-server
        trust-request-chat-template! weight-loader-disable-mmap! weight-loader-prefetch-checkpoints!
        weight-loader-prefetch-num-threads
    """
    context_option = "--context-length"
    needs_context = False  # it limits requests to its pool (ModelRunner.init_memory_pool, srt/model_executor)

    def finish(self, found: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """The sizes are those of all attention replicas, or of one of several whole copies (`command.py`)."""
        left, settings = found.left, found.settings
        if "context-length" in settings:
            found.fields["context_tokens"] = settings["context-length"]
        copies = next((left[name] for name in ("dp-size", "data-parallel-size", "dp") if name in left), "1")
        replicas = left.get("attn-dp-size")
        if replicas is None and left.get("enable-dp-attention"):
            replicas, copies = copies, "1"
        number = whole(replicas or "1", "--attn-dp-size")
        parts = number * whole(settings.get("attn-cp-size", "1"), "--attn-cp-size")
        if parts > 1:
            each, rest = divmod(found.size("tensor_parallel_size"), parts)
            if rest or not each:
                found.notes.append(f"--tp-size is not a multiple of {parts}")
            found.fields.update(tensor_parallel_size=str(max(each, 1)), data_parallel_size=str(number))
        found.copies = whole(copies, "--dp-size")
        if left.get("quantization") == "fp8":
            found.fields["dtype"] = "fp8"
        algorithm = left.get("speculative-algorithm") or left.get("speculative-algo")
        if algorithm is not None:
            self._drafting(found, algorithm.upper())

    def _drafting(self, found: Read, algorithm: str) -> None:
        model = found.left.get("speculative-draft-model-path") or found.left.get("speculative-draft-model")
        method = MTP if algorithm == "NEXTN" else inverse(ALGORITHMS).get(algorithm)
        if method in (MTP, EAGLE1):
            method = MTP if model is None else EAGLE1
        checked = found.settings.pop("speculative-num-draft-tokens", None)
        steps = found.left.get("speculative-num-steps")
        if checked is not None:
            number = whole(checked, "--speculative-num-draft-tokens") - 1
        else:
            number = whole(steps or "3", "--speculative-num-steps")
        if method is None or number < 1:
            found.notes.append(f"drafting with {algorithm} is not counted")
            return
        found.drafting = method, number, None if method in (MTP, NGRAM) else model


READER = SglangReader()
