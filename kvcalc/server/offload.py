"""How much of a model has to be in host memory so that the rest fits on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcalc.engines.placement import PlacementOptions, count_placed_layers, expert_layers
from kvcalc.errors import ModelError, UsageError
from kvcalc.search import largest_where
from kvcalc.server.budget import Budget, budget
from kvcalc.server.case import Case, make_case

if TYPE_CHECKING:
    import kvcalc.documents as documents


def place_layers(case: Case) -> Case:
    """The case with as many layers on the device as fit, if it asks for that (`-ngl auto`), or else `case` itself.

    If requests are served, room is left for the cache of all that are asked for. ModelError (exit 3) if it is not known
    what fits.
    """
    options = _options(case)
    return _at(case, options.layers, _most_layers(case)) if options.is_auto(case.settings) else case


def suggest(case: Case) -> documents.HostOffload | None:
    """What to keep in host memory so that a model fits: the most layers on the device, and the fewest experts in host
    memory. None if the model has stages, or if neither helps. The engine must be able to place parts there."""
    if case.layout.pipeline_parallel_size > 1:
        return None
    layers, experts, options = _most_layers(case), _fewest_experts(case), _options(case)
    offload: documents.HostOffload = {
        "n_gpu_layers": _describe(case, options.layers, layers),
        "n_cpu_moe": None if experts is None else _describe(case, options.experts, experts),
    }
    return offload if any(offload.values()) else None


def _options(case: Case) -> PlacementOptions:
    """The engine's options. ValueError if it cannot place parts, so check `Engine.placement_options` first."""
    if case.engine.placement_options is None:
        raise ValueError(f"{case.engine_name} keeps no part of a model in host memory")
    return case.engine.placement_options


def _describe(case: Case, option: str, number: int) -> documents.HostOffloadNGpuLayers | None:
    """The option's number and the bytes that the host then holds. None if that does not fit after all."""
    placed = _at(case, option, number)
    room = _budget_of(placed)
    if room.host is None or not _fits(placed) or room.host.shortage() is not None:
        return None
    return {"value": number, "host_bytes": room.host.describe()["host_bytes"]}


def _most_layers(case: Case) -> int:
    """The largest number of layers on the device with which its part fits; 0 if none does."""
    most, option = count_placed_layers(case.spec) + 1, _options(case).layers
    return largest_where(lambda number: _fits(_at(case, option, number)), 0, most)


def _fewest_experts(case: Case) -> int | None:
    """The fewest layers with experts in host memory that fit with all layers on the device. None if no number does."""
    most, option = max(expert_layers(case.spec), default=-1) + 1, _options(case).experts
    if not most or not _fits(_at(case, option, most)):
        return None
    return most - largest_where(lambda on_device: _fits(_at(case, option, most - on_device)), 0, most)


def _at(case: Case, option: str, number: int) -> Case:
    """The same case with this number for one option, and without the other options for layers and experts."""
    given = case.question.engine_settings or {}
    options = _options(case)
    dropped = options if option == options.experts else (options.layers,)
    settings = {name: text for name, text in given.items() if name not in dropped}
    question = case.question._replace(engine_settings={**settings, option: str(number)})
    placed = make_case(question)
    workload = case.workload
    if (placed.workload.context_tokens, placed.workload.batch_size) != (workload.context_tokens, workload.batch_size):
        placed = placed.at(workload.context_tokens, workload.batch_size)
    return placed


def _fits(case: Case) -> bool:
    """Whether the device's part fits."""
    speed = case.question.speed
    if speed is not None and speed.concurrency is not None and speed.request_tokens is not None:
        case = case.at(case.workload.context_tokens, speed.concurrency)
    workload = case.workload
    held = case.allocation.batch_bytes(case.share, workload.kv_dtype, workload.context_tokens, workload.batch_size)
    try:
        return held <= _budget_of(case).pool_bytes
    except UsageError:  # --kv-memory is more than these weights leave
        return False


def _budget_of(case: Case) -> Budget:
    """The budget of a case. ModelError (exit 3) if it is not known."""
    room = budget(case)
    if isinstance(room, str):
        raise ModelError(f"{case.spec.name}: it is not known what fits: {room}")
    return room
