"""The lines of SGLang's log.

Source: memory_pool.py and the scheduler, SGLang 0.5.23; lines in public threads. SGLang's unit GB means GiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcalc.engines.log import LogReader, Reading
from kvcalc.engines.log_lines import Log, Pattern, option
from kvcalc.model.spec import ModelSpec

_GB = r"\d+(?:\.\d+)? ?GB"
_TYPE = r"(?: ?dtype: [\w.]{1,40},)?"

FACTS = (
    *option("version", "sglang==", value=r"\d[\w.]*"),
    Pattern("version", "sglang", r"(?i)sglang(?: version)?[ :=v]+(?P<value>\d+\.\d+[\w.]*)"),
    *option("model", "model_path", "--model-path", "--model", value=r"[\w./:-]+"),
    *option("context_tokens", "context_length", "--context-length", "context_len", value=r"\d+"),
    *option("tensor_parallel_size", "tp_size", "--tp-size", "--tp", "--tensor-parallel-size", value=r"\d+"),
    *option("pipeline_parallel_size", "pp_size", "--pp-size", "--pipeline-parallel-size", value=r"\d+"),
    *option("dp_size", "dp_size", "--dp-size", "--dp", value=r"\d+"),
    *option("attn_dp_size", "attn_dp_size", "--attn-dp-size", value=r"\d+"),
    *option("attn_cp_size", "attn_cp_size", "--attn-cp-size", "--attention-context-parallel-size", value=r"\d+"),
    *option("enable_dp_attention", "enable_dp_attention", value="True|False"),
    Pattern("enable_dp_attention", "--enable-dp-attention", r"--(?P<value>enable)-dp-attention"),
    *option("page_size", "page_size", "--page-size", value=r"\d+"),
    *option("swa_full_tokens_ratio", "swa_full_tokens_ratio", "--swa-full-tokens-ratio", value=r"[\d.]+"),
    # The scheduler prints the requests of one data-parallel rank, the arguments those of all.
    Pattern("running_requests", "max_total_num_tokens=",
            r"max_total_num_tokens=\d+, [\w=, -]{0,120}max_running_requests=(?P<value>\d+)"),
    *option("max_running_requests", "max_running_requests", "--max-running-requests", value=r"\d+"),
    *option("kv_dtype", "kv_cache_dtype", "--kv-cache-dtype"),
    Pattern("kv_dtype", "KV cache dtype", r"[Uu]sing KV cache dtype: (?:torch\.)?(?P<value>\w+)"),
    Pattern("kv_dtype", "KV Cache is allocated", r"KV Cache is allocated\. dtype: (?:torch\.)?(?P<value>\w+)"),
    *option("state_dtype", "mamba_ssm_dtype", "--mamba-ssm-dtype", value=r"float\d+|bfloat16"),
    *option("draft_tokens", "speculative_num_draft_tokens", "--speculative-num-draft-tokens", value=r"\d+"),
    Pattern("drafts", "speculative", r"speculative[_-]algorithm['\"]?[= :]{1,3}['\"]?(?P<value>[A-Z]\w{1,31})"),
    Pattern("dtype", "dtype=torch.", r"(?<!\w)dtype=torch\.(?P<value>\w+)"),
)  # fmt: skip

RECORDS = (
    Pattern("pool", "K size: ",
            rf"(?:KV Cache is allocated\.{_TYPE} ?)?(?:#tokens: (?P<tokens>\d+), ?)?"
            rf"K size: (?P<k>{_GB}), V size: (?P<v>{_GB})"),
    Pattern("pool", "KV size: ",
            rf"(?:KV Cache is allocated\.{_TYPE} ?)?(?:#tokens: (?P<tokens>\d+), ?)?KV size: (?P<kv>{_GB})"),
    Pattern("both_pools", "SWAKVPool mem usage",
            rf"SWAKVPool mem usage: (?P<both>{_GB})(?:, swa size: (?P<window>\d+), full size: (?P<full>\d+))?"),
    Pattern("states", "max_mamba_cache_size: ",
            rf"max_mamba_cache_size: (?P<slots>\d+), conv_state size: (?P<conv>{_GB}),?"
            rf" ssm_state size: (?P<ssm>{_GB})(?: intermediate_ssm_state_cache size: (?P<drafted_ssm>{_GB})"
            rf" intermediate_conv_window_cache size: (?P<drafted_conv>{_GB}))?"),
    Pattern("v4_memory", "memory calculation: ",
            r"DS[Vv]4 memory calculation: (?:[\w=, ]{0,99}, )?bytes_per_full_token=(?P<bytes>\d+\.\d+)"),
    Pattern("v4_pools", "DSV4 pool sizes: ",
            r"DSV4 pool sizes: full=(?P<full>\d+), swa=(?P<windows>\d+), c4=(?P<c4>\d+), c128=(?P<c128>\d+),"
            r" c4_state=(?P<states>\d+)"),
    Pattern("max_total_num_tokens", "max_total_num_tokens=", r"max_total_num_tokens=(?P<total>\d+)"),
)  # fmt: skip


class SglangLog(LogReader):
    """Reads SGLang's log."""

    facts, records, pool_words = FACTS, RECORDS, ("KV Cache", "KVPool", "Mamba Cache", "max_total_num_tokens")
    # A scale of 8 bits per 16 elements (MHATokenToKVPoolFP4, mem_cache/memory_pool.py, 0.5.23).
    dtypes: Mapping[str, str] = {"fp4_e2m1": "nvfp4", "float4_e2m1fn_x2": "nvfp4"}

    def readings(self, log: Log, spec: ModelSpec) -> Iterator[Reading]:
        if spec.model_type == "deepseek_v4":
            from kvcalc.engines.sglang.log import deepseek_v4

            return deepseek_v4.readings(log)
        from kvcalc.engines.sglang.log.readings import readings

        return readings(log, spec)

    def tensor_parallel_size(self, log: Log) -> int:
        """The part of --tp-size that splits the heads, after data-parallel ranks and the copies that divide a prompt.

        Source: derive_attn_tp_size, srt/runtime_context.py, SGLang 0.5.23.
        """
        size = super().tensor_parallel_size(log)
        if log.flag("enable_dp_attention"):
            return max(1, size // log.number("dp_size", "data-parallel size"))
        return max(1, size // (log.number("attn_dp_size", "attn_dp_size") * log.number("attn_cp_size", "attn_cp_size")))


LOG = SglangLog()
