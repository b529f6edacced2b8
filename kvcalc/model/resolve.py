"""Turn MODEL, as typed, into a ModelSpec: a preset's name, a path, `-` for stdin, or `hf:org/name`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from kvcalc.errors import ModelError, UsageError
from kvcalc.model import presets
from kvcalc.model.files import expanded, list_folder, one_of, read_stdin, read_text
from kvcalc.model.hf_config import read_config
from kvcalc.model.links import linked_name
from kvcalc.model.spec import ModelSpec

MAX_CONFIG_BYTES = 8 * 1024 * 1024
MAX_VALUES = 250_000
"""A limit on memory. The largest configs, which name every quantized tensor, have 70,000 values."""
MAX_KEYS = 10_000

_ADAPTER = "adapter_config.json"
_FILES = (".json", ".gguf", ".yaml", ".yml")

_Read = Callable[[Mapping[str, object], str, str], ModelSpec]


def load_model(reference: str, *, assume_full_attention: bool = False) -> ModelSpec:
    """The model that `reference` names.

    A preset's name or alias comes first; `./NAME` always means a path. A path is a config.json, a GGUF file, a folder
    with one of these, or a preset file (.yaml). The published name of another release of a preset's model is that
    preset with the release's changes (`pasted`), and a remark says so. `hf:org/name` is a model on the Hub, and the
    only form that may use the network. With `assume_full_attention`, an unrecognised config gives an upper bound
    (`upper_bound`), and a recognised one is read without its windows.

    Raises UsageError (exit 2) if a file is missing, unreadable or not a JSON object, ModelError (exit 3) for an unknown
    name or a config that is not understood, and RunError (exit 1) if the Hub cannot be reached or an extra is missing.
    """
    read: _Read = read_config
    if assume_full_attention:
        from kvcalc.model.upper_bound import read_upper_bound

        read = read_upper_bound
    reference = linked_name(reference)
    if reference == "-":
        config = _json_object(read_stdin(MAX_CONFIG_BYTES), "stdin")
        return read(config, "stdin", "stdin")._replace(reference=reference)
    if reference.startswith("hf:"):
        from kvcalc.model.hub import fetch_config

        fetched = fetch_config(reference, MAX_CONFIG_BYTES)
        config = _json_object(read_text(fetched.path, MAX_CONFIG_BYTES), reference)
        spec = _with_processor(read(config, fetched.name, fetched.source), os.path.dirname(fetched.path))
        return spec._replace(reference=fetched.name)
    if not _is_path(reference):
        preset = presets.find_preset(reference)
        if preset is not None:
            return _beside_a_path(_read_preset(preset, read), preset, reference)
        if not os.path.exists(reference):
            return _load_pasted(reference, read)
    path = expanded(reference)
    if _is_gguf(path):
        from kvcalc.model.gguf.config import load_gguf

        spec = load_gguf(path, assume_full_attention=assume_full_attention)
    else:
        spec = _load_path(path, read)
    return _beside_a_preset(spec, reference)


def find_drafter(name: str) -> ModelSpec | None:
    """The head that drafts tokens with a published name (presets/types/drafters.yaml). None if it is not known."""
    for first, row in presets.shipped_table("drafters").items():
        if name.casefold() in f"{first} {row['names']}".casefold().split():
            return read_config(row["config"], name, row["source"])._replace(reference=name)
    return None


def find_published(name: str) -> ModelSpec | None:
    """The model with a published name: a preset's, or that of another release of its model. None if it is not known.

    No path is opened, so the name may come from a file that somebody else wrote.
    """
    name = linked_name(name)
    preset = presets.find_preset(name)
    return _find_pasted(name, read_config) if preset is None else spec_of(preset)


def _load_pasted(reference: str, read: _Read) -> ModelSpec:
    """The model for a name that is not a preset's. ModelError (exit 3) if it is not certain which model it is."""
    pasted = _find_pasted(reference, read, any_owner=True)
    if pasted is None:
        from kvcalc.model.pasted import unknown_model

        raise unknown_model(reference)
    return pasted


