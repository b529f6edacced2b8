"""The lines of vLLM's log.

Source: kv_cache_utils.py, gpu_worker.py, core.py and interface.py, vLLM 0.33.0; the executors of V0 (executor_base.py
and worker.py, vLLM 0.8); lines in public threads.
"""

from __future__ import annotations

from kvcalc.planning.logs import option, pattern

_SIZE = r"\d+(?:[.,]\d+)? ?G(?:i)?B"
# The blocks of the swap space come last in their line.
_SWAP = r"CPU blocks: \d+(?!\d|, # CPU)"

FACTS = (
    pattern("version", "LLM engine (v", r"LLM engine \(v(?P<value>\d[^\s,)]*)\)"),
    pattern("version", "vLLM API server version", r"vLLM API server version v?(?P<value>\d[^\s,)]*)"),
    pattern("version", "vllm==", r"\bvllm==(?P<value>\d[^\s,)\"']*)"),
    pattern("version", "█", r"\bversion v?(?P<value>\d+\.\d[^\s,)]*)"),
    pattern("generation", "Initializing a V", r"Initializing a (?P<value>V[01]) LLM engine"),
    pattern("model", "model='", r"(?<!\w)model='(?P<value>[^']+)'"),
    pattern("model", "vllm serve ", r"vllm serve (?P<value>[^\s-][^\s]*)"),
    *option("model", "--model", "model_tag", value=r"[\w./:-]+"),
    pattern("dtype", "dtype=torch.", r"(?<!\w)dtype=torch\.(?P<value>\w+)"),
    *option("kv_dtype", "kv_cache_dtype", "--kv-cache-dtype"),
    *option("context_tokens", "max_seq_len", "max_model_len", "--max-model-len", value=r"\d[\d.]*[kKmM]?\b"),
    pattern("context_tokens", "max model len", r"Using max model len (?P<value>\d+)"),
    pattern("context_tokens", "Maximum concurrency for", r"Maximum concurrency for (?P<value>[\d,]+) tokens per"),
    pattern("context_tokens", "max seq len (", r"max seq len \((?P<value>\d+)\)"),
    *option("tensor_parallel_size", "tensor_parallel_size", "--tensor-parallel-size", "-tp", value=r"\d+"),
    *option("pipeline_parallel_size", "pipeline_parallel_size", "--pipeline-parallel-size", "-pp", value=r"\d+"),
    pattern(
        "pp_layer_partition",
        "VLLM_PP_LAYER_PARTITION",
        r"VLLM_PP_LAYER_PARTITION['\"]?[=:] ?['\"]?(?P<value>\d+(?:,\d+)+)",
    ),
    pattern(
        "pp_layer_partition", "unevenly partitioned", r"layers were unevenly partitioned: \[(?P<value>\d+(?:,\d+)+)\]"
    ),
    *option("token_ranks", "decode_context_parallel_size", "--decode-context-parallel-size", "-dcp", value=r"\d+"),
    *option("prefill_ranks", "prefill_context_parallel_size", "--prefill-context-parallel-size", "-pcp", value=r"\d+"),
    *option("block_size", "block_size", "--block-size", value=r"\d+"),
    pattern("block_size", "kv cache block size to", r"Setting kv cache block size to (?P<value>\d+) for"),
    *option("max_num_batched_tokens", "max_num_batched_tokens", "--max-num-batched-tokens", value=r"\d+"),
    *option("num_speculative_tokens", "num_speculative_tokens", "num_spec_tokens", value=r"\d+"),
    pattern(
        "speculative_method",
        "peculative",
        r"[Ss]peculative[-_]?[Cc]onfig[^\n]{0,60}?method['\"]? ?[=:] ?['\"](?P<value>[\w-]{1,32})",
    ),
    *option("enable_prefix_caching", "enable_prefix_caching", value="True|False"),
    pattern("enable_prefix_caching", "--enable-prefix-caching", r"--(?P<value>enable)-prefix-caching"),
    pattern("enable_prefix_caching", "--no-enable-prefix-caching", r"--(?P<value>no)-enable-prefix-caching"),
    pattern("async_scheduling", "synchronous scheduling is", r"Asynchronous scheduling is (?P<value>enabled|disabled)"),
    *option("async_scheduling", "async_scheduling", value="True|False"),
    pattern("async_scheduling", "--no-async-scheduling", r"--(?P<value>no)-async-scheduling"),
    *option("mamba_cache_mode", "mamba_cache_mode", "--mamba-cache-mode", value="align|all|none"),
    *option("mamba_cache_dtype", "mamba_cache_dtype", "--mamba-cache-dtype", value=r"float\d+|bfloat16"),
    *option("mamba_ssm_cache_dtype", "mamba_ssm_cache_dtype", "--mamba-ssm-cache-dtype", value=r"float\d+|bfloat16"),
    pattern(
        "no_hybrid_manager", "--disable-hybrid-kv-cache-manager", r"(?<!no)--(?P<value>disable)-hybrid-kv-cache-manager"
    ),
    pattern("platform", "device_config=", r"device_config=(?P<value>[a-z]{1,16})\b"),
    pattern("platform", "[XPU]", r"\[(?P<value>XPU)\]"),
    # While the memory of CUDA graphs is measured, 0.17 to 0.19 replace 0 blocks by as many as the graphs need.
    pattern(
        "blocks_override",
        "Overriding num_gpu_blocks",
        r"Overriding num_gpu_blocks=(?!0 )\d+ with num_gpu_blocks_override=(?P<value>\d+)",
    ),
    *(
        pattern("blocks_override", name, rf"(?<!with ){name}['\"]?[:= ] ?(?P<value>[1-9]\d*)")
        for name in ("--num-gpu-blocks-override", "num_gpu_blocks_override")
    ),
    *option("swap_space_gib", "swap_space", "--swap-space", value=r"\d+(?:\.\d+)?"),
)

