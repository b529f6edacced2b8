"""The bytes of published releases, of quantized copies above all: what a recipe leaves in 16 bits differs by release.

A type that differs from the published one changes the bytes by half or more, and a wrong list of modules by 1 to 40%.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvcalc
from tests.rows import every_row

_LINES = (Path(__file__).parent / "published_bytes.tsv").read_text().splitlines()
ROWS = [line.split("\t") for line in _LINES if not line.startswith(("#", "name\t"))]
BY_CONFIG = {name: (int(size), cache) for name, size, cache in ROWS if size.isdigit()}
ON_DISK = {name: float(size.removesuffix(" GiB")) * 2**30 for name, size, _ in ROWS if not size.isdigit()}


@every_row("name", BY_CONFIG)
def test_a_release_has_the_bytes_and_the_cache_of_its_own_config(name: str) -> None:
    size, cache = BY_CONFIG[name]
    answer: Any = kvcalc.estimate(name, engine="vllm", context_tokens=1024)
    assert answer["kv_cache"]["dtype"] == cache
    assert abs(answer["weights"]["bytes"] - size) <= 0.001 * size


@every_row("name", ON_DISK)
def test_a_release_takes_the_published_space(name: str) -> None:
    """MTP layers, and towers that are not counted, are at most 6% of it."""
    weights: Any = kvcalc.estimate(name, context_tokens=1024)["weights"]
    counted = weights["bytes"] + sum(tower["bytes"] or 0 for tower in weights["towers"])
    assert 0.94 * ON_DISK[name] <= counted <= 1.01 * ON_DISK[name]
