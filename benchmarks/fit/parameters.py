"""The parameters of the fit: which constants are fitted, their priors, and who may deviate from them.

A parameter is the logarithm of a constant (or of its distance from 1) and applies to the rows with its label: all rows
(no label), an engine, a kind of device, an engine on a kind, or the releases of an engine before a step. The labels of
a row add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from benchmarks.fit.arrays import Values, stacked_values
from kvcalc.releases import parse_release
from kvcalc.throughput.constants import HALVED

if TYPE_CHECKING:
    from benchmarks.fit.rows import Row


class Since(NamedTuple):
    """A release from which on an engine's constants are different, and why."""

    release: str
    source: str


# The first release of the newest constants. Older releases deviate.
SINCE = {
    "vllm": Since("0.14.0", "asynchronous scheduling is the default: vLLM, pull request 27614"),
    "sglang": Since("0.5.9", "faster attention than 0.5.6: kernel tables of aiconfigurator, commit 095f58a"),
    "tensorrt-llm": Since("1.2.0rc2", "11 to 14 % faster at equal points than 1.0 and 1.1"),
    "llama.cpp": Since("b6500", "1.3 to 2 times as fast as the tables of 2024 and as b6118"),
}  # fmt: skip


class Parameter(NamedTuple):
    """A constant's likely value, the spread of its logarithm, and the spread of the deviations by label.

    With `floor` 1, the value is 1 plus the fitted part, so it is never better than ideal. `of` names one key of a
    constant that is a mapping by weight class. `means` has the likely deviations that are not 0.
    """

    name: str
    likely: float
    spread: float
    deviations: Mapping[str, float] = {}
    floor: float = 0.0
    of: str = ""
    means: Mapping[str, float] = {}


_ENGINES = ("vllm", "sglang", "tensorrt-llm")


def _each(labels: Sequence[str], spread: float) -> dict[str, float]:
    return dict.fromkeys(labels, spread)


def before(engine: str) -> str:
    """The label of the releases before the step of an engine."""
    return f"{engine}<{SINCE[engine].release}"


_OLDER = tuple(before(engine) for engine in SINCE)
_SYNCHRONOUS = before("vllm")

# Likely values by weight class: medians of the kernel tables, as in benchmarks/results/kernel_tables.json. The kernels
# for experts in nvfp4 read at 1.0 to 1.15 times the ideal time, and those of dense layers at 1.3 to 1.7 times.
_READ = {
    "bf16": 0.2, "fp8": 0.25, "nvfp4": 0.5, "nvfp4 experts": 0.12, "mxfp4": 0.25, "int8": 0.15, "int4": 0.15,
}  # fmt: skip
_MULTIPLY = {"bf16": 0.35, "fp8": 0.9, "nvfp4": 1.2, "mxfp4": 1.0}

# Kernels of their own: gpt-fast's for integers, of which `logical` has rows, are slower than Marlin, which the servers
# have. AMD's for scaled types are others than NVIDIA's, and those for 16 bits are not slower: with this, the constants
# of DeepSeek-R1 in fp8 predict six other models on MI300X (SGLang's cookbook, three of them in 16 bits) within 25 % on
# average, and within 36 % with one factor for all types.
_AMD = {"fp8": {"cdna3": 2.0, "cdna4": 0.5}, "mxfp4": {"cdna4": 0.5}}
# Hopper does not multiply mxfp4. Its kernels read it at 1.2 to 1.6 times the ideal time, Blackwell's at 1.2 to 1.4. In
# fp8 it is 1.1 to 1.2 on Hopper, and 1.2 to 1.7 on Blackwell.
_OWN = {
    "int8": {"logical": 0.8}, "int4": {"logical": 0.8},
    "fp8": {**_AMD["fp8"], "blackwell": 0.3}, "mxfp4": {**_AMD["mxfp4"], "hopper": 0.3},
}  # fmt: skip
_OWN_MEANS = {"fp8": {"blackwell": 0.4}, "mxfp4": {"hopper": 0.5, "cdna4": 0.7}}

