"""Devices: what a vendor publishes of one, read from presets/gpus; one of your own; and how many of it there are.

A device is found by its name or an alias, exactly: letter case, blanks, hyphens, underscores and the vendor's words
before the name (NVIDIA, GeForce, AMD Instinct) do not matter, parts of a name never do ("a40" is no "RTX A4000").
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from kvcalc.errors import GpuError, KvcalcError, UsageError, nearest
from kvcalc.model.compiled_presets import compiled_mapping
from kvcalc.model.files import read_text
from kvcalc.model.preset_folders import shipped_files
from kvcalc.model.presets import presets_folder
from kvcalc.units import parse_count

LOCAL = "local"
CUSTOM = "custom"
_MAX_BYTES = 16 * 1024
_SEPARATORS = str.maketrans("", "", " -_/()")
# Words in front of a name which say who makes it: "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X".
_MAKERS = ("nvidia", "amd", "intel", "apple", "google", "geforce", "tesla", "instinct", "radeon")
# The types dense_tflops may name.
FLOP_DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")


class Interconnect(NamedTuple):
    """What joins devices: bytes a second out of one of them, one direction, all its links together; and how many
    devices it joins at most."""

    name: str
    bytes_per_second: int
    devices: int


class Gpu(NamedTuple):
    """One device as the driver shows it.

    `memory_bytes`: the total a process sees where that is published, else nominal (the file says which).
    `flops_per_second`: dense, by dtype, 16-bit with 32-bit accumulation; no entry for a type it has no units for.
    `device_class` is the microarchitecture. `interconnect` is None where devices talk over PCIe or a network alone.
    Of a device of one's own only `memory_bytes` may be known: then the rates are 0 and the flops empty.
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

    @property
    def shares_host_memory(self) -> bool:
        """Whether its memory is the machine's own (Apple, GB10, Ryzen AI Max)."""
        return self.memory_type is not None and self.memory_type.startswith("LPDDR")


class Devices(NamedTuple):
    """So many of one device."""

    gpu: Gpu
    num_devices: int


def gpus_folder() -> str:
    """The folder of the devices that ship with kvcalc."""
    return os.path.join(os.path.dirname(presets_folder()), "gpus")


def gpu_names() -> list[str]:
    """The names of the shipped devices, sorted. Reads the folder, not the files."""
    return [name for name, _ in shipped_files(gpus_folder())]


def all_gpus() -> list[Gpu]:
    """Every shipped device, by name."""
    return [load_gpu(path) for _, path in shipped_files(gpus_folder())]


def find_gpu(name: str) -> Gpu:
    """The device called `name`, by its own name or an alias; GpuError (exit 3) with the nearest names otherwise."""
    found = _look_up(name)
    if found is None:
        raise _unknown(name)
    return found


def find_devices(text: str) -> Devices:
    """`h100` is one, `h100x8` and `8xh100` are eight. Raises what `find_gpu` does."""
    found = _look_up(text)
    if found is not None:
        return Devices(found, 1)
    name, number = _split_count(text)
    found = None if number is None else _look_up(name)
    if found is None or number is None:
        raise _unknown(name)
    return Devices(found, number)


@lru_cache(maxsize=256)
def _look_up(name: str) -> Gpu | None:
    """A name costs one file, and an alias the build's list of them too, or a text search of all files; what was found
    is kept."""
    wanted = fold(name)
    if not wanted:
        return None
    files = shipped_files(gpus_folder())
    for stem, path in files:
        if fold(stem) == wanted:
            return load_gpu(path)
    hinted = _hinted(wanted)
    for _, path in [pair for pair in files if pair[0] == hinted] + files:
        # The text says whether a file is worth parsing, the parsed names whether it is the one.
        if wanted in read_text(path, _MAX_BYTES).casefold().translate(_SEPARATORS):
            gpu = load_gpu(path)
            if wanted in map(fold, gpu.aliases):
                return gpu
    return None


def _hinted(wanted: str) -> str | None:
    """The device whose alias the build found this to be; None without such a list. A list may be older than the files,
    so that what it says is only where to look first."""
    import json

    try:
        with open(os.path.join(os.path.dirname(gpus_folder()), "compiled", "gpus", "_aliases.json")) as file:
            listed = json.load(file)
        return next((name for name, aliases in listed.items() if wanted in map(fold, aliases)), None)
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _unknown(name: str) -> GpuError:
    known = [known for gpu in all_gpus() for known in (gpu.name, *gpu.aliases)]
    hint = nearest(name, known) or "list them: kvcalc gpus; or describe one: --gpu-memory 80GB --gpu-bandwidth 3.35TB/s"
    return GpuError(f"device {name[:60]!r} is not known", hint)


