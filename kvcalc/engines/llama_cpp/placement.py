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

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING

from kvcalc.engines.options import SettingsReader
from kvcalc.engines.placement import Placement, PlacementOptions
from kvcalc.errors import UsageError
from kvcalc.model.layout import LayoutAsked
from kvcalc.units import parse_bandwidth, parse_size

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Devices


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


# How llama.cpp divides the layers of a model among several devices: --split-mode and --tensor-split.
# Source: llama_model_base::load_tensors (src/llama-model.cpp) in llama-cpp-python 0.3.36. The output counts as one more
# layer at the end. Layer i of n is on the first device whose cumulative share is more than i / n. Without
# --tensor-split, the shares are the devices' free memory. The cache of a layer is where the layer is
# (llama-kv-cache.cpp, llama-memory-recurrent.cpp), also with --split-mode row.

SPLIT, MODE = "tensor-split", "split-mode"
NONE, LAYER, ROW = "none", "layer", "row"

_EXAMPLE = "for example --tensor-split 3,1"
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,12})?|\.\d{1,12}")
_MOST_DEVICES = 128


def parse_mode(settings: Mapping[str, str]) -> str:
    """The split mode. Raises UsageError (exit 2) for a mode that is not modelled."""
    return SettingsReader("llama.cpp", settings).choice(MODE, "a mode that is modelled")


def parse_shares(text: str) -> tuple[Fraction, ...]:
    """The shares in `3,1` or `3/1`, one for each device. Raises UsageError (exit 2) for text that has none."""
    parts = [part.strip() for part in re.split("[,/]", str(text))]
    if len(parts) > _MOST_DEVICES or not all(_NUMBER.fullmatch(part) for part in parts):
        raise UsageError(f"--{SPLIT} {str(text)[:40]!a}: must be a list of numbers, one for each device", _EXAMPLE)
    shares = tuple(map(Fraction, parts))
    if not any(shares):
        raise UsageError(f"--{SPLIT} {str(text)[:40]!a}: at least one device must have a share", _EXAMPLE)
    return shares


def count_devices(settings: Mapping[str, str]) -> int | None:
    """The number of devices that the settings name, or None if they do not. Raises what the parsers raise."""
    if parse_mode(settings) == NONE:
        return 1
    return len(parse_shares(settings[SPLIT])) if SPLIT in settings else None


def split_layers(
    settings: Mapping[str, str], devices: Devices | None, layout: LayoutAsked
) -> tuple[Devices | None, LayoutAsked]:
    """The devices, and the layout with a stage for each device that --tensor-split names.

    Without it, all devices are used, which is the default, unless the layout says otherwise. UsageError (exit 2) if the
    settings contradict the stages or the number of devices.
    """
    stages = layout.pipeline_parallel_size or 1
    number = count_devices(settings) if SPLIT in settings or MODE in settings else None
    if number is None:
        is_open = layout.tensor_parallel_size is None and layout.sizes.num_devices == 1
        if devices is None or devices.num_devices == 1 or not is_open:
            return devices, layout
        number = devices.num_devices
    if stages not in (1, number):
        option = f"--{SPLIT} {settings[SPLIT]}" if SPLIT in settings else f"--{MODE} {NONE}"
        raise UsageError(f"--pp {stages} contradicts {option}", "remove --pp")
    if settings.get(MODE) == NONE and devices is not None:
        devices = devices._replace(num_devices=1)  # the others are not used
    elif SPLIT in settings and devices is not None and devices.num_devices > 1 and devices.num_devices % number:
        raise UsageError(
            f"--{SPLIT} {settings[SPLIT]} has {number} shares, but there are {devices.num_devices} devices",
            f"use --num-gpus {number}, or one share for each device (0 for a device without layers)",
        )
    return devices, LayoutAsked(layout.tensor_parallel_size or 1, number)


def devices_of_layers(num_layers: int, shares: Sequence[Fraction | int]) -> list[int]:
    """The device of every layer, and at the end that of the output. `shares` has one number for each device."""
    *_, total = sums = list(accumulate(shares))
    return [sum(s * (num_layers + 1) <= number * total for s in sums) for number in range(num_layers + 1)]


def layers_per_device(num_layers: int, shares: Sequence[Fraction | int]) -> list[int]:
    """The number of layers on each device, up to the device with the output. Later devices hold nothing."""
    *layers, output = devices_of_layers(num_layers, shares)
    return [layers.count(device) for device in range(output + 1)]