def _find_pasted(reference: str, read: _Read, *, any_owner: bool = False) -> ModelSpec | None:
    from kvcalc.model.pasted import find_pasted

    pasted = find_pasted(reference, any_owner=any_owner)
    if pasted is None:
        return None
    spec = read(pasted.config, pasted.name, pasted.preset.source)
    if pasted.has_mtp and not spec.num_draft_layers:
        return None
    return _with_tower(spec, pasted.has_unknown_tower)._replace(
        reference=pasted.reference, remarks=(*spec.remarks, pasted.remark), named_dtype=pasted.dtype,
        published_bytes=pasted.published_bytes, has_unread_recipe=pasted.has_unread_recipe,
        named_file=pasted.file,
    )  # fmt: skip


def _beside_a_path(spec: ModelSpec, preset: presets.Preset, reference: str) -> ModelSpec:
    """The model of a preset, with a remark if a file or folder has the name that was typed."""
    name = next((alias for alias in preset.aliases if alias.casefold() == reference.casefold()), reference)
    spec = spec._replace(reference=name)
    if not os.path.exists(reference):
        return spec
    other = os.path.join(os.curdir, reference)
    remark = f"{reference} is read as the preset; for the path with that name, use {other}"
    return spec._replace(remarks=(*spec.remarks, remark))


def _beside_a_preset(spec: ModelSpec, reference: str) -> ModelSpec:
    """The model at a path, with a remark if the typed text, as ORG/NAME, is also a preset's alias."""
    spec = spec._replace(reference=reference)
    if reference.count("/") != 1 or reference.startswith((".", "~", "/")) or reference.endswith(_FILES):
        return spec
    preset = presets.find_preset(reference)
    if preset is None:
        return spec
    return spec._replace(
        remarks=(*spec.remarks, f"{reference} is read as a path; for the preset with that name, use {preset.name}")
    )


def _is_gguf(path: str) -> bool:
    """Whether a path means a GGUF file: by its name or its first bytes, or for a folder by the files in it."""
    if path.endswith((".json", ".yaml", ".yml")):
        return False
    if not os.path.isdir(path):
        from kvcalc.model.gguf.files import means_gguf

        return means_gguf(path)
    entries = list_folder(path)
    return "config.json" not in entries and any(entry.endswith(".gguf") for entry in entries)


def spec_of(preset: presets.Preset) -> ModelSpec:
    """The ModelSpec of a preset. Raises ModelError if its config is not understood."""
    spec = read_config(preset.config, preset.name, preset.source, strict=not preset.as_published)
    spec = _with_tower(spec, preset.has_unknown_tower)
    if not preset.unconfirmed:
        return spec
    published = next((f"hf:{alias}" for alias in preset.aliases if "/" in alias), "its config.json")
    remark = f"no published file with the sizes of {preset.name} was read; to be sure, give {published} as MODEL"
    return spec._replace(remarks=(*spec.remarks, remark))


def _with_tower(spec: ModelSpec, is_unknown: bool) -> ModelSpec:
    """`spec` with a tower that nothing describes if there is one (`tower: unknown`)."""
    return spec._replace(has_unknown_tower=True) if is_unknown and spec.multimodal is None else spec


def _is_path(reference: str) -> bool:
    looks = reference.startswith((".", "~", os.sep)) or reference.endswith((*_FILES, os.sep))
    # `meta-llama/Meta-Llama-3-70B` has a separator but is an alias; it is a path only if it exists.
    return looks or (os.sep in reference and os.path.exists(reference))


def _read_preset(preset: presets.Preset, read: _Read) -> ModelSpec:
    if read is read_config:
        return spec_of(preset)
    return _with_tower(read(preset.config, preset.name, preset.source), preset.has_unknown_tower)


def _load_path(path: str, read: _Read) -> ModelSpec:
    if os.path.isdir(path):
        path = _config_in(path)
    if path.endswith((".yaml", ".yml")):
        return _read_preset(presets.load_preset(path), read)
    spec = read(_config_at(path), _name_of(path), path)
    folder, file = os.path.split(path)
    if file != "config.json":
        return spec
    return _with_processor(spec, folder)._replace(checkpoint=folder or os.curdir)


def published_config(reference: str) -> tuple[dict[str, object], str, str]:
    """A published config, the model's name, and where it is from. `reference` is a path, a folder or `hf:org/name`."""
    if reference.startswith("hf:"):
        from kvcalc.model.hub import fetch_config

        fetched = fetch_config(reference, MAX_CONFIG_BYTES)
        return _json_object(read_text(fetched.path, MAX_CONFIG_BYTES), reference), fetched.name, fetched.source
    path = expanded(reference)
    if os.path.isdir(path):
        path = _config_in(path)
    return _config_at(path), _name_of(path), os.path.abspath(path)