_STEP = (
    *(
        Parameter("weight_overhead", likely, 0.4, _OWN.get(kind, {}), 1, kind, _OWN_MEANS.get(kind, {}))
        for kind, likely in _READ.items()
    ),
    *(
        Parameter("compute_overhead", likely, 0.3, {"blackwell": 0.25, **_AMD.get(kind, {})}, floor=1, of=kind)
        for kind, likely in _MULTIPLY.items()
    ),
    Parameter("expert_overhead", 0.15, 0.5, _each(_ENGINES, 0.3), 1),
    Parameter("expert_compute_overhead", 0.5, 0.5, floor=1),
    Parameter("token_overlap", 0.3, 0.7, floor=1),
    Parameter("kv_overhead", 0.25, 0.5, _each(_ENGINES, 0.3), 1),
    Parameter("attention_compute_overhead", 0.8, 0.4, floor=1),
    Parameter("roof_power", 0.9, 0.3, floor=1),
    Parameter("device_overhead", 0.01, 0.3, {"cdna3": 1.0, "cdna4": 1.0}, 1),
    Parameter(
        "kernel_seconds", 2.2e-6, 0.3,
        {**_each(_ENGINES, 0.3), **_each(("blackwell", "cdna3", "cdna4"), 0.3), **_each(_OLDER, 0.3), "logical": 0.5},
        # Decode attention takes 1.5 to 1.8 times as long in SGLang 0.5.6.post2 as in 0.5.14 (kernel tables, hopper), 5
        # to 7 us of the 25 to 35 us that the small kernels of a layer take.
        means={before("sglang"): 0.2},
    ),
    Parameter("step_seconds", 1e-3, 0.7, {**_each(_ENGINES, 0.4), _SYNCHRONOUS: 0.4, "logical": 0.8}),
    Parameter("sequence_seconds", 1.5e-5, 0.7, {**_each(_ENGINES, 0.4), _SYNCHRONOUS: 0.5}),
    Parameter("busy_sequence_seconds", 3e-5, 0.7),
    Parameter("activation_passes", 12, 0.7),
    # The activations of experts, from kernel tables: `activation_factor` is 1.4 to 2.6 of fewer elements, in which gate
    # and up read their input together.
    Parameter("expert_passes", 1.9, 0.15),
    Parameter("prefill_overhead", 0.2, 0.4, {**_each(_ENGINES, 0.2), "blackwell": 0.3}, 1),
    Parameter("prefill_expert_overhead", 0.5, 0.4, {"blackwell": 0.3}, 1),
    Parameter("prefill_attention_overhead", 0.8, 0.4, floor=1),
)  # fmt: skip
# Kinds of device that no row of these engines is from, and whose kernels are measured (aiconfigurator's kernel tables),
# or servers: vLLM 0.13 with ShareGPT on RTX 3090, 4090, 5090, RTX 5000 Ada and A100 (`score/serving.py`).
_MEASURED_KERNELS = ("ada", "ampere", "ampere-hbm", "blackwell-rtx")
CHECKED = {"vllm": _MEASURED_KERNELS, "sglang": _MEASURED_KERNELS, "tensorrt-llm": _MEASURED_KERNELS}
# The first requests of a benchmark wait for what a server compiles or loads with its first steps. Few runs say more of
# it than their mean does.
_DEVICES = ("blackwell", "cdna3", "cdna4")
_FIRST_TOKEN = (
    Parameter("ttft_seconds", 0.006, 0.4, {**_each(_ENGINES, 0.3), **_each(_OLDER, 0.3), **_each(_DEVICES, 0.3)}),
    Parameter(
        "ttft_steps", 0.3, 0.5,
        {**_each(_ENGINES, 0.5), **_each(_OLDER, 0.3), **_each(_DEVICES, 0.5)},
    ),
    Parameter("ttft_token_seconds", 2e-6, 0.5, {**_each(_ENGINES, 0.5), **_each(_OLDER, 0.1), **_each(_DEVICES, 0.5)}),
    # Python and the CUDA driver take 5 to 10 us for an operation that is not in a graph, and some launch several.
    Parameter(
        "prompt_launch_seconds", 1e-5, 0.7,
        {**_each(_ENGINES, 0.5), **_each(_OLDER, 0.3), **_each(_DEVICES, 0.3)},
    ),
    Parameter("first_seconds", 0.3, 0.7, {**_each(_ENGINES, 0.7), **_each(_OLDER, 0.5), **_each(_DEVICES, 0.7)}),
    Parameter("cold_seconds", 2.0, 0.7, {**_each(_ENGINES, 0.5), **_each(_OLDER, 0.5), **_each(_DEVICES, 0.5)}),
)  # fmt: skip
_KINDS = (
    "ada", "ampere", "ampere-hbm", "apple-m", "blackwell-rtx", "gb10", "rdna3.5", "rdna4", "turing", "blackwell",
)  # fmt: skip
_LAPTOP = (
    *(
        Parameter("weight_overhead", likely, 0.4, {**_each(_KINDS, 0.3), "mlx": 0.3}, 1, kind)
        for kind, likely in {"bf16": 0.15, "int8": 0.15, "int4": 0.25}.items()
    ),
    # The kernels of mxfp4 were new in b6096.
    Parameter("weight_overhead", 0.25, 0.4, {**_each(_KINDS, 0.3), "mlx": 0.3, before("llama.cpp"): 0.8}, 1, "mxfp4"),
    Parameter("expert_overhead", 0.2, 0.5, {**_each(_KINDS, 0.15), before("llama.cpp"): 0.3, "mlx": 0.3}, 1),
    Parameter("kv_overhead", 0.4, 0.5, {**_each(_KINDS, 0.3), before("llama.cpp"): 0.5, "mlx": 0.5}, 1),
    Parameter("kv_token_seconds", 3e-9, 1.5, {"mlx": 1.0}),
    Parameter("kernel_seconds", 2.5e-6, 0.5, {**_each(_KINDS, 0.4), before("llama.cpp"): 0.4, "mlx": 0.4}),
    Parameter("step_seconds", 3e-4, 0.7, {**_each(_KINDS, 0.4), before("llama.cpp"): 0.4, "mlx": 0.4}),
    Parameter("stage_seconds", 1e-4, 1.0),
)

