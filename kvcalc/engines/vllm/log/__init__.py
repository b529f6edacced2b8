"""The lines of vLLM's log.

Source: kv_cache_utils.py, gpu_worker.py, core.py and interface.py, vLLM 0.33.0; the executors of V0 (executor_base.py
and worker.py, vLLM 0.8); lines in public threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcalc.engines.log import LogReader, Reading
from kvcalc.engines.log_lines import Log, Pattern, option
from kvcalc.model.spec import ModelSpec

_SIZE = r"\d+(?:[.,]\d+)? ?G(?:i)?B"
# The blocks of the swap space come last in their line.
_SWAP = r"CPU blocks: \d+(?!\d|, # CPU)"

FACTS = (
    Pattern("version", "LLM engine (v", r"LLM engine \(v(?P<value>\d[^\s,)]*)\)"),
    Pattern("version", "vLLM API server version", r"vLLM API server version v?(?P<value>\d[^\s,)]*)"),
    Pattern("version", "vllm==", r"\bvllm==(?P<value>\d[^\s,)\"']*)"),
    Pattern("version", "█", r"\bversion v?(?P<value>\d+\.\d[^\s,)]*)"),
    Pattern("generation", "Initializing a V", r"Initializing a (?P<value>V[01]) LLM engine"),
    Pattern("model", "model='", r"(?<!\w)model='(?P<value>[^']+)'"),
    Pattern("model", "vllm serve ", r"vllm serve (?!for )(?P<value>[^\s-][^\s]*)"),
    *option("model", "--model", "model_tag", value=r"[\w./:-]+"),
    Pattern("dtype", "dtype=torch.", r"(?<!\w)dtype=torch\.(?P<value>\w+)"),
    *option("kv_dtype", "kv_cache_dtype", "--kv-cache-dtype"),
    *option("context_tokens", "max_seq_len", "max_model_len", "--max-model-len", value=r"\d[\d.]*[kKmM]?\b"),
    Pattern("context_tokens", "max model len", r"Using max model len (?P<value>\d+)"),
    Pattern("context_tokens", "Maximum concurrency for", r"Maximum concurrency for (?P<value>[\d,]+) tokens per"),
    Pattern("context_tokens", "max seq len (", r"max seq len \((?P<value>\d+)\)"),
    *option("tensor_parallel_size", "tensor_parallel_size", "--tensor-parallel-size", "-tp", value=r"\d+"),
    *option("pipeline_parallel_size", "pipeline_parallel_size", "--pipeline-parallel-size", "-pp", value=r"\d+"),
    Pattern("pp_layer_partition", "VLLM_PP_LAYER_PARTITION",
            r"VLLM_PP_LAYER_PARTITION['\"]?[=:] ?['\"]?(?P<value>\d+(?:,\d+)+)"),
    Pattern("pp_layer_partition", "unevenly partitioned",
            r"layers were unevenly partitioned: \[(?P<value>\d+(?:,\d+)+)\]"),
    *option("token_ranks", "decode_context_parallel_size", "--decode-context-parallel-size", "-dcp", value=r"\d+"),
    *option("prefill_ranks", "prefill_context_parallel_size", "--prefill-context-parallel-size", "-pcp", value=r"\d+"),
    *option("block_size", "block_size", "--block-size", value=r"\d+"),
    Pattern("block_size", "kv cache block size to", r"Setting kv cache block size to (?P<value>\d+) for"),
    *option("max_num_batched_tokens", "max_num_batched_tokens", "--max-num-batched-tokens", value=r"\d+"),
    *option("num_speculative_tokens", "num_speculative_tokens", "num_spec_tokens", value=r"\d+"),
    Pattern("speculative_method", "peculative",
            r"[Ss]peculative[-_]?[Cc]onfig[^\n]{0,60}?method['\"]? ?[=:] ?['\"](?P<value>[\w-]{1,32})"),
    *option("enable_prefix_caching", "enable_prefix_caching", value="True|False"),
    Pattern("enable_prefix_caching", "--enable-prefix-caching", r"--(?P<value>enable)-prefix-caching"),
    Pattern("enable_prefix_caching", "--no-enable-prefix-caching", r"--(?P<value>no)-enable-prefix-caching"),
    Pattern("async_scheduling", "synchronous scheduling is", r"Asynchronous scheduling is (?P<value>enabled|disabled)"),
    *option("async_scheduling", "async_scheduling", value="True|False"),
    Pattern("async_scheduling", "--no-async-scheduling", r"--(?P<value>no)-async-scheduling"),
    *option("mamba_cache_mode", "mamba_cache_mode", "--mamba-cache-mode", value="align|all|none"),
    *option("mamba_cache_dtype", "mamba_cache_dtype", "--mamba-cache-dtype", value=r"float\d+|bfloat16"),
    *option("mamba_ssm_cache_dtype", "mamba_ssm_cache_dtype", "--mamba-ssm-cache-dtype", value=r"float\d+|bfloat16"),
    Pattern("no_hybrid_manager", "--disable-hybrid-kv-cache-manager",
            r"(?<!no)--(?P<value>disable)-hybrid-kv-cache-manager"),
    Pattern("platform", "device_config=", r"device_config=(?P<value>[a-z]{1,16})\b"),
    Pattern("platform", "[XPU]", r"\[(?P<value>XPU)\]"),
    # While the memory of CUDA graphs is measured, 0.17 to 0.19 replace 0 blocks by as many as the graphs need.
    Pattern("blocks_override", "Overriding num_gpu_blocks",
            r"Overriding num_gpu_blocks=(?!0 )\d+ with num_gpu_blocks_override=(?P<value>\d+)"),
    *(
        Pattern("blocks_override", name, rf"(?<!with ){name}['\"]?[:= ] ?(?P<value>[1-9]\d*)")
        for name in ("--num-gpu-blocks-override", "num_gpu_blocks_override")
    ),
    *option("swap_space_gib", "swap_space", "--swap-space", value=r"\d+(?:\.\d+)?"),
)  # fmt: skip

RECORDS = (
    Pattern("available_memory", "Available KV cache memory", rf"Available KV cache memory: (?P<memory>-?{_SIZE})"),
    Pattern("available_memory", "reserved for KV Cache", rf"reserved for KV Cache is (?P<memory>-?{_SIZE})"),
    Pattern("available_memory", "memory for KV Cache", rf"reserved (?P<memory>{_SIZE}) memory for KV Cache"),
    # On CPUs, without the unit, which is GiB.
    Pattern("available_memory", "GiB for KV cache on node",
            r"(?:Explicitly|Auto) set \((?P<memory>\d+(?:\.\d+)?)/\d+(?:\.\d+)?\) GiB for KV cache on node"),
    Pattern("available_memory", "kv_cache_size=", rf"kv_cache_size=(?P<memory>{_SIZE})"),
    Pattern("available_memory", "available KV cache memory (", rf"available KV cache memory \((?P<memory>{_SIZE})\)"),
    Pattern("kv_cache_tokens", "KV cache size", r"KV cache size: (?P<tokens>\d[\d,]*) tokens"),
    Pattern("kv_cache_tokens", "stored in KV cache (", r"stored in (?:the )?KV cache \((?P<tokens>\d+)\)"),
    Pattern("max_concurrency", "Maximum concurrency for",
            r"Maximum concurrency for (?P<length>[\d,]+) tokens per request: (?P<concurrency>\d+(?:\.\d+)?)x"),
    # V0 names the blocks after the platform: "# CUDA blocks", "# rocm blocks", also "# CPU blocks" (executor_base.py).
    Pattern("num_gpu_blocks", "blocks:", rf"# (?!{_SWAP})\w{{1,16}} blocks: (?P<gpu_blocks>\d+)"),
    Pattern("fitting_blocks", "Overriding num_gpu_blocks",
            r"Overriding num_gpu_blocks=(?P<gpu_blocks>[1-9]\d*) with num_gpu_blocks_override"),
    Pattern("num_cpu_blocks", "CPU blocks:", rf"(?={_SWAP})CPU blocks: (?P<cpu_blocks>\d+)"),
    Pattern("attention_block_size", "attention block size to",
            r"(?<!\])Setting attention block size to (?P<block_size>\d+) tokens"),
    Pattern("request_bytes", "KV cache is needed", rf"(?<![\d.,])(?P<needed>{_SIZE}) KV cache is needed"),
    Pattern("max_model_len", "estimated maximum model length",
            r"estimated maximum model length is (?P<longest>\d+)"),
)  # fmt: skip


class VllmLog(LogReader):
    """Reads vLLM's log, of V0 and V1."""

    facts, records, pool_words = FACTS, RECORDS, ("KV cache", "KV Cache", "blocks:")
    # kvcalc derives vLLM's layout from the model and the type.
    dtypes: Mapping[str, str] = {"fp8_ds_mla": "fp8"}

    def readings(self, log: Log, spec: ModelSpec) -> Iterator[Reading]:
        from kvcalc.engines.vllm.log.readings import readings

        return readings(log, spec)

    def pipeline_parallel_size(self, log: Log) -> int:
        """The number in the log, or else of the stages in a list of their layers, such as 16,32."""
        layers = log.text("pp_layer_partition")
        if layers is None or log.text("pipeline_parallel_size") is not None:
            return super().pipeline_parallel_size(log)
        return layers.count(",") + 1


LOG = VllmLog()