def _config_at(path: str) -> dict[str, object]:
    """The config in a JSON file, with the quantization beside it. Raises ModelError for an adapter's."""
    config = _json_object(read_text(path, MAX_CONFIG_BYTES), path)
    if "peft_type" in config:
        raise _adapter(path, config)
    folder, file = os.path.split(path)
    return _with_quantization(config, folder) if file == "config.json" else config


def _with_quantization(config: dict[str, object], folder: str) -> dict[str, object]:
    """`config` with the quantization that TensorRT Model Optimizer writes to a file next to it (modelopt 0.37)."""
    path = os.path.join(folder, "hf_quant_config.json")
    if config.get("quantization_config") is not None or not os.path.isfile(path):
        return config
    stated = _json_object(read_text(path, MAX_CONFIG_BYTES), path).get("quantization")
    if not isinstance(stated, dict):
        raise ModelError(f"{path}: quantization is missing or not an object")
    return {**config, "quantization_config": {"quant_method": "modelopt", **stated}}


def _with_processor(spec: ModelSpec, folder: str) -> ModelSpec:
    """`spec` with the config of its image processor. Transformers 5 writes it into processor_config.json."""
    if spec.multimodal is None:
        return spec
    for file, inner in (("preprocessor_config.json", None), ("processor_config.json", "image_processor")):
        path = os.path.join(folder, file)
        if os.path.isfile(path):
            stated = _json_object(read_text(path, MAX_CONFIG_BYTES), path)
            processor = stated if inner is None else stated.get(inner)
            if isinstance(processor, dict):
                return spec._replace(multimodal={**spec.multimodal, "preprocessor_config": processor})
    return spec


def _config_in(folder: str) -> str:
    """The path of config.json in `folder`. If there is none, raises UsageError, which names the other files."""
    entries = list_folder(folder)
    if "config.json" in entries:
        return os.path.join(folder, "config.json")
    if _ADAPTER in entries:
        return os.path.join(folder, _ADAPTER)
    others = [entry for entry in entries if entry.endswith((".json", ".yaml", ".yml"))]
    if not others:
        raise UsageError(f"{folder}: no config.json", "give the path of a config.json, or of a folder that has one")
    raise one_of(folder, "no config.json, but", others)


def _adapter(path: str, config: Mapping[str, object]) -> ModelError:
    """The error for the config of an adapter (PEFT), which names its base model."""
    base = config.get("base_model_name_or_path")
    hint = f"give the model that it adapts: {base[:200]}" if isinstance(base, str) and base else None
    return ModelError(f"{path}: an adapter, not a model", hint)


def _name_of(path: str) -> str:
    """A config.json is named after its folder, any other file after itself."""
    folder, file = os.path.split(os.path.abspath(path))
    return os.path.basename(folder) or file if file == "config.json" else os.path.splitext(file)[0]


def _json_object(text: str, name: str) -> dict[str, object]:
    import json

    if sum(map(text.count, ",[{")) > MAX_VALUES:
        raise UsageError(f"{name}: more than {MAX_VALUES:,} values, the maximum")
    try:
        # Published configs contain Infinity and NaN, which JSON does not allow (time_step_limit). The reader refuses
        # them in keys that matter.
        data = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise UsageError(f"{name}: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}: not JSON: {error}") from None
    except ValueError:
        raise UsageError(f"{name}: not JSON: a number has thousands of digits") from None
    except _TwiceError as error:
        raise UsageError(f"{name}: key {error.args[0]!r} appears twice, with different values") from None
    if not isinstance(data, dict):
        raise UsageError(f"{name}: not a JSON object")
    if len(data) > MAX_KEYS:
        raise UsageError(f"{name}: {len(data):,} keys; at most {MAX_KEYS:,} are read")
    return data


class _TwiceError(Exception):
    """A key appears twice in one object, with different values."""


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object's keys and values. Raises _TwiceError if a key has two values, because either could be meant."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        for key, value in pairs:
            if mapping[key] != value:
                raise _TwiceError(key)
    return mapping
