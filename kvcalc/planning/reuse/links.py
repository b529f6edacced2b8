"""Slower memory and links: their rates, how much a tier keeps, how long moving it takes, and when that pays.

A tier is memory that keeps what a device's cache drops: host memory, disks, or another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvcalc.engines.reuse import CPU, DISK
from kvcalc.notes import Note
from kvcalc.records import NamedTuple

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Gpu

# One NVMe drive on four lanes of PCIe 4.0 reads 6,800 MB/s (Micron 7450, data sheet: 128 KB sequential reads).
NVME_BYTES_PER_SECOND = 6_800_000_000

# NVLink-C2C between Grace and Hopper: 900 GB/s in both directions together (NVIDIA GH200 data sheet).
_C2C = {"gh200-96gb": 450_000_000_000, "gh200-144gb": 450_000_000_000}

# The data rate of one port in one direction, in Gbit/s. InfiniBand: HDR is 200, NDR 400 and XDR 800 (InfiniBand Trade
# Association, InfiniBand roadmap). Ethernet: IEEE 802.3 (10G to 400G), 802.3df (800G). Headers take some per cent.
_NETWORKS = {
    "infiniband": (100, 200, 400, 800),
    "ethernet": (10, 25, 40, 50, 100, 200, 400, 800),
}  # fmt: skip

# The longest context that the search for a break-even length tries.
_MOST_TOKENS = 1 << 24


class Tier(NamedTuple):
    """A tier of `memory_bytes`, which is read at `bytes_per_second`, or None if that is not known."""

    name: str
    memory_bytes: int
    bytes_per_second: int | None


def network_names() -> list[str]:
    """The names of the networks that `network_bytes_per_second` knows, such as `infiniband-400g`."""
    return [f"{kind}-{rate}g" for kind, rates in _NETWORKS.items() for rate in rates]


def network_bytes_per_second(name: str) -> int | None:
    """The data rate of one port of a network, in one direction. None for an unknown name."""
    kind, _, rate = name.casefold().rpartition("-")
    digits = rate.removesuffix("g")
    if rate == digits or not digits.isdecimal() or int(digits) not in _NETWORKS.get(kind, ()):
        return None
    return int(digits) * 10**9 // 8


def contexts_kept(memory_bytes: int, context_bytes: int) -> int | None:
    """How many contexts of `context_bytes` bytes each are kept in `memory_bytes`. None if a context takes nothing."""
    return max(memory_bytes, 0) // context_bytes if context_bytes else None


def longest_kept(memory_bytes: int, bytes_of: Callable[[int], int], most_tokens: int, step: int = 1) -> int:
    """The most tokens of one context, up to `most_tokens`, whose bytes fit. It is a multiple of `step`.

    `bytes_of` gives the bytes of a number of tokens, and must not fall as that number grows.
    """
    least, most = 0, most_tokens // step
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if bytes_of(middle * step) <= memory_bytes else (least, middle - 1)
    return least * step


def tokens_kept(memory_bytes: int, bytes_of: Callable[[int], int], tokens: int, step: int = 1) -> int | None:
    """The tokens kept in contexts of `tokens` tokens each: of as many whole contexts as fit, and of one more in part.

    None if a context takes nothing. `bytes_of` and `step` are those of `longest_kept`.
    """
    whole = contexts_kept(memory_bytes, bytes_of(tokens))
    if whole is None:
        return None
    rest = max(memory_bytes, 0) - whole * bytes_of(tokens)
    return whole * tokens + longest_kept(rest, bytes_of, tokens, step)


def move_seconds(num_bytes: float, bytes_per_second: float) -> float:
    """The seconds to move bytes over a link at its rate. Several links that work at once need the bytes of one."""
    return num_bytes / bytes_per_second


def break_even_tokens(
    move: Callable[[int], float], compute: Callable[[int], float], step: int = 1, most: int = _MOST_TOKENS
) -> int | None:
    """The shortest context from which on moving it back takes no longer than computing it. None if no context does.

    `move` and `compute` give the seconds of a number of tokens. The time to move grows with the tokens, and that to
    compute at least so: from the result on, moving pays for every length. The result is a multiple of `step`.
    """

    def pays(steps: int) -> bool:
        return move(steps * step) <= compute(steps * step)

    limit = most // step
    if limit < 1 or not pays(limit):
        return None
    last, count = 0, 1
    while count < limit:
        # The lengths are tried up to the end, because moving may pay for a few tokens and then not.
        last, count = (last if pays(count) else count), 2 * count
    first = min(2 * last, limit) if last else 1
    while last + 1 < first:
        middle = (last + first) // 2
        last, first = (last, middle) if pays(middle) else (middle, first)
    return first * step


def tier_rate(name: str, gpu: Gpu | None, given: Mapping[str, int], notes: list[Note], part: str) -> int | None:
    """Bytes per second at which a tier is read: by each device if it is host memory, else in total.

    None if the rate is not known. A note about `part` of the document then says how to set it. Without a device nothing
    is timed, and there is no note about its link.
    """
    if name in given:
        return given[name]
    rate: int | None = None
    if name == CPU:
        if gpu is None:
            return None
        rate = _C2C.get(gpu.name, gpu.pcie_bytes_per_second)
        text, example = f"the link of {gpu.name} to host memory is not known", "50GB/s"
    elif name == DISK:
        rate = NVME_BYTES_PER_SECOND
        text, example = f"disk is assumed to read {rate / 1e9:g} GB/s, one NVMe drive on PCIe 4.0", "6GB/s"
    else:
        text, example = f"the rate of {name} is not known", "ethernet-100g"
    if rate is None or name == DISK:
        notes.append(Note(part, "tier-bandwidth", f"{text}; --offload-bandwidth {name}={example} sets it"))
    return rate
