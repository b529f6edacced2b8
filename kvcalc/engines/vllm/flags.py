"""The releases in which vLLM's own flags began.

Source: engine/arg_utils.py and config/cache.py of 0.9.2, 0.10.2, 0.11.2 to 0.20 and 0.33.0. The flag for the hybrid
manager came with it, in 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcalc.engines.place import Place
from kvcalc.errors import UsageError

_SINCE: dict[str, tuple[int, ...]] = {
    "disable-hybrid-kv-cache-manager": (0, 9, 1), "decode-context-parallel-size": (0, 10, 2),
    "mamba-cache-dtype": (0, 10, 2), "mamba-ssm-cache-dtype": (0, 10, 2), "mamba-block-size": (0, 11),
    "mamba-cache-mode": (0, 15), "kv-cache-dtype-skip-layers": (0, 19), "prefill-context-parallel-size": (0, 12),
}  # fmt: skip


def check_flags(given: Iterable[str], place: Place) -> None:
    """Raise UsageError (exit 2) for a flag that the requested release does not have."""
    for name in given:
        since = _SINCE.get(name)
        if since is not None and not place.since(*since):
            first = ".".join(map(str, since))
            raise UsageError(f"--{name}: this release of vLLM has no such flag", f"it is in vLLM {first} and later")
