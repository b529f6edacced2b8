"""The few factors that a user's own results can change: each one multiplies several of an engine's constants.

A handful of runs cannot determine twenty constants, but it can say that steps cost more on this server, or that prompts
delay the others less. This module is the only place that knows which constants a factor multiplies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.records import NamedTuple
from kvcalc.throughput.constants import Constants
from kvcalc.throughput.roofline import SpeedModel


class Factors(NamedTuple):
    """Factors on an engine's constants. 1 leaves them as they are.

    - step: launches and host time per step, whatever the batch.
    - sequence: the time per running sequence.
    - prefill: multiplying. That is most of the work of prompts, and so of the delay that they cause to running
      requests. The same kernels multiply in the steps of large batches.
    - communication: all-reduces between devices, and passing data between stages.
    - reading: reading the weights and the cache.
    - waiting: what a request waits for its first token besides its own prefill: host time, steps, other requests.
    """

    step: float = 1.0
    sequence: float = 1.0
    prefill: float = 1.0
    communication: float = 1.0
    reading: float = 1.0
    waiting: float = 1.0

    def apply(self, constants: Constants) -> Constants:
        """The constants multiplied by the factors. An overhead over the ideal time stays at least 1."""
        changed: dict[str, Any] = {}
        for factor, names in SCALED.items():
            scale = getattr(self, factor)
            if scale != 1:
                changed.update((name, _scaled(name, getattr(constants, name), scale)) for name in names)
        return constants._replace(**changed)


SCALED: Mapping[str, tuple[str, ...]] = {
    "step": ("kernel_seconds", "step_seconds", "decode_launch_seconds"),
    "sequence": ("sequence_seconds", "busy_sequence_seconds", "head_seconds"),
    "prefill": (
        "compute_overhead", "attention_compute_overhead", "prefill_attention_overhead", "activation_passes",
        "expert_passes",
    ),
    "communication": (
        "all_reduce_seconds", "all_reduce_device_seconds", "link_overhead", "prompt_link_overhead",
        "prompt_link_overhead_per_device", "pcie_all_reduce_seconds", "pcie_all_reduce_device_seconds",
        "pcie_overhead", "pcie_overhead_per_device", "stage_seconds",
    ),
    "reading": ("weight_overhead", "kv_overhead", "kv_token_seconds"),
    "waiting": (
        "ttft_seconds", "ttft_steps", "ttft_token_seconds", "prompt_launch_seconds", "first_seconds",
    ),
}  # fmt: skip
"""The constants that each factor multiplies. Other overheads of prompts, experts and devices act on these."""

PRIOR_SPREAD = Factors(step=0.5, sequence=0.8, prefill=0.6, communication=0.6, reading=0.25, waiting=0.8)
"""The spread of each factor's logarithm between setups (model, device and engine): the error of the fitted constants,
by what causes it. The values are those that predict other runs of a server well (benchmarks/score/calibrate.py)."""

OF_ENGINE = ("step", "sequence", "communication")
"""The factors that carry over to another model or type of weights: they belong to the engine on the user's machine."""


def _scaled(name: str, value: Any, scale: float) -> Any:
    if isinstance(value, Mapping):
        return {kind: _scaled(name, each, scale) for kind, each in value.items()}
    scaled = value * scale
    return max(1.0, scaled) if name.endswith("overhead") else scaled


def scaled(model: SpeedModel, factors: Factors) -> SpeedModel:
    """The same model on the same devices, with constants multiplied by the factors."""
    return SpeedModel(model.counts, model.gpu, factors.apply(model.constants))
