"""SGLang's prefill and decode instances (--disaggregation-mode): what they allocate, and what they do not."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.errors import DoesNotFitError, LayoutError, UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.planning.check.answer import check
from kvcalc.planning.check.servers import servers_in
from kvcalc.throughput.hardware import find_devices
from tests.documents import estimate
from tests.engines.models import ask, gated_delta, gpt_oss, lines, plain

STATE = 30 * (8192 * 3 * 2 + 524288 * 4)


def given(**settings: Any) -> dict[str, Any]:
    return {name.replace("_", "-"): value for name, value in settings.items()}


def decode(running: int | None = None, **settings: Any) -> dict[str, Any]:
    limit = {} if running is None else {"max-running-requests": str(running)}
    return {"disaggregation-mode": "decode", **limit, **given(**settings)}


@pytest.mark.parametrize(("settings", "full", "windows"), [
    (decode(16), 166_554, 8_208),
    (decode(32), 158_346, 16_416),
    (decode(33), 166_281, 8_481),
    (decode(16, page_size="64"), 162_432, 12_288),
    (decode(16, speculative_num_draft_tokens="4"), 160_298, 14_464),
    (decode(16, speculative_num_draft_tokens="4", page_size="64", disable_overlap_schedule=True), 156_288, 18_432),
    (decode(16, disaggregation_decode_extra_slots="0"), 170_650, 4_112),
    (decode(64, disaggregation_decode_extra_slots="8"), 157_290, 17_472),
])  # fmt: skip
def test_windows_of_a_decode_instance_are_those_of_its_requests(
    settings: dict[str, Any], full: int, windows: int
) -> None:
    """gpt-oss-20b and 4 GiB: the numbers of SGLang's own code, run on these options.

    SWAChunkCapPoolConfigurator of 0.5.14 and compute_swa_request_cap of 0.5.23 agree. Neither counts a step of prompts.
    """
    for release in ("0.5.14", "0.5.23"):
        found = ask(gpt_oss(), f"sglang@{release}", 1000, kv_memory_bytes=4 * 2**30, settings=settings)["engine"]
        assert (found["kv_cache_tokens"], found["swa_max_total_num_tokens"]) == (full, windows)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        (decode(16), 16 + 32 + 1),
        (decode(32), 32 + 64 + 1),
        (decode(33), 33 + 1),
        (decode(16, disaggregation_decode_extra_slots="3"), 16 + 3 + 1),
        (given(disaggregation_mode="prefill", max_running_requests="16"), 16 + 1),
        (given(max_running_requests="16", disaggregation_decode_extra_slots="3"), 16 + 1),
    ],
)
def test_requests_that_are_received_have_rows_in_the_table(settings: dict[str, Any], rows: int) -> None:
    """DecodeReqToTokenPool: 4,096 + 4 indices of 4 bytes in each row."""
    table = lines(plain(), "sglang", 100, settings={**settings, "context-length": "4096"})["request table"]
    assert table == rows * 4100 * 4


def test_a_decode_instance_has_a_state_for_every_request_that_runs_or_is_received() -> None:
    """HybridMambaDecodeReqToTokenPool, which had none for those that are received before 0.5.11."""

    def states(engine: str = "sglang", batch: int = 1, **settings: Any) -> int:
        found = lines(gated_delta(), engine, 100, batch, settings=settings)
        return (found.get("states beyond the batch", 0) + found["dummy state"]) // STATE + batch

    assert states(**decode(16)) == 16 + 32 + 1
    assert states(batch=20, **decode(16)) == 20 + 32 + 1
    assert states(**decode(40)) == 40 + 1
    assert states(**decode(16, max_mamba_cache_size="64")) == 64 + 1
    assert states("sglang@0.5.10", **decode(16)) == 1 + 1
    assert states(**decode()) == 1 + 1
    # With a prefix cache SGLang counts five states for a request, and three in the pool.
    assert states(**decode(16, disaggregation_decode_enable_radix_cache=True)) == 3 * (16 + 32) + 1


def test_a_prefill_instance_checks_no_drafts() -> None:
    """_pd_prefill_skips_mamba_spec_state of 0.5.22. The numbers of states are those without drafts."""

    def slots(engine: str, role: str) -> int:
        settings = given(disaggregation_mode=role, speculative_num_draft_tokens="4", max_running_requests="16")
        return lines(gated_delta(), engine, 100, settings=settings).get("states for checking drafts", 0)

    with_drafts = slots("sglang", "null")
    assert with_drafts == 17 * 4 * 30 * 524288 * 4
    assert [slots(f"sglang@{release}", "prefill") for release in ("0.5.21", "0.5.22")] == [with_drafts, 0]
    assert slots("sglang", "decode") == 49 * 4 * 30 * 524288 * 4
    memory = 190 * STATE
    found = [
        ask(
            gated_delta(),
            "sglang",
            100,
            kv_memory_bytes=memory,
            settings={**settings, "disaggregation-mode": "prefill"},
        )
        for settings in ({}, {"speculative-num-draft-tokens": "4", "max-running-requests": "16"})
    ]
    assert found[0]["engine"]["kv_cache_tokens"] == found[1]["engine"]["kv_cache_tokens"]


# (device, devices, DP ranks, settings) -> --mem-fraction-static without a mode, of a prefill and of a decode instance.
SHARES = [
    ("llama-3.1-8b", "h100", 1, 1, {}, (0.828, 0.835, 0.874)),
    ("llama-3.1-8b", "h100", 4, 1, {}, (0.817, 0.83, 0.874)),
    ("llama-3.1-8b", "l40s", 1, 1, {}, (0.841, 0.842, 0.917)),
    ("llama-3.1-8b", "l40s", 1, 1, {"max-running-requests": "16"}, (0.841, 0.842, 0.918)),
    ("llama-3.1-8b", "l40s", 1, 1, {"max-running-requests": "3000"}, (0.841, 0.842, 0.886)),
    (
        "llama-3.1-8b", "l40s", 1, 1, {"max-running-requests": "900", "speculative-num-draft-tokens": "4"},
        (0.841, 0.842, 0.866),
    ),
    ("deepseek-v3", "h200", 8, 1, {}, (0.885, 0.893, 0.928)),
    ("deepseek-v3", "h200", 1, 8, {}, (0.757, 0.893, 0.832)),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gpu", "ranks", "copies", "settings", "shares"), SHARES)
def test_the_default_share_has_no_part_for_the_other_role(
    model: str, gpu: str, ranks: int, copies: int, settings: dict[str, str], shares: tuple[float, ...]
) -> None:
    """The numbers of reserve_for_graph_mb and handle_gpu_memory_settings of SGLang 0.5.23, run on these options."""

    def share(role: str, engine: str = "sglang") -> Any:
        found: Any = kvcalc.estimate(
            model, engine=engine, devices=find_devices(f"{gpu}x{ranks * copies}"), tensor_parallel_size=ranks,
            data_parallel_size=copies, context_tokens=4000, engine_settings={**settings, "disaggregation-mode": role},
        )  # fmt: skip
        return found["engine"]["mem_fraction_static"]

    assert tuple(share(role) for role in ("null", "prefill", "decode")) == shares
    # Until 0.5.14, separate instances have no prefill graphs, and nothing else of their own.
    assert share("prefill", "sglang@0.5.14") == share("decode", "sglang@0.5.14") > share("null", "sglang@0.5.14")
    assert share("prefill", "sglang@0.5.9") == share("null", "sglang@0.5.9")


def test_a_decode_instance_reserves_nothing_for_images_since_0_5_17() -> None:
    def share(engine: str, role: str, model: str) -> Any:
        found: Any = kvcalc.estimate(
            model, engine=engine, devices=find_devices("h100"), context_tokens=4000,
            engine_settings={"disaggregation-mode": role},
        )  # fmt: skip
        return found["engine"]["mem_fraction_static"]

    assert share("sglang@0.5.17", "decode", "gemma-3-27b") == share("sglang@0.5.17", "decode", "qwen3-32b")
    assert share("sglang@0.5.16", "decode", "gemma-3-27b") < share("sglang@0.5.16", "decode", "qwen3-32b")
    assert share("sglang", "prefill", "gemma-3-27b") < share("sglang", "prefill", "qwen3-32b")


def test_requests_of_dp_ranks_have_extra_slots_if_the_number_was_given() -> None:
    """handle_pd_disaggregation divides the number that was given, and runs before the defaults are set."""
    asked: dict[str, Any] = {"engine": "sglang", "context_tokens": 4000, "data_parallel_size": 8}

    def table(model: str, **settings: Any) -> Any:
        found = estimate(kvcalc.load_model(model), engine_settings=given(**settings), **asked)
        return {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}["request table"]

    row = (8192 + 4) * 4
    sized = {"disaggregation_mode": "decode", "context_length": "8192"}
    assert table("deepseek-v3", **sized, max_running_requests="128") == (16 + 32 + 1) * row
    assert table("deepseek-v3", **sized, max_running_requests="264") == (33 + 1) * row
    # By default 256 requests of DeepSeek-V4 run, and 48 if tokens are drafted.
    assert table("deepseek-v4-flash", **sized) == (32 + 1) * row
    assert table("deepseek-v4-flash", **sized, max_running_requests="256") == (32 + 64 + 1) * row
    drafts = {"speculative_num_draft_tokens": "2"}
    assert table("deepseek-v3", **sized, **drafts) == (6 + 1) * (8192 + 6) * 4


def test_the_pools_of_deepseek_v4_in_a_decode_instance() -> None:
    """128 + 128 + 256 + 256 tokens for a request that runs, and 128 + 256 for one that is received."""

    def pools(**settings: Any) -> tuple[int, dict[str, int]]:
        found = estimate(
            kvcalc.load_model("deepseek-v4-flash"), engine="sglang", context_tokens=32_768, batch_size=2,
            engine_settings=given(**settings),
        )  # fmt: skip
        sizes = {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}
        assert sum(sizes.values()) == found["kv_cache"]["bytes_per_device"]
        return found["engine"]["swa_max_total_num_tokens"], sizes

    plain = pools(max_running_requests="8", disable_radix_cache=True)
    own = pools(max_running_requests="8", disaggregation_mode="decode")
    assert plain[0] == 8 * 768 + 2 * 8192 + 256
    assert own[0] == 8 * 768 + 16 * 384
    # The states of entries of 128 tokens, in 20 layers, for 16 more requests; and fewer pages of windows with states.
    pages = (plain[0] - own[0]) // 256
    more = 20 * 16 * 128 * 2 * 512 * 4 - 21 * pages * 8 * 4 * (512 + 128) * 4
    name = "full compressor states in fp32"
    assert own[1][name] - plain[1][name] == more
    tails = [pools(max_running_requests="8", swa_prefix_tails=number)[0] for number in ("0", "5")]
    assert tails == [plain[0], plain[0] + round(5 * 384 / 256 + 0.25) * 256]
    with pytest.raises(UsageError, match="swa-prefix-tails: this release of SGLang has no such flag"):
        estimate(kvcalc.load_model("deepseek-v4-flash"), engine="sglang@0.5.20",
                 engine_settings={"swa-prefix-tails": "1"})  # fmt: skip


def test_what_a_separate_instance_does_not_start_with() -> None:
    """validate_mamba_extra_buffer and check_server_args. A decode instance has no steps of prompts."""
    lazy = {"mamba-radix-cache-strategy": "extra_buffer_lazy"}
    asked: dict[str, Any] = {"engine": "sglang", "devices": find_devices("h100x8"), "tensor_parallel_size": 8}
    for role in ("prefill", "decode"):
        with pytest.raises(LayoutError, match=f"does not start a {role} instance with extra_buffer_lazy"):
            kvcalc.estimate("qwen3-next-80b-a3b", engine_settings={**lazy, "disaggregation-mode": role}, **asked)
    uneven = {"chunked-prefill-size": "1000", "page-size": "64"}
    assert kvcalc.estimate("llama-3.1-8b", engine_settings={**decode(), **uneven}, **asked)
    with pytest.raises(LayoutError, match="no whole pages"):
        kvcalc.estimate("llama-3.1-8b", engine_settings={**uneven, "disaggregation-mode": "prefill"}, **asked)
    with pytest.raises(UsageError, match="both': not a mode"):
        kvcalc.estimate("llama-3.1-8b", engine="sglang", engine_settings={"disaggregation-mode": "both"})


SERVED: dict[str, Any] = {"input_tokens": 2000, "output_tokens": 200, "engine": "sglang"}
SIMULATED: dict[str, Any] = {"prompt_tokens": 2000, "answer_tokens": 200, "engine": "sglang"}


def test_an_instance_of_one_role_serves_no_requests_alone() -> None:
    settings = decode(8)
    for asks in (
        lambda: kvcalc.plan("llama-3.1-8b", ["h100"], requests_per_second=2, engine_settings=settings, **SERVED),
        lambda: kvcalc.simulate(
            "llama-3.1-8b", devices=find_devices("h100"), requests_per_second=2, engine_settings=settings, **SIMULATED
        ),
    ):
        with pytest.raises(UsageError, match="a decode instance serves no requests alone"):
            asks()
    speed = kvcalc.SpeedQuestion(input_tokens=2000, output_tokens=200)
    found: Any = kvcalc.estimate(
        "llama-3.1-8b", devices=find_devices("h100"), engine="sglang", engine_settings=settings, speed=speed
    )
    assert found["throughput"]["serving"] is None
    assert found["throughput"]["decode_step_seconds"] > 0
    assert [note["text"] for note in found["warnings"] if note["code"] == "separate-instance"]
    server = servers_in(
        "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --disaggregation-mode decode "
        "--max-running-requests 8"
    )[0]
    checked = check(server, find_devices("h100"), input_tokens=2000, output_tokens=200)
    assert (checked["starts"], checked["capacity"]) == (True, None)
    assert checked["requests"] is not None
    assert checked["requests"]["max_requests"] == 8
    assert [note["text"] for note in checked["warnings"] if note["code"] == "separate-instance"]
    with pytest.raises(DoesNotFitError, match="extra_buffer_lazy"):
        check(server._replace(words=[*server.words, "--mamba-radix-cache-strategy", "extra_buffer_lazy"]),
              find_devices("h100"))  # fmt: skip


def test_drafts_may_go_beyond_the_context_of_a_server() -> None:
    """The request table has room for them (get_req_to_token_extra_context_len)."""
    found: Any = kvcalc.simulate(
        "deepseek-v3", devices=find_devices("h200x8"), tensor_parallel_size=8, requests_per_second=2, requests=10,
        engine_settings={"context-length": "2202"}, speculative=Speculation("mtp", 1, 1.8), **SIMULATED,
    )  # fmt: skip
    assert found["load"]["requests"] == 10
    assert not [note for note in found["warnings"] if note["code"] == "left-out"]
