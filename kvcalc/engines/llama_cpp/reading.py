"""Read the commands that start llama.cpp.

Source: common/arg.cpp of llama.cpp, 2026.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from kvcalc.engines.llama_cpp.command import SPEC_TYPES
from kvcalc.engines.reading import Read, Reader, inverse, whole
from kvcalc.errors import ModelError
from kvcalc.model.derived import file_stem, file_type
from kvcalc.model.drafting import DRAFT, MTP
from kvcalc.model.spec import ModelSpec

# Expressions for the experts of all layers: .ffn_.*_exps.=CPU, exps=CPU, \\.ffn_(up|gate|down)_exps\\.=CPU
_ALL_EXPERTS = re.compile(r"(?:[\\.*]*ffn_?)?(?:\.\*_?|\(?[a-z|]+\)?_?)?exps[\\.*]*(?:weight)?=CPU")
_STEP = "512"  # common_params, common/common.h
# The same for --flash-attn (is_truthy, is_falsey and is_autoy, common/arg.cpp).
_FLASH = {"1": "on", "enabled": "on", "true": "on", "0": "off", "disabled": "off", "false": "off", "-1": "auto"}
_PLACED, _MARGIN_MIB = ("n-gpu-layers", "cpu-moe", "n-cpu-moe"), "1024"


class LlamaCppReader(Reader):
    """`llama-server ...`."""

    def finish(self, read: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """A step is no longer than a batch. The slots divide the context, unless they share one stream."""
        left, settings = read.left, read.settings
        batch = left.get("batch-size")
        if batch is not None:  # src/llama-context.cpp
            step = min(whole(batch, "--batch-size"), whole(settings.get("ubatch-size", _STEP), "--ubatch-size"))
            settings["ubatch-size"] = str(step)
        fits = left.get("fit", "on").casefold() not in ("off", "disabled", "false", "0")
        total = left.get("ctx-size")
        read.keeps_context = not fits or total == "0"  # -c 0 is the model's own length (--ctx-size, common/arg.cpp)
        if "flash-attn" in settings:
            settings["flash-attn"] = _FLASH.get(settings["flash-attn"], settings["flash-attn"])
        if settings.get("parallel") == "-1":  # the default: the server chooses
            del settings["parallel"]
        slots = whole(settings.get("parallel", "1"), "--parallel")
        if "kv-unified" in settings or "parallel" not in settings:
            slots = 1
        else:
            read.fields["batch_size"] = str(slots)
        read.length_shares = slots  # llama_context::llama_context, src/llama-context.cpp
        if total is not None and total != "0":
            read.fields["context_tokens"] = str(max(1, whole(total, "--ctx-size") // slots))
        if settings.get("split-mode") == "tensor":
            del settings["split-mode"]
            read.fields["tensor_parallel_size"] = "all"
        if settings.get("split-mode") == "none":
            del settings["split-mode"]
            read.num_devices = 1
        if "device" in left:
            read.num_devices = 0 if left["device"] == "none" else len(left["device"].split(","))
        read.model = named(read.model, left.get("hf-file"))
        self._overrides(read)
        # --fit places the model only if no option does (common_params_fit_impl, common/fit.cpp).
        if fits and not any(name in settings for name in _PLACED) and "override-tensor" not in left:
            read.margin_bytes = whole(settings.get("fit-target", _MARGIN_MIB), "--fit-target") * 2**20
        drafter = left.get("spec-draft-model", left.get("spec-draft-hf"))
        if (method := inverse(SPEC_TYPES).get(left.get("spec-type", ""))) is not None or drafter is not None:
            number = settings.pop("draft-max", None) or left.get("spec-ngram-mod-n-max") or "16"
            method = method or DRAFT
            model = None if drafter is None or method == MTP else named(drafter)
            read.drafting = method, whole(number, "--spec-draft-n-max"), model

    def check_model(self, read: Read, spec: ModelSpec) -> None:
        """Raise ModelError (exit 3) for a file whose layers have types that were not read (UD-Q4_K_XL)."""
        quantization = spec.quantization
        if isinstance(quantization, Mapping) and str(quantization.get("quant_method")).startswith("gguf "):
            hint = "use the file itself (-m PATH), or a type that all layers have, such as Q4_K_M"
            raise ModelError(f"{read.model}: which types its layers have is not known", hint)

    def _overrides(self, read: Read) -> None:
        """-ot 'exps=CPU' keeps the experts of every layer in host memory, like --cpu-moe (common/arg.cpp)."""
        given = read.left.get("override-tensor")
        if given is None:
            return
        if _ALL_EXPERTS.fullmatch(given):
            read.settings.setdefault("cpu-moe", "true")
        else:
            read.unknown.append("--override-tensor")


def named(text: str, file: str | None = None) -> str:
    """The model in -hf REPOSITORY:TYPE with --hf-file FILE, or in -m FILE, as `load_model` takes it.

    A file that is not here is known by its name if that ends in a type.
    """
    if os.path.exists(text):
        return text
    if file is not None:
        quant = file_type(file)
        return text if quant is None else f"{text.partition(':')[0]}:{quant}"
    path = text.replace("\\", "/")  # Windows
    return file_stem(path) if path.casefold().endswith(".gguf") and file_type(path) else text


READER = LlamaCppReader("llama.cpp")
