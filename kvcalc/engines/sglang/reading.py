"""Read the commands that start SGLang.

Source: sglang/srt/arg_groups/fields in SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.reading import Read, Reader, inverse, whole
from kvcalc.engines.sglang.command import ALGORITHMS
from kvcalc.errors import LayoutError
from kvcalc.model.drafting import EAGLE1, MTP, NGRAM

# The values of --chunked-prefill-size with which prompts are not divided. The memory is then reserved for
# --max-prefill-tokens (_handle_gpu_memory_settings, server_args.py in 0.5.9).
_WHOLE_PROMPTS = ("-1", "0")


class SglangReader(Reader):
    """`python -m sglang.launch_server ...` and `sglang serve ...`."""

    def finish(self, read: Read, environment: Mapping[str, str], files: Mapping[str, str]) -> None:
        """The sizes are those of all DP ranks, or of one of several whole copies (`command.py`)."""
        left, settings = read.left, read.settings
        if "context-length" in settings:
            read.fields["context_tokens"] = settings["context-length"]
        copies = left.get("dp-size", "1")
        replicas = left.get("attn-dp-size")
        if replicas is None and left.get("enable-dp-attention"):
            replicas, copies = copies, "1"
        number = whole(replicas or "1", "--attn-dp-size")
        parts = number * whole(settings.get("attn-cp-size", "1"), "--attn-cp-size")
        if parts > 1:
            size = read.size("tensor_parallel_size")
            if size % parts:
                text = f"SGLang does not start: --tp-size {size} is not a multiple of {parts}, the copies of attention"
                raise LayoutError(text, f"use --tp-size {parts}")  # parallel_hook.py
            read.fields.update(tensor_parallel_size=str(size // parts), data_parallel_size=str(number))
        if "attn-cp-size" not in settings:
            read.unknown += [f"--{name}" for name in ("enable-prefill-cp", "cp-strategy") if name in left]
        if settings.get("chunked-prefill-size") in _WHOLE_PROMPTS:
            settings["chunked-prefill-size"] = settings.get("max-prefill-tokens", "16384")
            read.notes.append("prompts are not divided: a step is counted with --max-prefill-tokens")
        read.copies = whole(copies, "--dp-size")
        if not left.get("enable-lora") and "lora-paths" not in left:
            read.ignore_adapters()  # check_lora_server_args, arg_groups/lora_hook.py
        elif "max-lora-rank" in settings:
            read.unknown += ["--lora-target-modules"] if left.get("lora-target-modules", "all") != "all" else []
        else:
            read.unknown.append("--lora-paths")  # SGLang takes the rank from the adapters
        algorithm = left.get("speculative-algorithm")
        if algorithm is not None:
            self._drafting(read, algorithm.upper())

    def _drafting(self, read: Read, algorithm: str) -> None:
        model = read.left.get("speculative-draft-model-path")
        method = MTP if algorithm == "NEXTN" else inverse(ALGORITHMS).get(algorithm)
        if method in (MTP, EAGLE1):
            method = MTP if model is None else EAGLE1
        checked = read.settings.pop("speculative-num-draft-tokens", None)
        steps = read.left.get("speculative-num-steps")
        if checked is not None:
            number = whole(checked, "--speculative-num-draft-tokens") - 1
        else:
            number = whole(steps or "3", "--speculative-num-steps")
        if method is None or number < 1:
            read.notes.append(f"drafting with {algorithm} is not counted")
            return
        read.drafting = method, number, None if method in (MTP, NGRAM) else model


READER = SglangReader("sglang")
