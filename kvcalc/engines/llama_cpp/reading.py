"""Read the commands that start llama.cpp.

Source: common/arg.cpp of llama.cpp, 2026.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from kvcalc.engines.llama_cpp.command import SPEC_TYPES
from kvcalc.engines.reading import Read, Reader, inverse, whole
from kvcalc.errors import ModelError, UsageError
from kvcalc.memory.dtypes import parse_weight_dtype
from kvcalc.model.drafting import DRAFT, MTP

# The type at the end of the name of a GGUF file: Qwen3-32B-Q4_K_M.gguf, model.UD-Q4_K_XL-00001-of-00003.gguf.
_TYPE = re.compile(r"(.*?)[-.](?:UD-)?((?:I?Q\d|TQ\d|MXFP4|BF16|F16|F32)\w*)(?:-\d{5}-of-\d{5})?", re.IGNORECASE)
_DRAFT_MODEL = (
    "spec-draft-model", "md", "model-draft", "spec-draft-hf", "hfd", "hfrd", "hf-repo-draft",
)  # fmt: skip
# Expressions for the experts of all layers: .ffn_.*_exps.=CPU, exps=CPU, \\.ffn_(up|gate|down)_exps\\.=CPU
_ALL_EXPERTS = re.compile(r"(?:[\\.*]*ffn_?)?(?:\.\*_?|\(?[a-z|]+\)?_?)?exps[\\.*]*(?:weight)?=CPU")
_STEP = "512"  # common_params, common/common.h
_FLOATS = {"f16": "fp16", "f32": "fp32"}


class LlamaCppReader(Reader):
    """`llama-server ...`."""

    def finish(self, found: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """A step is no longer than a batch. The slots divide the context, unless they share one stream."""
        left, settings = found.left, found.settings
        batch = found.last("batch-size", "b")
        if batch is not None:  # src/llama-context.cpp
            step = min(whole(batch, "--batch-size"), whole(settings.get("ubatch-size", _STEP), "--ubatch-size"))
            settings["ubatch-size"] = str(step)
        found.keeps_context = left.get("fit", "on").casefold() in ("off", "disabled", "false", "0")
        total = found.last("ctx-size", "c")
        if settings.get("parallel") == "-1":  # the default: the server chooses
            del settings["parallel"]
        slots = whole(settings.get("parallel", "1"), "--parallel")
        if "kv-unified" in settings or "parallel" not in settings:
            slots = 1
        else:
            found.fields["batch_size"] = str(slots)
        found.length_shares = slots  # llama_context::llama_context, src/llama-context.cpp
        if total is not None and total != "0":
            found.fields["context_tokens"] = str(max(1, whole(total, "--ctx-size") // slots))
        if settings.get("split-mode") == "tensor":
            del settings["split-mode"]
            found.fields["tensor_parallel_size"] = "all"
        written, file = found.model, found.last("hf-file", "hff")
        found.model, dtype = named(written)
        dtype = dtype if file is None else named(file)[1]
        if dtype is None and not written.casefold().endswith(".gguf"):
            found.model = written  # -hf takes the repository's file in the default type, which its name stands for
        if dtype is not None:
            found.fields["dtype"] = _known(dtype, written)
        self._overrides(found)
        own = found.last(*_DRAFT_MODEL)
        if (method := inverse(SPEC_TYPES).get(left.get("spec-type", ""))) is not None or own is not None:
            number = settings.pop("draft-max", None) or left.get("spec-ngram-mod-n-max") or "16"
            method = method or DRAFT
            model = None if own is None or method == MTP else named(own)[0]
            found.drafting = method, whole(number, "--spec-draft-n-max"), model

    def _overrides(self, found: Read) -> None:
        """-ot 'exps=CPU' keeps the experts of every layer in host memory, like --cpu-moe (common/arg.cpp)."""
        given = found.last("override-tensor", "ot")
        if given is None:
            return
        if _ALL_EXPERTS.fullmatch(given):
            found.settings.setdefault("cpu-moe", "true")
        else:
            found.unknown.append("--override-tensor")


def _known(dtype: str, written: str) -> str:
    """The type of a file. ModelError (exit 3) for one whose layers have types that were not read (UD-Q4_K_XL)."""
    try:
        parse_weight_dtype(dtype)
    except UsageError:
        hint = "use the file itself (-m PATH), or a type that all layers have, such as Q4_K_M"
        raise ModelError(f"{written}: which types its layers have is not known", hint) from None
    return dtype


def named(text: str) -> tuple[str, str | None]:
    """The model and the type of the weights in `org/NAME-GGUF:Q4_K_M` or `path/NAME-Q4_K_M.gguf`.

    A file that is here says both itself.
    """
    if os.path.exists(text):
        return text, None
    name, _, quant = text.partition(":")
    name = re.sub(r"(?i)\.gguf$", "", name)
    if not quant and (found := _TYPE.fullmatch(name.rpartition("/")[2])) is not None:
        name, quant = found[1], found[2]
    base = re.sub(r"(?i)[-_.]gguf$", "", name.rpartition("/")[2] if name.casefold().endswith("gguf") or quant else name)
    if not quant and (found := _TYPE.fullmatch(base)) is not None:  # as in gguf-my-repo's NAME-Q8_0-GGUF
        base, quant = found[1], found[2]
    dtype = re.sub(r"^ud-", "", quant.casefold())
    return base, _FLOATS.get(dtype, dtype) or None


READER = LlamaCppReader("llama.cpp")