# Kinds with half the rate come first, as their rows also have the label of the whole kind.
ALL_KINDS = (*(f"{kind}-half" for kind in HALVED), *_KINDS, "hopper", "cdna3", "cdna4")

# All-reduces as kernel tables have them: seconds between two devices, for each further one, and the share of the link
# that up to 4 MiB reach, as in decode steps. Median error 4 to 10 % (aiconfigurator, commit 095f58a, vLLM 0.24, SGLang
# 0.5.14 and TensorRT-LLM 1.3rc20).
_LINKS: dict[str, dict[str, tuple[float, float, float]]] = {
    "hopper": {"vllm": (4.45e-6, 0.14e-6, 0.63), "": (2.6e-6, 0.2e-6, 0.63)},
    "blackwell": {"vllm": (7.1e-6, 0.15e-6, 0.51), "": (4.3e-6, 0.22e-6, 0.51)},
    "ampere-hbm": {"": (5.1e-6, 0.25e-6, 0.58)},
}
# The longest all-reduces of the same tables, as of prompts: 1 / the share of two devices, and what each further device
# adds. Eight devices of hopper reach 1.04 times the link of a ring, because NVSwitch adds up the bytes (NVLS). AMD's
# links carry 48 of 64 GB/s (rocm.blogs.amd.com, mi300x-rccl-xgmi).
_LONG = {"hopper": (1.35, -0.065), "blackwell": (1.61, -0.06), "ampere-hbm": (1.51, -0.035)}
_LONG_OF_AMD = (1.33, 0.0)
# Over PCIe: the same seconds, 1 / the share of two devices, and what each further device adds to it. The share depends
# more on the machine than on the card. Two L40S and two RTX PRO 6000 with P2P reach 60 to 62 % (the same tables), and
# two RTX PRO 6000 without it 25 % (LLMServingSim): 2.3 is between them. Four and eight RTX PRO 6000 reach 47 and 38 %
# there, and eight 35 to 65 % on six more machines (voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md). Four L40S in two
# sockets reach 12 %, but eight need at least 30 % for NVIDIA's published rates (TensorRT-LLM 0.17, perf-overview.md).
# From three devices on, engines leave PCIe to NCCL (vLLM's custom_all_reduce.py), which copies through host memory
# unless a PCIe switch joins the devices (ncclTopoCheckP2p, src/graph/paths.cc). Servers for data centre cards have
# switches. GeForce cards are in machines without: four reach 16 %, as NCCL's four L40S in two sockets do (the same
# tables). Four RTX 5090, on PCIe 5.0, reach 56 % (NVIDIA/nccl#1639).
_ON_HOST_BRIDGES = (4.9e-6, 3.8e-6, 2.3, 1.95)
_PCIE = {
    "blackwell-rtx": (4.4e-6, 4.1e-6, 2.3, 0.1), "ampere-half": _ON_HOST_BRIDGES, "ada-half": _ON_HOST_BRIDGES,
    "": (4.9e-6, 3.8e-6, 2.3, 0.3),
}  # fmt: skip
# The attention of one sequence and KV head in a layer, from the same tables.
_HEAD_SECONDS = {"hopper": 24e-9, "blackwell": 10e-9, "ampere-hbm": 33e-9, "ada": 20e-9, "blackwell-rtx": 18e-9}
# Reading and multiplying on kinds of devices without serving points: (read, multiply). Full rates are from the same
# tables (a100-sxm-80gb, l40s without its ECC, rtx-pro-6000-server). ampere and half rates in 16 bits are from the
# profiles of LLMServingSim (commit 5daddb2: an A6000, an RTX 3090, an RTX 4090). Other types at half rate are derived:
# multiplying reaches that rate too.
_TABLES: dict[str, dict[str, tuple[float, float]]] = {
    "ada": {"bf16": (1.09, 1.7), "fp8": (1.16, 2.1), "int8": (1.04, 1.5), "int4": (1.04, 1.5)},
    "ada-half": {
        "bf16": (1.09, 1.03), "fp8": (1.16, 1.1), "mxfp4": (1.16, 1.1), "int8": (1.04, 1.05), "int4": (1.04, 1.05),
    },
    "ampere": {"bf16": (1.08, 1.4)},
    "ampere-half": {"bf16": (1.19, 1.1), "mxfp4": (1.2, 1.1)},
    "ampere-hbm": {"bf16": (1.26, 1.21), "int8": (1.1, 1.2)},
    "blackwell-rtx": {"bf16": (1.06, 1.2), "fp8": (1.12, 1.35), "nvfp4": (1.4, 1.45)},
    "blackwell-rtx-half": {"bf16": (1.06, 1.03), "fp8": (1.12, 1.1), "nvfp4": (1.4, 1.45)},
    # Marlin is for NVIDIA's devices. Others have kernels like gpt-fast's, which read int4 at 1.8 times the ideal time.
    **{kind: {"int4": (1.8, 1.27)} for kind in ("cdna3", "cdna4", "rdna3.5", "rdna4")},
}  # fmt: skip
# A small kernel in 16 bits on these kinds, as a multiple of its time on hopper, from the same tables.
_LAUNCHES = {"ampere-hbm": 1.26, "ada": 0.9, "blackwell-rtx": 0.87}
_FIXED = {
    "head_seconds": 20e-9, "kv_token_seconds": 0.0, "stage_seconds": 2e-5,
}  # fmt: skip


