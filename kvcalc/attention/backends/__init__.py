"""The ways to run one decode step, behind one interface: a name, whether it can run a case here, and the step."""

from __future__ import annotations

from kvcalc.attention.backends.base import Backend, Case, GroupedMatmul, GroupedSdpa, RepeatKv
from kvcalc.attention.backends.flex import Flex
from kvcalc.attention.backends.libraries import FlashAttn, FlashInfer, FlashMla
from kvcalc.attention.backends.native import Native

__all__ = ["BACKENDS", "Backend", "Case"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (GroupedSdpa(), GroupedMatmul(), Native(), Flex(), FlashAttn(), FlashInfer(), FlashMla(), RepeatKv())
}
"""By name, as `--backend` takes it."""
