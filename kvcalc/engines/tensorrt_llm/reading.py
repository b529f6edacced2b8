"""Read the commands that start TensorRT-LLM, with the file of `--config`.

Sources: `serve` in tensorrt_llm/commands/serve.py; LlmArgs and KvCacheConfig in tensorrt_llm/llmapi/llm_args.py,
TensorRT-LLM 1.3.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvcalc.engines.reading import Read, Reader, float_types, inverse, whole
from kvcalc.engines.tensorrt_llm.command import DECODING, KV_CACHE_CONFIG
from kvcalc.errors import UsageError
from kvcalc.model.drafting import MTP
from kvcalc.model.yaml_mapping import parse_mapping

# Keys of the file that are options of trtllm-serve under another name.
_KEYS = {
    "tensor_parallel_size": "tp-size", "pipeline_parallel_size": "pp-size", "moe_expert_parallel_size": "ep-size",
}  # fmt: skip
_DECODING = {**inverse(DECODING), "Eagle": "eagle1", "EAGLE3": "eagle"}
_LARGEST_FILE = 1 << 20


class TensorrtLlmReader(Reader):
    """`trtllm-serve ...`."""

    def finish(self, found: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """The settings of the file are read like options, which come first."""
        path = found.left.get("config") or found.left.get("extra-llm-api-options")
        text = None if path is None else files.get(path, files.get(os.path.basename(path)))
        if path is not None and text is None:
            try:
                with open(path, encoding="utf-8") as file:
                    text = file.read(_LARGEST_FILE)
            except (OSError, ValueError):
                found.notes.append(f"{path} is not here, so its settings do not count")
        if text is not None:
            self._settings(found, parse_mapping(text, path or ""))
        if found.left.get("dtype") in float_types():
            found.fields["dtype"] = float_types()[found.left["dtype"]]

    def _settings(self, found: Read, config: Mapping[Any, Any]) -> None:
        rows = {**config, **(config.get("kv_cache_config") or {})}
        if isinstance(cache := config.get("kv_cache_config"), dict):
            found.fields["kv_dtype"] = str(cache.get("dtype") or "auto")
        own = {key: name for name, key in KV_CACHE_CONFIG.items()}
        for key, value in rows.items():
            if key in ("kv_cache_config", "speculative_config") or value is None:
                continue
            if value is False and str(key).replace("_", "-") in self._own:
                continue  # a flag that is not set
            name = own.get(key) or _KEYS.get(key, str(key).replace("_", "-"))
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            if key == "dtype" and "dtype" not in config:
                continue  # the cache's
            if name in self.fields:
                found.fields.setdefault(self.fields[name], text)
            elif name == "dtype":
                found.left.setdefault("dtype", str(config["dtype"]))
            elif name in self._own:
                found.settings.setdefault(self._own[name], text)
            elif name not in self.known and key != "enable_attention_dp":
                found.unknown.append(str(key))
        if config.get("enable_attention_dp") is True:  # of all ranks, wherever their number stands
            found.fields.update(data_parallel_size=str(found.size("tensor_parallel_size")), tensor_parallel_size="1")
        drafting = config.get("speculative_config")
        if isinstance(drafting, dict):
            method = _DECODING.get(str(drafting.get("decoding_type")))
            number = drafting.get("max_draft_len") or drafting.get("num_nextn_predict_layers")
            if method is None or number is None:
                raise UsageError("speculative_config: needs decoding_type and max_draft_len")
            model = drafting.get("speculative_model") or drafting.get("speculative_model_dir")
            found.drafting = method, whole(str(number), "max_draft_len"), None if method == MTP else model


READER = TensorrtLlmReader("tensorrt-llm")
