"""Turn the options for a cache that is used again into values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvcalc.errors import UsageError
from kvcalc.units import parse_bandwidth, parse_count, parse_size, parse_tokens

if TYPE_CHECKING:
    from kvcalc.planning.reuse import CacheReuse

_NAMES = ("prefix_tokens", "turns", "offload", "offload_bandwidth", "offload_backend", "transfer_bandwidth")


def reuse_of(given: Mapping[str, Any]) -> CacheReuse | None:
    """How the cache is used again, or None if no option asks for it. Raises UsageError (exit 2)."""
    if all(given.get(name) is None for name in _NAMES):
        return None
    from kvcalc.planning.reuse import CacheReuse

    prefix, turns, backend = given.get("prefix_tokens"), given.get("turns"), given.get("offload_backend")
    found = CacheReuse(
        0 if prefix is None or prefix.strip() == "0" else parse_tokens(prefix, "--prefix-tokens"),
        None if turns is None else parse_count(turns, "--turns", least=2),
        tier_sizes_of(given),
        tier_rates_of(given),
        transfer=transfer_of(given),
    )
    if backend is not None:
        found = found._replace(backend=backend.strip().casefold())
        _check_offload(given, "offload_backend")
    return None if found == CacheReuse() else found


def tier_sizes_of(given: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The bytes of each tier in --offload."""
    return _pairs(given, "offload", parse_size, "cpu=200GiB,disk=2TiB")


def tier_rates_of(given: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The bytes per second of each tier in --offload-bandwidth. UsageError (exit 2) without --offload."""
    _check_offload(given, "offload_bandwidth")
    return _pairs(given, "offload_bandwidth", _rate, "cpu=50GB/s,disk=6GB/s")


def _check_offload(given: Mapping[str, Any], name: str) -> None:
    if given.get(name) is not None and given.get("offload") is None:
        raise UsageError(f"--{name.replace('_', '-')} {given[name]}: needs --offload", "--offload cpu=200GiB")


def _pairs(
    given: Mapping[str, Any], name: str, parse: Callable[[str, str], int], example: str
) -> tuple[tuple[str, int], ...]:
    """The amount of each tier in `cpu=200GiB,disk=2TiB`, in this order."""
    text, option = given.get(name), "--" + name.replace("_", "-")
    if text is None:
        return ()
    pairs = []
    for part in text.split(","):
        tier, equals, amount = part.partition("=")
        if not equals:
            raise UsageError(f"{option} {text[:40]!a}: not a list of tiers", f"for example {option} {example}")
        pairs.append((tier.strip().casefold(), parse(amount.strip(), option)))
    if len({tier for tier, _ in pairs}) < len(pairs):
        raise UsageError(f"{option} {text[:40]}: a tier is given twice", f"for example {option} {example}")
    return tuple(pairs)


def _rate(text: str, option: str) -> int:
    """Bytes per second of a rate or a named network."""
    from kvcalc.planning.reuse.links import network_bytes_per_second

    found = network_bytes_per_second(text)
    return parse_bandwidth(text, option) if found is None else found


def transfer_of(given: Mapping[str, Any]) -> int | str | None:
    """The link in --transfer-bandwidth: bytes per second, or a name, which begins with a letter. None without one."""
    text = given.get("transfer_bandwidth")
    if text is None:
        return None
    return text.strip() if text.strip()[:1].isalpha() else parse_bandwidth(text, "--transfer-bandwidth")
