"""Read the commands that start TensorRT-LLM, with the file of `--config`.

Sources: `serve` in tensorrt_llm/commands/serve.py; LlmArgs and KvCacheConfig in tensorrt_llm/llmapi/llm_args.py,
TensorRT-LLM 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines.reading import Read, Reader, float_types, inverse, text_of, whole
from kvcalc.engines.tensorrt_llm.command import DECODING, KV_CACHE_CONFIG
from kvcalc.errors import LayoutError, UsageError
from kvcalc.model.drafting import MTP
from kvcalc.model.yaml_mapping import parse_mapping

# Keys of the file that are options of trtllm-serve under another name.
_KEYS = {
    "tensor_parallel_size": "tp-size", "pipeline_parallel_size": "pp-size", "moe_expert_parallel_size": "ep-size",
}  # fmt: skip
# Mappings whose keys are read like those around them. Until 0.20, the second one had those of the PyTorch backend.
_NESTED = ("kv_cache_config", "attention_dp_config", "pytorch_backend_config")
# Keys of moe_config that choose kernels. Tokens in a step of the experts and slots for more of them change the memory.
_MOE = ("backend", "disable_finalize_fusion", "use_low_precision_moe_combine")
_DEFAULTS: tuple[tuple[str, Any], ...] = (("max_beam_width", 1), ("max_gpu_total_bytes", 0), ("scheduler_config", {}))
_DECODING = {**inverse(DECODING), "Eagle": "eagle1", "EAGLE3": "eagle"}


class TensorrtLlmReader(Reader):
    """`trtllm-serve ...`."""

    def finish(self, read: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """The settings of the file are read like options, which come first."""
        path = read.left.get("config")
        text = None if path is None else text_of(path, files)
        if path is not None and text is None:
            read.notes.append(f"{path} is not here, so its settings do not count")
        if text is not None:
            self._settings(read, parse_mapping(text, path or ""))
        if read.left.get("dtype") in float_types():
            read.fields["dtype"] = float_types()[read.left["dtype"]]

    def _settings(self, read: Read, config: Mapping[Any, Any]) -> None:
        inside = {key: config[key] for key in _NESTED if isinstance(config.get(key), dict)}
        rows = {**config, **{key: value for part in inside.values() for key, value in part.items()}}
        if "kv_cache_config" in inside:
            read.fields["kv_dtype"] = str(inside["kv_cache_config"].get("dtype") or "auto")
        if "kv_cache_dtype" in rows:
            read.fields["kv_dtype"] = str(rows.pop("kv_cache_dtype"))
        self._graphs(config.get("cuda_graph_config"))
        harmless = self.words.keys.split()
        options = {key: name for name, key in KV_CACHE_CONFIG.items()}
        for key, value in rows.items():
            if key in (*_NESTED, "speculative_config", *harmless) or value is None:
                continue
            if key == "moe_config" and isinstance(value, dict):
                read.unknown += [f"moe_config.{name}" for name in value if name not in _MOE]
                continue
            if (key, value) in _DEFAULTS:
                continue
            if value is False and str(key).replace("_", "-") in self.own:
                continue  # a flag that is not set
            name = options.get(key) or _KEYS.get(key, str(key).replace("_", "-"))
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            if key == "dtype" and "dtype" not in config:
                continue  # the cache's
            if name in self.fields:
                read.fields.setdefault(self.fields[name], text)
            elif name == "dtype":
                read.left.setdefault("dtype", str(config["dtype"]))
            elif name in self.own:
                read.settings.setdefault(self.own[name], text)
            elif name not in self.harmless:
                read.unknown.append(str(key))
        if rows.get("enable_attention_dp") is True:  # of all ranks, wherever their number stands
            read.fields.update(data_parallel_size=str(read.size("tensor_parallel_size")), tensor_parallel_size="1")
        drafting = config.get("speculative_config")
        if isinstance(drafting, dict):
            method = _DECODING.get(str(drafting.get("decoding_type")))
            number = drafting.get("max_draft_len") or drafting.get("num_nextn_predict_layers")
            if method is None or number is None:
                raise UsageError("speculative_config: needs decoding_type and max_draft_len")
            model = drafting.get("speculative_model") or drafting.get("speculative_model_dir")
            read.drafting = method, whole(str(number), "max_draft_len"), None if method == MTP else model

    def _graphs(self, config: Any) -> None:
        """The largest graph and the list of graphs must agree (BaseCudaGraphConfig, llm_args.py)."""
        given = config if isinstance(config, dict) else {}
        sizes, most = given.get("batch_sizes"), given.get("max_batch_size")
        if (
            isinstance(sizes, list)
            and sizes
            and all(type(size) is int for size in sizes)
            and most not in (None, 0, max(sizes))
        ):
            text = f"TensorRT-LLM does not start with graphs of {max(sizes)} requests and a max_batch_size of {most}"
            raise LayoutError(f"cuda_graph_config: {text}", f"max_batch_size: {max(sizes)}")


READER = TensorrtLlmReader("tensorrt-llm")
