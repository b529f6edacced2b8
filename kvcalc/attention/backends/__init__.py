"""Backends for one decode step. Each has a name, a check whether it can run a case on this machine, and the step."""

from __future__ import annotations

from kvcalc.attention.backends.base import Backend, Case, GroupedMatmul, RepeatKv
from kvcalc.attention.backends.flex import Flex
from kvcalc.attention.backends.native import Native
from kvcalc.attention.backends.sdpa import GroupedSdpa, SdpaKernel
from kvcalc.attention.backends.triton import Gluon, Triton

__all__ = ["BACKENDS", "Backend", "Case"]

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        GroupedSdpa(),
        SdpaKernel("flash"),
        SdpaKernel("efficient"),
        SdpaKernel("cudnn"),
        GroupedMatmul(),
        Native(),
        Triton(),
        Gluon(),
        Flex(),
        RepeatKv(),
    )
}
"""All backends, keyed by the name that `--backend` takes."""
