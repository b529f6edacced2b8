"""kvcalc: how many bytes a model's KV cache takes, and a check of it on the device at hand.

>>> import kvcalc
>>> answer = kvcalc.estimate("llama-3-70b", context_tokens=8192)
>>> answer["kv_cache"]["total_bytes"]
2684354560

Names are imported when first used: importing kvcalc loads neither torch nor rich nor typer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

_EXPORTS = {
    "CacheReuse": "kvcalc.planning.reuse",
    "ImagesAsked": "kvcalc.planning.images",
    "KvcalcError": "kvcalc.errors",
    "ModelSpec": "kvcalc.model.spec",
    "Speculation": "kvcalc.model.drafting",
    "SpeedQuestion": "kvcalc.planning.layout",
    "WhatIf": "kvcalc.model.variants",
    "audit": "kvcalc.api",
    "compare": "kvcalc.api",
    "estimate": "kvcalc.api",
    "find_devices": "kvcalc.throughput.hardware",
    "fit": "kvcalc.api",
    "gpus": "kvcalc.api",
    "load_model": "kvcalc.model.resolve",
    "models": "kvcalc.api",
    "plan": "kvcalc.api",
    "prefix_curve": "kvcalc.api",
    "read_calibration": "kvcalc.planning.calibration",
    "read_config": "kvcalc.model.hf_config",
    "score": "kvcalc.api",
    "simulate": "kvcalc.api",
    "sweep": "kvcalc.api",
}

__all__ = [
    "CacheReuse",
    "ImagesAsked",
    "KvcalcError",
    "ModelSpec",
    "Speculation",
    "SpeedQuestion",
    "WhatIf",
    "__version__",
    "audit",
    "compare",
    "estimate",
    "find_devices",
    "fit",
    "gpus",
    "load_model",
    "models",
    "plan",
    "prefix_curve",
    "read_calibration",
    "read_config",
    "score",
    "simulate",
    "sweep",
]

if TYPE_CHECKING:
    from kvcalc.api import audit, compare, estimate, fit, gpus, models, plan, prefix_curve, score, simulate, sweep
    from kvcalc.errors import KvcalcError
    from kvcalc.model.drafting import Speculation
    from kvcalc.model.hf_config import read_config
    from kvcalc.model.resolve import load_model
    from kvcalc.model.spec import ModelSpec
    from kvcalc.model.variants import WhatIf
    from kvcalc.planning.calibration import read_calibration
    from kvcalc.planning.images import ImagesAsked
    from kvcalc.planning.layout import SpeedQuestion
    from kvcalc.planning.reuse import CacheReuse
    from kvcalc.throughput.hardware import find_devices


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvcalc' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
