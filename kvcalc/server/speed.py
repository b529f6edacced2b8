"""The speed of a case: its model's counts, its device's figures and its engine's constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvcalc.model.memo import keep, remembered_of_two
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.records import NamedTuple
from kvcalc.server.case import Case
from kvcalc.server.dp_attention import spread_names
from kvcalc.server.launched import with_launches
from kvcalc.server.weights import stored_weights
from kvcalc.throughput.constants import Regime, has_constants
from kvcalc.throughput.roofline import SpeedModel
from kvcalc.throughput.speed import StoredWeights, speed_model

if TYPE_CHECKING:
    from kvcalc.throughput.applied import Applied
    from kvcalc.throughput.hardware import Gpu

# The most speeds that are remembered for one model. Each device with figures of its own has another one.
_MOST_SPEEDS = 256


class Speed(NamedTuple):
    """A SpeedModel, the regime its constants were fitted in, the dtype of the weights, and how it was calibrated."""

    model: SpeedModel
    regime: Regime
    weight_dtype: str
    calibration: Applied | None = None


@remembered_of_two
def _speeds_of(model: ModelSpec, spec: ModelSpec) -> dict[tuple[Any, ...], tuple[Speed | str, Gpu]]:
    """The speeds computed so far for this model, and the device of each, so that its id() is not reused."""
    return {}


def speed_of(case: Case, notes: list[Note]) -> Speed | str:
    """The speed of a case on its device, or the reason if it is not known.

    Cached per model, device, dtypes, layout and the engine's settings, which decide how it stores the cache. Building
    it takes a millisecond, and a step only microseconds.
    """
    question, workload, gpu = case.question, case.workload, case.devices.gpu
    if case.engine.settings.get("split_mode") == "row":
        return "the speed of --split-mode row is not modelled"
    calibration = None if question.speed is None else question.speed.calibration
    key: tuple[Any, ...] = (
        question.engine, id(gpu), workload.kv_dtype, workload.model_dtype, question.dtype, case.engine.placement,
        calibration, workload.layout, *sorted(case.settings.items()),
    )  # fmt: skip
    if question.speculative is not None:
        from kvcalc.server.drafting.drafter import key_of

        key += key_of(question.speculative)
    known = _speeds_of(case.model, case.spec)
    kept = known.get(key)
    if kept is None:
        kept = keep(known, key, (_new_speed(case), gpu), _MOST_SPEEDS)
    speed = kept[0]
    if isinstance(speed, Speed) and speed.calibration is not None:
        notes += speed.calibration.notes
    return speed


def _new_speed(case: Case) -> Speed | str:
    speed = _speed(case)
    speed_question = case.question.speed
    if isinstance(speed, Speed) and speed_question is not None and speed_question.calibration is not None:
        speed = speed_question.calibration.apply(case, speed)
    return _with_other_parts(case, speed) if isinstance(speed, Speed) else speed


def _speed(case: Case) -> Speed | str:
    spec, workload, gpu = case.spec, case.workload, case.devices.gpu
    if spec.is_encoder:
        return f"{spec.name} is an encoder and does not decode"
    if not has_constants(case.question.engine):
        return f"the speed of {case.engine_name} is not known: nobody has measured it"
    if not gpu.bandwidth_bytes_per_second or not gpu.flops_per_second:
        return f"the bandwidth and FLOP/s of {gpu.name} are not known: give --gpu-bandwidth and --flops"
    stored = stored_weights(case.model, spec, case.question.dtype, workload.model_dtype)
    if not isinstance(stored, StoredWeights):
        return stored
    model, regime = speed_model(
        case.engine.attended(spec), stored, case.reads(0, spec.num_layers), gpu, case.question.engine, case.layout,
        spread_names(spec, case.engine, case.layout),
    )  # fmt: skip
    return Speed(with_launches(case, stored.weights, model), regime, stored.name)


def _with_other_parts(case: Case, speed: Speed) -> Speed | str:
    """The speed with what runs beside the model on the device: the host's part of it, and what drafts tokens."""
    if case.engine.placement is None and case.question.speculative is None:
        return speed
    stored = stored_weights(case.model, case.spec, case.question.dtype, case.workload.model_dtype)
    if not isinstance(stored, StoredWeights):
        return stored
    models = []
    for model in (speed.model, *(() if speed.calibration is None else speed.calibration.near)):
        around = _around(case, stored, model)
        if isinstance(around, str):
            return around
        models.append(around)
    first, *near = models
    mark = None if speed.calibration is None else speed.calibration._replace(near=tuple(near))
    return speed._replace(model=first, calibration=mark)


def _around(case: Case, stored: StoredWeights, model: SpeedModel) -> SpeedModel | str:
    if case.engine.placement is not None:
        from kvcalc.server.host import hosted

        model = hosted(case, case.engine.placement, stored, model)
    if case.question.speculative is None:
        return model
    from kvcalc.server.drafting.drafter import speed_of_drafting

    return speed_of_drafting(case, model)
