"""The lines of TensorRT-LLM's log. Source: kvCacheManager.cpp and the executor; lines in public threads."""

from __future__ import annotations

from kvcalc.planning.logs import option, pattern

FACTS = (
    pattern("version", "TensorRT-LLM version", r"TensorRT-LLM version:? v?(?P<value>\d[\w.]*)"),
    pattern("model", "trtllm-serve ", r"trtllm-serve (?:serve )?(?P<value>[^\s-]\S*)"),
    *option("model", "model", "--model", value=r"[\w.-]+/[\w./-]+"),
    *option("context_tokens", "max_seq_len", "--max_seq_len", value=r"\d+"),
    *option("tensor_parallel_size", "tensor_parallel_size", "tp_size", "--tp_size", value=r"\d+"),
    *option("pipeline_parallel_size", "pipeline_parallel_size", "pp_size", "--pp_size", value=r"\d+"),
    *option("enable_attention_dp", "enable_attention_dp", value="(?i:true|false)"),
    *option("kv_dtype", "kv_cache_dtype", "--kv_cache_dtype"),
    *option("tokens_per_block", "tokens_per_block", value=r"\d+"),
    pattern("tokens_per_block", "okens per block", r"[Tt]okens per block[=:] ?(?P<value>\d+)"),
    *option(
        "memory_fraction",
        "free_gpu_memory_fraction",
        "--free_gpu_memory_fraction",
        "kv_cache_free_gpu_mem_fraction",
        "--kv_cache_free_gpu_memory_fraction",
        value=r"0?\.\d+",
    ),
    *option("max_tokens", "max_tokens_in_paged_kv_cache", value=r"\d+"),
    pattern("fake_cache", "fake cache manager", r"Using fake cache manager with head_dim=(?P<value>0)"),
    pattern("block_window", "[window size=", r"per sequence: \d+ \[window size=(?P<value>\d+)\]"),
)

RECORDS = (
    pattern("pool", "Allocated ",
            r"Allocated (?P<size>\d+(?:\.\d+)? [KMG]iB)(?: for max tokens in paged KV cache)? \((?P<tokens>\d+)\)"),
    pattern("available", "available: ", r"total: \d+(?:\.\d+)? GiB, available: (?P<available>\d+(?:\.\d+)? GiB)"),
    pattern("pool_bytes", "bytes for k/v cache", r"Allocate (?P<bytes>\d+) bytes for k/v cache"),
    pattern("tokens", "tokens in paged KV cache", r"Using (?P<tokens>\d+) tokens in paged KV cache"),
    pattern("blocks", "KV cache primary pool", r"Number of blocks in KV cache primary pool: (?P<blocks>\d+)"),
    pattern("blocks", "primary blocks", r"primary blocks[=:] ?(?P<blocks>\d+)"),
    pattern("states", "max_mamba_cache_size: ",
            r"max_mamba_cache_size: (?P<slots>\d+), conv_state size: (?P<conv>\d+(?:\.\d+)? ?GB),"
            r" ssm_state size: (?P<ssm>\d+(?:\.\d+)? ?GB)"),
    pattern("pages", "KV cache pages per sequence", r"Max KV cache pages per sequence: (?P<pages>\d+)"),
    pattern("pages", "KV cache blocks per sequence", r"Max KV cache blocks per sequence: (?P<pages>\d+)"),
)  # fmt: skip

POOL_WORDS = ("KV cache", "k/v cache", "primary blocks", "available:")
