"""The step between the projections and attention, where its kernel does not compile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvcalc.attention import step
from kvcalc.attention.cache import TokenCache
from tests.simulated_cuda import simulated_cuda


class TritonError(Exception):
    """In place of Triton's."""


def test_a_step_that_does_not_compile_for_a_shape_is_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TritonError("out of resource: shared memory")

    kernel = SimpleNamespace(can_store=lambda _: True, rotate_and_append=refuse, TritonError=TritonError)
    monkeypatch.setattr(step, "_kernel", lambda device: kernel)
    with simulated_cuda():
        cuda = torch.device("cuda", 0)
        cache = TokenCache(1, ((2, 16), (2, 16)), 8, None, torch.bfloat16, cuda)
        query, key = (torch.ones(1, heads, 1, 16, dtype=torch.bfloat16, device=cuda) for heads in (4, 2))
        assert step.rotate_and_append(None, query, key, cache, value=key) is query
        assert cache.length == 1
