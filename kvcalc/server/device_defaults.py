"""The defaults of an engine that a device would change, for a question without one.

The engine's rules are asked for each kind of device, so this module knows no default itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.engines import engine_class, resolve_kv_dtype
from kvcalc.engines.place import DISTINGUISHED, Place
from kvcalc.memory.dtypes import Dtype, parse_dtype
from kvcalc.model.spec import ModelSpec
from kvcalc.releases import release_of

if TYPE_CHECKING:
    import kvcalc.documents as documents

# The classes of devices whose kernels of attention read blocks of their own, and all others. AMD's do for few models.
_BLOCKS = (("blackwell", "B200 and B300"), ("hopper", "Hopper"), ("cdna3", "AMD Instinct"), ("", "others"))


def describe_device_defaults(
    spec: ModelSpec, engine: str, given: Mapping[str, Any], in_use: Mapping[str, object],
    types: tuple[str, str, str | None],
) -> list[documents.DeviceDefault]:  # fmt: skip
    """A row for each default in use that depends on the device: the option, its value here, and those on devices.

    `given` are the engine's options that were given, `in_use` the settings in the document. `types` are the cache's
    type as asked, the one that it has here, and the requested type of the weights.
    """
    rows_by_name: dict[str, list[documents.DeviceDefaultOnDevicesItem]] = {}
    for option, value, devices in engine_class(engine).device_defaults(release_of(engine)):
        here = in_use.get(option.replace("-", "_"))
        if here is not None and option not in given:
            shown = int(value) if isinstance(here, int) else value
            rows_by_name.setdefault(option, []).append({"value": shown, "devices": devices})
    rows = [_row(option, in_use[option.replace("-", "_")], values) for option, values in rows_by_name.items()]
    asked, here, dtype = types
    if "block-size" not in given:
        rows += _blocks(spec, engine, here)
    if asked.casefold() == "auto":
        named = _cache_types(spec, engine, dtype, given)
        rows.append(_row("kv-cache-dtype", here, [{"value": n or here, "devices": devices} for n, devices in named]))
    return [row for row in rows if any(on_device["value"] != row["value"] for on_device in row["on_devices"])]


def _row(option: str, here: Any, values: list[documents.DeviceDefaultOnDevicesItem]) -> documents.DeviceDefault:
    return {"option": option, "value": here, "on_devices": values}


def _blocks(spec: ModelSpec, engine: str, kv_dtype: str) -> list[documents.DeviceDefault]:
    """The row for the size of a block, if the device decides it."""
    release, default = release_of(engine), engine_class(engine).default_block
    here = default(spec, kv_dtype, Place(release))
    if here is None:
        return []
    sizes = {on: default(spec, kv_dtype, Place(release, device_class)) for device_class, on in _BLOCKS}
    if sizes["AMD Instinct"] == sizes["others"]:
        del sizes["AMD Instinct"]
    return [_row("block-size", here, [{"value": size or here, "devices": on} for on, size in sizes.items()])]


def _cache_types(
    spec: ModelSpec, engine: str, dtype: str | None, settings: Mapping[str, str]
) -> list[tuple[str | None, str]]:
    """The name of the cache's type on each kind of device, in words. None is the model's own type."""
    types = []
    for device_class, devices in DISTINGUISHED:
        resolved, _ = resolve_kv_dtype(engine, spec, "auto", settings, dtype, device_class)
        types.append((_name_of(resolved), devices))
    return types


def _name_of(resolved: str | Dtype) -> str | None:
    if isinstance(resolved, Dtype):
        return resolved.name
    return None if resolved == "auto" else parse_dtype(resolved, "the engine's type").name
