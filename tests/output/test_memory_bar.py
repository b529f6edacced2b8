"""The memory bar: each part that is not empty has a mark, and parts that do not fit go past the device's end."""

from __future__ import annotations

import pytest

from kvcalc.output.human.fit import bar


def parts(weights: int, kv: int, activation: int, reserve: int, device: int) -> dict[str, int]:
    free = device - weights - kv - activation - reserve
    return {"weights": weights, "kv_cache": kv, "activation": activation, "reserve": reserve, "free": free}


def test_a_quarter_of_each() -> None:
    assert bar(parts(16, 16, 0, 16, 64), 64) == "[" + "#" * 16 + "=" * 16 + "x" * 16 + "." * 16 + "]"


def test_what_is_small_is_still_seen() -> None:
    assert bar(parts(6300, 1, 1, 1, 6400), 6400).count("=") == 1
    assert bar(parts(6300, 1, 1, 1, 6400), 6400).count("+") == 1


def test_too_much_runs_past_the_end() -> None:
    drawn = bar(parts(96, 32, 0, 0, 64), 64)
    assert drawn == "[" + "#" * 32 + "|" + "#" * 16 + "=" * 16 + "]"
    assert "." not in drawn


def test_a_full_device_has_no_mark_at_its_end() -> None:
    assert bar(parts(32, 16, 8, 8, 64), 64) == "[" + "#" * 32 + "=" * 16 + "+" * 8 + "x" * 8 + "]"
    assert bar(parts(32, 16, 8, 9, 64), 64).endswith("|x]")


@pytest.mark.parametrize("shares", [(1, 1, 1, 0), (1, 1, 1, 4), (5, 1, 1, 0), (90, 3, 2, 2)])
def test_rounding_does_not_change_the_width(shares: tuple[int, int, int, int]) -> None:
    assert len(bar(parts(*shares, 97), 97, width=40)) == len("[") + 40 + len("]")


@pytest.mark.parametrize("device", [1, 7, 64, 10**12])
@pytest.mark.parametrize("shares", [(0, 0, 0, 0), (1, 0, 0, 0), (0.5, 0.2, 0.1, 0.1), (3, 2, 1, 1), (0, 0, 0, 1)])
def test_it_is_never_longer_than_a_line(device: int, shares: tuple[float, ...]) -> None:
    weights, kv, activation, reserve = (int(share * device) for share in shares)
    assert 2 <= len(bar(parts(weights, kv, activation, reserve, device), device)) <= 70
