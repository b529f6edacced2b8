"""One line of JSON: the same values as `json`, and ASCII for every stdout."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcalc.output.json_line import encode

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=5))
def test_a_line_reads_back_as_the_same_document(document: dict[str, Any]) -> None:
    line = encode(document)
    assert json.loads(line) == document
    assert line.isascii()
    assert "\n" not in line


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", "caf\u00e9", "\x1b[31m", 1e-7, -0.0])
def test_values_that_orjson_refuses_or_writes_differently(value: object) -> None:
    assert json.loads(encode({"value": value})) == {"value": value}
