"""The default engine: the one that people usually start for a kind of checkpoint on a device.

An engine's `engine.yaml` says on which classes of devices it runs (`device_classes`), and this module the order in
which engines are preferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcalc.engines import load_engine
from kvcalc.engines.declarations import FACTS
from kvcalc.engines.options import AUTO_ENGINE, NO_ENGINE
from kvcalc.errors import KvcalcError, ModelError
from kvcalc.memory.dtypes import FILE_TYPES, GGUF_TYPES, MLX_TYPES
from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec

if TYPE_CHECKING:
    from kvcalc.throughput.hardware import Devices, Gpu

_FILES, _SERVER, _APPLE = "llama.cpp", "vllm", "mlx"
_ON_DEVICES = (_SERVER, _APPLE, _FILES)  # the preferred one first


def engine_on(name: str, spec: ModelSpec, kind: Gpu | Devices | None, dtype: str | None) -> str:
    """The engine's name in lower case, or for `auto` the default one on a kind of device."""
    name = name.casefold()
    if name != AUTO_ENGINE:
        return name
    from kvcalc.throughput.hardware import Devices

    return default_engine(spec, kind.gpu if isinstance(kind, Devices) else kind, dtype)


def default_engine(spec: ModelSpec, gpu: Gpu | None, dtype: str | None) -> str:
    """The engine for a model on a kind of device. `dtype` is the requested type of the weights.

    - A GGUF file, a name of ollama or a type of llama.cpp's files: llama.cpp. A checkpoint of MLX: mlx.
    - Else vllm or mlx, whichever runs on the device; a class of devices that no engine names counts as vllm's.
    - Else llama.cpp.
    - The formulas alone, without a device or if none of these engines runs the model.
    """
    if gpu is None:
        return NO_ENGINE
    return next((name for name in _preferred(spec, gpu, dtype) if _runs(spec, name)), NO_ENGINE)


def _preferred(spec: ModelSpec, gpu: Gpu, dtype: str | None) -> list[str]:
    """The engines that may run the checkpoint on the device, the preferred one first."""
    kind = dtype or spec.named_dtype or ""
    if spec.gguf is not None or kind.startswith("gguf:") or kind in FILE_TYPES or kind in GGUF_TYPES:
        return [_FILES]
    if kind in MLX_TYPES or _is_of_mlx(spec):
        return [_APPLE]
    return [
        name for name in _ON_DEVICES
        if gpu.vendor not in FACTS[name].get("refused_vendors", ()) and _has_kernels(name, gpu.device_class)
    ]  # fmt: skip


def _is_of_mlx(spec: ModelSpec) -> bool:
    if not isinstance(spec.quantization, Mapping):
        return False
    from kvcalc.memory.quantization.schemes import is_mlx

    return is_mlx(spec.quantization)


def _has_kernels(name: str, device_class: str | None) -> bool:
    """Whether the engine runs on a class of devices. One that no engine names is new, or has a plugin of vLLM."""
    is_new = not any(device_class in FACTS[other]["device_classes"] for other in _ON_DEVICES)
    return device_class in FACTS[name]["device_classes"] or (is_new and name == _SERVER)


@remembered
def _runs(spec: ModelSpec, name: str) -> bool:
    """Whether the engine is known to run the model. It may refuse the model for another reason, which is then said."""
    try:
        load_engine(name, spec)
    except KvcalcError as error:
        return not isinstance(error, ModelError)
    return True
