"""Inkling in SGLang: SGLang's pools with a smaller share for windows and for states by default."""

from __future__ import annotations

from collections.abc import Mapping

from kvcalc.engines.sglang.engine import Sglang
from kvcalc.units import Number

# Source: _inkling_overrides (arg_groups/model_overrides/inkling.py), SGLang 0.5.23.
_SHARE = Number("0.1")


class Inkling(Sglang):
    """Counts pools as for other models with windows and states."""

    @classmethod
    def default_settings(cls, settings: Mapping[str, str]) -> Mapping[str, str]:
        return {"swa-full-tokens-ratio": _SHARE, "mamba-full-memory-ratio": _SHARE, **settings}
