"""Which layers a pipeline stage holds. Source: get_pp_indices, distributed/utils.py, vLLM 0.33.0."""

from __future__ import annotations


def stage_bounds(num_layers: int, stages: int) -> list[tuple[int, int]]:
    """(first, last) layer of every stage. What does not divide goes to the stages before the last, one layer each."""
    sizes = [num_layers // stages] * stages
    for place in range(2, num_layers % stages + 2):
        sizes[-place] += 1
    bounds, first = [], 0
    for size in sizes:
        bounds.append((first, first + size - 1))
        first += size
    return bounds
