"""Kernels that are not torch operators: scaled_dot_product_attention's choice, flex_attention and Triton's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.simulated_cuda.machine import machine
from tests.simulated_cuda.tensors import SimulatedTensor, finish, leaves_of, run, unwrapped
from tests.simulated_cuda.tensors import compute as run_on_cpu

_HALF = (torch.float16, torch.bfloat16)
_sdpa = torch.nn.functional.scaled_dot_product_attention


def _sdpa_kernel(query: Any, key: Any, value: Any, mask: Any, is_causal: bool) -> str:
    """The kernel that torch would choose on sm_90, among those that `torch.nn.attention.sdpa_kernel` allows.

    The order is that of torch from 2.11 on. Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    width, v_width = query.shape[-1], value.shape[-1]
    heads_match = query.shape[1] == key.shape[1] == value.shape[1]
    packed = all(t.on_cpu.stride(-1) == 1 for t in (query, key, value))
    half, backends = query.dtype in _HALF, torch.backends.cuda
    aligned = width % 8 == v_width % 8 == 0
    fused = packed and heads_match
    if backends.cudnn_sdp_enabled() and fused and half and aligned and max(width, v_width) <= 256:
        return "cudnn"
    if backends.flash_sdp_enabled() and fused and half and mask is None and width == v_width <= 256:
        return "flash"
    if backends.mem_efficient_sdp_enabled() and fused and (aligned or not half):
        return "efficient"
    if backends.math_sdp_enabled():
        return "math"
    raise RuntimeError("No available kernel. Aborting execution.")


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    which = _sdpa_kernel(query, key, value, attn_mask, is_causal)
    if which == "cudnn":
        machine().plan((query.shape, key.shape, value.shape))
    named = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale,
             "enable_gqa": enable_gqa}  # fmt: skip
    return run(_sdpa_on_cpu, f"sdpa {which}", (query, key, value), named, False)


def _sdpa_on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
    # `sdpa_kernel` says which kernels the device may use, and those of the CPU must not be among them.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        return _sdpa(*args, **kwargs)


def _choice(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
            *_: Any, **__: Any) -> int:  # fmt: skip
    numbers = {"math": 0, "flash": 1, "efficient": 2, "cudnn": 3}
    return numbers[_sdpa_kernel(query, key, value, attn_mask, is_causal)]


EMULATED: dict[Any, Callable[..., Any]] = {_sdpa: _attend, torch._fused_sdp_choice: _choice}


def compiled(function: Any = None, **options: Any) -> Any:
    """torch.compile on the device, for `flex_attention` alone. Compiling is not permitted during a capture.

    With `dynamic` False, every new shape compiles again, and torch stops compiling at its limit.
    """
    if getattr(function, "__name__", None) != "flex_attention":
        raise RuntimeError("the simulated device compiles only flex_attention")
    shapes: set[Any] = set()

    def launch(query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
               enable_gqa: bool = False, **_: Any) -> Any:  # fmt: skip
        shape = query.dtype if options.get("dynamic") else (query.dtype, query.shape, key.shape, value.shape, scale)
        if shape not in shapes:
            machine().refuse_in_capture("torch.compile")
            if len(shapes) >= 8 and not options.get("dynamic"):
                raise RuntimeError("hit config.recompile_limit (8)")
            shapes.add(shape)
            machine().compilations += 1
        if key.shape[1] != query.shape[1]:
            assert enable_gqa, f"Expect query and key/value to have the same number of heads, got {query.shape[1]}"
            key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
        scores = query.float() @ key.float().transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if score_mod is not None:
            places = (torch.arange(n, device=query.device) for n in scores.shape)
            scores = score_mod(scores, *(p.view(-1, *[1] * (3 - axis)) for axis, p in enumerate(places)))
        return (scores.softmax(-1) @ value.float()).to(query.dtype)

    return launch


def kernel(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """`compute`, a function of CPU tensors, as one kernel of the device.

    Its first launch loads the kernel's code, which CUDA does not permit during a capture. A function that is given
    no simulated tensor runs as it is.
    """
    loaded = False

    def launch(*args: Any, **kwargs: Any) -> Any:
        nonlocal loaded
        ours = [t for t in leaves_of((args, kwargs)) if isinstance(t, SimulatedTensor)]
        if not ours:
            return compute(*args, **kwargs)
        if not loaded:
            machine().refuse_in_capture(f"the first launch of {name}")
        loaded = True
        a, k = unwrapped((args, kwargs))
        out = run_on_cpu(compute, a, k, [t for t in leaves_of((a, k)) if isinstance(t, torch.Tensor)])
        index: int = ours[0].number
        return finish(name, ours, out, index, True, lambda: compute(*a, **k))

    return launch


class Interpreted:
    """A Triton kernel for Triton's interpreter, launched as `kernel[grid](...)`, as one kernel of the device."""

    def __init__(self, name: str, function: Any) -> None:
        self._launch = kernel(name, lambda grid, *given, **named: function[grid](*given, **named))

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(self._launch, grid)
