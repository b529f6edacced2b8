"""Read the commands that start vLLM.

Source: vllm/engine/arg_utils.py and SpeculativeConfig (config/speculative.py) in vLLM 0.33.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.engines.options import has_adapters
from kvcalc.engines.place import Place
from kvcalc.engines.reading import Read, Reader, inverse, json_object, whole
from kvcalc.engines.vllm.command import METHODS
from kvcalc.errors import LayoutError
from kvcalc.model.drafting import DRAFT, MTP
from kvcalc.model.spec import ModelSpec
from kvcalc.releases import release_of
from kvcalc.units import parse_vllm_integer

# Methods of --quantization for checkpoints in awq, gptq and so on, which convert nothing (`names` of `reading.yaml`).
_OF_CHECKPOINTS = ("awq", "gptq", "compressed-tensors", "modelopt", "fp8")
# Methods that convert a checkpoint in 16 bits while it is loaded, and the recipe of kvcalc.model.published with such
# weights (layers/quantization/online/base.py, 0.33.0; bitsandbytes quantizes with compressed statistics).
_CONVERTED = {
    "bitsandbytes": "bnb_nf4", "mxfp8": "mxfp8", "experts_int8": "int8_experts",
    "int8_per_channel_weight_only": "int8_experts", "nvfp4_per_token": "nvfp4_experts",
}  # fmt: skip
# The options that human_readable_int reads, besides --max-model-len: 10G is 10 x 2^30, and 10g is 10^10.
_INTEGERS = {"kv_memory_bytes": "--kv-cache-memory-bytes", "max-num-batched-tokens": "--max-num-batched-tokens"}


class VllmReader(Reader):
    """`vllm serve ...`, and the module that it replaced."""

    def finish(self, found: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """--enable-expert-parallel distributes whole experts over all devices (ParallelConfig, config/parallel.py)."""
        left = found.left
        for place, name in ((found.fields, "kv_memory_bytes"), (found.settings, "max-num-batched-tokens")):
            if name in place:
                place[name] = str(parse_vllm_integer(place[name], _INTEGERS[name]))
        local = left.get("data-parallel-size-local")
        if local is not None and whole(local, "--data-parallel-size-local") < found.size("data_parallel_size"):
            found.nodes = -(-found.size("data_parallel_size") // int(local))
        if left.get("enable-expert-parallel"):
            replicas = found.size("data_parallel_size") * found.size("tensor_parallel_size")
            found.fields["expert_parallel_size"] = str(replicas)
        if left.get("enable-lora"):
            loras = found.settings.get("max-loras", "1")  # LoRAConfig, config/lora.py
            if not has_adapters(found.settings):
                found.settings["max-loras"] = loras
            held = left.get("max-cpu-loras")
            if held is not None and loras.isdecimal() and whole(held, "--max-cpu-loras") < int(loras):
                text = (
                    f"--max-cpu-loras {held}: vLLM does not start with fewer adapters in host memory than on a device"
                )
                raise LayoutError(text, f"--max-cpu-loras {loras}")
        else:
            found.ignore_adapters()
        images = left.get("limit-mm-per-prompt")
        if images is not None:
            limits = json_object(images, "limit-mm-per-prompt")
            if limits and not any(limits.values()):
                # A tower is not loaded if its limits are 0 (_mark_tower_model, model_executor/models/interfaces.py).
                found.settings["language-model-only"] = ""
            else:
                found.unknown.append("--limit-mm-per-prompt")
        quantization = left.get("quantization")
        if quantization in self.names["to fp8"]:
            found.fields["dtype"] = "fp8"  # a checkpoint that is not quantized is converted while it is loaded
        elif quantization in _CONVERTED:
            found.converts_to = _CONVERTED[quantization]
        elif quantization in self.names["converts"]:
            found.unknown.append(f"quantization {quantization}")
        if "VLLM_PP_LAYER_PARTITION" in environment:
            found.settings["pp-layer-partition"] = environment["VLLM_PP_LAYER_PARTITION"]
        compiled = left.get("compilation-config")
        if compiled is not None:
            self._graphs(found, compiled)
        attention = left.get("attention-config")
        if attention is not None:
            self._attention(found, json_object(attention, "attention-config"))
        config = left.get("speculative-config")
        if config is not None:
            self._drafting(found, json_object(config, "speculative-config"))

    def check_model(self, found: Read, spec: ModelSpec) -> None:
        """_verify_quantization (config/model.py) and get_quant_config (model_loader/weight_utils.py).

        Since 0.10.1, modelopt's method replaces any other for its checkpoints (vllm-project/vllm#22073).
        """
        asked = found.left.get("quantization", "")
        needed = next((own for own in _OF_CHECKPOINTS if asked in self.names.get(own, ())), None)
        stated = spec.quantization if isinstance(spec.quantization, Mapping) else None
        own = "" if stated is None else str(stated.get("quant_method", "modelopt"))
        if stated is None and needed is not None:
            text = f"--quantization {asked}: vLLM does not start with a checkpoint that is not quantized"
            raise LayoutError(text, "leave it out, or name a quantized copy")
        is_known = any(own.startswith(one) for one in _OF_CHECKPOINTS) and (needed is not None or asked == "fp8")
        replaces = own.startswith("modelopt") and Place(release_of(found.engine)).since(0, 10, 1)
        if is_known and not replaces and not own.startswith(needed or "fp8"):
            text = f"--quantization {asked}: vLLM does not start with a checkpoint in {own.split()[0]}"
            raise LayoutError(text, "leave it out: vLLM reads the checkpoint's")

    def _attention(self, found: Read, config: Mapping[str, Any]) -> None:
        for key, value in config.items():
            if key == "backend":
                found.settings.setdefault("attention-backend", str(value))
            elif key not in self.names["kernels"]:
                found.unknown.append(f"attention-config {key}")

    def _graphs(self, found: Read, config: str) -> None:
        """--compilation-config is an object, or the number of its mode."""
        mode = (("mode", 3 if config == "3" else config),)
        for key, value in mode if config.isdecimal() else json_object(config, "compilation-config").items():
            if key == "cudagraph_mode" and isinstance(value, str):
                found.settings["cudagraph-mode"] = value.casefold()
            elif key.split(".")[0] not in self.names["passes"] and not (key in ("mode", "level") and value == 3):
                found.unknown.append(f"compilation-config {key}")

    def _drafting(self, found: Read, config: Mapping[str, Any]) -> None:
        tokens, method, model = config.get("num_speculative_tokens", 1), config.get("method"), config.get("model")
        known = inverse(METHODS).get(str(method))
        # Names of the methods of single model types (MTPModelTypes, config/speculative.py), and a model alone.
        known = MTP if known is None and str(method).endswith("mtp") else known
        known = DRAFT if method is None and model else known
        if known is None:
            found.notes.append(f"drafting with {method} is not counted")
            return
        found.drafting = known, whole(str(tokens), "num_speculative_tokens"), None if known == MTP else model


READER = VllmReader("vllm")
