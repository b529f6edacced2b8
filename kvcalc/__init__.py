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
    "CacheReuse": "kvcalc.question.question",
    "ImagesAsked": "kvcalc.question.question",
    "KvcalcError": "kvcalc.errors",
    "ModelSpec": "kvcalc.model.spec",
    "Speculation": "kvcalc.model.drafting",
    "SpeedQuestion": "kvcalc.question.question",
    "WhatIf": "kvcalc.model.variants",
    "audit": "kvcalc.api.files",
    "check": "kvcalc.api.serving",
    "compare": "kvcalc.api.memory",
    "estimate": "kvcalc.api.memory",
    "find_devices": "kvcalc.throughput.hardware",
    "fit": "kvcalc.api.memory",
    "gpus": "kvcalc.api.memory",
    "load_model": "kvcalc.model.resolve",
    "models": "kvcalc.api.memory",
    "plan": "kvcalc.api.serving",
    "prefix_curve": "kvcalc.api.files",
    "read_calibration": "kvcalc.planning.calibration",
    "read_config": "kvcalc.model.hf_config",
    "score": "kvcalc.api.files",
    "simulate": "kvcalc.api.serving",
    "sweep": "kvcalc.api.memory",
}

# Functions that the package itself uses too. As public functions they refuse arguments like those of `kvcalc.api`.
_FUNCTIONS = ("find_devices", "load_model", "read_calibration", "read_config")

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
    "check",
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
    from kvcalc.api.files import audit, prefix_curve, score
    from kvcalc.api.memory import compare, estimate, fit, gpus, models, sweep
    from kvcalc.api.serving import check, plan, simulate
    from kvcalc.errors import KvcalcError
    from kvcalc.model.drafting import Speculation
    from kvcalc.model.hf_config import read_config
    from kvcalc.model.resolve import load_model
    from kvcalc.model.spec import ModelSpec
    from kvcalc.model.variants import WhatIf
    from kvcalc.planning.calibration import read_calibration
    from kvcalc.question.question import CacheReuse, ImagesAsked, SpeedQuestion
    from kvcalc.throughput.hardware import find_devices


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvcalc' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    if name in _FUNCTIONS:
        from kvcalc.api.arguments import takes

        value = takes()(value)
    globals()[name] = value
    return value
