"""The lines of llama.cpp's log.

Source: llama-kv-cache.cpp, llama-memory-recurrent.cpp and llama-context.cpp in llama-cpp-python 0.3.36. Lines of older
builds are from public threads. The unit MB in builds of 2023 means MiB.
"""

from __future__ import annotations

from kvcalc.planning.logs import option, pattern

_MIB = r"\d+(?:[.,]\d+)? M(?:i)?B"
_KV = rf"(?:, K \((?P<k_type>\w+)\): +(?P<k>{_MIB}), V \((?P<v_type>\w+)\): +(?P<v>{_MIB}))?"
_STATES = (
    rf"(?P<size>{_MIB}) \((?: *(?P<slots>\d+) cells,)?(?: +(?P<layers>\d+) layers,?)?(?: *(?P<seqs>\d+) seqs)?"
    rf"(?: +(?P<drafted>\d+) rs_seq)?[^()]{{0,64}}\)(?:, R \(\w+\): +(?P<r>{_MIB}), S \(\w+\): +(?P<s>{_MIB}))?"
)

FACTS = (
    pattern("arch", " arch ", r"(?:print_info|llm_load_print_meta): arch += (?P<value>[\w-]+)"),
    *(
        pattern(name, f" {name} ", rf"(?:print_info|llm_load_print_meta): {name} += (?P<value>\d+)\s*$")
        for name in ("n_layer", "n_head", "n_head_kv", "n_embd", "n_embd_head_k", "n_embd_head_v", "n_swa")
    ),
    pattern("version", "build", r"\bbuild(?:_info)?: b?(?P<value>\d+[^\s,]*)"),
    pattern("model", "general.name", r"general\.name (?:\w+ )? *= (?P<value>\S.*)"),
    *option("context_tokens", "n_ctx", value=r"\d+"),
    *option("parallel", "n_seq_max", "n_parallel", "n_slots", value=r"\d+"),
    *option("ubatch_size", "n_ubatch", value=r"\d+"),
    *option("flash_attn", "flash_attn", value="0|1|on|off|enabled|disabled"),
    *option("kv_unified", "kv_unified", value="true|false"),
    pattern("swa_full", "--swa-full", r"--(?P<value>swa)-full"),
    pattern("offloaded", "layers to GPU", r"offloaded (?P<value>\d+/\d+) layers to GPU"),
)

RECORDS = (
    pattern("cache", "llama_kv_cache",
            rf"llama_kv_cache\w{{0,40}}: size = +(?P<size>{_MIB}) \( *(?P<cells>\d+) cells, +(?P<layers>\d+) layers"
            rf"(?:, +(?P<seqs>\d+)(?:/ *(?P<streams>\d+))? seqs)?\){_KV}"),
    # A line that a person has shortened.
    pattern("cache", " cells,", rf"^\s{{0,40}}(?P<size>{_MIB}) \( *(?P<cells>\d+) cells, +(?P<layers>\d+) layers"),
    pattern("creating", "KV cache, size",
            r"creating +(?P<kind>non-SWA|SWA|main|indexer) KV cache, size = +(?P<cells>\d+) cells"),
    pattern("self", "self size", rf"(?i:kv) self size += +(?P<size>{_MIB})(?:, c\^KV \((?P<c_type>\w+)\))?{_KV}"),
    pattern("buffer", "KV buffer size", rf"(?<![\w-])(?P<device>[\w-]{{1,64}}) KV buffer size = +(?P<size>{_MIB})"),
    pattern("state_buffer", "RS buffer size",
            rf"(?<![\w-])(?P<device>[\w-]{{1,64}}) RS buffer size = +(?P<size>{_MIB})"),
    pattern("states", "llama_memory_recurrent", rf"llama_memory_recurrent: size = +{_STATES}"),
    pattern("states", " cells,", rf"(?<!\w)RS +{_STATES}"),
    *(
        pattern("split", name, rf"(?<!\S){name}[ =]+(?P<shares>[\d.]+(?:[,/][\d.]+)+)")
        for name in ("--tensor-split", "-ts")
    ),
    pattern("device", "MiB free", r"using device (?P<device>[\w-]{1,64}) \([^()]{0,100}\)(?: \([^()]{0,40}\))? - +"
            r"(?P<free>\d+) MiB free"),
)  # fmt: skip

POOL_WORDS = ("llama_kv_cache", "KV self size", "KV buffer size", "llama_memory_recurrent")
