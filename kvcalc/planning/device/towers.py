"""The vision and audio towers that an engine loads beside the language model: their bytes on a device."""

from __future__ import annotations

from kvcalc.model.memo import remembered
from kvcalc.model.spec import ModelSpec
from kvcalc.model.towers import towers_of
from kvcalc.model.towers.image_rule import ImageRule
from kvcalc.model.towers.images import image_rule
from kvcalc.notes import Note
from kvcalc.planning.cases.case import Case
from kvcalc.records import NamedTuple

_ELEMENT_BYTES = 2


class LoadedTowers(NamedTuple):
    """The towers on a device: a name and bytes for each, notes about those that are not counted, and what the vision
    tower needs in a step."""

    lines: tuple[tuple[str, int], ...] = ()
    notes: tuple[Note, ...] = ()
    images: ImageRule | None = None

    @property
    def bytes(self) -> int:
        """The bytes of all lines."""
        return sum(size for _, size in self.lines)


def loaded_towers(case: Case) -> LoadedTowers:
    """The towers that the case's engine loads. Quantized checkpoints leave them in 16 bits."""
    model = case.model
    if model.multimodal is None or model.gguf is not None or not case.engine_class.loads_towers:
        return LoadedTowers()
    if "language-model-only" in case.settings:
        return LoadedTowers()
    lines, notes = [], []
    for tower in towers_of(model):
        if tower.parameters is None:
            notes.append(Note("fit", "tower-not-counted", f"the {tower.name} is not counted: {tower.reason}"))
        else:
            lines.append((tower.name, tower.on_rank(case.workload.tensor_parallel_size) * _ELEMENT_BYTES))
    return LoadedTowers(tuple(lines), tuple(notes), image_rule(model))


@remembered
def described_towers(model: ModelSpec) -> list[dict[str, object]]:
    """The `towers` part of the weights in a document."""
    return [
        {
            "name": tower.name,
            "type": tower.kind,
            "parameters": tower.parameters,
            "bytes": None if tower.parameters is None else tower.parameters * _ELEMENT_BYTES,
            "reason": tower.reason,
        }
        for tower in towers_of(model)
    ]
