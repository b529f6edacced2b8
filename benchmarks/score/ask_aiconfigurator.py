"""Ask aiconfigurator for estimates. peers.py starts it in aiconfigurator's own environment.

    python benchmarks/score/ask_aiconfigurator.py about            # its release, its models and its tables, as JSON
    python benchmarks/score/ask_aiconfigurator.py estimate < questions.jsonl > answers.jsonl

A question has `arguments` of `aiconfigurator.cli.api.cli_estimate`, and `versions`, the engine's releases to try in
turn. An answer has `tpot_seconds`, `ttft_seconds`, `version` and `beyond_cache`, or `error`. Tested with aiconfigurator
0.8.0 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def about() -> dict[str, Any]:
    """The release, the models with a config in the package, and the releases with tables, by system and engine."""
    from aiconfigurator.sdk import common, perf_database

    # The package has been two since 0.11, and the second one has the configs.
    package = Path(common.__file__).resolve().parent.parent
    configs = (package / "model_configs").glob("*_config.json")
    return {
        "release": importlib.metadata.version("aiconfigurator"),
        "models": sorted(path.name.removesuffix("_config.json").replace("--", "/") for path in configs),
        "databases": {name: dict(found) for name, found in perf_database.get_supported_databases().items()},
    }


def answer(question: dict[str, Any], estimate: Callable[..., Any]) -> dict[str, Any]:
    """The answer from the first of the releases whose tables have everything that the question needs."""
    error = "no release"
    for version in question["versions"]:
        try:
            found = estimate(**question["arguments"], backend_version=version)
        except Exception as problem:  # a missing table, model or dtype raises errors of many kinds
            error = f"{type(problem).__name__}: {problem}"
            continue
        return {
            "tpot_seconds": float(found.tpot) / 1e3,
            "ttft_seconds": float(found.ttft) / 1e3,
            "version": version,
            # Set if the cache cannot hold all requests. aiconfigurator then calls its TPOT inaccurate.
            "beyond_cache": bool(getattr(found, "kv_cache_warning", None)),
        }
    return {"error": error.splitlines()[0][:200]}


def answers(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    from aiconfigurator.cli.api import cli_estimate

    for line in lines:
        yield answer(json.loads(line), cli_estimate)


def main() -> None:
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # the package prints its progress on stdout
        for document in [about()] if sys.argv[1:] == ["about"] else answers(iter(sys.stdin)):
            print(json.dumps(document), file=out, flush=True)


if __name__ == "__main__":
    main()
