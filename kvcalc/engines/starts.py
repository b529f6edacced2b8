"""What engines refuse to start: checks that several engines have, with the facts of each in its `starts.yaml`.

The checks are those of a device's kernels (`Rules.capabilities`) and of weights in fp8 with a scale per block, of which
each device must have whole blocks. What an engine asks of single settings is checked where it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from kvcalc.engines.declarations import table
from kvcalc.engines.place import CAPABILITIES, is_fp8
from kvcalc.errors import LayoutError
from kvcalc.memory.dtypes import Dtype
from kvcalc.memory.quantization.formats import Format
from kvcalc.memory.quantization.schemes import Scheme, UnknownSchemeError, read_scheme
from kvcalc.model.layout import Layout
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec, is_sparse, latent_of, weights_of
from kvcalc.model.tensors import LINEAR, WHOLE, ModelWeights, Weight
from kvcalc.records import NamedTuple
from kvcalc.releases import Release, parse_release
from kvcalc.throughput.hardware import Gpu

# The projections whose inputs are divided among tensor-parallel ranks. All other projections divide their outputs.
BY_INPUTS = ("o_proj", "o_b_proj", "out_proj", "down_proj", "w2", "wo", "dense", "fc2", "c_proj")
# The projections that engines join into one matrix.
_JOINED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")


class Start(NamedTuple):
    """A server to be started. `dtype` is the requested type of the weights, and `gpu` the device, or None.

    The weights named in `spread_names` are split over the devices of all copies of the attention.
    """

    spec: ModelSpec
    kv_dtype: Dtype
    layout: Layout
    spread_names: frozenset[str]
    dtype: str | None
    gpu: Gpu | None

    @property
    def is_on_nvidia(self) -> bool:
        return is_nvidia(self.gpu)

    def ranks(self, weight: Weight) -> int:
        """The number of devices that divide a matrix among them."""
        layout = self.layout
        if weight.copies > 1:
            return max(layout.ranks // layout.expert_parallel_size, 1)
        return layout.ranks if weight.name in self.spread_names else layout.tensor_parallel_size

    def with_sizes(self, size: int, experts: int) -> Start:
        """The same with another tensor-parallel and expert-parallel size."""
        return self._replace(layout=self.layout._replace(tensor_parallel_size=size, expert_parallel_size=experts))


def is_nvidia(gpu: Gpu | None) -> bool:
    """Whether a device is NVIDIA's, as far as is known."""
    return gpu is None or gpu.device_class is None or gpu.device_class in CAPABILITIES


class Rules(NamedTuple):
    """The checks of a release.

    - `inputs`, `outputs`, `joined`, `experts`: whether a device must have whole blocks of the inputs of a matrix, of
      its outputs, of the outputs of a matrix that is a part of a joined one, and of experts.
    - `least_block`: the smallest size to which the blocks of experts are refined while they are loaded (method fp8). 0
      means never.
    - `capabilities`: the least compute capability for a way to store weights (`method` or `method type`), times ten.
      The empty name is that of the engine itself.
    - `bf16`: the least compute capability for --dtype bf16.
    - `fp8_cache`: that for a cache in fp8.
    - `unchecked`: the matrices of a type of models that the engine does not check or pads, by the end of their names.
    - `padded`: the same, on NVIDIA's GPUs alone.
    - `groups`: the methods of which a device must have whole groups of inputs that share a scale, but for experts.
    - `backends`: what the backends of --attention-backend take (`attention_backends.py`). Others are not judged.
    - `no_stages`: the types of models that have no pipeline stages; false for those that have them again.
    - `needs_experts`: whether a model without experts is refused with expert parallelism.
    - `latent_fp8`: the compute capabilities with a kernel for a latent in fp8 (MLA that is not sparse), times ten.
      Empty means any.
    - `sparse_latent`: the major compute capabilities that have a kernel for sparse latent attention. Empty means any.
    """

    inputs: bool = True
    outputs: bool = True
    joined: bool = True
    experts: bool = True
    least_block: int = 0
    capabilities: Mapping[str, int] = {}
    bf16: int = 0
    fp8_cache: int = 0
    latent_fp8: Sequence[int] = ()
    sparse_latent: Sequence[int] = ()
    unchecked: Mapping[str, Sequence[str]] = {}
    padded: Mapping[str, Sequence[str]] = {}
    groups: Sequence[str] = ()
    backends: Mapping[str, Mapping[str, Any]] = {}
    no_stages: Mapping[str, bool] = {}
    needs_experts: bool = False

    def ends_unchecked(self, model_type: str, is_on_nvidia: bool) -> tuple[str, ...]:
        """The ends of the names of the matrices of this type that are not checked on this device."""
        ends = [*self.unchecked.get(model_type, ()), *(self.padded.get(model_type, ()) if is_on_nvidia else ())]
        return tuple(f".{end}" for end in ends)


