"""Build hook: presets/models and presets/gpus as JSON too, because importing a YAML parser is a third of a start.

Each JSON file carries the text it was made from: kvcalc.model.compiled_presets reads it only where the YAML file still
says the same, so a checkout in which a preset was changed is never answered from an old copy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompilePresets(BuildHookInterface[Any]):
    """Runs before every wheel, an editable install's included."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compile_presets(Path(self.root) / "presets")


def compile_presets(presets: Path) -> None:
    """Write presets/compiled/NAME.json for every presets/models/NAME.yaml, compiled/gpus/NAME.json for every
    presets/gpus/NAME.yaml, the devices' other names as compiled/gpus/_aliases.json, and nothing else there."""
    compiled = presets / "compiled"
    aliases: dict[str, list[str]] = {}
    for kind, folder in (("models", compiled), ("gpus", compiled / "gpus")):
        folder.mkdir(exist_ok=True)
        for stale in folder.glob("*.json"):
            stale.unlink()
        for path in sorted((presets / kind).glob("*.yaml")):
            text = path.read_text(encoding="utf-8")
            mapping = yaml.safe_load(text)
            (folder / f"{path.stem}.json").write_text(json.dumps({"text": text, "mapping": mapping}, default=str))
            if kind == "gpus":
                aliases[path.stem] = mapping["aliases"]
    (compiled / "gpus" / "_aliases.json").write_text(json.dumps(aliases))
