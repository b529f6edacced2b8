"""Tensors that say they are on a CUDA device, and the modes that make and run them.

A `SimulatedTensor` shares the storage of a CPU tensor, `on_cpu`. torch's own dispatch key says CUDA, so torch treats it
as a CUDA tensor everywhere, and every operation on it comes to `run`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated_cuda.machine import Allocation, machine

CPU, _ANY_CUDA = torch.device("cpu"), torch.device("cuda")

# Functions of torch.Tensor whose bindings ask for a real device before they reach the dispatcher.
_BINDINGS = frozenset(
    "item tolist numpy nonzero contiguous copy_ __float__ __int__ __bool__ __index__ __complex__ __contains__ "
    "__invert__ __getitem__ __setitem__".split()
)
# Operations whose result the host needs. `index` needs it if a boolean mask is among the indices.
_HOST_NEEDS = frozenset(
    "item tolist numpy __float__ __int__ __bool__ __index__ __complex__ __contains__ _local_scalar_dense nonzero equal "
    "is_nonzero masked_select unique _unique2 allclose".split()
)
_INDEXING = frozenset("index index_put index_put_ _index_put_impl_ __getitem__ __setitem__".split())
_COPIES = frozenset("to _to_copy copy_ copy cpu cuda".split())
# Matrix products, and which of their arguments has the summed dimension as its last one.
_PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "linear": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}
# These make a tensor without launching a kernel.
_NO_KERNEL = frozenset("empty empty_like empty_strided new_empty new_empty_strided detach_ set_".split())


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device. `on_cpu` has its values, and `block` its memory."""

    on_cpu: torch.Tensor
    number: int
    block: Allocation | None

    @staticmethod
    def __new__(cls, values: torch.Tensor, number: int) -> SimulatedTensor:
        device = torch.device("cuda", number)
        made: Any = torch.Tensor._make_subclass(
            cls, values, False, dispatch_device=True, device_for_backend_keys=device
        )
        made.on_cpu, made.number, made.block = values, number, machine().block_of(values, number)
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SimulatedTensor({tuple(self.on_cpu.shape)}, {self.on_cpu.dtype}, cuda:{self.number})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.simulated_cuda.kernels import EMULATED

        name = getattr(func, "__name__", "")
        if name in _BINDINGS:
            return run(func, name, args, kwargs or {}, name in ("__setitem__", "copy_"))
        if func in EMULATED:
            return EMULATED[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})


class Dispatch(TorchDispatchMode):
    """Sees operations without a simulated tensor too: those that make one."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise the first operation imports torch's compiler, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Gives "cuda" its index, which torch would ask the driver for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        args, kwargs = [_with_index(value) for value in args], {key: _with_index(v) for key, v in kwargs.items()}
        if getattr(func, "__name__", "") == "cuda" and isinstance(args[0], torch.Tensor):
            return args[0].to(_with_index(torch.device("cuda", *args[1:])))
        return func(*args, **kwargs)


def _with_index(device: Any) -> Any:
    if isinstance(device, (str, torch.device)) and device in ("cuda", _ANY_CUDA):
        return torch.device("cuda", machine().current_device)
    return device


@contextlib.contextmanager
def plain() -> Iterator[None]:
    """Inside the block, torch runs as without a simulation, for the values of tensors."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


_NESTED = (list, tuple, dict)


def leaves_of(values: Any) -> list[Any]:
    """The values in nested lists, tuples and dicts. Like torch's pytree, which takes longer than most operations."""
    if not isinstance(values, _NESTED):
        return [values]
    found = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, _NESTED):
            found += leaves_of(value)
        else:
            found.append(value)
    return found


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """`values` with `function` of every leaf."""
    if isinstance(values, torch.Size):
        return values
    if isinstance(values, dict):
        return {key: mapped(function, value) for key, value in values.items()}
    if not isinstance(values, _NESTED):
        return function(values)
    made = [mapped(function, value) if isinstance(value, _NESTED) else function(value) for value in values]
    return made if isinstance(values, list) else type(values)(*made) if hasattr(values, "_fields") else tuple(made)


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that torch dispatched."""
    if func is torch.ops.prim.device.default:
        return torch.device("cuda", args[0].number)
    if func._schema.name.startswith("c10d::"):
        return _communicate(func, args, kwargs)
    name = func._schema.name.partition("::")[2]
    if name == "_has_compatible_shallow_copy_type":
        return False
    return run(func, name, args, kwargs, func._schema.is_mutable)


def _communicate(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective operation outside a capture. NCCL's run on the device, gloo's on the host."""
    ours = [t for t in leaves_of(args) if isinstance(t, SimulatedTensor)]
    if not ours:
        return func(*args, **kwargs)
    if not machine().has_nccl:
        machine().wait("a copy by gloo")

    def communicate(*a: Any, **k: Any) -> Any:
        out = func(*a, **k)
        out[-1].wait()
        return out

    a, k = unwrapped((args, kwargs))
    out = compute(communicate, a, k, [t.on_cpu for t in ours])
    return finish(func._schema.name, ours, out, ours[0].number, True, lambda: communicate(*a, **k))


