"""The defaults of an engine that a device would change, for a question without one.

The engine's rules are asked for each kind of device, so this module knows no default itself.
"""

from __future__ import annotations

from typing import Any

from kvcalc.memory.dtypes import Dtype, parse_dtype
from kvcalc.memory.engines import resolve_kv_dtype
from kvcalc.memory.engines.place import DISTINGUISHED
from kvcalc.memory.engines.release import release_of
from kvcalc.memory.reserve import device_defaults
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.planning.case import Case


def describe_device_defaults(case: Case) -> list[dict[str, Any]]:
    """A row for each default in use that depends on the device: the option, its value here, and those on devices."""
    asked = case.question
    given = asked.engine_settings or {}
    found: dict[str, list[dict[str, Any]]] = {}
    for option, value, devices in device_defaults(case.engine_name, release_of(asked.engine)):
        here = case.rules.settings.get(option.replace("-", "_"))
        if here is not None and option not in given:
            shown = int(value) if isinstance(here, int) else value
            found.setdefault(option, []).append({"value": shown, "devices": devices})
    rows = [_row(option, case.rules.settings[option.replace("-", "_")], values) for option, values in found.items()]
    if asked.kv_dtype.casefold() == "auto":
        types = _cache_types(case.spec, asked.engine, asked.dtype, *sorted(case.settings.items()))
        here = case.workload.kv_dtype.name
        values = [{"value": name or here, "devices": devices} for name, devices in types]
        rows.append(_row("kv-cache-dtype", here, values))
    return [row for row in rows if any(one["value"] != row["value"] for one in row["on_devices"])]


def _row(option: str, here: object, values: list[dict[str, Any]]) -> dict[str, Any]:
    return {"option": option, "value": here, "on_devices": values}


@remembered
def _cache_types(
    spec: ModelSpec, engine: str, dtype: str | None, *settings: tuple[str, str]
) -> list[tuple[str | None, str]]:
    """The name of the cache's type on each kind of device, in words. None is the model's own type."""
    found = []
    for device_class, devices in DISTINGUISHED:
        resolved, _ = resolve_kv_dtype(engine, spec, "auto", dict(settings), dtype, device_class)
        found.append((_name_of(resolved), devices))
    return found


def _name_of(resolved: str | Dtype) -> str | None:
    if isinstance(resolved, Dtype):
        return resolved.name
    return None if resolved == "auto" else parse_dtype(resolved, "the engine's type").name
