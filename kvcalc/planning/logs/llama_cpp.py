"""The lines of llama.cpp's log.

Source: llama-kv-cache.cpp, llama-memory-recurrent.cpp and llama-context.cpp in llama-cpp-python 0.3.36. Lines of older
builds are from public threads. The unit MB in builds of 2023 means MiB.
"""

from __future__ import annotations

import re

from kvcalc.planning.logs import option, pattern

_MIB = r"\d+(?:[.,]\d+)? M(?:i)?B"
# A device's name, also of one that another machine serves: RPC[10.0.0.2:50052].
_DEVICE = r"(?<![\w-])(?P<device>RPC\d{0,3}\[[^\]\s]{1,64}\]|[\w-]{1,64})"
_KV = rf"(?:, K \((?P<k_type>\w+)\): +(?P<k>{_MIB}), V \((?P<v_type>\w+)\): +(?P<v>{_MIB}))?"
_HUMAN = r"\d+(?:\.\d+)? [KMG]iB"
_STATES = (
    rf"(?P<size>{_MIB}) +\((?: *(?P<slots>\d+) cells,)?(?: +(?P<layers>\d+) layers,?)?(?: *(?P<seqs>\d+) seqs)?"
    rf"(?: +(?P<drafted>\d+) rs_seq)?[^()]{{0,64}}\)(?:, R \(\w+\): +(?P<r>{_MIB}), S \(\w+\): +(?P<s>{_MIB}))?"
)

# Names of dimensions in llama.cpp's log, and the keys of a GGUF file.
GGUF_KEYS = {
    "n_layer": "block_count", "n_head": "attention.head_count", "n_head_kv": "attention.head_count_kv",
    "n_embd": "embedding_length", "n_embd_head_k": "attention.key_length", "n_embd_head_v": "attention.value_length",
    "n_swa": "attention.sliding_window",
}  # fmt: skip

FACTS = (
    pattern("arch", " arch ", r"(?:print_info|llm_load_print_meta): arch += (?P<value>[\w-]+)"),
    *(
        pattern(name, f" {name} ", rf"(?:print_info|llm_load_print_meta): {name} += (?P<value>\d+)\s*$")
        for name in ("n_layer", "n_head", "n_head_kv", "n_embd", "n_embd_head_k", "n_embd_head_v", "n_swa")
    ),
    # The file's own keys, which Ollama's log has without the lines above.
    pattern("gguf_arch", "general.architecture", r"- kv +\d+: +general\.architecture str += (?P<value>[\w-]+)"),
    *(
        pattern(f"gguf_{name}", f".{key} ", rf"- kv +\d+: +[\w-]+\.{re.escape(key)} u32 += (?P<value>\d+)\s*$")
        for name, key in GGUF_KEYS.items()
    ),
    pattern("version", "build", r"\bbuild(?:_info)?: b?(?P<value>\d+[^\s,]*)"),
    pattern("model", "general.name", r"general\.name (?:\w+ )? *= (?P<value>\S.*)"),
    *option("context_tokens", "n_ctx", "KvSize", "--ctx-size", value=r"[1-9]\d*"),
    *option("parallel", "n_seq_max", "n_parallel", "n_slots", "--parallel", "-np", value=r"\d+"),
    *option("ubatch_size", "n_ubatch", "--ubatch-size", "-ub", value=r"\d+"),
    *option("ollama_kv_type", "KvCacheType", "--kv-cache-type", value=r"[a-z]\w{1,15}"),
    *option("flash_attn", "flash_attn", value="0|1|on|off|enabled|disabled"),
    *option("kv_unified", "kv_unified", value="true|false"),
    pattern("swa_full", "--swa-full", r"--(?P<value>swa)-full"),
    pattern("offloaded", "layers to GPU", r"offloaded (?P<value>\d+/\d+) layers to GPU"),
)

RECORDS = (
    pattern("cache", "llama_kv_cache",
            rf"llama_kv_cache\w{{0,40}}: +size = *(?P<size>{_MIB}) +\( *(?P<cells>\d+) cells, +(?P<layers>\d+) layers"
            rf"(?:, +(?P<seqs>\d+)(?:/ *(?P<streams>\d+))? seqs)?\){_KV}"),
    # A line that a person has shortened.
    pattern("cache", " cells,", rf"^\s{{0,40}}(?P<size>{_MIB}) \( *(?P<cells>\d+) cells, +(?P<layers>\d+) layers"),
    pattern("creating", "KV cache, size",
            r"creating +(?P<kind>non-SWA|SWA|main|indexer) KV cache, size = +(?P<cells>\d+) cells"),
    pattern("self", "self size", rf"(?i:kv) self size += +(?P<size>{_MIB})(?:, c\^KV \((?P<c_type>\w+)\))?{_KV}"),
    pattern("buffer", "KV buffer size", rf"{_DEVICE} KV buffer size = +(?P<size>{_MIB})"),
    pattern("state_buffer", "RS buffer size",
            rf"{_DEVICE} RS buffer size = +(?P<size>{_MIB})"),
    pattern("states", "llama_memory_recurrent", rf"llama_memory_recurrent: size = *{_STATES}"),
    pattern("states", " cells,", rf"(?<!\w)RS +{_STATES}"),
    # Ollama: the estimate of its scheduler until 2025, and since then the buffers of each device.
    pattern("ollama_total", "memory.required.kv", rf'memory\.required\.kv="(?P<size>{_HUMAN})"'),
    pattern("ollama_buffer", 'msg="kv cache"',
            rf'msg="kv cache" device=(?P<device>\w{{1,64}}) size="(?P<size>{_HUMAN})"'),
    *(
        pattern("split", name, rf"(?<!\S){name}[ =]+(?P<shares>[\d.]+(?:[,/][\d.]+)+)")
        for name in ("--tensor-split", "-ts")
    ),
    pattern("device", "MiB free", rf"using device {_DEVICE} \([^()]{{0,100}}\)(?: \([^()]{{0,40}}\))? - +"
            r"(?P<free>\d+) MiB free"),
)  # fmt: skip

POOL_WORDS = (
    "llama_kv_cache", "KV self size", "KV buffer size", "llama_memory_recurrent", "memory.required.kv",
    'msg="kv cache"',
)  # fmt: skip
