"""Build hook: write the presets as JSON too, because importing YAML takes a third of the start-up time.

Each JSON file includes the text it was made from. kvcalc.model.compiled_presets uses it only if the YAML file still has
the same text, so an edited preset in a checkout is never read from an old copy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompilePresets(BuildHookInterface[Any]):
    """Runs before every wheel is built, including the wheel of an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compile_presets(Path(self.root) / "presets")


def compile_presets(presets: Path) -> None:
    """Write presets/compiled/NAME.json for every presets/models/NAME.yaml, and compiled/KIND/NAME.json for every
    NAME.yaml in presets/gpus and presets/types, and compiled/engines/NAME.json for kvcalc/engines/NAME/engine.yaml.
    Write the devices' aliases to compiled/gpus/_aliases.json.

    Old JSON files are removed. Raises ValueError if a row of a table of model types is not as its reader expects.
    """
    compiled = presets / "compiled"
    aliases: dict[str, list[str]] = {}
    files = {}
    for kind in ("models", "gpus", "types"):
        files[kind] = {path.stem: path for path in sorted((presets / kind).glob("*.yaml"))}
    files["engines"] = {path.parent.name: path for path in presets.parent.glob("kvcalc/engines/*/engine.yaml")}
    for kind, named in files.items():
        folder = compiled if kind == "models" else compiled / kind
        folder.mkdir(exist_ok=True)
        for stale in folder.glob("*.json"):
            stale.unlink()
        for name, path in named.items():
            text = path.read_text(encoding="utf-8")
            mapping = yaml.safe_load(text)
            (folder / f"{name}.json").write_text(json.dumps({"text": text, "mapping": mapping}, default=str))
            if kind == "gpus":
                aliases[name] = mapping["aliases"]
            if kind == "types":
                _check(presets.parent, mapping)
    (compiled / "gpus" / "_aliases.json").write_text(json.dumps(aliases))


def _check(root: Path, rows: dict[str, Any]) -> None:
    """Check the rows with the reader in this checkout, which is not installed yet. So are the engines' declarations."""
    sys.path.insert(0, str(root))
    try:
        from kvcalc.engines import declarations
        from kvcalc.model.families.decoder_check import check_rows
    finally:
        sys.path.remove(str(root))
    check_rows(rows)
    if not declarations.ENGINES:
        raise ValueError("kvcalc/engines has no engine.yaml")
