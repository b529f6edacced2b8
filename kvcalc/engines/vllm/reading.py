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
from kvcalc.model.drafting import DFLASH, DRAFT, EAGLE, EAGLE1, MTP
from kvcalc.releases import release_of

# Without a method, parts of the drafting model's name say it, the first that is there.
_BY_NAME = {"eagle-": EAGLE1, "eagle3": EAGLE, "dflash": DFLASH}


class VllmReader(Reader):
    """`vllm serve ...`, and the module that it replaced."""

    def finish(self, read: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """--enable-expert-parallel distributes whole experts over all devices (ParallelConfig, config/parallel.py)."""
        left = read.left
        if "device-ids" in left:
            read.num_devices = len(left["device-ids"].split(","))
        local = left.get("data-parallel-size-local")
        if local is not None and whole(local, "--data-parallel-size-local") < read.size("data_parallel_size"):
            read.nodes = -(-read.size("data_parallel_size") // int(local))
        if left.get("enable-expert-parallel"):
            replicas = read.size("data_parallel_size") * read.size("tensor_parallel_size")
            read.fields["expert_parallel_size"] = str(replicas)
        if left.get("enable-lora"):
            loras = read.settings.get("max-loras", "1")  # LoRAConfig, config/lora.py
            if not has_adapters(read.settings):
                read.settings["max-loras"] = loras
            held = left.get("max-cpu-loras")
            read.ignored += [] if held is None else ["--max-cpu-loras"]
            if held is not None and loras.isdecimal() and whole(held, "--max-cpu-loras") < int(loras):
                text = (
                    f"--max-cpu-loras {held}: vLLM does not start with fewer adapters in host memory than on a device"
                )
                raise LayoutError(text, f"--max-cpu-loras {loras}")
        else:
            read.ignore_adapters()
        images = left.get("limit-mm-per-prompt")
        if images is not None:
            limits = json_object(images, "limit-mm-per-prompt")
            if limits and not any(limits.values()):
                # A tower is not loaded if its limits are 0 (_mark_tower_model, model_executor/models/interfaces.py).
                read.settings["language-model-only"] = ""
            else:
                read.unknown.append("--limit-mm-per-prompt")
        compiled = left.get("compilation-config")
        if compiled is not None:
            self._graphs(read, compiled)
        attention = left.get("attention-config")
        if attention is not None:
            self._attention(read, json_object(attention, "attention-config"))
        config = left.get("speculative-config")
        if config is not None:
            self._drafting(read, json_object(config, "speculative-config"))

    def installed(self, read: Read) -> None:
        """The images have FlashInfer, with which these releases sample (`kvcalc.engines.vllm.reserve`)."""
        place = Place(release_of(read.engine))
        if place.since(0, 8) and not place.since(0, 11, 1):
            read.settings.setdefault("flashinfer-sampler", "1")

    def replaces_method(self, read: Read) -> bool:
        """vllm-project/vllm#22073."""
        return Place(release_of(read.engine)).since(0, 10, 1)

    def _attention(self, read: Read, config: Mapping[str, Any]) -> None:
        for key, value in config.items():
            if key == "backend":
                read.settings.setdefault("attention-backend", str(value))
            elif key not in self.names["kernels"]:
                read.unknown.append(f"attention-config {key}")

    def _graphs(self, read: Read, config: str) -> None:
        """--compilation-config is an object, or the number of its mode."""
        mode = (("mode", 3 if config == "3" else config),)
        for key, value in mode if config.isdecimal() else json_object(config, "compilation-config").items():
            if key == "cudagraph_mode" and isinstance(value, str):
                read.settings["cudagraph-mode"] = value.casefold()
            elif key.split(".")[0] not in self.names["passes"] and not (key in ("mode", "level") and value == 3):
                read.unknown.append(f"compilation-config {key}")

    def _drafting(self, read: Read, config: Mapping[str, Any]) -> None:
        tokens, method, model = config.get("num_speculative_tokens", 1), config.get("method"), config.get("model")
        known = inverse(METHODS).get(str(method))
        # Names of the methods of single model types (MTPModelTypes, config/speculative.py), and a model alone.
        known = MTP if known is None and str(method).endswith("mtp") else known
        if method is None and model:
            known = next((method for part, method in _BY_NAME.items() if part in str(model).casefold()), DRAFT)
        if known is None:
            read.notes.append(f"drafting with {method} is not counted")
            return
        read.drafting = known, whole(str(tokens), "num_speculative_tokens"), None if known == MTP else model


READER = VllmReader("vllm")
