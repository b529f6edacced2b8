"""Which questions `--context auto` suits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import UsageError
from kvcalc.releases import Release, release_of

# The first known release with the mode. llama.cpp: the last known build without it, of November 2025.
_VLLM_SINCE = Release.of(0, 14)
_LLAMA_CPP_BEFORE = Release.of(7079)


def check_auto_context(engine: str, settings: Mapping[str, Any], has_device: bool, serves_requests: bool) -> None:
    """Raise UsageError (exit 2) if the engine does not choose a context, or has nothing to choose it from."""
    name, release = engine.partition("@")[0], release_of(engine)
    if name not in ("llama.cpp", "vllm"):
        raise UsageError(
            f"--context auto: {name} does not choose a context",
            "llama.cpp and vllm do: --engine llama.cpp; or give --context N",
        )
    is_old = release is not None and (release < _VLLM_SINCE if name == "vllm" else release <= _LLAMA_CPP_BEFORE)
    if is_old or str(settings.get("before-pull", "19067")) not in ("24216", "19067"):
        since = "0.14" if name == "vllm" else "December 2025"
        raise UsageError(f"--context auto: {name} before {since} does not choose a context", "give --context N")
    if not has_device:
        raise UsageError(
            "--context auto needs a device, whose memory decides", "for example --gpu rtx-4090; or give --context N"
        )
    if serves_requests:
        raise UsageError("--context auto: with requests to serve, the context is that of a request", "remove --context")
