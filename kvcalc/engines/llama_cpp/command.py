"""The command that starts llama.cpp.

Source: tools/server/README.md of llama.cpp, 2026. A test compares the options with the complete list.
"""

from __future__ import annotations

from kvcalc.engines.command import Checkpoint, Drafting, ServerArguments, StartCommand
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.drafting import DRAFT, EAGLE, MTP, NGRAM

SPEC_TYPES = {MTP: "draft-mtp", EAGLE: "draft-eagle3", DRAFT: "draft-simple", NGRAM: "ngram-mod"}
# kvcalc's options that are not options of llama-server. `_drafting` prints the number of draft tokens.
_NOT_FLAGS = ("before-pull", "host-memory", "host-bandwidth", "draft-max")
_FLOATS = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}


class Command(StartCommand):
    """`llama-server ...`."""

    program = "llama-server"

    def words(self, checkpoint: Checkpoint, arguments: ServerArguments) -> list[str] | None:
        """None for DP ranks, and for types of the cache that llama.cpp does not have.

        The slots divide the context among them, so --ctx-size holds all requests. Pipeline stages are llama.cpp's
        default split over devices, by layers.
        """
        types = [_ggml_type(name) for name in arguments.kv_dtype.split("/")]  # of K and V, or one of both
        k, v = types[0], types[-1]
        if k is None or v is None or arguments.layout.data_parallel_size > 1:
            return None
        model = checkpoint.name if checkpoint.name.endswith(".gguf") else "<your GGUF file>"
        slots, words = arguments.max_running, ["llama-server", "--model", model]
        if arguments.context_tokens is not None:
            words += ["--ctx-size", str(arguments.context_tokens * (slots or 1))]
        words += [] if slots is None else ["--parallel", str(slots)]
        words += ["--n-gpu-layers", arguments.settings.get("n-gpu-layers", "all")]
        if arguments.layout.tensor_parallel_size > 1:
            words += ["--split-mode", "tensor"]
        flags = []
        values = {"--cache-type-k": k, "--cache-type-v": v} if {k, v} != {"f16"} else {}
        for option in arguments.options("llama.cpp", words, _NOT_FLAGS):
            name = f"--{option.name}"
            if option.metavar is None:
                flags.append(name)
            else:
                values[name] = arguments.settings[option.name]
        flags += _drafting(arguments.drafting) if arguments.drafting else []
        return [*words, *(word for pair in values.items() for word in pair), *flags]


def _drafting(drafting: Drafting) -> list[str]:
    words = ["--spec-type", SPEC_TYPES[drafting.method]]
    if drafting.checkpoint is not None:
        file = drafting.checkpoint if drafting.checkpoint.endswith(".gguf") else "<your draft's GGUF file>"
        words += ["--spec-draft-model", file]
    number = "--spec-ngram-mod-n-max" if drafting.method == NGRAM else "--spec-draft-n-max"
    return [*words, number, str(drafting.num_tokens)]


def _ggml_type(kv_dtype: str) -> str | None:
    """llama.cpp's name for a type of the cache, or None if it has no such type. Its names for blocks are kvcalc's."""
    if kv_dtype in _FLOATS:
        return _FLOATS[kv_dtype]
    return kv_dtype if kv_dtype in DTYPES and "_" in kv_dtype else None


COMMAND = Command()
