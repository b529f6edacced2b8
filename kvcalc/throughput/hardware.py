"""Devices: vendors' published figures from presets/gpus, your own devices, and the number of devices.

A device is found by its name or an alias. Case, spaces, hyphens, underscores and the vendor's words before the name
(NVIDIA, GeForce, AMD Instinct) are ignored. A part of a name never matches: "a40" does not find "RTX A4000".
"""

from __future__ import annotations

import os
import re
from functools import cache, lru_cache
from itertools import pairwise
from math import ceil
from typing import Any

from kvcalc.errors import GpuError, KvcalcError, UsageError, nearest
from kvcalc.model.compiled_presets import compiled_mapping
from kvcalc.model.files import read_text
from kvcalc.model.preset_folders import shipped_files
from kvcalc.model.presets import presets_folder, shipped_table
from kvcalc.records import NamedTuple
from kvcalc.units import parse_count, parse_size

LOCAL = "local"
CUSTOM = "custom"
_MAX_BYTES = 16 * 1024
_SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)?\s*[MGT]i?B", re.IGNORECASE)
# HGX, MI300X platforms and usual servers with PCIe cards have eight devices, and a network port of 400 Gbit/s for each.
_OF_MACHINE, _PORT_BYTES_PER_SECOND = 8, 50_000_000_000
# Large products in 16 bits take 1.27 times as long as the bandwidth allows on an L40S (kernel tables of aiconfigurator,
# commit 095f58a), and 1.06 to 1.1 times on an RTX 4090 and an RTX A6000, where ECC is off (profiles of LLMServingSim,
# commit 5daddb2). Renderers are 15 % slower with ECC (support.chaos.com, ECC state for Nvidia GPUs).
_INLINE_ECC = 1.17
_SEPARATORS = str.maketrans("", "", " -_/()")
# Vendors' words before a name: "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X".
_MAKERS = ("nvidia", "amd", "intel", "apple", "google", "geforce", "tesla", "instinct", "radeon")
# The types that dense_tflops may contain.
FLOP_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
# A power limit as a share of the TDP, and what it leaves of the rates of multiplying and of reading. RTX 3090: prompts
# on six under llama.cpp (llmgarage.ai, power-limit-tokens-per-second-benchmark), training on four (pugetsystems.com,
# article 1974), tokens of one request (jankyai.droidgram.com, power-limiting-rtx-3090-gpu). An RTX PRO 6000 and an RTX
# 5060 Ti lose less: 4 % of the tokens of 32 requests at two thirds, and 1 % at five sixths.
_LIMITED = (
    (1.0, 1.0, 1.0), (0.8, 0.95, 0.961), (0.714, 0.853, 0.942), (0.643, 0.73, 0.883), (0.571, 0.6, 0.806),
    (0.5, 0.43, 0.621), (0.429, 0.258, 0.408),
)  # fmt: skip


class Interconnect(NamedTuple):
    """The link between devices.

    `bytes_per_second` is the rate out of one device, in one direction, over all its links. `devices` is the largest
    number of devices that the link connects. `mesh` is whether there is no switch between them: each pair has an equal
    part of the links, so fewer devices use fewer links.
    """

    name: str
    bytes_per_second: int
    devices: int
    mesh: bool = False


class Gpu(NamedTuple):
    """One device, as the driver reports it.

    - `memory_bytes` is the total that a process sees, if that is published, else the nominal size. The device's file
      says which.
    - `flops_per_second` is dense, by dtype, with 32-bit accumulation for 16-bit types. A type that the device has no
      units for has no entry.
    - `device_class` is the microarchitecture.
    - `inline_ecc` is whether error correction is on by default and stored in the memory itself, as on data centre cards
      with GDDR. It takes a sixteenth of the memory, which `memory_bytes` excludes, and slows reading.
    - `interconnect` is None if devices are only connected over PCIe or a network.
    - `machine_devices` is the most devices in one machine, and `network_bytes_per_second` the rate at which each sends
      to other machines.

    For a custom device, only `memory_bytes` may be known. Then the rates are 0 and `flops_per_second` is empty.
    """

    name: str
    vendor: str | None
    device_class: str | None
    memory_bytes: int
    memory_type: str | None
    bandwidth_bytes_per_second: int
    flops_per_second: dict[str, int]
    interconnect: Interconnect | None
    pcie_bytes_per_second: int | None
    tdp_watts: int | None
    aliases: tuple[str, ...]
    source: str
    date: str | None
    note: str | None = None
    inline_ecc: bool = False
    machine_devices: int = _OF_MACHINE
    network_bytes_per_second: int = _PORT_BYTES_PER_SECOND

    @property
    def read_bytes_per_second(self) -> float:
        """The bandwidth for data, without what inline ECC reads besides."""
        return self.bandwidth_bytes_per_second / (_INLINE_ECC if self.inline_ecc else 1.0)


