"""How SGLang divides its memory between states and tokens, release by release.

Source: handle_max_mamba_cache and _calculate_mamba_ratio in the wheels of 0.5.2 to 0.5.23.
"""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.engines import load_engine
from kvcalc.engines.place import Place
from kvcalc.engines.sglang.settings import parse_settings
from kvcalc.engines.sglang.states import num_states
from kvcalc.errors import UsageError
from kvcalc.planning.check.servers import servers_in
from kvcalc.releases import release_of
from tests.documents import estimate
from tests.engines.models import ask, gated_delta

STATE, TOKEN = 30 * (8192 * 3 * 2 + 524288 * 4), 10 * 1024 * 2
MEMORY = 190 * STATE


def states(release: str, **settings: Any) -> float:
    """The states' worth of memory that tokens do not get, of 190."""
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    engine = f"sglang@{release}"
    found = ask(gated_delta(model_type="qwen3_next"), engine, 100, kv_memory_bytes=MEMORY, settings=given)["engine"]
    return float(round((MEMORY - found["kv_cache_tokens"] * TOKEN) / STATE, 2))


@pytest.mark.parametrize(
    ("release", "plain", "drafts", "counted", "off"),
    [
        # Without drafts: 90 states, of which one is spare since 0.5.17; before 0.5.4, 512.
        # With four checked tokens: 18 times 1 + 4; 48 x 4 for the requests first; 50 in 1 + 4/3 of the budget, and 16 x
        # 4; (90 - 5) / (1 + 4/5) = 47, a spare one, and (9 + 1) x 4.
        # With --max-mamba-cache-size 20: not read from 0.5.4 to 0.5.6.
        # Without the prefix cache and a number of requests: 512 states before 0.5.9.
        ("0.5.3", 190, 190, 20, 190),
        ("0.5.4", 90, 90, 90, 190),
        ("0.5.6", 90, 90, 90, 190),
        ("0.5.7", 90, 190, 20, 190),
        ("0.5.8", 90, 190, 20, 190),
        ("0.5.9", 90, 190, 20, 90),
        ("0.5.12", 90, 190, 20, 90),
        ("0.5.13", 90, 38 + 12 * 4, 20, 90),
        ("0.5.14", 90, 50 + 10 * 4, 20, 90),
        ("0.5.16", 90, 50 + 10 * 4, 20, 90),
        ("0.5.17", 90, 48 + 10 * 4, 21, 90),
        ("0.5.23", 90, 48 + 10 * 4, 21, 90),
    ],
)  # fmt: skip
def test_the_states_take_the_memory_of_the_release(
    release: str, plain: int, drafts: int, counted: int, off: int
) -> None:
    assert states(release) == plain
    assert states(release, speculative_num_draft_tokens="4") == drafts
    assert states(release, max_mamba_cache_size="20") == counted
    assert states(release, disable_radix_cache=True) == off


def test_fewer_requests_leave_more_before_the_rest_is_divided() -> None:
    # 8 requests check 4 tokens: 32 of 190 states' memory, and 0.9 of 1.9 of the rest is 74 states.
    assert states("0.5.10", speculative_num_draft_tokens="4", max_running_requests="8") == 32 + 74


def test_granite_has_the_logged_states_and_tokens() -> None:
    """ibm-granite/granite-4.0-h-micro on a 16 GB device, February 2026: 38 states, and 399,740 tokens in 3.05 GB."""
    model = kvcalc.load_model("granite-4.0-h-micro")
    state = 36 * (4352 * 3 * 2 + 64 * 64 * 128 * 4)
    memory, settings = 399_740 * 8192 + 38 * state, parse_settings({}, 1)
    found = estimate(model, context_tokens=4096, engine="sglang@0.5.9", kv_memory_bytes=memory)["engine"]
    assert found["kv_cache_tokens"] == 399_740
    places = [Place(release_of(f"sglang@{release}")) for release in ("0.5.9", "0.5.16", "0.5.17")]
    assert [num_states(memory, state, settings, 3, place) for place in places] == [38, 38, 37]


def each(release: str, model: str, **settings: Any) -> int:
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    return int(load_engine(f"sglang@{release}", kvcalc.load_model(model), given).states_each)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("release", "model", "settings", "expected"),
    [
        ("0.5.23", "qwen3.6-27b", {}, 5),
        ("0.5.14", "qwen3.6-27b", {}, 5),
        ("0.5.13", "qwen3.6-27b", {}, 3),
        ("0.5.13", "qwen3.6-27b", {"mamba_radix_cache_strategy": "extra_buffer"}, 5),
        ("0.5.23", "qwen3.6-27b", {"mamba_radix_cache_strategy": "extra_buffer_lazy"}, 4),
        ("0.5.23", "qwen3.6-27b", {"mamba_radix_cache_strategy": "no_buffer"}, 3),
        # Without overlapping steps, pages of more than one token still need a state more.
        ("0.5.23", "qwen3.6-27b", {"disable_overlap_schedule": True}, 3),
        ("0.5.23", "qwen3.6-27b", {"disable_overlap_schedule": True, "page_size": "64"}, 4),
        ("0.5.23", "qwen3.6-27b", {"disable_radix_cache": True}, 1),
        ("0.5.15", "kimi-linear-48b", {}, 3),
        ("0.5.16", "kimi-linear-48b", {}, 5),
        ("0.5.3", "qwen3-next-80b-a3b", {}, 1),
    ],
)  # fmt: skip
def test_a_request_has_the_states_of_the_strategy(
    release: str, model: str, settings: dict[str, Any], expected: int
) -> None:
    assert each(release, model, **settings) == expected


def test_a_strategy_under_its_older_name() -> None:
    words = "python -m sglang.launch_server --model-path Qwen/Qwen3.6-27B --mamba-scheduler-strategy extra_buffer"
    assert servers_in(words)[0].read().settings["mamba-radix-cache-strategy"] == "extra_buffer"
    with pytest.raises(UsageError, match="not a strategy"):
        each("0.5.23", "qwen3.6-27b", mamba_radix_cache_strategy="all")
