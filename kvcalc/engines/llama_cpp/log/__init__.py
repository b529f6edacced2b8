"""The lines of llama.cpp's log, and of Ollama's, which runs it.

Source: llama-kv-cache.cpp, llama-memory-recurrent.cpp and llama-context.cpp in llama-cpp-python 0.3.36. Lines of older
builds are from public threads. The unit MB in builds of 2023 means MiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvcalc.engines.log import LogReader, Reading
from kvcalc.engines.log_lines import Log, Passes, Pattern, Record, option
from kvcalc.model.hf_config import read_config
from kvcalc.model.spec import ModelSpec

_MIB = r"\d+(?:[.,]\d+)? M(?:i)?B"
# A device's name, also of one that another machine serves: RPC[10.0.0.2:50052].
_DEVICE = r"(?<![\w-])(?P<device>RPC\d{0,3}\[[^\]\s]{1,64}\]|[\w-]{1,64})"
_KV = rf"(?:, K \((?P<k_type>\w+)\): +(?P<k>{_MIB}), V \((?P<v_type>\w+)\): +(?P<v>{_MIB}))?"
_HUMAN = r"\d+(?:\.\d+)? [KMG]iB"
_STATES = (
    rf"(?P<size>{_MIB}) +\((?: *(?P<slots>\d+) cells,)?(?: +(?P<layers>\d+) layers,?)?(?: *(?P<seqs>\d+) seqs)?"
    rf"(?: +(?P<drafted>\d+) rs_seq)?[^()]{{0,64}}\)(?:, R \(\w+\): +(?P<r>{_MIB}), S \(\w+\): +(?P<s>{_MIB}))?"
)

# Architectures in which every layer keeps K and V of every token, with the same width (src/models).
_PLAIN = "llama qwen2 qwen2moe qwen3 qwen3moe command-r stablelm starcoder2 codeshell olmo2".split()

# Names of dimensions in the log, and the keys of a GGUF file.
_GGUF_KEYS = {
    "n_layer": "block_count", "n_head": "attention.head_count", "n_head_kv": "attention.head_count_kv",
    "n_embd": "embedding_length", "n_embd_head_k": "attention.key_length", "n_embd_head_v": "attention.value_length",
    "n_swa": "attention.sliding_window",
}  # fmt: skip

FACTS = (
    Pattern("arch", " arch ", r"(?:print_info|llm_load_print_meta): arch += (?P<value>[\w-]+)"),
    *(
        Pattern(name, f" {name} ", rf"(?:print_info|llm_load_print_meta): {name} += (?P<value>\d+)\s*$")
        for name in ("n_layer", "n_head", "n_head_kv", "n_embd", "n_embd_head_k", "n_embd_head_v", "n_swa")
    ),
    # The file's own keys, which Ollama's log has without the lines above.
    Pattern("gguf_arch", "general.architecture", r"- kv +\d+: +general\.architecture str += (?P<value>[\w-]+)"),
    *(
        Pattern(f"gguf_{name}", f".{key} ", rf"- kv +\d+: +[\w-]+\.{re.escape(key)} u32 += (?P<value>\d+)\s*$")
        for name, key in _GGUF_KEYS.items()
    ),
    Pattern("version", "build", r"\bbuild(?:_info)?: b?(?P<value>\d+[^\s,]*)"),
    Pattern("model", "general.name", r"general\.name (?:\w+ )? *= (?P<value>\S.*)"),
    *option("context_tokens", "n_ctx", "KvSize", "--ctx-size", value=r"[1-9]\d*"),
    *option("parallel", "n_seq_max", "n_parallel", "n_slots", "--parallel", "-np", value=r"\d+"),
    *option("ubatch_size", "n_ubatch", "--ubatch-size", "-ub", value=r"\d+"),
    *option("ollama_kv_type", "KvCacheType", "--kv-cache-type", value=r"[a-z]\w{1,15}"),
    *option("flash_attn", "flash_attn", value="0|1|on|off|enabled|disabled"),
    *option("kv_unified", "kv_unified", value="true|false"),
    Pattern("swa_full", "--swa-full", r"--(?P<value>swa)-full"),
    Pattern("offloaded", "layers to GPU", r"offloaded (?P<value>\d+/\d+) layers to GPU"),
)  # fmt: skip

RECORDS = (
    Pattern("cache", "llama_kv_cache",
            rf"llama_kv_cache\w{{0,40}}: +size = *(?P<size>{_MIB}) +\( *(?P<cells>\d+) cells, +(?P<layers>\d+) layers"
            rf"(?:, +(?P<seqs>\d+)(?:/ *(?P<streams>\d+))? seqs)?\){_KV}"),
    # A line that a person has shortened.
    Pattern("cache", " cells,", rf"^\s{{0,40}}(?P<size>{_MIB}) \( *(?P<cells>\d+) cells, +(?P<layers>\d+) layers"),
    Pattern("creating", "KV cache, size",
            r"creating +(?P<kind>non-SWA|SWA|main|indexer) KV cache, size = +(?P<cells>\d+) cells"),
    Pattern("self", "self size", rf"(?i:kv) self size += +(?P<size>{_MIB})(?:, c\^KV \((?P<c_type>\w+)\))?{_KV}"),
    Pattern("buffer", "KV buffer size", rf"{_DEVICE} KV buffer size = +(?P<size>{_MIB})"),
    Pattern("state_buffer", "RS buffer size",
            rf"{_DEVICE} RS buffer size = +(?P<size>{_MIB})"),
    Pattern("states", "llama_memory_recurrent", rf"llama_memory_recurrent: size = *{_STATES}"),
    Pattern("states", " cells,", rf"(?<!\w)RS +{_STATES}"),
    # Ollama: the estimate of its scheduler until 2025, and since then the buffers of each device.
    Pattern("ollama_total", "memory.required.kv", rf'memory\.required\.kv="(?P<size>{_HUMAN})"'),
    Pattern("ollama_buffer", 'msg="kv cache"',
            rf'msg="kv cache" device=(?P<device>\w{{1,64}}) size="(?P<size>{_HUMAN})"'),
    *(
        Pattern("split", name, rf"(?<!\S){name}[ =]+(?P<shares>[\d.]+(?:[,/][\d.]+)+)")
        for name in ("--tensor-split", "-ts")
    ),
    Pattern("device", "MiB free", rf"using device {_DEVICE} \([^()]{{0,100}}\)(?: \([^()]{{0,40}}\))? - +"
            r"(?P<free>\d+) MiB free"),
)  # fmt: skip


class MeasuringPasses(Passes):
    """The passes in which llama.cpp measures a model before it loads it.

    Each of them prints the context, and buffers of 0.00 MiB, and may have another context and other layers on the
    devices. The model that is loaded prints the same lines again (`fitting params to device memory`,
    common/common.cpp).
    """

    names = frozenset(("buffer", "cache", "creating", "self", "state_buffer", "states"))

    def __init__(self) -> None:
        # Line numbers: of the last buffer with bytes, of the last one without, and of the last context.
        self._loaded = self._measured = self._context = 0
        # The context of the first pass that measured since a model was loaded.
        self._first: int | None = None

    def replaces(self, name: str, said: int, line: int) -> bool:
        if name == "context_tokens":
            self._context = line
        return self._loaded < said < self._measured < line

    def earlier(self, record: Record) -> range:
        if record.name != "buffer":
            return range(0)
        if not float(record.parts["size"].split()[0].replace(",", ".")):
            self._measured = record.line
            if self._first is None:
                # Without the line of its context, a pass after a model was loaded begins here.
                self._first = self._context if self._context >= self._loaded else record.line
            return range(0)
        first, self._first, self._loaded = self._first, None, record.line
        if first is None:
            return range(0)
        return range(first, self._context if self._context > self._measured else record.line)


class LlamaCppLog(LogReader):
    """Reads the log of llama.cpp, of its servers, and of Ollama."""

    facts, records, passes = FACTS, RECORDS, MeasuringPasses
    pool_words = (
        "llama_kv_cache", "KV self size", "KV buffer size", "llama_memory_recurrent", "memory.required.kv",
        'msg="kv cache"',
    )  # fmt: skip

    def readings(self, log: Log, spec: ModelSpec) -> Iterator[Reading]:
        from kvcalc.engines.llama_cpp.log.readings import readings

        return readings(log, spec)

    def model(self, log: Log, name: str) -> ModelSpec | None:
        """A plain decoder with the dimensions in the log. None if one is missing or the model is not plain."""
        said = _dimensions(log) if (log.text("arch") or log.text("gguf_arch")) in _PLAIN else None
        if said is None or said["n_swa"] or said["n_embd_head_k"] != said["n_embd_head_v"]:
            return None
        config: dict[str, object] = {
            "model_type": "generic", "num_hidden_layers": said["n_layer"], "num_attention_heads": said["n_head"],
            "num_key_value_heads": said["n_head_kv"], "hidden_size": said["n_embd"], "head_dim": said["n_embd_head_k"],
            "torch_dtype": "float16",
        }  # fmt: skip
        return read_config(config, name, "the log's dimensions")


def _dimensions(log: Log) -> dict[str, int] | None:
    """The dimensions in llama.cpp's own lines, or else in the file's keys. None if one is missing."""
    said = {key: int(text) for key in _GGUF_KEYS if (text := log.text(key)) is not None}
    if len(said) == len(_GGUF_KEYS):
        return said
    said = {key: int(text) for key in _GGUF_KEYS if (text := log.text(f"gguf_{key}")) is not None}
    if not {"n_layer", "n_head", "n_embd"} <= said.keys() or not said["n_head"]:
        return None
    # The defaults of keys that a file may leave out (llama_model::load_hparams).
    width = said["n_embd"] // said["n_head"]
    return {"n_head_kv": said["n_head"], "n_embd_head_k": width, "n_embd_head_v": width, "n_swa": 0, **said}


LOG = LlamaCppLog()
