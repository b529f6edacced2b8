"""Budgets worked out by hand: the memory for the cache, the message if it is too little, and the layout of models."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from kvcalc import estimate
from kvcalc.engines.reserve import Held, Reserve
from kvcalc.errors import UsageError
from kvcalc.memory.sharding import Width
from kvcalc.model.layout import LayoutAsked
from kvcalc.model.memo import forget
from kvcalc.model.resolve import load_model
from kvcalc.model.spec import ModelSpec
from kvcalc.notes import Note
from kvcalc.planning.answers.gpus import describe_hardware
from kvcalc.question.question import Question
from kvcalc.server.budget import Budget, budget
from kvcalc.server.case import Case, make_case
from kvcalc.server.device_weights import DeviceWeights
from kvcalc.server.fit import describe_fit
from kvcalc.server.layout import count_replicas, lay_out
from kvcalc.server.resolve import with_device
from kvcalc.throughput.hardware import Devices, Gpu, find_devices, find_gpu, own_gpu

GIB, MIB = 2**30, 2**20

# One token takes 131,072 bytes of cache in bf16, so 1 GiB holds 8,192 tokens.
SPEC = load_model("llama-3-8b")
TOKEN = 131_072
WEIGHTS = DeviceWeights(4 * GIB, 0, Width(1000, 100, 50_000, 32, False), None)
TEN = own_gpu(None, 10 * GIB, None, None)


def ask(
    engine: str = "logical", context: int = 1024, batch: int = 1, tp: int = 1, pp: int = 1, gpu: Gpu = TEN,
    model: ModelSpec = SPEC, **settings: str,
) -> Case:  # fmt: skip
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    return make_case(
        Question(model, context, batch, "bf16", "auto", engine, given, tp, pp, devices=Devices(gpu, tp * pp))
    )


def ask_budget(case: Case, weights: DeviceWeights) -> Budget | str:
    """The budget of a case if a device holds `weights`."""
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvcalc.server.budget.device_weights", lambda *asked: weights)
        found = budget(case)
    forget()  # so that no other test gets the budget of these weights
    return found


def budget_of(engine: str = "logical", weights_gib: int = 4, **asked: Any) -> Budget:
    found = ask_budget(ask(engine, **asked), WEIGHTS._replace(bytes=weights_gib * GIB))
    assert isinstance(found, Budget)
    return found


def test_the_cache_gets_what_weights_and_reserve_leave() -> None:
    # Without an engine, 10% of the device is reserved.
    assert budget_of("logical").pool_bytes == 10 * GIB - 4 * GIB - GIB
    assert budget_of("logical").offered_bytes == 10 * GIB - 4 * GIB - GIB
    # The pool is negative if weights and reserve are larger than the device.
    assert budget_of("logical", weights_gib=12).pool_bytes == -3 * GIB
    assert budget_of("logical", weights_gib=9).pool_bytes == 0


def test_an_engine_that_takes_a_share_of_the_rest_gets_that_share() -> None:
    # Activations: 8,192 tokens x (2 x width + widest module) x 2 bytes. The CUDA context takes 1 GiB.
    left = 10 * GIB - 4 * GIB - GIB - 8192 * (2 * 100 + 1000) * 2
    assert budget_of("tensorrt-llm").pool_bytes == budget_of("tensorrt-llm").offered_bytes == int(left * 0.9)
    # If the fraction is given, the engine applies it to its pool itself.
    given = budget_of("tensorrt-llm", free_gpu_memory_fraction="0.5")
    assert (given.pool_bytes, given.offered_bytes) == (int(left * 0.5), left)
    # No share is taken of a negative amount.
    short = budget_of("tensorrt-llm", weights_gib=12)
    assert short.pool_bytes == short.offered_bytes == left - 8 * GIB


def test_ranks_and_stages_bring_buffers_between_devices() -> None:
    alone = budget_of("tensorrt-llm").reserve.held_bytes()
    for tp, pp in ((2, 1), (1, 2), (2, 2)):
        assert budget_of("tensorrt-llm", tp=tp, pp=pp).reserve.held_bytes() == alone + 15 * GIB // 4
    # SGLang's share of the device is 1/8 GiB smaller for each rank.
    one, four = (
        budget_of("sglang", tp=size, pp=size).reserve.settings["mem_fraction_static"] for size in (1, 2)
    )  # fmt: skip
    assert isinstance(one, float)
    assert four == pytest.approx(one - 3 / 8 / 10, abs=0.002)


def test_a_longer_prompt_takes_more_of_what_an_engine_holds_for_it() -> None:
    # Transformers prefills all sequences at once: 1,200 x 2 bytes per token, and 6 bytes per logit and sequence.
    def expected(tokens: int, sequences: int) -> int:
        held = sequences * (tokens * 1200 * 2 + 50_000 * 6)
        return 10 * GIB - 4 * GIB - 512 * MIB - held

    found = budget_of("transformers", context=1000, batch=2)
    assert found.pool_bytes == found.pool_at(1000, 2) == expected(1000, 2)
    assert found.pool_at(5000, 3) == expected(5000, 3)
    assert found.pool_shrinkage is not None
    assert found.pool_shrinkage(5000, 3) == expected(1000, 2) - expected(5000, 3)
    # Other engines reserve the same for any prompt.
    fixed = budget_of("logical", context=1000, batch=2)
    assert (fixed.pool_at(5000, 3), fixed.pool_shrinkage) == (fixed.pool_bytes, None)


@pytest.mark.parametrize("unknown", [{"bytes": None}, {"width": None}])
def test_there_is_no_budget_where_the_weights_are_not_known(unknown: dict[str, Any]) -> None:
    found = ask_budget(ask(), WEIGHTS._replace(reason="not in the config", **unknown))
    assert found == "the weights of llama-3-8b are not known: not in the config"


@pytest.mark.parametrize("unknown", [{"bytes": None}, {"width": None}])
def test_what_is_not_known_is_not_divided_at_another_length_either(unknown: dict[str, Any]) -> None:
    found = Budget(ask(), WEIGHTS._replace(**unknown), Reserve([], {}, varies=True), 0, 0)
    with pytest.raises(ValueError, match="needs the bytes of the weights"):
        found.pool_at(100, 1)


@pytest.mark.parametrize(("gib", "kept"), [(10, 3), (32, 3), (33, 4), (64, 4)])
def test_macos_keeps_a_third_of_a_small_memory_and_a_quarter_of_a_large_one(gib: int, kept: int) -> None:
    gpu = TEN._replace(memory_bytes=gib * GIB)
    whole, apple = (budget_of("logical", gpu=one).pool_bytes for one in (gpu, gpu._replace(vendor="Apple")))
    assert whole is not None
    assert apple is not None
    assert whole - apple == -(-gib * GIB // kept)


@pytest.mark.parametrize(
    ("engine", "option"),
    [("tensorrt-llm", "max-tokens"), ("sglang", "max-total-tokens"), ("vllm", "num-gpu-blocks-override")],
)
def test_a_limited_pool_has_the_bytes_of_the_caches_type_in_every_order(engine: str, option: str) -> None:
    """The budget of the same model, engine and device is remembered, but its limit in tokens depends on the type."""

    def figures(kv_dtype: str) -> Any:
        found = estimate(
            SPEC, context_tokens=1024, kv_dtype=kv_dtype, engine=engine, engine_settings={option: 2000},
            devices=find_devices("h100"),
        )["fit"]  # fmt: skip
        assert found is not None
        return found["reserve_bytes"], found["max_context_tokens"]

    alone = {}
    for kv_dtype in ("bf16", "fp8"):
        forget()
        alone[kv_dtype] = figures(kv_dtype)
    assert alone["bf16"][0] < alone["fp8"][0]
    for order in (("bf16", "fp8"), ("fp8", "bf16")):
        forget()
        assert [figures(kv_dtype) for kv_dtype in order] == [alone[kv_dtype] for kv_dtype in order]


def test_a_release_has_its_own_reserve_and_a_device_its_own_defaults() -> None:
    def settings(engine: str, **given: str) -> dict[str, str]:
        return with_device(engine, {k.replace("_", "-"): v for k, v in given.items()}, find_devices("h100"))

    own = {"max-num-batched-tokens": "8192", "max-num-seqs": "1024", "gdn-prefill-backend": "flashinfer"}
    assert settings("vllm") == own
    assert settings("vllm@0.7")["max-num-seqs"] == "256"
    assert settings("vllm", max_num_seqs="7", block_size="32") == {**own, "max-num-seqs": "7", "block-size": "32"}
    assert with_device("vllm", {}, find_devices("a100"))["max-num-seqs"] == "256"
    assert settings("logical", anything="1") == {"anything": "1"}
    # vLLM uses 0.92 of the device since 0.20, and 0.9 before. Since 0.20 it also reserves memory for CUDA graphs.
    h100 = find_gpu("h100")
    for engine, left_alone in (("vllm", 0.08), ("vllm@0.19", 0.1)):
        found = budget_of(engine, gpu=h100, max_num_batched_tokens="8192", max_num_seqs="256")
        named = {part.name.split(" (")[0]: part.bytes for part in found.reserve.held}
        assert named["unused share"] == pytest.approx(left_alone * h100.memory_bytes, rel=1e-6)
        assert ("CUDA graphs" in named) == (engine == "vllm")


EIGHT, ONE = find_devices("h100x8"), find_devices("h100")


@pytest.mark.parametrize(
    ("devices", "tp", "stages", "expected"),
    [
        # Without a size, all devices of a stage are used.
        (EIGHT, None, 1, (EIGHT, 8)), (EIGHT, None, 2, (EIGHT, 4)), (EIGHT, None, 8, (EIGHT, 1)),
        (EIGHT, 2, 1, (EIGHT, 2)), (EIGHT, 2, 2, (EIGHT, 2)),
        # A device without a number becomes as many as the layout needs.
        (ONE, None, 1, (ONE, 1)), (ONE, None, 3, (ONE._replace(num_devices=3), 1)),
        (ONE, 4, 1, (ONE._replace(num_devices=4), 4)), (ONE, 4, 2, (ONE._replace(num_devices=8), 4)),
    ],
)  # fmt: skip
def test_how_devices_are_laid_out(devices: Devices, tp: int | None, stages: int, expected: tuple[Devices, int]) -> None:
    asked = Question(load_model("llama-3-8b"), engine="vllm", devices=devices).with_layout(LayoutAsked(tp, stages))
    laid_out = lay_out(asked)
    assert (laid_out.devices, laid_out.tensor_parallel_size) == expected


def test_stages_that_do_not_divide_the_devices_are_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--pipeline-parallel-size 3 does not divide 8 devices"):
        lay_out(Question(load_model("llama-3-8b"), engine="vllm", devices=EIGHT, pipeline_parallel_size=3))


def test_devices_hold_whole_replicas() -> None:
    def replicas(number: int, tp: int, pp: int) -> int:
        return count_replicas(number, ask(tp=tp, pp=pp).layout)

    assert [replicas(8, tp, pp) for tp, pp in ((1, 1), (4, 1), (2, 2), (4, 2))] == [8, 2, 2, 1]
    for number, tp, pp, said in (
        (8, 16, 1, "8 devices with --tp 16: one replica needs 16"),
        (6, 4, 1, "6 devices with --tp 4: one replica needs 4"),
        (6, 2, 2, "6 devices with --tp 2 --pp 2: one replica needs 4"),
        (1, 2, 1, "1 device with --tp 2: one replica needs 2"),
        (2, 4, 1, "2 devices with --tp 4: one replica needs 4"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            replicas(number, tp, pp)


def test_a_device_of_ones_own_says_null_for_a_bandwidth_it_has_not() -> None:
    plain = describe_hardware(make_case(Question(SPEC, devices=Devices(TEN, 4), tensor_parallel_size=2)))
    assert (plain["num_devices"], plain["replicas"], plain["memory_bytes"]) == (4, 2, 10 * GIB)
    assert plain["bandwidth_bytes_per_second"] is None
    assert plain["interconnect"] is None
    h100 = find_gpu("h100")
    assert h100.interconnect is not None
    full = describe_hardware(ask(gpu=h100))
    assert full["bandwidth_bytes_per_second"] == h100.bandwidth_bytes_per_second
    assert full["interconnect"] == h100.interconnect._asdict()


class Fit(NamedTuple):
    """The result of `describe_fit` and the texts of its notes."""

    fit: Any
    remarks: list[str]


def described(found: Budget) -> Fit:
    notes = list[Note]()
    fit = describe_fit(found, notes)
    assert fit["fits"] is not any(note.code == "does-not-fit" for note in notes)
    return Fit(fit, [note.text for note in notes])


def fit_of(engine: str, weights_gib: int, **asked: Any) -> Fit:
    return described(budget_of(engine, weights_gib, **asked))


def test_the_parts_of_a_fit_stand_in_order_and_add_up() -> None:
    found = budget_of("logical", context=8192, batch=2)
    fit, remarks = described(found._replace(weights=found.weights._replace(replicated_bytes=123)))
    assert [(line["name"], line["bytes"]) for line in fit["lines"]] == [
        ("weights", 4 * GIB), ("KV cache", 2 * GIB), ("reserved (10 %)", GIB), ("free", 3 * GIB),
    ]  # fmt: skip
    assert (fit["device_bytes"], fit["weights_bytes"], fit["weights_replicated_bytes"]) == (10 * GIB, 4 * GIB, 123)
    assert (fit["activation_bytes"], fit["reserve_bytes"], fit["kv_cache_memory_bytes"]) == (0, GIB, 5 * GIB)
    assert (fit["fits"], fit["memory_context_tokens"], fit["max_batch_size"]) == (True, 5 * 4096, 5)
    assert not [remark for remark in remarks if "need" in remark]


def test_activations_stand_before_reserves_and_what_the_cache_may_not_have_is_a_reserve() -> None:
    fit, _ = fit_of("tensorrt-llm", 4)
    kinds = [line["kind"] for line in fit["lines"]]
    assert kinds == ["weights", "kv_cache", "activation", "reserve", "reserve", "free"]
    by_name = {line["name"]: line["bytes"] for line in fit["lines"]}
    activations = 8192 * (2 * 100 + 1000) * 2
    left = 10 * GIB - 4 * GIB - GIB - activations
    assert by_name["not used for the cache (1 - 0.9 of the free memory)"] == left - int(left * 0.9)
    assert fit["activation_bytes"] == activations
    assert fit["reserve_bytes"] == GIB + left - int(left * 0.9)
    assert sum(by_name.values()) == fit["device_bytes"]


def test_why_it_does_not_fit_is_said_with_what_would() -> None:
    # The weights leave no memory, so no context fits.
    for weights in (9, 12):
        fit, remarks = fit_of("logical", weights)
        assert not fit["fits"]
        assert (fit["max_context_tokens"], fit["max_batch_size"]) == (0, 0)
        assert remarks[-1] == (
            f"no memory is left for the cache: the weights take {weights}.00 GiB of the device's 10.00 GiB, "
            "and 1.00 GiB is reserved"
        )
    # One request needs 6 GiB, and 5 GiB is available: enough for 40,960 tokens.
    _, remarks = fit_of("logical", 4, context=6 * 8192)
    assert remarks[-1] == (
        "one request of 49,152 tokens needs 6.00 GiB of cache per device, but only 5.00 GiB is available; "
        "the longest context that fits is 40,960"
    )
    # With several requests, the longest context is that of several, so it is not printed for one.
    _, remarks = fit_of("logical", 4, context=6 * 8192, batch=2)
    assert remarks[-1].endswith("needs 6.00 GiB of cache per device, but only 5.00 GiB is available")
    # One fits, seven do not.
    fit, remarks = fit_of("logical", 4, context=8192, batch=7)
    assert remarks[-1] == (
        "7 requests of 8,192 tokens need 7.00 GiB of cache per device, but only 5.00 GiB is available; "
        "the largest batch that fits is 5"
    )
    assert (fit["fits"], fit["free_bytes"]) == (False, -2 * GIB)
    # A cache that takes exactly the available memory fits.
    assert fit_of("logical", 4, context=5 * 8192).fit["fits"]
    _, remarks = fit_of("logical", 4, context=5 * 8192, batch=2)
    assert remarks[-1].endswith("only 5.00 GiB is available; the largest batch that fits is 1")


@pytest.mark.parametrize(
    ("engine", "start", "option"),
    [
        ("vllm", "vLLM does not start: one request", "--max-model-len"),
        ("sglang", "one request", "--context-length"),
        ("tensorrt-llm", "one request", "--max_seq_len"),
    ],
)
def test_a_context_that_is_too_long_is_said_with_the_option_to_try(
    kvcalc: Any, engine: str, start: str, option: str
) -> None:
    asked = ("fit", "llama-3.1-8b", "--gpu", "rtx-4090", "--engine", engine)
    failed = kvcalc(*asked, "--context", "128k", "--json")
    longest = failed.json["fit"]["max_context_tokens"]
    [text] = [one["text"] for one in failed.json["warnings"] if one["code"] == "does-not-fit"]
    assert text.startswith(f"{start} of 131,072 tokens needs 16.")
    assert text.endswith(f"the longest context that fits is {longest:,}: {option} {longest}")
    shown = " ".join(kvcalc(*asked, "--context", "128k", "--format", "human").out.split())
    assert text in shown or "(131,072 tokens need 16.00 GiB per device, and" in shown
    assert kvcalc(*asked, "--context", str(longest)).status == 0


def test_memory_that_is_there_is_rounded_down_and_memory_that_is_needed_up() -> None:
    less = TEN._replace(memory_bytes=10 * GIB - 10)
    for weights, said in ((4, "needs 6.01 GiB of cache per device, but only 4.99 GiB is available"),
                          (9, "9.00 GiB of the device's 9.99 GiB, and 1.00 GiB is reserved")):  # fmt: skip
        _, remarks = fit_of("logical", weights, gpu=less, context=6 * 8192 + 1)
        assert said in remarks[-1]


def test_a_model_without_a_cache_has_no_limit_but_its_weights() -> None:
    # Engines keep no cache for an encoder after its forward pass.
    case = ask("vllm", context=512, model=load_model("bert-base"))
    # Exactly enough memory, and one byte too little.
    for pool, limit in ((0, None), (-1, 0)):
        found = Budget(case, WEIGHTS, Reserve([], {}), pool, pool)
        fit, _ = described(found)
        assert (fit["memory_context_tokens"], fit["max_batch_size"]) == (limit, limit)
        assert found.running_limit() == limit


def test_a_verdict_counts_one_devices_share() -> None:
    _, remarks = fit_of("logical", 4, context=24 * 8192, tp=4)
    assert "one request of 196,608 tokens needs 6.00 GiB of cache per device" in remarks[-1]


def test_how_many_requests_run_at_once() -> None:
    def limit(engine: str, weights_gib: int, tokens: int) -> int | None:
        return budget_of(engine, weights_gib, context=tokens).running_limit()

    assert [limit("logical", 4, tokens) for tokens in (8192, 8193, 4096)] == [5, 4, 10]
    assert (limit("logical", 12, 1), limit("logical", 9, 1)) == (0, 0)
    # In addition to its cache, each prompt takes activations (1,200 x 2 bytes per token) and logits.
    for tokens in (8192, 2000):
        assert limit("transformers", 4, tokens) == (6 * GIB - 512 * MIB) // (tokens * (TOKEN + 2400) + 300_000)


def test_what_else_grows_with_the_question_shrinks_the_limits() -> None:
    # In 5.5 GiB minus the logits, each token takes 131,072 bytes of cache and 2,400 bytes of prefill.
    fit, _ = fit_of("transformers", 4)
    assert fit["memory_context_tokens"] == (6 * GIB - 512 * MIB - 300_000) // (TOKEN + 2400)


def test_no_share_of_nothing_is_no_line() -> None:
    found = Budget(ask(), WEIGHTS, Reserve([Held("reserve", "all", 0)], {}), 6 * GIB, 6 * GIB)
    assert [line["name"] for line in described(found).fit["lines"]] == ["weights", "KV cache", "all", "free"]
