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

from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.records import NamedTuple
from kvcalc.units import parse_bandwidth, parse_size

AUTO, ALL = "auto", "all"
LAYERS, EXPERTS, ALL_EXPERTS, KV = "n-gpu-layers", "n-cpu-moe", "cpu-moe", "no-kv-offload"
# The options that say where a part of the model is, and those that describe the host.
_OPTIONS = (LAYERS, EXPERTS, ALL_EXPERTS, KV, "host-memory", "host-bandwidth")

# The theoretical rate of two channels of DDR5-5600: 2 x 8 bytes x 5600 MT/s. Intel states it as the maximum memory
# bandwidth of the Core i9-13900K and i9-14900K.
DEFAULT_HOST_BANDWIDTH = 89_600_000_000


class Placement(NamedTuple):
    """Where the parts of a model are.

    `gpu_layers` is the number given to -ngl: the output and the last layers. None is all of them. `expert_layers` is
    the number of leading layers whose experts are in host memory; None is every layer. `kv_offload` is whether the
    cache of a layer on the device is on the device too. `host_memory_bytes` is None if it is not given, and then there
    is no limit. `host_bandwidth` is in bytes per second; None is the default.
    """

    gpu_layers: int | None = None
    expert_layers: int | None = 0
    kv_offload: bool = True
    host_memory_bytes: int | None = None
    host_bandwidth: int | None = None

    def first_on_device(self, num_layers: int) -> int:
        """The number of the first layer on the device: `num_layers` if there is none, and one more if the output is in
        host memory too."""
        return 0 if self.gpu_layers is None else max(num_layers + 1 - self.gpu_layers, 0)

    def has_output_on_device(self) -> bool:
        return self.gpu_layers != 0

    def keeps_experts(self, layer: int) -> bool:
        """Whether the experts of this layer stay in host memory even if the layer is on the device."""
        return self.expert_layers is None or layer < self.expert_layers


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


def count_placed_layers(spec: ModelSpec) -> int:
    """The layers that -ngl counts. A GGUF file may have more than the model: those for multi-token prediction."""
    weights = None if spec.gguf is None else spec.gguf.weights
    return spec.num_layers if weights is None or weights.parts is None else len(weights.parts.layers)


def is_auto(settings: Mapping[str, str]) -> bool:
    """Whether the number of layers on the device is as many as fit."""
    return settings.get(LAYERS) == AUTO


def _count(text: str, name: str, what: str = "a whole number") -> int:
    """A whole number of at least 0. llama.cpp also accepts -1 (auto) and -2 (all) for -ngl; kvcalc takes the words."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"--{name} {text[:40]!a}: must be {what}", f"for example --{name} 20")
    return int(text)