def joined_devices(gpu: Gpu) -> int:
    """The most devices for tensor parallelism: those that a fast link joins, or those of one machine.

    Machines of one device use it over their network, as NVIDIA's instructions for several DGX Spark do.
    """
    devices = gpu.machine_devices if gpu.interconnect is None else gpu.interconnect.devices
    return devices if devices > 1 else _OF_MACHINE


def node_devices(gpu: Gpu) -> int:
    """The most devices that reach each other without a network: those of one machine, or of a larger fast link."""
    return max(gpu.machine_devices, 0 if gpu.interconnect is None else gpu.interconnect.devices)


class Devices(NamedTuple):
    """A number of identical devices."""

    gpu: Gpu
    num_devices: int


def gpus_folder() -> str:
    """The folder of the shipped devices."""
    return os.path.join(os.path.dirname(presets_folder()), "gpus")


def all_gpus() -> list[Gpu]:
    """Every shipped device, sorted by name."""
    return [load_gpu(path) for _, path in shipped_files(gpus_folder())]


def find_gpu(name: str) -> Gpu:
    """The device with this name or alias, or for a size, `24GB`, a device of which only the memory is known.

    Raises GpuError (exit 3) with the nearest names if there is none.
    """
    gpu = _look_up(name)
    if gpu is None and _SIZE.fullmatch(name.strip()):
        return own_gpu(None, parse_size(name, "--gpu-memory"), None, None)
    if gpu is None:
        raise _unknown(name)
    return gpu


def find_devices(text: str) -> Devices:
    """The devices in `text`: `h100` is one device, and `h100x8`, `8xh100`, `h100:8` and `p5.48xlarge` are eight.

    Raises the same as `find_gpu`.
    """
    if _look_up(text) is not None:
        return Devices(find_gpu(text), 1)
    machine = _machines().get(fold(text).removeprefix("standard"))
    if machine is not None:
        return find_devices(machine)
    for name, _, digits in (
        text.rpartition("x"),
        text.rpartition("X"),
        text.partition("x")[::-1],
        text.rpartition(":"),
    ):
        if name and digits.isdecimal() and len(digits) <= 6:
            gpu, number = find_devices(name)
            return Devices(gpu, number * parse_count(digits, "--gpu"))
    return Devices(find_gpu(text), 1)


@cache
def _machines() -> dict[str, str]:
    """The devices of each machine that clouds rent, by its folded name."""
    rows: dict[str, str] = shipped_table("instances")
    return {fold(name): devices for devices, names in rows.items() for name in names.split()}


@lru_cache(maxsize=256)
def _look_up(name: str) -> Gpu | None:
    """The device with this name or alias, or None. Results are cached.

    A name needs one file. An alias also needs the list of aliases written by the build, or a text search of all files.
    """
    wanted = fold(name)
    if not wanted:
        return None
    files = shipped_files(gpus_folder())
    for stem, path in files:
        if fold(stem) == wanted:
            return load_gpu(path)
    hinted = _hinted(wanted)
    for _, path in [pair for pair in files if pair[0] == hinted] + files:
        # Parse a file only if its text contains the name. The parsed aliases then decide.
        if wanted in read_text(path, _MAX_BYTES).casefold().translate(_SEPARATORS):
            gpu = load_gpu(path)
            if wanted in map(fold, gpu.aliases):
                return gpu
    return None


