"""Documents about presets: the list, one preset, and the check of preset files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from kvcalc.errors import KvcalcError, UsageError, nearest
from kvcalc.memory.curves import stored_curve
from kvcalc.memory.dtypes import DTYPES, bytes_of
from kvcalc.memory.kv_cache import growth, stored_cache_bytes
from kvcalc.memory.workload import Workload, bind_workload, resolve_workload
from kvcalc.model.caches import Cache, CompressedAttention, CrossAttention
from kvcalc.model.describe import describe_model
from kvcalc.model.presets import Preset, check_name, find_preset, list_presets, load_preset, names_of, shipped_presets
from kvcalc.model.resolve import spec_of
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note, describe_notes
from kvcalc.question.question import Question
from kvcalc.records import NamedTuple
from kvcalc.schema import SCHEMA_VERSION
from kvcalc.server.weights import describe_weights

if TYPE_CHECKING:
    import kvcalc.documents as documents

NO_FAMILY = "other"


class Wanted(NamedTuple):
    """Which models to list: those of a family, with a text in a name, and with no more bytes of published weights."""

    family: str | None = None
    text: str | None = None
    max_weights_bytes: int | None = None


def list_models(wanted: Wanted = Wanted()) -> documents.Models:
    """The presets that are wanted, each with its attention, its layers and the bytes of its cache, by family.

    A user's file that cannot be used is left out, with a warning. Raises UsageError if there is no such family, or if
    no name has the text.
    """
    presets, notes = choose_presets(wanted)
    rows = []
    for preset in presets:
        try:
            row = _row(preset)
        except KvcalcError as error:
            if not preset.is_users:
                raise
            notes.append(Note("models", "left-out", f"left out: {preset.path}: {error.message}"))
            continue
        if wanted.max_weights_bytes is None or (row["weights_bytes"] or wanted.max_weights_bytes + 1) <= (
            wanted.max_weights_bytes
        ):
            rows.append(row)
    rows.sort(key=lambda row: ((row["family"] or NO_FAMILY).casefold(), _digits_as_numbers(row["name"])))
    return {"schema_version": SCHEMA_VERSION, "models": rows, "warnings": describe_notes(notes)}


def choose_presets(wanted: Wanted) -> tuple[list[Preset], list[Note]]:
    """The presets of the wanted family whose names have the wanted text, and notes about files that cannot be used."""
    found = list_presets()
    notes = [Note("models", "left-out", f"left out: {problem.error.message}") for problem in found.problems]
    families = {preset.family or NO_FAMILY for preset in found.presets}
    family = None if wanted.family is None else wanted.family.casefold()
    if family is not None and family not in {known.casefold() for known in families}:
        hint = nearest(family, families) or f"families: {', '.join(sorted(families, key=str.casefold))}"
        raise UsageError(f"--family {wanted.family!r}: no such family", hint)
    presets = [p for p in found.presets if family in (None, (p.family or NO_FAMILY).casefold())]
    if wanted.text is not None:
        text = wanted.text.casefold()
        presets = [p for p in presets if any(text in name.casefold() for name in names_of(p))]
        if not presets:
            raise UsageError(f"no model name contains {wanted.text!r}", "kvcalc models lists all")
    return presets, notes


def is_part_of_names(text: str) -> bool:
    """Whether a text is only a part of model names."""
    folded = text.casefold()
    return find_preset(text) is None and any(
        folded in name.casefold() for preset in list_presets().presets for name in names_of(preset)
    )


def show_model(name: str) -> documents.ModelsShow:
    """One preset as its file states it. Raises ModelError (exit 3) with the nearest names if there is none.

    If the name is another release of a preset's model, as its publisher names it, the config is the config of that
    release, and the note names the preset.
    """
    preset = find_preset(name)
    if preset is None:
        from kvcalc.model.pasted import find_pasted, unknown_model

        pasted = find_pasted(name)
        if pasted is None:
            raise unknown_model(name)
        preset = pasted.preset._replace(name=pasted.name, config=pasted.config, note=pasted.remark)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": preset.name,
        "family": preset.family,
        "aliases": list(preset.aliases),
        "source": preset.source,
        "date": preset.date,
        "note": preset.note,
        "file": preset.path if preset.is_users else None,
        "config": preset.config,
    }


def check_models(paths: Sequence[str]) -> documents.ModelsCheck:
    """Check each file as a preset: its form, its config (with the strict reader) and its names.

    `files` has a row for each file with the exit code of its error, or 0 if it has none; `exit_code` is the highest.
    """
    shipped = shipped_presets()
    good: list[Preset] = []
    rows: list[documents.ModelsCheckFilesItem] = []
    for path in paths:
        name: str | None = None
        error: KvcalcError | None = None
        try:
            preset = load_preset(path)
            name = preset.name
            check_name(preset)
            spec_of(preset)
            _check_names(preset, [*(other for other in shipped if other.name != name), *good])
            good.append(preset)
        except KvcalcError as caught:
            error = caught
        rows.append({
            "file": path,
            "name": name,
            "ok": error is None,
            "exit_code": 0 if error is None else error.exit_code,
            "error": None if error is None else error.message.removeprefix(f"{path}: "),
            "hint": None if error is None else error.hint,
        })  # fmt: skip
    return {"schema_version": SCHEMA_VERSION, "exit_code": max(row["exit_code"] for row in rows), "files": rows}


def _check_names(preset: Preset, others: Sequence[Preset]) -> None:
    names = set(names_of(preset))
    for other in others:
        for name in names_of(other):
            if name in names:
                where = other.path if other.is_users else f"the shipped preset {other.name}"
                raise UsageError(f"{preset.path}: {name!r} is also a name of {where}", "rename it, or remove the alias")


def _row(preset: Preset) -> documents.ModelsModelsItem:
    spec = spec_of(preset)
    model, workload = describe_model(spec), resolve_workload(spec)
    token, fixed = _growth(spec, workload)
    weights = describe_weights(spec, spec, None, workload.model_dtype, [])
    return {
        "name": preset.name,
        "family": preset.family,
        "attention": model["attention"],
        "num_layers": model["num_layers"],
        "num_attention_heads": model["num_attention_heads"],
        "num_kv_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "sliding_window": model["sliding_window"],
        "max_position_embeddings": model["max_position_embeddings"],
        "parameters": weights["parameters"],
        "weights_bytes": weights["bytes"],
        "bytes_per_token_16_bit": sum(
            _bytes_per_token(cache) * group.num_layers for group in spec.layers for cache in group.caches
        ),
        "kv_dtype": workload.kv_dtype.name,
        "context_tokens": workload.context_tokens,
        "bytes_per_token": token,
        "fixed_bytes_per_sequence": fixed,
        "aliases": list(preset.aliases),
        "source": preset.source,
        "date": preset.date,
        "file": preset.path if preset.is_users else None,
    }


def _growth(spec: ModelSpec, workload: Workload) -> tuple[int, int]:
    """The bytes per token and the fixed bytes that an estimate without options has."""
    curve = stored_curve(bind_workload(spec, workload), workload.kv_dtype)
    if curve is not None:
        return curve.growth_at(workload.context_tokens)
    from kvcalc.planning.answers.figures import cache_figures
    from kvcalc.server.case import make_case

    figures = cache_figures(make_case(Question(spec)))
    return figures.bytes_per_token, figures.fixed_bytes_per_sequence


def _bytes_per_token(cache: Cache) -> int:
    """The bytes that one token adds at 16 bits while no window is full. It adds nothing to an encoder's output.

    Compressed entries are written once every few tokens, next to a short window. They count with their mean.
    """
    bf16 = DTYPES["bf16"]
    if isinstance(cache, CrossAttention):
        return 0
    if isinstance(cache, CompressedAttention):
        return growth(lambda t: stored_cache_bytes(cache, t, bf16), cache.window, cache.compress_rate or 1)[0]
    return bytes_of(sum(cache.token_rows()), bf16)


def _digits_as_numbers(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts qwen3-8b before qwen3-14b."""
    runs = ((is_number, "".join(run)) for is_number, run in groupby(name, str.isdecimal))
    return [(is_number, int(run) if is_number else 0, "" if is_number else run) for is_number, run in runs]
