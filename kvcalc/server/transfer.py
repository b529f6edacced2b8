"""The time in which a prefill instance sends the cache of a prompt to a decode instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.errors import UsageError
from kvcalc.server.case import Case
from kvcalc.server.reuse import prompt_tokens_of
from kvcalc.throughput.links import link_bytes_per_second as bytes_per_second_to_peers
from kvcalc.units import network_bytes_per_second, network_names

if TYPE_CHECKING:
    import kvcalc.documents as documents
    from kvcalc.throughput.hardware import Gpu

NVLINK, PCIE = "nvlink", "pcie"


def describe_transfer(case: Case, ttft_seconds: float | None) -> documents.KvTransfer:
    """The `kv_transfer` part. Both instances have the same layout, and each device sends its share to its counterpart.

    Raises UsageError (exit 2) for an unknown link, or if the engine has no separate prefill instances.
    """
    reuse, workload = case.question.reuse, case.workload
    link = None if reuse is None else reuse.transfer
    if link is None:
        raise ValueError("the question asks for no transfer")
    rate = link if isinstance(link, int) else link_bytes_per_second(link, case.devices.gpu)
    prompt = prompt_tokens_of(case.question.speed, workload)
    sent = case.prefixes().sent_bytes(prompt)
    seconds = sent / rate
    return {
        "link": link if isinstance(link, str) else None,
        "bandwidth_bytes_per_second": rate,
        "prompt_tokens": prompt,
        "bytes_per_device": sent,
        "seconds": seconds,
        "share_of_ttft": None if ttft_seconds is None else seconds / ttft_seconds,
    }


def check_link(name: str) -> None:
    """Raise UsageError (exit 2) if there is no link of this name."""
    if name.casefold() not in (NVLINK, PCIE) and network_bytes_per_second(name) is None:
        known = ", ".join((NVLINK, PCIE, *network_names()))
        raise UsageError(f"--transfer-bandwidth {name[:40]!a}: neither a rate nor a link", f"50GB/s, or one of {known}")


def link_bytes_per_second(name: str, gpu: Gpu) -> int:
    """The rate of a link of one device, in one direction. UsageError (exit 2) if there is none of this name."""
    folded = name.casefold()
    if folded == NVLINK:
        if gpu.interconnect is not None:
            return round(bytes_per_second_to_peers(gpu, 2))
        raise UsageError(f"--transfer-bandwidth {NVLINK}: {gpu.name} has no such link", "give a rate, such as 50GB/s")
    if folded == PCIE:
        if gpu.pcie_bytes_per_second:
            return gpu.pcie_bytes_per_second
        raise UsageError(f"--transfer-bandwidth {PCIE}: not known for {gpu.name}", "give a rate, such as 50GB/s")
    check_link(name)
    return network_bytes_per_second(folded) or 0