def _hinted(wanted: str) -> str | None:
    """The device for this alias in the list written by the build, or None.

    The list may be older than the files, so it only says where to look first.
    """
    import json

    try:
        with open(os.path.join(os.path.dirname(gpus_folder()), "compiled", "gpus", "_aliases.json")) as file:
            listed = json.load(file)
        return next((name for name, aliases in listed.items() if wanted in map(fold, aliases)), None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _unknown(name: str) -> GpuError:
    known = [known for gpu in all_gpus() for known in (gpu.name, *gpu.aliases)]
    hint = (
        f"{nearest(name, known) or 'kvcalc gpus lists them.'} To describe one: "
        "--gpu-memory 80GB --gpu-bandwidth 3.35TB/s --flops 989T"
    )
    return GpuError(f"device {name[:60]!r} is not known", hint)


def own_gpu(
    base: Gpu | None,
    memory_bytes: int | None,
    bandwidth_bytes_per_second: int | None,
    flops_per_second: int | None,
    network_bytes_per_second: int | None = None,
    pcie_bytes_per_second: int | None = None,
    power_limit_watts: int | None = None,
) -> Gpu:
    """A device described by its figures. The given figures replace those of `base`, if there is one.

    `flops_per_second` is for bf16. The other types of `base` keep their ratio to bf16. With `pcie_bytes_per_second`,
    devices of a machine have no other link. Raises UsageError (exit 2) if there is neither a base nor a memory size, or
    for a power limit below those whose loss is known.
    """
    if power_limit_watts is not None:
        base = _limited(base, power_limit_watts)
    if base is None:
        if memory_bytes is None:
            raise UsageError("a custom device needs --gpu-memory", "for example: --gpu-memory 80GB")
        flops = {} if flops_per_second is None else {"bf16": flops_per_second, "fp16": flops_per_second}
        rate = bandwidth_bytes_per_second or 0
        gpu = Gpu(CUSTOM, None, None, memory_bytes, None, rate, flops, None, None, None, (), "options", None)
        return gpu._replace(
            network_bytes_per_second=network_bytes_per_second or gpu.network_bytes_per_second,
            pcie_bytes_per_second=pcie_bytes_per_second,
        )
    given: dict[str, Any] = {
        "memory_bytes": memory_bytes,
        "bandwidth_bytes_per_second": bandwidth_bytes_per_second,
        "flops_per_second": None if flops_per_second is None else _scaled(base.flops_per_second, flops_per_second),
        "network_bytes_per_second": network_bytes_per_second,
        "pcie_bytes_per_second": pcie_bytes_per_second,
    }
    changed = base._replace(**{name: figure for name, figure in given.items() if figure is not None})
    if pcie_bytes_per_second is not None:
        changed = changed._replace(interconnect=None)
    return changed if changed == base else changed._replace(source=f"{base.source}; changed by options")


def _limited(gpu: Gpu | None, watts: int) -> Gpu:
    """The device with a power limit, which lowers its rates. UsageError (exit 2) if what it loses is not known."""
    if gpu is None or gpu.tdp_watts is None:
        raise UsageError("--power-limit needs a device with a known TDP", "for example: --gpu rtx-3090")
    share, least = watts / gpu.tdp_watts, _LIMITED[-1][0]
    if not least <= share <= 1:
        known = f"{ceil(least * gpu.tdp_watts)} to {gpu.tdp_watts} W"
        raise UsageError(f"--power-limit {watts}W: what {gpu.name} loses is known for {known}", "give one of these")
    (high, *more), (low, *less) = next(line for line in pairwise(_LIMITED) if share >= line[1][0])
    multiply, read = (end + (start - end) * (share - low) / (high - low) for start, end in zip(more, less))
    return gpu._replace(
        bandwidth_bytes_per_second=round(gpu.bandwidth_bytes_per_second * read),
        flops_per_second={dtype: round(rate * multiply) for dtype, rate in gpu.flops_per_second.items()},
        tdp_watts=watts,
    )


def _scaled(flops: dict[str, int], bf16: int) -> dict[str, int]:
    half = flops.get("bf16") or flops.get("fp16")
    if not half:
        return {"bf16": bf16, "fp16": bf16}
    return {dtype: value * bf16 // half for dtype, value in flops.items()}


def fold(name: str) -> str:
    """Normalise a name for comparison: lower case, no separators, and no vendor's word at the start."""
    folded = name.casefold().translate(_SEPARATORS)
    while True:
        shorter = next((folded[len(w) :] for w in _MAKERS if folded.startswith(w) and folded != w), None)
        if shorter is None:
            return folded
        folded = shorter


def load_gpu(path: str) -> Gpu:
    """The device in the shipped file at `path`. Raises UsageError or GpuError if it is not a device."""
    file = os.path.basename(path)
    text = read_text(path, _MAX_BYTES)
    mapping = compiled_mapping(path, text)
    if mapping is None:
        from kvcalc.model.yaml_mapping import parse_mapping

        mapping = parse_mapping(text, file)
    try:
        return _read(mapping)
    except (KeyError, TypeError, ValueError, AttributeError, KvcalcError) as error:
        raise GpuError(f"{file}: not a device: {error}") from None


def _read(mapping: dict[object, object]) -> Gpu:
    facts = {str(key): value for key, value in mapping.items()}
    tflops, aliases = facts.pop("dense_tflops"), facts.pop("aliases", None) or []
    if not isinstance(tflops, dict) or set(tflops) - set(FLOP_DTYPES):
        raise ValueError(f"dense_tflops must be a mapping with the keys {', '.join(FLOP_DTYPES)}")
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ValueError("aliases must be a list of names")
    note, inline_ecc = facts.pop("note", None), facts.pop("inline_ecc", False)
    if type(inline_ecc) is not bool:
        raise ValueError("inline_ecc must be true or false")
    gpu = Gpu(
        name=_text(facts.pop("name")),
        vendor=_text(facts.pop("vendor")),
        device_class=_text(facts.pop("device_class")),
        memory_bytes=parse_size(_text(facts.pop("memory")), "memory"),
        memory_type=_text(facts.pop("memory_type")),
        bandwidth_bytes_per_second=_scale(facts.pop("bandwidth_gb_per_second"), 10**9),
        flops_per_second={str(dtype): _scale(value, 10**12) for dtype, value in tflops.items()},
        interconnect=_interconnect(facts.pop("interconnect", None)),
        pcie_bytes_per_second=_optional(facts.pop("pcie_gb_per_second", None), 10**9),
        tdp_watts=_optional(facts.pop("tdp_watts", None), 1),
        aliases=tuple(aliases),
        source=_text(facts.pop("source")),
        date=str(facts.pop("date")),
        note=None if note is None else _text(note),
        inline_ecc=inline_ecc,
        machine_devices=_scale(facts.pop("machine_devices", _OF_MACHINE), 1),
        network_bytes_per_second=_scale(facts.pop("network_gb_per_second", _PORT_BYTES_PER_SECOND / 10**9), 10**9),
    )
    if facts:
        raise ValueError(f"unknown key {min(facts)!r}")
    return gpu


def _interconnect(value: object) -> Interconnect | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("interconnect must be a mapping")
    if value.keys() - {"mesh"} != {"name", "gb_per_second", "devices"}:
        raise ValueError("interconnect must have the keys name, gb_per_second and devices")
    name, rate, devices, mesh = value["name"], value["gb_per_second"], value["devices"], value.get("mesh", False)
    if type(mesh) is not bool:
        raise ValueError("mesh must be true or false")
    return Interconnect(_text(name), _scale(rate, 10**9), _scale(devices, 1), mesh)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a text")
    return value


def _scale(value: object, scale: int) -> int:
    """A published figure such as 4.8 TB/s in whole units. Rounded, because 4.8 is not exact in binary."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{value!r} is not a positive number")
    return round(value * scale)


def _optional(value: object, scale: int) -> int | None:
    return None if value is None else _scale(value, scale)
