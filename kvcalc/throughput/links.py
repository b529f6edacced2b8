"""The links between devices: the fast link of a node, PCIe, and the network between nodes.

An all-reduce over several nodes has three parts, as in NCCL. The devices of a node reduce over the fast link, each its
own part of the bytes. Each device exchanges its part with the other nodes over a network port of its own. Then the
devices of a node gather the parts over the fast link.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from kvcalc.records import NamedTuple
from kvcalc.throughput.hardware import node_devices

if TYPE_CHECKING:
    from kvcalc.model.layout import Layout
    from kvcalc.throughput.hardware import Gpu

# PCIe 4.0 x16 in one direction, used if the device's own rate is not known.
_PCIE_BYTES_PER_SECOND = 32e9
# NCCL in CUDA graphs, 8 x H200 a node. An all-reduce of 8 KiB takes 17.2 us in one node (sgl-project/sglang#22734) and
# 45.8 us over four (microsoft/mscclpp#794). Two sends over the network for each doubling of the nodes are four for four
# nodes, so each takes 7 us. (A100 with HDR: 63 us over 32 nodes, NVIDIA/nccl#652. NCCL's own estimate, src/graph/
# tuning.cc, is 5 us for each of the same sends.) Within a node, engines have faster kernels than NCCL: about 5 us. They
# do not reach other nodes.
NCCL_SECONDS = 12e-6
NETWORK_SECONDS = 7e-6
# From 1 to 8 MiB over the four nodes, each further MiB takes 18.5 us. The fast link takes 6.5 of them, and the network
# ports would ideally take 3.9.
NETWORK_OVERHEAD = 3.0
# The bytes of prompts, which are many: 46 to 48 GB/s of a port (NVIDIA/nccl-tests#290).
PROMPT_NETWORK_OVERHEAD = 1.07


class AllReduce(NamedTuple):
    """The route of an all-reduce, and the ideal seconds per byte of the reduced data.

    `devices` are those of one node that take part. `sends` is the number of sends over the network, one after the
    other.
    """

    devices: int
    sends: int
    link: float
    network: float


def all_reduce(gpu: Gpu, size: int) -> AllReduce:
    """The route of an all-reduce over `size` devices, spread evenly over as few nodes as possible."""
    num_nodes = nodes(gpu, size)
    devices = ceil(size / num_nodes)
    # A ring sends each byte twice, except one device's share.
    link = 2 * (devices - 1) / devices / link_bytes_per_second(gpu, size if num_nodes == 1 else devices)
    network = 2 * (num_nodes - 1) / num_nodes / devices / network_bytes_per_second(gpu)
    return AllReduce(devices, 2 * (num_nodes - 1).bit_length(), link, network)


def stage_network(gpu: Gpu, layout: Layout) -> float:
    """The ideal seconds per byte of what pipeline stages pass on to stages in other nodes.

    The devices of a stage each send their part over a network port of their own.
    """
    crossings = min(layout.pipeline_parallel_size, nodes(gpu, layout.num_devices)) - 1
    return crossings / layout.tensor_parallel_size / network_bytes_per_second(gpu)


def nodes(gpu: Gpu, size: int) -> int:
    """The nodes that `size` devices need: parts between which there is only a network."""
    return ceil(size / node_devices(gpu))


def network_bytes_per_second(gpu: Gpu) -> float:
    """Bytes per second that one device sends to other nodes: never more than over its own link."""
    port, link = gpu.network_bytes_per_second, gpu.interconnect
    return float(port if link is None else min(port, link.bytes_per_second))


def link_bytes_per_second(gpu: Gpu, devices: int) -> float:
    """Bytes per second that one device sends to its peers.

    They go over its fast link, over PCIe if the link joins fewer devices, or over the network if several machines are
    needed. In a mesh, they go over the links to these peers only.
    """
    link = gpu.interconnect
    if nodes(gpu, devices) > 1:
        return network_bytes_per_second(gpu)
    if link is None or devices > link.devices:
        return float(gpu.pcie_bytes_per_second or _PCIE_BYTES_PER_SECOND)
    share = max(1, devices - 1) / (link.devices - 1) if link.mesh else 1.0
    return link.bytes_per_second * share