def own_gpu(
    base: Gpu | None, memory_bytes: int | None, bandwidth_bytes_per_second: int | None, flops_per_second: int | None
) -> Gpu:
    """A device described by its figures, over `base` where one is named: those given replace its own.

    `flops_per_second` is bf16's; the other types keep their ratio to it where `base` has them. Raises UsageError
    (exit 2) where there is neither a base nor a memory.
    """
    if base is None:
        if memory_bytes is None:
            raise UsageError("a device of your own needs --gpu-memory", "for example: --gpu-memory 80GB")
        flops = {} if flops_per_second is None else {"bf16": flops_per_second, "fp16": flops_per_second}
        rate = bandwidth_bytes_per_second or 0
        return Gpu(CUSTOM, None, None, memory_bytes, None, rate, flops, None, None, None, (), "options", None)
    changed = base
    if memory_bytes is not None:
        changed = changed._replace(memory_bytes=memory_bytes)
    if bandwidth_bytes_per_second is not None:
        changed = changed._replace(bandwidth_bytes_per_second=bandwidth_bytes_per_second)
    if flops_per_second is not None:
        changed = changed._replace(flops_per_second=_scaled(base.flops_per_second, flops_per_second))
    return changed if changed == base else changed._replace(source=f"{base.source}; changed by options")


def _scaled(flops: dict[str, int], bf16: int) -> dict[str, int]:
    half = flops.get("bf16") or flops.get("fp16")
    if not half:
        return {"bf16": bf16, "fp16": bf16}
    return {dtype: value * bf16 // half for dtype, value in flops.items()}


def fold(name: str) -> str:
    """A name as names are compared: lower case, no separators, no maker's word in front."""
    folded = name.casefold().translate(_SEPARATORS)
    while True:
        shorter = next((folded[len(w) :] for w in _MAKERS if folded.startswith(w) and folded != w), None)
        if shorter is None:
            return folded
        folded = shorter


def _split_count(text: str) -> tuple[str, int | None]:
    """The name and the number in `h100x8` or `8xh100`; None where there is no number."""
    for name, _, digits in (text.rpartition("x"), text.rpartition("X"), text.partition("x")[::-1]):
        if name and digits.isdecimal() and len(digits) <= 6:
            return name, parse_count(digits, "--gpu")
    return text, None


def load_gpu(path: str) -> Gpu:
    """The device in the shipped file at `path`; UsageError or GpuError where it is none."""
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
    from kvcalc.units import parse_size

    facts = {str(key): value for key, value in mapping.items()}
    tflops = facts["dense_tflops"]
    if not isinstance(tflops, dict) or set(tflops) - set(FLOP_DTYPES):
        raise ValueError(f"dense_tflops are of {', '.join(FLOP_DTYPES)}")
    aliases = facts.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
        raise ValueError("aliases are a list of names")
    gpu = Gpu(
        name=_text(facts["name"]),
        vendor=_text(facts["vendor"]),
        device_class=_text(facts["device_class"]),
        memory_bytes=parse_size(_text(facts["memory"]), "memory"),
        memory_type=_text(facts["memory_type"]),
        bandwidth_bytes_per_second=_scale(facts["bandwidth_gb_per_second"], 10**9),
        flops_per_second={str(dtype): _scale(value, 10**12) for dtype, value in tflops.items()},
        interconnect=_interconnect(facts.get("interconnect")),
        pcie_bytes_per_second=_optional(facts.get("pcie_gb_per_second"), 10**9),
        tdp_watts=_optional(facts.get("tdp_watts"), 1),
        aliases=tuple(aliases),
        source=_text(facts["source"]),
        date=str(facts["date"]),
        note=None if facts.get("note") is None else _text(facts["note"]),
    )
    if unknown := set(facts) - _KEYS:
        raise ValueError(f"{min(unknown)!r} is not a device's key")
    return gpu


_KEYS = {
    "name", "vendor", "aliases", "source", "date", "note", "device_class", "memory", "memory_type",
    "bandwidth_gb_per_second", "dense_tflops", "interconnect", "pcie_gb_per_second", "tdp_watts",
}  # fmt: skip


def _interconnect(value: object) -> Interconnect | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("interconnect is a mapping")
    devices = value["devices"]
    return Interconnect(_text(value["name"]), _scale(value["gb_per_second"], 10**9), _scale(devices, 1))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is no text")
    return value


def _scale(value: object, scale: int) -> int:
    """A published figure, as 4.8 TB/s, in whole units: rounded, since it is not a whole number in binary."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{value!r} is no positive number")
    return round(value * scale)


def _optional(value: object, scale: int) -> int | None:
    return None if value is None else _scale(value, scale)
