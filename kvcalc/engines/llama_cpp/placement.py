"""Which parts of a model llama.cpp keeps in the host's memory: whole layers (-ngl), or only experts (--n-cpu-moe).

Source, in llama.cpp: llama_model_base::load_tensors (src/llama-model.cpp) for the layers, common/arg.cpp for the
options, and LLM_FFN_EXPS_REGEX (common/common.h) for the experts.

- The last layers go to the device. The output counts as one more layer after them, so that `-ngl N` puts the output and
  the last N - 1 layers on the device (i_gpu_start = n_layer + 1 - n_gpu_layers).
- The input embedding always stays in host memory. If the model has no output head of its own, the device has a copy.
- The cache of a layer is where the layer is, or in host memory with --no-kv-offload.
- --n-cpu-moe N keeps the routed experts of the first N layers in host memory. Shared experts and routers move with
  their layer.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.placement import Placement, PlacementOptions
from kvcalc.errors import UsageError
from kvcalc.units import parse_bandwidth, parse_size

AUTO, ALL = "auto", "all"
OPTIONS = LAYERS, EXPERTS, ALL_EXPERTS = PlacementOptions("n-gpu-layers", "n-cpu-moe", "cpu-moe")
KV = "no-kv-offload"
# The options that say where a part of the model is, and those that describe the host.
_OPTIONS = (*OPTIONS, KV, "host-memory", "host-bandwidth")


def parse_placement(settings: Mapping[str, str]) -> Placement | None:
    """The placement that the settings ask for. None if they do not mention one. `auto` is all layers here.

    Raises UsageError (exit 2) for values that llama.cpp refuses, and for both ways to place the experts at once.
    """
    if ALL_EXPERTS in settings and EXPERTS in settings:
        raise UsageError("--cpu-moe and --n-cpu-moe set the same thing", "use one")
    if not any(name in settings for name in _OPTIONS):
        return None
    experts = None if ALL_EXPERTS in settings else _count(settings.get(EXPERTS, "0"), EXPERTS)
    memory, bandwidth = settings.get("host-memory"), settings.get("host-bandwidth")
    layers = settings.get(LAYERS, ALL)
    return Placement(
        None if layers in (ALL, AUTO) else _count(layers, LAYERS, f"a number of layers, {AUTO} or {ALL}"),
        experts,
        KV not in settings,
        None if memory is None else parse_size(memory, "--host-memory"),
        None if bandwidth is None else parse_bandwidth(bandwidth, "--host-bandwidth"),
    )


def _count(text: str, name: str, what: str = "a whole number") -> int:
    """A whole number of at least 0. llama.cpp also accepts -1 (auto) and -2 (all) for -ngl; kvcalc takes the words."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"--{name} {text[:40]!a}: must be {what}", f"for example --{name} 20")
    return int(text)