@cache
def _releases(engine: str) -> list[tuple[Release | None, Rules]]:
    """The rules of an engine and the release since which they count, the oldest first.

    A release has the facts of the one before it, but for those that it names, also of single backends and types.
    """
    listed, rules = [], Rules()
    for row in table(engine, "starts")["releases"]:
        since, facts = row.get("since"), {name: fact for name, fact in row.items() if name != "since"}
        for name in ("capabilities", "no_stages"):
            facts[name] = {**getattr(rules, name), **facts.get(name, {})}
        changed = {
            name: {**rules.backends.get(name, {}), **changes} for name, changes in facts.get("backends", {}).items()
        }
        facts["backends"] = {**rules.backends, **changed}
        rules = rules._replace(**facts)
        listed.append((since and parse_release(engine, since).release, rules))
    return listed


def rules_of(engine: str, release: Release | None) -> Rules:
    """The rules of a release (None: the newest)."""
    known = [rules for since, rules in _releases(engine) if release is None or since is None or since <= release]
    return known[-1]


def check(start: Start, rules: Rules, engine: str, backend: str | None = None) -> None:
    """Raise LayoutError (exit 2) if an engine refuses to start. `engine` is its name and release, in words.

    `backend` is that of --attention-backend, if it is given.
    """
    for reason, hint in (
        *_of_device(start, rules), *_of_layout(start, rules), *_of_backend(start, rules, backend),
    ):  # fmt: skip
        raise LayoutError(f"{engine} does not start: {reason}", hint)
    if (partial := _partial(start, rules)) is not None:
        raise LayoutError(f"{engine} does not start: {partial}", _hint(start, rules))


def _of_device(start: Start, rules: Rules) -> Iterator[tuple[str, str | None]]:
    gpu = start.gpu
    capability = None if gpu is None else CAPABILITIES.get(gpu.device_class or "")
    if gpu is None or capability is None:
        return
    has = f"{gpu.name} has {_shown(capability)}"
    for name in ("", *_storage(start.spec, start.dtype)):
        least = rules.capabilities.get(name, 0)
        if capability < least:
            what = f"weights in {name.rpartition(' ')[2]} need" if name else "it needs"
            yield f"{what} a compute capability of {_shown(least)}, and {has}", None
    if start.dtype == "bf16" and capability < rules.bf16:
        yield f"--dtype bf16 needs a compute capability of {_shown(rules.bf16)}, and {has}", "--dtype fp16"
    has_fp8, has_sparse = is_fp8(start.kv_dtype.name), is_sparse(start.spec)
    reads_all = latent_of(start.spec) is not None and not has_sparse
    if capability < rules.fp8_cache and has_fp8:
        yield f"a cache in fp8 needs a compute capability of {_shown(rules.fp8_cache)}, and {has}", None
    elif rules.latent_fp8 and capability not in rules.latent_fp8 and has_fp8 and reads_all:
        known = ", ".join(map(_shown, rules.latent_fp8))
        yield f"MLA has kernels for a cache in fp8 for compute capability {known}, and {has}", "--kv-dtype bf16"
    if rules.sparse_latent and capability // 10 not in rules.sparse_latent and has_sparse:
        known = ", ".join(f"{major}.x" for major in rules.sparse_latent)
        yield f"sparse latent attention has kernels for compute capability {known}, and {has}", None


