"""llama.cpp's log, and that of Ollama, which runs it."""

from __future__ import annotations

from kvcalc.engines.log import LogReader
from kvcalc.engines.log_lines import Log, Passes, Record
from kvcalc.model.hf_config import read_config
from kvcalc.model.spec import ModelSpec

# Architectures in which every layer keeps K and V of every token, with the same width (src/models).
_PLAIN = "llama qwen2 qwen2moe qwen3 qwen3moe command-r stablelm starcoder2 codeshell olmo2".split()

# Names of dimensions in the log. `gguf_` and the name is the fact of the file's key.
_DIMENSIONS = ("n_layer", "n_head", "n_head_kv", "n_embd", "n_embd_head_k", "n_embd_head_v", "n_swa")


class MeasuringPasses(Passes):
    """The passes in which llama.cpp measures a model before it loads it.

    Each of them prints the context, and buffers of 0.00 MiB, and may have another context and other layers on the
    devices. The model that is loaded prints the same lines again (`fitting params to device memory`,
    common/common.cpp).
    """

    names = frozenset(("buffer", "cache", "creating", "self", "state_buffer", "states"))

    def __init__(self) -> None:
        # Line numbers: of the last buffer with bytes, of the last one without, and of the last fact, as the context.
        self._loaded = self._measured = self._context = 0
        # The context of the first pass that measured since a model was loaded.
        self._first: int | None = None

    def replaces(self, name: str, said: int, line: int) -> bool:
        self._context = line
        return self._loaded < said < self._measured < line

    def earlier(self, record: Record) -> range | None:
        if record.name != "buffer":
            return None
        if not float(record.parts["size"].split()[0].replace(",", ".")):
            self._measured = record.line
            if self._first is None:
                # Without the line of its context, a pass after a model was loaded begins here.
                self._first = self._context if self._context >= self._loaded else record.line
            return None
        first, self._first, self._loaded = self._first, None, record.line
        if first is None:
            return None
        return range(first, self._context if self._context > self._measured else record.line)


class LlamaCppLog(LogReader):
    """Reads the log of llama.cpp, of its servers, and of Ollama."""

    passes = MeasuringPasses

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
    said = {key: int(text) for key in _DIMENSIONS if (text := log.text(key)) is not None}
    if len(said) == len(_DIMENSIONS):
        return said
    said = {key: int(text) for key in _DIMENSIONS if (text := log.text(f"gguf_{key}")) is not None}
    if not {"n_layer", "n_head", "n_embd"} <= said.keys() or not said["n_head"]:
        return None
    # The defaults of keys that a file may leave out (llama_model::load_hparams).
    width = said["n_embd"] // said["n_head"]
    return {"n_head_kv": said["n_head"], "n_embd_head_k": width, "n_embd_head_v": width, "n_swa": 0, **said}


LOG = LlamaCppLog()