RECORDS = (
    pattern("available_memory", "Available KV cache memory", rf"Available KV cache memory: (?P<memory>-?{_SIZE})"),
    pattern("available_memory", "reserved for KV Cache", rf"reserved for KV Cache is (?P<memory>-?{_SIZE})"),
    pattern("available_memory", "memory for KV Cache", rf"reserved (?P<memory>{_SIZE}) memory for KV Cache"),
    # On CPUs, without the unit, which is GiB.
    pattern("available_memory", "GiB for KV cache on node",
            r"(?:Explicitly|Auto) set \((?P<memory>\d+(?:\.\d+)?)/\d+(?:\.\d+)?\) GiB for KV cache on node"),
    pattern("available_memory", "kv_cache_size=", rf"kv_cache_size=(?P<memory>{_SIZE})"),
    pattern("available_memory", "available KV cache memory (", rf"available KV cache memory \((?P<memory>{_SIZE})\)"),
    pattern("kv_cache_tokens", "KV cache size", r"KV cache size: (?P<tokens>\d[\d,]*) tokens"),
    pattern("kv_cache_tokens", "stored in KV cache (", r"stored in (?:the )?KV cache \((?P<tokens>\d+)\)"),
    pattern("max_concurrency", "Maximum concurrency for",
            r"Maximum concurrency for (?P<length>[\d,]+) tokens per request: (?P<concurrency>\d+(?:\.\d+)?)x"),
    # V0 names the blocks after the platform: "# CUDA blocks", "# rocm blocks", also "# CPU blocks" (executor_base.py).
    pattern("num_gpu_blocks", "blocks:", rf"# (?!{_SWAP})\w{{1,16}} blocks: (?P<gpu_blocks>\d+)"),
    pattern("fitting_blocks", "Overriding num_gpu_blocks",
            r"Overriding num_gpu_blocks=(?P<gpu_blocks>[1-9]\d*) with num_gpu_blocks_override"),
    pattern("num_cpu_blocks", "CPU blocks:", rf"(?={_SWAP})CPU blocks: (?P<cpu_blocks>\d+)"),
    pattern("attention_block_size", "attention block size to",
            r"(?<!\])Setting attention block size to (?P<block_size>\d+) tokens"),
    pattern("request_bytes", "KV cache is needed", rf"(?<![\d.,])(?P<needed>{_SIZE}) KV cache is needed"),
    pattern("max_model_len", "estimated maximum model length",
            r"estimated maximum model length is (?P<longest>\d+)"),
)  # fmt: skip

POOL_WORDS = ("KV cache", "KV Cache", "blocks:")