def _shown(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def _storage(spec: ModelSpec, dtype: str | None) -> Iterator[str]:
    """The names under which `Rules.capabilities` may have the storage of the weights."""
    if dtype is not None:
        yield dtype
        return
    scheme, stated = scheme_of(spec), spec.quantization
    if isinstance(stated, Mapping):
        method = str(stated.get("quant_method", "modelopt" if "quant_algo" in stated else ""))
        yield from (f"{method} {scheme.name}", method) if scheme is not None else (method,)


@remembered
def scheme_of(spec: ModelSpec) -> Scheme | None:
    """The scheme of the checkpoint. None if it has none, or if it is not modelled."""
    if not isinstance(spec.quantization, Mapping):
        return None
    try:
        return read_scheme(spec.quantization, 2)
    except UnknownSchemeError:
        return None


def quantized_matrices(spec: ModelSpec, weights: ModelWeights | None) -> Iterator[tuple[Weight, Format, int]]:
    """The quantised matrices of `weights`, which may be a part of the model's, and how each of how many is stored."""
    scheme = scheme_of(spec)
    for block in () if scheme is None or weights is None else weights.blocks:
        prefix = block.prefix.format(block.numbers[0] if block.numbers else 0)
        for weight in block.weights:
            form = scheme.format_of(prefix + weight.name, weight.role) if scheme and weight.role == LINEAR else None
            if form is not None:
                yield weight, form, len(block.numbers)


@remembered
def _matrices(spec: ModelSpec) -> list[tuple[Weight, Format]]:
    """The quantised matrices that devices divide, and how they are stored."""
    return [(weight, form) for weight, form, _ in quantized_matrices(spec, weights_of(spec)) if weight.split != WHOLE]


@remembered
def _blocks_of(spec: ModelSpec) -> list[tuple[str, Weight, tuple[int, int]]]:
    """The matrices with a scale per block, with their names and their blocks.

    Published checkpoints keep matrices of no whole blocks in 16 bits, and gates of a few outputs, but for experts.
    """
    blocks: list[tuple[str, Weight, tuple[int, int]]] = []
    for weight, form in _matrices(spec):
        if form.block is not None:
            rows, columns = form.block
            is_whole = weight.rows > rows and not (weight.rows % rows or weight.columns % columns)
            if weight.copies > 1 or is_whole:
                blocks.append((weight.name, weight, form.block))
    return blocks


def _of_layout(start: Start, rules: Rules) -> Iterator[tuple[str, str | None]]:
    stages, experts, model_type = (
        start.layout.pipeline_parallel_size, start.layout.expert_parallel_size, start.spec.model_type,
    )  # fmt: skip
    if stages > 1 and rules.no_stages.get(model_type):
        yield f"--pp {stages}: its {model_type} has no pipeline stages", "use --tp"
    if rules.needs_experts and experts > 1 and not _has_experts(start.spec):
        yield f"--ep {experts}: {start.spec.name} has no experts", "leave it out"


def _of_backend(start: Start, rules: Rules, backend: str | None) -> Iterator[tuple[str, str | None]]:
    named, facts = _named(rules, backend)
    if facts is not None and start.is_on_nvidia:
        from kvcalc.engines.attention_backends import Backend, refusals

        yield from refusals(start.spec, start.gpu, start.kv_dtype.name, named, Backend(**facts))


def _named(rules: Rules, backend: str | None) -> tuple[str, Mapping[str, Any] | None]:
    backends = {name.casefold(): (name, facts) for name, facts in rules.backends.items()}
    return backends.get((backend or "").casefold(), ("", None))


def backend_block(engine: str, release: Release | None, backend: str) -> int | None:
    """The default number of tokens in a block with this --attention-backend. None if that is the engine's own."""
    facts = _named(rules_of(engine, release), backend)[1]
    return None if facts is None else facts.get("block")


@remembered
def _has_experts(spec: ModelSpec) -> bool:
    """Whether the model has experts, or may have some because its weights are not known."""
    weights = weights_of(spec)
    return weights is None or any(weight.copies > 1 for block in weights.blocks for weight in block.weights)


def _partial(start: Start, rules: Rules) -> str | None:
    """The first matrix of which a device has no whole blocks or groups, in words."""
    if start.dtype is not None:
        return None
    return _partial_block(start, rules) or _partial_group(start, rules)


def _partial_group(start: Start, rules: Rules) -> str | None:
    stated = start.spec.quantization
    if not isinstance(stated, Mapping) or stated.get("quant_method") not in rules.groups:
        return None
    for weight, form in _matrices(start.spec):
        if form.group and weight.copies == 1 and weight.name.rpartition(".")[2] in BY_INPUTS:
            part = weight.columns // start.ranks(weight)
            if part % form.group and weight.columns % form.group == 0:
                inputs = f"{part:,} of the {weight.columns:,} inputs of {weight.name}"
                return f"a device has {inputs}, which are no whole groups of {form.group}"
    return None


def _partial_block(start: Start, rules: Rules) -> str | None:
    """The first matrix of which a device has no whole blocks, in words."""
    stated = start.spec.quantization
    unchecked = rules.ends_unchecked(start.spec.model_type, start.is_on_nvidia)
    refines = isinstance(stated, Mapping) and stated.get("quant_method") == "fp8"
    for name, weight, (rows, columns) in _blocks_of(start.spec):
        ranks, leaf = start.ranks(weight), name.rpartition(".")[2]
        if f".{name}".endswith(unchecked):
            continue
        by_inputs = leaf in BY_INPUTS
        whole, block = (weight.columns, columns) if by_inputs else (weight.rows, rows)
        ranks = min(ranks, weight.kv_heads) if weight.kv_heads else ranks
        part = -(-whole // ranks)
        if part % block == 0:
            continue
        if weight.copies > 1:
            is_checked = rules.experts
            smallest = math.gcd(rows, columns, part)
            if refines and rules.least_block and smallest >= rules.least_block:
                continue
        else:
            is_checked = rules.inputs if by_inputs else rules.joined if leaf in _JOINED else rules.outputs
        if is_checked:
            what = "inputs" if by_inputs else "outputs"
            return f"a device has {part:,} of the {whole:,} {what} of {name}, which are no whole fp8 blocks of {block}"
    return None


def _hint(start: Start, rules: Rules) -> str | None:
    """The largest smaller tensor-parallel size that starts, and whole experts on each device if that helps."""
    size, ranks, hints = start.layout.tensor_parallel_size, start.layout.ranks, []
    for smaller in range(size // 2, 0, -1):
        if size % smaller == 0 and _partial(start.with_sizes(smaller, 1), rules) is None:
            hints.append(f"--tp {smaller}")
            break
    whole = start.with_sizes(size, ranks)
    if any(weight.copies > 1 for _, weight, _ in _blocks_of(start.spec)) and _partial_block(whole, rules) is None:
        hints.append(f"--ep {ranks}")
    return f"use {' or '.join(hints)}" if hints else None
