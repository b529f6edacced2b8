"""Compare every preset with its published config.json, key by key, and keep the facts that count in a small table.

    python benchmarks/score/preset_facts.py FOLDER...          # what differs; exit status 1 if anything does
    python benchmarks/score/preset_facts.py FOLDER... --write  # also refresh tests/benchmarks/published_facts.json

Every FOLDER has config.json files, named after their repositories (`org--Name.json`, or `org/Name/config.json`). A
file is compared with the preset that has its name as an alias. A key of the published config counts if the preset
without it, or with another value, reads as another model: other caches, weights, drafting layers, context or dtype.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvcalc.errors import KvcalcError
from kvcalc.memory.weights import count_parameters
from kvcalc.model.hf_config import read_config
from kvcalc.model.presets import Preset, names_of, shipped_presets
from kvcalc.model.published import releases
from kvcalc.model.spec import ModelSpec, weights_of
from kvcalc.model.wrappers import WRAPPERS

TABLE = Path(__file__).resolve().parents[2] / "tests" / "benchmarks" / "published_facts.json"

# A preset describes the weights as they were trained. Releases that differ only in these are other recipes for them.
_RECIPE = ("quantization_config", "expert_dtype", "torch_dtype", "dtype")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--write", action="store_true", help=f"refresh {TABLE.name}")
    asked = parser.parse_args()
    presets = {name: preset for preset in shipped_presets() for name in names_of(preset)}
    same = (release for release in releases() if not release.changes and release.recipe is None)
    presets = {**{release.name.casefold(): presets[release.preset] for release in same}, **presets}
    table: dict[str, object] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    compared, problems = 0, 0
    for name, path in sorted(config for folder in asked.folders for config in configs_in(folder)):
        preset = presets.get(name.casefold())
        if preset is None:
            continue
        compared += 1
        published = json.loads(path.read_text())
        for text in differences(preset, published):
            problems += 1
            print(f"{preset.name} ({path.name}): {text}")
        table[preset.name] = {"published": name, "facts": facts(preset, published)}
    missing = sorted({preset.name for preset in presets.values()} - set(table))
    print(f"{compared} configs compared, {problems} differences; not compared: {len(missing)} presets")
    if asked.write:
        lines = (f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 1 if problems else 0


def configs_in(folder: str) -> Iterator[tuple[str, Path]]:
    """The published name and the path of every config below a folder."""
    for root, _, files in os.walk(folder):
        for file in files:
            path = Path(root, file)
            if file == "config.json":
                yield "/".join(path.parts[-3:-1]), path
            elif file.endswith(".json"):
                yield path.stem.removesuffix("_config").replace("--", "/", 1), path


def flattened(config: Mapping[str, object]) -> dict[str, object]:
    """The keys of the language model, with those that it inherits from the wrapper."""
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    found = dict(config)
    for key in wrapper.keys if wrapper else ():
        inner = found.get(key)
        if isinstance(inner, Mapping):
            found = {**found, **inner}
    return found


def described(spec: ModelSpec) -> dict[str, object]:
    """What of a model counts in an answer."""
    weights = weights_of(spec)
    return {
        "layers": [(group.first, group.last, repr(group.caches)) for group in spec.layers],
        "weights": None if weights is None else repr(count_parameters(weights)),
        "drafting layers": spec.num_draft_layers,
        "context": spec.max_position_embeddings,
        "encoder tokens": spec.encoder_tokens,
        "state dtype": spec.state_dtype,
    }


def _read(preset: Preset, config: Mapping[str, object]) -> dict[str, object] | str:
    try:
        return described(read_config(config, preset.name, preset.source))
    except KvcalcError as error:
        return error.message


def differences(preset: Preset, published: Mapping[str, object]) -> Iterator[str]:
    """Every key whose published value would change what the preset reads as."""
    own, theirs = flattened(preset.config), flattened(published)
    reading = _read(preset, preset.config)
    for key, value in sorted(theirs.items()):
        if key in _RECIPE or key.endswith("_config") or key == "model_type" or own.get(key) == value:
            continue
        changed = _read(preset, with_key(preset.config, key, value))
        if changed == reading or value is None:
            continue
        had = f"the preset has {own[key]!r}" if key in own else "the preset lacks it"
        if isinstance(changed, str):
            if key in own:
                yield f"{key} is {value!r}, {had} ({changed})"
            continue
        assert isinstance(reading, dict)
        parts = ", ".join(part for part in changed if changed[part] != reading[part])
        yield f"{key} is {value!r}, {had}: changes {parts}"


def facts(preset: Preset, published: Mapping[str, object]) -> dict[str, object]:
    """The published keys that count: without them, or with another value, the preset would read as another model."""
    found: dict[str, object] = {}
    reading = _read(preset, preset.config)
    for key, value in sorted(flattened(published).items()):
        if key in _RECIPE or key.endswith("_config") or key == "model_type" or value is None:
            continue
        others = (None, *_other(value))
        if any(_read(preset, with_key(preset.config, key, other)) != reading for other in others):
            found[key] = value
    return found


def _other(value: object) -> tuple[object, ...]:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (2 * value, value + 1)
    return (value[:-1],) if isinstance(value, (list, str)) and value else ()


def with_key(config: Mapping[str, object], key: str, value: object) -> Mapping[str, object]:
    """`config` with `value` under `key` of its language model; None removes the key."""
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    path = [name for name in (wrapper.keys if wrapper else ()) if isinstance(config.get(name), Mapping)]
    if path:
        inner = config[path[0]]
        assert isinstance(inner, Mapping)
        return {**config, path[0]: with_key({**inner}, key, value)}
    rest = {name: each for name, each in config.items() if name != key}
    return rest if value is None else {**rest, key: value}


if __name__ == "__main__":
    sys.exit(main())
