"""The vision and audio towers beside a language model: how many parameters each has.

Engines load a tower with its projector, and quantized checkpoints leave both in 16 bits. `rules` finds a family's rule.
A tower without a rule is listed with the reason why it is not counted, so that it is never a silent zero.
"""

from __future__ import annotations

from kvcalc.errors import ModelError
from kvcalc.model.memo import remembered
from kvcalc.model.reader import TOWER_KEYS, ConfigReader
from kvcalc.model.spec import ModelSpec
from kvcalc.model.towers.rules import rule_of
from kvcalc.model.type_tables import rows_of
from kvcalc.records import NamedTuple

# Models whose code has the dimensions of the vision tower.
WITHOUT_CONFIG = ("molmo", "phi4mm")


class Tower(NamedTuple):
    """A tower and its projector. `name` is "vision tower" or "audio tower", `kind` is its published type.

    Tensor parallelism splits `split_parameters` (the matrices of its layers); every rank holds `whole_parameters`. Both
    are None if the tower's rule is not known, and `reason` says so.
    """

    name: str
    kind: str
    split_parameters: int | None
    whole_parameters: int | None
    reason: str | None = None

    @property
    def parameters(self) -> int | None:
        """All parameters of the tower and its projector, or None."""
        if self.split_parameters is None or self.whole_parameters is None:
            return None
        return self.split_parameters + self.whole_parameters

    def on_rank(self, ranks: int) -> int:
        """The parameters on one of `ranks` tensor-parallel ranks. 0 if they are not known."""
        return -(-(self.split_parameters or 0) // ranks) + (self.whole_parameters or 0)


# The size of a tower that nothing describes is at most a share of its language model's, with a lower and an upper end.
# No preset whose towers are known has more. Of 171 presets, Ovis2 1B (0.64 B beside 0.49 B), dots.ocr (0.71 of its
# language model) and NVLM-D 72B (6.7 B) come closest.
_LARGEST_SHARE, _SMALLEST_END, _LARGEST_END = 0.81, 670_000_000, 7_200_000_000


def most_parameters(language_model: int | None) -> int:
    """The most parameters of a tower that nothing describes. The language model's are None if they are not known."""
    if language_model is None:
        return _LARGEST_END
    return min(max(round(_LARGEST_SHARE * language_model), _SMALLEST_END), _LARGEST_END)


@remembered
def towers_of(spec: ModelSpec) -> tuple[Tower, ...]:
    """The towers of a model, vision first. Empty for a model of text alone."""
    if spec.has_unknown_tower:
        return (Tower("tower", "unknown", None, None, "the size of its vision or audio tower is not known"),)
    if spec.multimodal is None:
        return ()
    config = ConfigReader(spec.multimodal, spec.name, spec.source)
    outer = config.shown("model_type")
    if config.is_object("thinker_config"):
        config = config.nested("thinker_config")
    towers = (_tower(modality, config, outer, spec.attention.hidden_size) for modality in TOWER_KEYS)
    return tuple(tower for tower in towers if tower is not None)


def tower_parameters(spec: ModelSpec) -> int:
    """The parameters of all towers whose rule is known. 0 for a model of text alone."""
    return sum(tower.parameters or 0 for tower in towers_of(spec))


def stated_tower(config: ConfigReader, modality: str) -> tuple[str | None, ConfigReader | None]:
    """The first key that describes a tower, and its description. It is None if the value is not one.

    If there is no such key, the description is empty.
    """
    key = next((key for key in TOWER_KEYS[modality] if not config.is_any(key, None, False)), None)
    if key is None:
        return None, ConfigReader({}, f"{modality}_config", config.source)
    if config.is_object(key):
        return key, config.nested(key)
    named = rows_of("towers")["repositories"].get(config.shown(key))
    return key, None if named is None else ConfigReader(named, key, config.source)


def _tower(modality: str, config: ConfigReader, outer: str, width: int | None) -> Tower | None:
    key, stated = stated_tower(config, modality)
    if key is None and (modality != "vision" or outer not in WITHOUT_CONFIG):
        return None
    name = f"{modality} tower"
    if stated is None:
        return Tower(name, config.shown(key or ""), None, None, f"{key} names a tower without its dimensions")
    kind = stated.shown("model_type") if stated.is_set("model_type") else outer
    rule = rule_of(modality, outer, kind)
    if rule is None or width is None:
        return Tower(name, kind, None, None, f"the weights of a tower of type {kind} in {outer} are not counted")
    try:
        split, whole = rule(stated, width, config)
    except ModelError as error:
        return Tower(name, kind, None, None, error.message)
    if min(split, whole) < 0:  # such as fewer words than marks
        return Tower(name, kind, None, None, f"{stated.name}: the sizes contradict each other")
    return Tower(name, kind, split, whole)
