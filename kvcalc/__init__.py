"""kvcalc: how many bytes a model's KV cache takes, and proof of it on the device at hand.

>>> import kvcalc
>>> answer = kvcalc.estimate(kvcalc.load_model("llama-3-70b"), context_tokens=8192)
>>> answer["kv_cache"]["total_bytes"]
2684354560

Names are imported when first used: importing kvcalc loads neither torch nor rich nor typer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_EXPORTS = {
    "KvcalcError": "kvcalc.errors",
    "ModelSpec": "kvcalc.model.spec",
    "WhatIf": "kvcalc.model.variants",
    "audit": "kvcalc.planning.audit",
    "estimate": "kvcalc.planning.estimate",
    "find_devices": "kvcalc.throughput.hardware",
    "load_model": "kvcalc.model.resolve",
    "read_config": "kvcalc.model.hf_config",
}

__all__ = [
    "KvcalcError",
    "ModelSpec",
    "WhatIf",
    "__version__",
    "audit",
    "estimate",
    "find_devices",
    "load_model",
    "read_config",
]

if TYPE_CHECKING:
    from kvcalc.errors import KvcalcError
    from kvcalc.model.hf_config import read_config
    from kvcalc.model.resolve import load_model
    from kvcalc.model.spec import ModelSpec
    from kvcalc.model.variants import WhatIf
    from kvcalc.planning.audit import audit
    from kvcalc.planning.estimate import estimate
    from kvcalc.throughput.hardware import find_devices


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvcalc' has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
