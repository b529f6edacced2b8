"""What an engine leaves of a device's memory for the cache: one module per engine, named as in `memory.engines`.

A module's `reserve(question)` names everything that is neither weights nor cache, in bytes: the activations of its
largest step, its graphs, the driver's context, and what it leaves alone. Each constant stands with its source. They are
estimates where the weights and the cache are counts: a context and a graph differ by driver, kernel and release.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import NamedTuple

from kvcalc.errors import UsageError
from kvcalc.memory.engines import ENGINES
from kvcalc.memory.sharding import Width

GIB = 2**30
MIB = 2**20

ACTIVATION, RESERVE = "activation", "reserve"


class Held(NamedTuple):
    """A part of a device's memory: what for, under what name, how much."""

    kind: str
    name: str
    bytes: int


class Question(NamedTuple):
    """A device's memory, what lies on it, and the engine's own settings (option name to text).

    `ranks`: tensor-parallel ranks times pipeline stages. `is_latent`: it is an MLA model. `is_apple`: its memory is
    managed by macOS. `release`: the engine's, None for the newest.
    """

    memory_bytes: int
    weights_bytes: int
    width: Width
    ranks: int
    context_tokens: int
    batch_size: int
    settings: Mapping[str, str]
    num_heads: int = 0
    is_latent: bool = False
    release: tuple[int, ...] | None = None
    device_class: str | None = None
    device_name: str = ""
    is_apple: bool = False


class Reserve(NamedTuple):
    """What is kept from the cache, the part of the rest the cache may have, and the settings that said so.

    `share`: of what is left after `held`, the cache's part (TensorRT-LLM's fraction of free memory). `varies`: whether
    `held` grows with the context or the batch.
    """

    held: tuple[Held, ...]
    settings: dict[str, object]
    share: float = 1.0
    varies: bool = False

    def held_bytes(self) -> int:
        """All of it."""
        return sum(part.bytes for part in self.held)


def reserve_of(engine: str, question: Question) -> Reserve:
    """What `engine` keeps from the cache on such a device. UsageError (exit 2) for a setting out of range."""
    found: Reserve = import_module(f"kvcalc.memory.reserve.{ENGINES[engine]}").reserve(question)
    if question.is_apple:
        # Metal's recommendedMaxWorkingSetSize is about three quarters of the machine's memory.
        system = Held(RESERVE, "kept by macOS (a quarter)", question.memory_bytes // 4)
        found = found._replace(held=(*found.held, system))
    return found


def device_settings(
    engine: str, memory_bytes: int, device_class: str | None, device_name: str, release: tuple[int, ...] | None
) -> dict[str, str]:
    """Settings whose defaults `engine` takes from the device (vLLM's tokens of one step), for those not given."""
    rule = getattr(import_module(f"kvcalc.memory.reserve.{ENGINES[engine]}"), "device_settings", None)
    found: dict[str, str] = rule(memory_bytes, device_class, device_name, release) if rule else {}
    return found


def release_of(engine: str) -> tuple[int, ...] | None:
    """The release in `vllm@0.11`, as numbers; None for the newest."""
    text = engine.partition("@")[2].removeprefix("v")
    parts = text.split(".") if text else []
    return tuple(map(int, parts)) if parts and all(part.isdecimal() for part in parts) else None


def fraction(question: Question, option: str, default: float) -> float:
    """The share an option gives, above 0 and at most 1."""
    text = question.settings.get(option)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise UsageError(f"--{option} {text[:40]!a}: must be above 0 and at most 1", f"the default is {default:g}")
    return value


def step_activations(width: Width, tokens: int, element_bytes: int = 2) -> int:
    """What one step of `tokens` tokens holds at its peak: the residual and the normed input, and the widest module's
    inputs and middle, which stand at once; layers follow one another and reuse the memory."""
    return tokens * (2 * width.hidden_size + width.module_elements) * element_bytes
