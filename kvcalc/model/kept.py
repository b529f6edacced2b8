"""Keep a published config.json among the user's own presets."""

from __future__ import annotations

import os
import re
from datetime import date

from kvcalc.atomic_file import write_file
from kvcalc.errors import ModelError, UsageError
from kvcalc.model.preset_folders import VARIABLE, folder_for_new, user_files
from kvcalc.model.presets import MAX_PRESET_BYTES, Preset, load_preset
from kvcalc.model.resolve import published_config, spec_of
from kvcalc.model.yaml_mapping import mapping_text, parse_mapping

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def keep_config(reference: str) -> Preset:
    """Write the config that `reference` names into the user's folder of presets, and return the preset.

    `reference` is a config.json, a folder with one, or `hf:org/name`. The preset has the name of the folder or of the
    repository, and the repository's id as an alias. All keys are kept as they are published.

    Raises the errors of `load_model` for a config that is missing or not understood; UsageError (exit 2) if the user
    has a preset with this name, or if the name cannot be a file's; RunError (exit 1) if the file cannot be written.
    """
    config, published, source = published_config(reference)
    name = published.rpartition("/")[2]
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot be a preset's name", "give the folder of config.json the model's name")
    taken = next((path for stem, path in user_files() if stem == name.casefold()), None)
    if taken is not None:
        raise UsageError(f"{name} is among your presets: {taken}", "remove the file first")
    folder = folder_for_new()
    if folder is None:
        raise UsageError("there is no folder for your presets", f"name one: {VARIABLE}=FOLDER")
    path = os.path.join(folder, f"{name}.yaml")
    aliases = (published,) if published != name else ()
    today = date.today()
    preset = Preset(name, None, aliases, source, str(today), None, config, path, is_users=True, as_published=True)
    spec_of(preset)
    facts = {"name": name, "aliases": [*aliases], "source": source, "date": today, "as_published": True}
    text = mapping_text({**facts, "config": config})
    if len(text.encode()) > MAX_PRESET_BYTES:
        raise ModelError(f"{reference}: its config is larger than a preset may be ({MAX_PRESET_BYTES:,} bytes)")
    if parse_mapping(text, path)["config"] != config:
        raise ModelError(f"{reference}: its config cannot be written as a preset", f"give the path instead: {source}")
    os.makedirs(folder, exist_ok=True)
    write_file(text.encode(), path)
    return load_preset(path)
