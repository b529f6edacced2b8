"""The error of a plan without any layout: its reason, of which device it is, and how many more have none."""

from __future__ import annotations

from typing import Any

import pytest

from kvcalc.errors import DoesNotFitError
from kvcalc.planning.plan.document import refuse_empty


def plans(*reasons: str) -> Any:
    rows = [{"gpu": f"gpu-{n}", "reason": reason, "hint": f"hint {n}"} for n, reason in enumerate(reasons)]
    return {"best": None, "plans": rows}


@pytest.mark.parametrize(
    ("reasons", "message"),
    [
        (["too slow"], "no layout serves this load: too slow"),
        (["too slow"] * 3, "no layout serves this load: too slow"),
        (["too slow", "too small"], "no layout serves this load: gpu-0: too slow; 1 more without a layout"),
        (["a", "a", "b"], "no layout serves this load: gpu-0: a; 2 more without a layout"),
    ],
)
def test_one_reason_speaks_for_all_that_share_it(reasons: list[str], message: str) -> None:
    with pytest.raises(DoesNotFitError) as caught:
        refuse_empty(plans(*reasons))
    assert (caught.value.message, caught.value.hint) == (message, "hint 0")


def test_a_plan_with_a_layout_is_no_error() -> None:
    found = plans("too slow")
    refuse_empty(found | {"best": {"gpu": "gpu-1"}})
