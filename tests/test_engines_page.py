"""The table of engines in the manual."""

import re

from kvcalc.engines import ENGINES
from tests.conftest import ROOT


def test_the_table_has_one_row_for_each_engine() -> None:
    page = (ROOT / "docs" / "reference" / "engines.md").read_text()
    table = page.partition("| engine | rules read from |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(ENGINES)