def _of_sums(sums: Mapping[tuple[str, str], Any], parameters: Sequence[Parameter]) -> dict[str, Any]:
    """The constants whose logarithms above their floors are `sums`, by name and weight class."""
    floors = {(p.name, p.of): p.floor for p in parameters}
    found: dict[str, Any] = {}
    for (name, of), total in sums.items():
        value = floors[name, of] + np.exp(total)
        if of:
            found.setdefault(name, {})[of] = value
        else:
            found[name] = value
    return found


class Model:
    """The parameters of one fit."""

    def __init__(self, name: str, engines: Sequence[str], parameters: Sequence[Parameter], first: Model | None) -> None:
        self.name = name
        self.engines = engines
        self.parameters = parameters
        self._first = first
        self.is_first_token = first is None
        # The parameter and the label of each theta.
        self.thetas = [(p, label) for p in parameters for label in ("", *p.deviations)]

    @property
    def first_token(self) -> Model:
        """The fit of the time to first token, which follows."""
        if self._first is None:
            raise ValueError("this is that fit")
        return self._first

    @property
    def prior(self) -> tuple[Values, Values]:
        """The mean and the spread of each theta."""
        mean = [p.means.get(label, 0.0) if label else math.log(p.likely) for p, label in self.thetas]
        spread = [p.deviations[label] if label else p.spread for p, label in self.thetas]
        return np.array(mean), np.array(spread)

    def labels_of(self, row: Row) -> list[str]:
        """The labels of a row: its engine, its kind of device, and whether its release is older than the step."""
        found = [row.engine, *kinds_of(row.constants_kind)]
        if row.engine in SINCE and is_older(row):
            found.append(before(row.engine))
        return found

    def arrays_of(self, rows: Sequence[Row]) -> Callable[[Values], dict[str, Any]]:
        """A function that turns the thetas into constants that are arrays over the rows."""
        labels = [{"", *self.labels_of(row)} for row in rows]
        columns = [np.array([float(label in own) for own in labels]) for _, label in self.thetas]
        kinds = {(row.engine, row.constants_kind) for row in rows}
        likely = {(e, kind): {**self.likely(), **self.fixed(e, kind)} for e, kind in kinds}
        each = [likely[row.engine, row.constants_kind] for row in rows]
        given = stacked_values(each)

        def arrays(theta: Values) -> dict[str, Any]:
            sums: dict[tuple[str, str], Any] = {}
            for (p, _), value, column in zip(self.thetas, theta, columns):
                sums[p.name, p.of] = sums.get((p.name, p.of), 0.0) + value * column
            found = _of_sums(sums, self.parameters)
            return {
                **given,
                **{n: {**given[n], **v} if isinstance(v, dict) else v for n, v in found.items()},
            }

        return arrays

    def values(self, theta: Values, engine: str, labels: Sequence[str]) -> dict[str, Any]:
        """The constants of an engine for one set of labels: its kind of device, and whether its release is older."""
        sums: dict[tuple[str, str], float] = {}
        for (p, label), value in zip(self.thetas, theta):
            if label in ("", engine, *labels):
                sums[p.name, p.of] = sums.get((p.name, p.of), 0.0) + value
        found, likely = _of_sums(sums, self.parameters), self.likely()
        if self.is_first_token:
            return found
        kind = next((kind for kind in ALL_KINDS if kind in labels), "")
        # gpt-fast, which `logical` stands for, was measured on ampere-hbm: its rows determine the constants there.
        is_fitted = engine == "logical" and kind == "ampere-hbm"
        tables = {} if is_fitted else self.tables(kind)
        for name, first in likely.items():
            if isinstance(first, dict):
                found[name] = {**first, **found.get(name, {}), **tables.get(name, {})}
        if self.name == "servers" and not is_fitted:
            found["kernel_seconds"] *= _LAUNCHES.get(kinds_of(kind)[-1], 1.0)
        return {**likely, **found, **self.fixed(engine, kind)}

    def likely(self) -> dict[str, Any]:
        """The constants that this fit does not determine, with their likely values."""
        if self.is_first_token:
            return {p.name: p.likely for p in self.parameters}
        parameters = (*_STEP, *self.parameters)
        found = _of_sums({(p.name, p.of): math.log(p.likely) for p in parameters}, parameters)
        return {**found, **_FIXED}

    def fixed(self, engine: str, kind: str) -> dict[str, Any]:
        """The constants that kernel tables determine."""
        # Laptops' engines have no all-reduces.
        tables = _PCIE if self.name == "servers" else {"": _PCIE[""]}
        pcie = tables.get(kind, tables.get(kinds_of(kind)[-1], tables[""]))
        *_, kind = kinds_of(kind)
        links = _LINKS.get(kind, _LINKS["hopper"])
        linked = links.get(engine, links[""])
        long = _LONG_OF_AMD if kind.startswith("cdna") else _LONG.get(kind, _LONG["hopper"])
        return {
            "all_reduce_seconds": linked[0], "all_reduce_device_seconds": linked[1], "link_overhead": 1 / linked[2],
            "prompt_link_overhead": long[0], "prompt_link_overhead_per_device": long[1],
            "pcie_all_reduce_seconds": pcie[0], "pcie_all_reduce_device_seconds": pcie[1],
            "pcie_overhead": pcie[2], "pcie_overhead_per_device": pcie[3],
            "head_seconds": _HEAD_SECONDS.get(kind, _FIXED["head_seconds"]),
        }  # fmt: skip

    def tables(self, kind: str) -> dict[str, dict[str, float]]:
        """Overheads of a kind of device without serving points, from kernel tables."""
        tables = _TABLES.get(kind, {}) if self.name == "servers" else {}
        return {
            "weight_overhead": {of: read for of, (read, _) in tables.items()},
            "compute_overhead": {of: multiply for of, (_, multiply) in tables.items()},
        }

    def described(self, theta: Values) -> dict[str, float]:
        return {
            f"{p.name}{'.' + p.of if p.of else ''}{'@' + label if label else ''}": float(
                f"{(0 if label else p.floor) + math.exp(value):.4g}"
            )
            for (p, label), value in zip(self.thetas, theta)
        }


def kinds_of(kind: str) -> list[str]:
    """A kind of device with half the rate and the whole kind, or that kind alone."""
    return list(dict.fromkeys((kind, kind.removesuffix("-half"))))


def is_older(row: Row) -> bool:
    """Whether the release that was measured is older than the step of its engine.

    InferenceX started vLLM with --async-scheduling before that was the default.
    """
    if row.engine == "vllm" and row.source == "silicon" and row.version in (None, "0.11.2"):
        return False
    release, since = row.release, parse_release(row.engine, SINCE[row.engine].release).release
    return release is not None and since is not None and release < since


SERVERS = Model("servers", (*_ENGINES, "logical"), _STEP, Model("servers", (*_ENGINES, "logical"), _FIRST_TOKEN, None))
# Nothing is known of first steps that take longer there, so they take as long as others.
_LAPTOP_FIRST_TOKEN = tuple(
    p._replace(likely=1e-9) if p.name in ("first_seconds", "cold_seconds", "prompt_launch_seconds") else p
    for p in _FIRST_TOKEN
)
LAPTOPS = Model(
    "laptops", ("llama.cpp", "mlx"), _LAPTOP, Model("laptops", ("llama.cpp", "mlx"), _LAPTOP_FIRST_TOKEN, None)
)
