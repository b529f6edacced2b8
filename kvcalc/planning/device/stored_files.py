"""Hold the files of a checkpoint against the weights that its config describes."""

from __future__ import annotations

from kvcalc.model.checkpoint import StoredWeights
from kvcalc.notes import Note
from kvcalc.units import format_size

# The least share of the counted bytes that believable files have. The count is exact, but some checkpoints leave out
# parts that are made while loading: tied embeddings that the config does not call tied, or positions.
_LEAST_PERCENT = 97
# A smaller excess is not worth a remark: buffers such as rotary frequencies, or the scales of an fp8 cache.
_EXCESS_PER_MILLE = 5


def believed_bytes(stored: StoredWeights, counted: int | None, towers: int | None) -> tuple[int | None, list[Note]]:
    """The bytes of the files if they are complete and plausible, else None; and notes that name the files.

    `counted` and `towers` are the sizes of the language model and of its towers according to the config, or None if
    they are not known. Files are not believed if their tensors outside towers are below 97 % of `counted`, or if they
    have tensors of towers, but below 97 % of `towers`: without any, they are a checkpoint of the language model alone.
    More is believed: weights in another type. Layers for multi-token prediction do not count, as in a config: only
    drafting loads them.
    """
    notes = [Note("weights", "adapter", remark) for remark in stored.adapters]
    size = None if stored.bytes is None else stored.bytes - stored.draft_bytes
    if size is None:
        if stored.trouble is not None:
            notes.append(_not_believed(f"{stored.name}: incomplete: {stored.trouble}", counted))
        return None, notes
    if counted is None:
        return size, notes
    text_bytes = size - stored.tower_bytes
    for found, described, of_what in (
        (text_bytes, counted, ""),
        (stored.tower_bytes, towers if towers and stored.tower_bytes else 0, " for its towers"),
    ):
        if found * 100 < described * _LEAST_PERCENT:
            text = f"{stored.name}: has {format_size(found)} of the {format_size(described)} that the config describes"
            notes.append(_not_believed(text + of_what, counted))
            return None, notes
    more = size - counted
    if more * 1000 > counted * _EXCESS_PER_MILLE:
        text = f"{stored.name}: has {format_size(more)} more than the language model of the config, for example a "
        text += "vision tower, or weights of another type"
        notes.append(Note("weights", "larger-files", text))
    return size, notes


def _not_believed(text: str, counted: int | None) -> Note:
    instead = "the size is not known" if counted is None else "the size is computed from the config"
    return Note("weights", "incomplete-files", f"{text}; {instead}")
