"""How many published names of models kvcalc knows, and what it answers for them.

    python benchmarks/score/known_names.py SOURCE... [--engine vllm] [--all]

A SOURCE is a text file with one name a line, a table with the columns `name` and `source` (known_names.tsv), the
folder of vllm-project/recipes (models/ORG/NAME.yaml), or the wheel of kvcache-simulator, whose catalogue names the
config.json of every model. Of the recipes, those of language models count: their tasks have `text` or `multimodal`.
Their first name counts, and with --variants the names of their variants too.

A name is answered if `kvcalc estimate NAME --engine ENGINE` gives the bytes of the cache. The others are listed with
the reason.
"""

from __future__ import annotations

import argparse
import csv
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml

import kvcalc

_CATALOGUE = "kvcache_sim/resources/models.yaml"
_LANGUAGE = {"text", "multimodal"}


def main() -> None:
    """Print how many names of each source are answered, and the others with the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--variants", action="store_true", help="the names of the recipes' variants too")
    parser.add_argument("--all", action="store_true", help="list the answered names too, with bytes and weights")
    asked = parser.parse_args()
    seen: dict[str, str | None] = {}
    for source in asked.sources:
        listed = table_in(source) if source.suffix == ".tsv" else {source.name: [*names_in(source, asked.variants)]}
        for of, names in listed.items():
            for name in names:
                if name not in seen:
                    seen[name] = problem_of(name, asked.engine, asked.all)
            print(f"{of}: {sum(seen[name] is None for name in names)} of {len(names)}")
    for name, problem in sorted(seen.items()):
        if problem is not None:
            print(f"  {name}: {problem}")
    print(f"together: {sum(problem is None for problem in seen.values())} of {len(seen)}")


def table_in(table: Path) -> dict[str, list[str]]:
    """The names in a table, by their source."""
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    listed: dict[str, list[str]] = {}
    for row in csv.DictReader(lines, delimiter="\t"):
        listed.setdefault(row["source"], []).append(row["name"])
    return listed


def names_in(source: Path, variants: bool) -> Iterator[str]:
    """The names that a source lists."""
    if source.is_dir():
        for path in sorted(source.glob("models/*/*.yaml")):
            yield from _names_of_recipe(yaml.safe_load(path.read_text()), variants)
    elif source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            catalogue = yaml.safe_load(wheel.read(_CATALOGUE))
        for model in catalogue["models"]:
            found = re.match(r"https://huggingface\.co/([^/]+/[^/]+)/", model["source_url"])
            if found:
                yield found[1]
    else:
        yield from (
            line.split("#")[0].strip() for line in source.read_text().splitlines() if line.split("#")[0].strip()
        )


def _names_of_recipe(recipe: dict[str, dict[str, dict[str, str]]], variants: bool) -> Iterator[str]:
    if _LANGUAGE.isdisjoint(recipe["meta"]["tasks"]):
        return
    yield str(recipe["model"]["model_id"])
    if variants:
        yield from (row["model_id"] for row in recipe["variants"].values() if "model_id" in row)


def problem_of(name: str, engine: str, shown: bool) -> str | None:
    """Why `name` is not answered, or None."""
    try:
        found = kvcalc.estimate(name, engine=engine)
    except kvcalc.KvcalcError as error:
        return "; ".join(filter(None, (error.message, error.hint)))[:200]
    if shown:
        weights = found["weights"] or {}
        print(f"  {name}: {found['kv_cache']['total_bytes']:,} bytes, {weights.get('dtype')} {weights.get('bytes')}")
    return None


if __name__ == "__main__":
    main()
