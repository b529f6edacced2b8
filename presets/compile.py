"""Build hook: write the presets as JSON too, because importing YAML takes a third of the start-up time.

Each JSON file includes the text it was made from. kvcalc.model.compiled_presets uses it only if the YAML file still has
the same text, so an edited preset in a checkout is never read from an old copy.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# LibYAML's, if PyYAML is built with it, takes a tenth of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class CompilePresets(BuildHookInterface[Any]):
    """Runs before every wheel is built, including the wheel of an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compile_presets(Path(self.root) / "presets")


def compile_presets(presets: Path) -> None:
    """Write presets/compiled/NAME.json for every presets/models/NAME.yaml, and compiled/KIND/NAME.json for every
    NAME.yaml in presets/gpus, presets/types, kvcalc/question and kvcalc/cli/commands. Write the models' names and
    aliases to compiled/_names.json, the devices' aliases to compiled/gpus/_aliases.json, all
    kvcalc/engines/NAME/engine.yaml to compiled/_engines.json, and each other TABLE.yaml there to
    compiled/engines/NAME.TABLE.json.

    Old JSON files are removed. Raises ValueError if a row of a table is not as its reader expects.
    """
    compiled, package = presets / "compiled", presets.parent / "kvcalc"
    aliases: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    sizes: dict[str, int] = {}
    tables: dict[str, dict[str, Any]] = {}
    if compiled.exists():
        shutil.rmtree(compiled)
    folders = {"models": presets / "models", "gpus": presets / "gpus", "types": presets / "types"}
    folders |= {"question": package / "question", "commands": package / "cli" / "commands"}
    for kind, folder in folders.items():
        target = compiled if kind == "models" else compiled / kind
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.yaml")):
            text, mapping = _read(path)
            _write(target / f"{path.stem}.json", text, mapping)
            if kind == "models":
                sizes[path.name] = path.stat().st_size
                for name in (mapping["name"], *(mapping.get("aliases") or ())):
                    other = owners.setdefault(name.casefold(), path.stem)
                    if other != path.stem:
                        raise ValueError(f"{name} is the name of {other} and of {path.stem}")
                    names[name] = path.stem
            if kind == "gpus":
                aliases[path.stem] = mapping["aliases"]
            if kind == "types":
                tables[path.stem] = mapping
    (compiled / "_names.json").write_text(json.dumps({"sizes": sizes, "names": names}))
    (compiled / "gpus" / "_aliases.json").write_text(json.dumps(aliases))
    engines = {path.parent.name: _read(path) for path in sorted((package / "engines").glob("*/engine.yaml"))}
    texts = {name: text for name, (text, _) in engines.items()}
    _write(compiled / "_engines.json", texts, {name: mapping for name, (_, mapping) in engines.items()})
    (compiled / "engines").mkdir()
    for path in sorted((package / "engines").glob("*/*.yaml")):
        if path.name != "engine.yaml":
            _write(compiled / "engines" / f"{path.parent.name}.{path.stem}.json", *_read(path))
    _check(presets.parent, tables)


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    return text, yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe loader: plain data, no objects


def _write(path: Path, text: object, mapping: object) -> None:
    path.write_text(json.dumps({"text": text, "mapping": mapping}, default=str))


def _check(root: Path, tables: dict[str, dict[str, Any]]) -> None:
    """Check the tables of types, and all tables of engines, with the readers in this checkout, not an installed one."""
    sys.path.insert(0, str(root))
    try:
        from presets.check import check_engines, check_question, check_table
    finally:
        sys.path.remove(str(root))
    for name, rows in tables.items():
        check_table(name, rows)
    check_question(_read(root / "kvcalc" / "question" / "fields.yaml")[1])
    check_engines()