def run(func: Callable[..., Any], name: str, args: Any, kwargs: Any, is_mutable: bool) -> Any:
    """Check the devices of an operation, compute it on the CPU, and count it as one kernel."""
    made = machine()
    leaves = leaves_of((args, kwargs))
    ours = [t for t in leaves if isinstance(t, SimulatedTensor)]
    others = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, SimulatedTensor)]
    target = next((torch.device(d) for d in (kwargs.get("device"), *leaves) if isinstance(d, torch.device)), None)
    if not ours and (target is None or target.type != "cuda"):
        return func(*args, **kwargs)
    index = _check_devices(name, ours, others, target)
    to_host = bool(ours) and ((target is not None and target.type == "cpu") or (name == "copy_" and args[0] in others))
    if to_host or name in _HOST_NEEDS:
        made.wait(name)
    elif name in _COPIES and others and not (args and name == "copy_" and others[0].dim() == 0):
        made.wait(f"{name} from the host")
    elif name in _INDEXING:
        _check_indices(name, [*leaves_of(args[1:2])])
    a, k = unwrapped((args, kwargs))
    out = compute(func, a, k, [t for t in leaves_of(a[:1]) if isinstance(t, torch.Tensor)] if is_mutable else [])
    if to_host or name in _HOST_NEEDS - {"nonzero", "masked_select", "unique", "_unique2"}:
        # A copy, also where the CPU's result would share the memory.
        return mapped(lambda t: t.clone() if isinstance(t, torch.Tensor) and name != "copy_" else t, out)
    return finish(name, ours, out, index, is_mutable, lambda: func(*a, **k), flop_of(name, a, k, out))


def flop_of(name: str, args: Any, kwargs: Any, out: Any) -> int:
    """The operations of a matrix product, or of attention: a causal kernel leaves out the pairs that are hidden."""
    if name in _PRODUCTS:
        return int(2 * out.numel() * args[_PRODUCTS[name]].shape[-1])
    if not name.startswith("sdpa "):
        return 0
    query, key, value = args
    queries, keys, mask = query.shape[-2], key.shape[-2], kwargs["attn_mask"]
    pairs = queries * (queries + 1) // 2 if kwargs["is_causal"] else queries * keys
    if mask is not None:
        pairs = int(mask.expand(*mask.shape[:-2], queries, keys).sum()) // (mask.numel() // mask[0, 0].numel())
    return int(2 * query.shape[0] * query.shape[1] * pairs * (query.shape[-1] + value.shape[-1]))


def compute(func: Callable[..., Any], args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
    """`func` of CPU tensors. A capture only records, so there, the tensors in `written` keep their values."""
    with plain():
        kept = [] if machine().capture is None else [tensor.clone() for tensor in written]
        out = func(*args, **kwargs)
        for tensor, values in zip(written, kept):
            tensor.copy_(values)
    return out


def finish(
    name: str, ours: list[SimulatedTensor], out: Any, index: int, is_mutable: bool, again: Callable[[], Any],
    flop: int = 0,
) -> Any:  # fmt: skip
    """Wrap the results `out` of an operation on `ours`. Unless they are views, count and record a kernel."""
    made = machine()
    given = {id(t.on_cpu): t for t in ours}
    known = {t.on_cpu.untyped_storage()._cdata for t in ours}
    results = [t for t in leaves_of(out) if isinstance(t, torch.Tensor)]
    fresh = [t for t in results if t.untyped_storage()._cdata not in known]

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return given[id(value)] if id(value) in given else SimulatedTensor(value, index)

    wrapped = mapped(wrap, out)
    if not (fresh or is_mutable) or name in _NO_KERNEL:
        return wrapped
    seconds = made.launch(name, [*(t.on_cpu for t in ours), *fresh], flop)
    if made.capture is not None:
        read = [t.block for t in ours if t.block is not None]
        with plain():
            # Until the graph is replayed, what it computes is not there.
            for tensor in fresh:
                if tensor.is_floating_point() and tensor.element_size() > 1:
                    tensor.fill_(float("nan"))
        made.capture.record(made, name, seconds, lambda: _repeat(again, results), read)
    return wrapped


def _repeat(again: Callable[[], Any], results: list[torch.Tensor]) -> None:
    """Run an operation of a graph again, into the memory of its first results."""
    with plain():
        for old, new in zip(results, (t for t in leaves_of(again()) if isinstance(t, torch.Tensor))):
            if old is not new:
                old.copy_(new)


def unwrapped(values: Any) -> Any:
    """`values` with CPU tensors and the CPU in the place of simulated ones."""

    def plain_value(value: Any) -> Any:
        if isinstance(value, SimulatedTensor):
            return value.on_cpu
        return CPU if isinstance(value, torch.device) and value.type == "cuda" else value

    return mapped(plain_value, values)


def _check_devices(
    name: str, ours: list[SimulatedTensor], others: list[torch.Tensor], target: torch.device | None
) -> int:
    """The index of the device on which an operation runs. Raises torch's error if its tensors are on several."""
    found = {t.number for t in ours}
    if name in _COPIES:
        return target.index or 0 if target is not None and target.type == "cuda" else max(found)
    # The host's numbers may be arguments of kernels, and its indices are copied.
    wrong = [t for t in others if t.dim()] if name not in _INDEXING else []
    if len(found) > 1 or wrong:
        devices = sorted({f"cuda:{index}" for index in found} | {"cpu" for _ in wrong})
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {' and '.join(devices)}! "
            f"(in {name})"
        )
    if found:
        return found.pop()
    return target.index or 0 if target is not None else 0


def _check_indices(name: str, indices: list[Any]) -> None:
    """A boolean mask needs the host, because it decides the size of the result. So do indices on the host."""
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dim():
            if not isinstance(index, SimulatedTensor):
                machine().wait(f"{name} with indices of the host")
            elif index.dtype in (torch.bool, torch.uint8):
                machine().wait(f"{name} with a mask")
