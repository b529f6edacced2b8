"""Drafted tokens in a question: the bytes, the document, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvcalc
from kvcalc.engines.command import Drafting
from kvcalc.errors import LayoutError, ModelError, UsageError
from kvcalc.model.drafting import Speculation
from kvcalc.question.question import SpeedQuestion
from kvcalc.server.checkpoint import checkpoint_of, drafting_of
from kvcalc.throughput.hardware import Devices, find_gpu
from tests.documents import estimate, texts
from tests.model.test_checkpoint import write

ENGINES = ("logical", "vllm", "sglang", "tensorrt-llm", "llama.cpp")

NGRAM = Speculation("ngram", 4, 1.6)
TRANSFORMERS: dict[str, Any] = {"engine": "transformers"}


def ask(name: str, speculative: Speculation | None, gpu: str | None = None, **asked: Any) -> dict[str, Any]:
    size = asked.pop("tensor_parallel_size", 1)
    devices = None if gpu is None else Devices(find_gpu(gpu), size)
    return estimate(
        kvcalc.load_model(name), speculative=speculative, devices=devices, tensor_parallel_size=size, **asked
    )


def test_a_question_without_drafting_has_none() -> None:
    assert ask("llama-3-8b", None)["speculative"] is None
    assert ask("llama-3-8b", None, "h100")["speculative"] is None


@pytest.mark.parametrize("speculative", [None, NGRAM])
def test_the_energy_is_per_token_that_is_kept(speculative: Speculation | None) -> None:
    """A step with drafted tokens keeps more than one token per sequence; they share its energy."""
    found = ask("llama-3-8b", speculative, "h100", engine="vllm", context_tokens=4096, batch_size=8)["throughput"]
    energy = found["energy"]
    assert energy["joules_per_token"] * found["decode_tokens_per_second"] == pytest.approx(energy["watts"])


@pytest.mark.parametrize("name", ["qwen3.6-27b", "glm-5.2", "deepseek-v3", "deepseek-v3.2"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_vllms_bytes_are_those_of_its_own_option(name: str, tokens: int) -> None:
    """`--num-speculative-tokens` was checked against vLLM's logs. Drafting with MTP counts the same blocks."""
    sizes: dict[str, Any] = {"context_tokens": 8192, "batch_size": 3, "engine": "vllm", "kv_memory_bytes": 40 * 2**30}
    own = ask(name, None, engine_settings={"num-speculative-tokens": str(tokens)}, **sizes)
    drafted = ask(name, Speculation("mtp", tokens), **sizes)
    assert drafted["engine"] == own["engine"]
    for figure in ("total_bytes", "bytes_per_device", "bytes_per_token"):
        assert drafted["kv_cache"][figure] == own["kv_cache"][figure]
    assert drafted["fit"]["max_batch_size"] == own["fit"]["max_batch_size"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_parts_add_up_to_the_bytes_without_drafting(engine: str) -> None:
    for name, asked in (
        ("deepseek-v3", Speculation("mtp", 3)),
        ("llama-3.1-8b", Speculation("eagle", 4)),
        ("llama-3.1-8b", Speculation("draft", 4, draft_model=kvcalc.load_model("llama-3.2-1b"))),
        ("llama-3.1-8b", Speculation("ngram", 4)),
    ):
        sizes: dict[str, Any] = {"context_tokens": 5000, "batch_size": 6, "engine": engine}
        # llama.cpp splits no heads.
        sizes["tensor_parallel_size"] = 1 if engine == "llama.cpp" else 2
        plain, drafted = ask(name, None, **sizes)["kv_cache"], ask(name, asked, **sizes)
        added = drafted["speculative"]["cache_bytes"]
        assert drafted["kv_cache"]["bytes_per_device"] == plain["bytes_per_device"] + added
        assert added > 0 or (asked.method == "ngram" and added == 0)
        cache = drafted["kv_cache"]
        assert cache["bytes_per_sequence"] == cache["fixed_bytes_per_sequence"] + 5000 * cache["bytes_per_token"]
        if "pool_lines" in drafted["engine"]:
            assert sum(line["bytes"] for line in drafted["engine"]["pool_lines"]) == cache["bytes_per_device"]
        if "request_lines" in drafted["engine"]:
            one = ask(name, asked, **{**sizes, "batch_size": 1})
            assert sum(line["bytes"] for line in one["engine"]["request_lines"]) == one["kv_cache"]["bytes_per_device"]


def test_an_mtp_layer_keeps_what_a_layer_of_the_model_keeps() -> None:
    plain, drafted = ask("deepseek-v3", None), ask("deepseek-v3", Speculation("mtp", 3))
    assert plain["kv_cache"]["total_bytes"] * 62 == drafted["kv_cache"]["total_bytes"] * 61
    # The model itself has 61 layers, whatever drafts for it.
    assert drafted["model"] == plain["model"]
    assert drafted["variants"] == plain["variants"]
    assert drafted["weights"] == plain["weights"]
    rows = [(row["first"], row["last"]) for row in drafted["kv_cache"]["layers"]]
    assert rows == [(0, 60), (61, 61)]
    assert (drafted["speculative"]["first_layer"], drafted["speculative"]["num_layers"]) == (61, 1)


def test_a_draft_models_whole_cache_is_counted() -> None:
    small = ask("llama-3.2-1b", None, context_tokens=8192, batch_size=4)
    plain = ask("llama-3-70b", None, context_tokens=8192, batch_size=4)
    model = kvcalc.load_model("llama-3.2-1b")
    both = ask("llama-3-70b", Speculation("draft", 4, draft_model=model), context_tokens=8192, batch_size=4)
    assert both["kv_cache"]["total_bytes"] == plain["kv_cache"]["total_bytes"] + small["kv_cache"]["total_bytes"]
    assert both["speculative"]["draft_model"] == "llama-3.2-1b"
    assert both["speculative"]["weights_bytes"] == small["weights"]["bytes"]


@pytest.mark.parametrize(
    ("engine", "slots", "served"),
    [("sglang", 19, 19), ("tensorrt-llm", 8, 8), ("vllm", 0, 4), ("llama.cpp", 0, 0), ("logical", 0, 0)],
)
def test_a_running_request_has_slots_for_drafted_tokens(engine: str, slots: int, served: int) -> None:
    asked = Speculation("ngram", 4, 2.0)
    sizes: dict[str, Any] = {"engine": engine, "context_tokens": 4096}
    found = ask("llama-3.1-8b", asked, **sizes)
    longer = ask("llama-3.1-8b", None, engine=engine, context_tokens=4096 + slots)
    assert found["speculative"]["lookahead_tokens"] == slots
    assert found["kv_cache"]["total_bytes"] == longer["kv_cache"]["total_bytes"]
    speed = kvcalc.SpeedQuestion(input_tokens=4000, output_tokens=96, concurrency=8)
    load = ask("llama-3.1-8b", asked, "h100", engine=engine, speed=speed)
    assert load["speculative"]["lookahead_tokens"] == served


def test_an_eagle_head_of_another_kind_has_a_cache_of_its_own(tmp_path: Path) -> None:
    """The head of an MLA model may have K and V, as Kimi K2's has."""
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 7168, "num_attention_heads": 64,
        "num_key_value_heads": 64, "head_dim": 128, "intermediate_size": 18_432, "vocab_size": 163_840,
        "draft_vocab_size": 32_000, "max_position_embeddings": 131_072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    head = kvcalc.load_model(str(path))
    for engine in ("sglang", "tensorrt-llm", "logical"):
        sizes: dict[str, Any] = {"context_tokens": 4096, "engine": engine}
        plain = ask("kimi-k2", None, **sizes)["kv_cache"]["total_bytes"]
        drafted = ask("kimi-k2", Speculation("eagle", 3, draft_model=head), **sizes)
        # 64 heads of 128, K and V, in 16 bits; and up to three slots and a page more.
        assert drafted["kv_cache"]["total_bytes"] - plain >= 4096 * 64 * 2 * 128 * 2
        assert drafted["kv_cache"]["total_bytes"] - plain <= (4096 + 64) * (64 * 2 * 128 * 2) + 64 * 61 * 576 * 2
        assert drafted["kv_cache"]["layers"][-1]["kind"] == "full_attention"


def test_the_weights_that_draft_take_memory() -> None:
    sizes: dict[str, Any] = {"engine": "vllm", "tensor_parallel_size": 8}
    plain = ask("deepseek-v3", None, "h200", **sizes)["fit"]
    drafted = ask("deepseek-v3", Speculation("mtp", 3, 2.4), "h200", **sizes)
    more = drafted["speculative"]["weights_bytes"]
    assert more > 10**9
    assert drafted["fit"]["weights_bytes"] == plain["weights_bytes"] + more
    assert drafted["fit"]["kv_cache_memory_bytes"] == plain["kv_cache_memory_bytes"] - more
    lines = {line["name"]: line["bytes"] for line in drafted["fit"]["lines"]}
    assert (lines["weights"] + lines["rotary tables"], lines["draft weights"]) == (plain["weights_bytes"], more)
    assert sum(lines.values()) == drafted["fit"]["device_bytes"]
    assert drafted["fit"]["max_batch_size"] < plain["max_batch_size"]


MTP_CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "kv_lora_rank": 64, "q_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 1000, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1,
}  # fmt: skip


def test_the_files_of_a_checkpoint_hold_the_mtp_layers_already(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MTP_CONFIG))
    asked = Speculation("mtp", 2, 1.5)
    counted = ask(str(tmp_path), asked, "h100", engine="logical")
    assert counted["speculative"]["weights_bytes"] > 0
    size = counted["fit"]["weights_bytes"] + 12345
    write(tmp_path / "model.safetensors", size)
    held = ask(str(tmp_path), asked, "h100", engine="logical")
    assert held["speculative"]["weights_bytes"] == 0
    assert held["fit"]["weights_bytes"] == size


@pytest.mark.parametrize("name", ["model.layers.4.mlp.x", "mtp.layers.0.x", "model.mtp_layers.0.x"])
def test_mtp_layers_in_files_count_only_if_they_draft(tmp_path: Path, name: str) -> None:
    """As in the config alone, whose weights the folder then has."""
    (tmp_path / "config.json").write_text(json.dumps(MTP_CONFIG))
    asked = Speculation("mtp", 2, 1.5)
    counted = [ask(str(tmp_path), how, "h100") for how in (None, asked)]
    size, more = counted[0]["weights"]["bytes"], counted[1]["speculative"]["weights_bytes"]
    sizes = {"model.layers.3.mlp.x": size, name: more}
    header, end = dict[str, Any](), 0
    for tensor, length in sizes.items():
        header[tensor] = {"dtype": "U8", "shape": [length], "data_offsets": [end, end + length]}
        end += length
    write(tmp_path / "model.safetensors", header=header, data=end)
    held = [ask(str(tmp_path), how, "h100") for how in (None, asked)]
    assert [answer["weights"]["bytes_source"] for answer in held] == ["safetensors", "safetensors"]
    for mine, theirs in zip(held, counted):
        assert mine["weights"]["bytes"] == theirs["weights"]["bytes"] == size
        assert mine["fit"]["weights_bytes"] == theirs["fit"]["weights_bytes"]


def test_the_speed_and_its_parts() -> None:
    asked = Speculation("draft", 4, 3.0, kvcalc.load_model("llama-3.2-1b"))
    sizes: dict[str, Any] = {"engine": "vllm", "tensor_parallel_size": 4, "batch_size": 16, "dtype": "fp8"}
    plain, drafted = ask("llama-3-70b", None, "h100", **sizes), ask("llama-3-70b", asked, "h100", **sizes)
    found, speed, before = drafted["speculative"], drafted["throughput"], plain["throughput"]
    assert found["verify_seconds"] + found["draft_seconds"] == pytest.approx(speed["decode_step_seconds"])
    assert found["seconds_without_drafting"] == before["decode_step_seconds"]
    assert speed["tokens_per_second_per_sequence"] == pytest.approx(3 / speed["decode_step_seconds"])
    assert speed["decode_tokens_per_second"] == pytest.approx(48 / speed["decode_step_seconds"])
    rates = speed["decode_tokens_per_second"] / before["decode_tokens_per_second"]
    assert found["speedup"] == pytest.approx(rates)
    assert sum(speed["parts"].values()) == pytest.approx(speed["decode_step_seconds"])
    assert speed["roofline_decode_step_seconds"] <= speed["low_seconds"] <= speed["decode_step_seconds"]
    assert speed["prefill_seconds"] > before["prefill_seconds"]


def test_drafting_is_outside_the_fit_and_the_range_is_wider() -> None:
    sizes: dict[str, Any] = {"engine": "vllm"}
    plain, drafted = ask("llama-3.1-8b", None, "h100", **sizes), ask("llama-3.1-8b", NGRAM, "h100", **sizes)
    ratios = [
        found["throughput"]["high_seconds"] / found["throughput"]["decode_step_seconds"] for found in (plain, drafted)
    ]
    assert ratios[0] < ratios[1]
    notes = [note["text"] for note in drafted["warnings"] if note["code"] == "not-fitted"]
    assert notes == ["not fitted for drafted tokens: the estimate is less certain"]


def test_the_batch_at_which_drafting_stops_paying() -> None:
    asked = Speculation("ngram", 4, 1.6)
    sizes: dict[str, Any] = {"engine": "vllm", "tensor_parallel_size": 4, "context_tokens": 4096}
    batch = ask("llama-3-70b", asked, "h100", **sizes)["speculative"]["break_even_batch"]
    there, before = (
        ask("llama-3-70b", asked, "h100", batch_size=size, **sizes)["speculative"] for size in (batch, batch - 1)
    )
    assert there["speedup"] <= 1 < before["speedup"]


def test_serving_with_drafted_tokens_is_faster_where_they_pay() -> None:
    speed = kvcalc.SpeedQuestion(input_tokens=1000, output_tokens=1000, concurrency=4)
    sizes: dict[str, Any] = {"engine": "vllm", "speed": speed, "tensor_parallel_size": 8}
    plain = ask("deepseek-v3", None, "h200", **sizes)["throughput"]["serving"]
    drafted = ask("deepseek-v3", Speculation("mtp", 1, 1.85), "h200", **sizes)["throughput"]["serving"]
    assert drafted["tpot_seconds"] < plain["tpot_seconds"]
    assert drafted["tokens_per_second"] > plain["tokens_per_second"]


def test_the_draft_models_of_two_questions_are_told_apart() -> None:
    times = []
    for name in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.2-1b"):
        asked = Speculation("draft", 4, 3.0, kvcalc.load_model(name))
        times.append(ask("llama-3-70b", asked, "h100", tensor_parallel_size=4)["speculative"]["draft_seconds"])
    assert times[0] == times[2] < times[1]


def test_an_assumed_eagle_head_is_said() -> None:
    found = ask("llama-3.1-8b", Speculation("eagle", 3))
    assert [note["code"] for note in found["warnings"] if note["part"] == "speculative"] == ["assumed-head"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Speculation("mtp", 3), "--speculative mtp:3"),
        (Speculation("mtp", 3, 4.1), "--acceptance-length 4.1"),
        (Speculation("mtp", 3, 0.9), "--acceptance-length 0.9"),
        (Speculation("mtp", 0, 1.0), "--speculative mtp:0"),
        (Speculation("mtp", 65, 2.0), "--speculative mtp:65"),
        (Speculation("medusa", 3, 2.0), "--speculative medusa:3"),
        (Speculation("draft", 3, 2.0), "draft model is missing"),
    ],
)
def test_values_out_of_range_are_refused_with_what_to_type(asked: Speculation, message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        ask("deepseek-v3", asked, "h200", tensor_parallel_size=8)
    assert message in refusal.value.message
    assert refusal.value.hint


def test_a_draft_model_that_nothing_uses_is_refused() -> None:
    with pytest.raises(UsageError, match="--draft-model llama-3-8b"):
        ask("deepseek-v3", Speculation("mtp", 3, 2.0, kvcalc.load_model("llama-3-8b")))


def test_transformers_assists_one_sequence_and_has_no_mtp() -> None:
    found = ask("llama-3-8b", Speculation("draft", 3, draft_model=kvcalc.load_model("llama-3.2-1b")), **TRANSFORMERS)
    assert found["speculative"]["cache_bytes"] == 4096 * 16 * 8 * 2 * 64 * 2
    for asked in (Speculation("mtp", 3), Speculation("eagle", 3)):
        with pytest.raises(UsageError, match="transformers drafts with a draft model or n-grams"):
            ask("deepseek-v3", asked, **TRANSFORMERS)
    assert [note["code"] for note in found["warnings"]] == ["one-sequence"]


def test_mlx_drafts_with_a_model_for_one_sequence() -> None:
    small = kvcalc.load_model("llama-3.2-1b")
    found = ask("llama-3-8b", Speculation("draft", 3, draft_model=small), engine="mlx")
    assert found["speculative"]["cache_bytes"] == 4096 * 16 * 8 * 2 * 64 * 2
    assert [note["code"] for note in found["warnings"]] == ["one-sequence"]
    for name, asked in (("deepseek-v3", "mtp"), ("llama-3-8b", "eagle"), ("llama-3-8b", "ngram")):
        with pytest.raises(UsageError, match="mlx drafts with a draft model only"):
            ask(name, Speculation(asked, 3), engine="mlx")
    with pytest.raises(UsageError, match="mlx drafts no tokens for qwen3-next-80b-a3b"):
        ask("qwen3-next-80b-a3b", Speculation("draft", 3, draft_model=small), engine="mlx")


@pytest.mark.parametrize(("engine", "running"), [("mlx", 1), ("transformers", 1), ("llama.cpp", 4)])
def test_an_engine_that_drafts_for_one_sequence_lets_the_others_wait(engine: str, running: int) -> None:
    small = Speculation("draft", 3, 2.0, kvcalc.load_model("llama-3.2-1b"))
    load = SpeedQuestion(input_tokens=1000, output_tokens=100, concurrency=4)
    found = ask("llama-3-8b", small, "m2-ultra", engine=engine, speed=load)
    assert (found["workload"]["batch_size"], found["throughput"]["serving"]["running_requests"]) == (running, running)
    plain = ask("llama-3-8b", None, "m2-ultra", engine=engine, speed=load)
    assert plain["throughput"]["serving"]["running_requests"] == 4


@pytest.mark.parametrize(("engine", "reserves"), [("vllm", False), ("sglang", False), ("tensorrt-llm", True)])
def test_a_drafting_engine_admits_requests_like_itself(engine: str, reserves: bool) -> None:
    """More requests run than fit at their full length, if the engine does not reserve it."""
    load = SpeedQuestion(input_tokens=100, output_tokens=7900, concurrency=200)
    settings = {"max-running-requests": "200"} if engine == "sglang" else {}
    for asked in (None, Speculation("ngram", 3, 2.0), Speculation("eagle", 3, 2.0)):
        found = ask("llama-3.1-8b", asked, "h100", engine=engine, speed=load, engine_settings=settings)
        assert found["workload"]["batch_size"] < 200
        running = found["throughput"]["serving"]["running_requests"]
        # Answers vary by a third, and long ones hold their places for longer.
        expected = found["workload"]["batch_size"] * 8000 / (100 + 7900 * (1 + 1 / 9))
        assert (running == pytest.approx(expected, rel=0.04)) == reserves


@pytest.mark.settled
def test_sglang_runs_48_requests_if_it_drafts_and_no_limit_is_given() -> None:
    load = SpeedQuestion(input_tokens=100, output_tokens=100, concurrency=200)
    for asked, running in ((None, 200), (Speculation("ngram", 3, 2.0), 48)):
        found = ask("llama-3.1-8b", asked, "h100", engine="sglang", speed=load)
        # A place is taken again some steps after its answer has ended.
        assert 0.8 * running < found["throughput"]["serving"]["running_requests"] <= running
        codes = [note["code"] for note in found["warnings"] if note["part"] == "speculative"]
        assert ("running-limit" in codes) == (running == 48)


DFLASH = {
    "model_type": "qwen3", "num_hidden_layers": 5, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 151_936,
    "max_position_embeddings": 40_960, "torch_dtype": "bfloat16", "block_size": 16,
}  # fmt: skip


def test_a_dflash_head_keeps_its_layers_and_drafts_in_one_pass() -> None:
    head = kvcalc.read_config(DFLASH, "dflash", "")
    asked = Speculation("dflash", 15, 5.0, head)
    plain = ask("qwen3-8b", None, "h100", engine="sglang", context_tokens=4096)
    found = ask("qwen3-8b", asked, "h100", engine="sglang", context_tokens=4096)
    row = 2 * 8 * 128 * 2
    lines = {line["name"]: line["bytes"] for line in found["engine"]["pool_lines"]}
    assert lines["cache of the draft model"] == (4096 + 1) * 5 * row
    assert lines["slots for drafted tokens"] == 31 * (36 + 5) * row
    assert found["kv_cache"]["total_bytes"] == plain["kv_cache"]["total_bytes"] + found["speculative"]["cache_bytes"]
    # 15 tokens take little longer than one, because they are drafted in one pass.
    one = ask("qwen3-8b", asked._replace(num_tokens=1, acceptance_length=2.0), "h100", engine="sglang")
    assert found["speculative"]["draft_seconds"] < 2 * one["speculative"]["draft_seconds"]


def test_dflash_needs_a_head_and_an_engine_that_has_it() -> None:
    head = kvcalc.read_config(DFLASH, "dflash", "")
    with pytest.raises(UsageError, match="dflash:15: the draft model is missing"):
        ask("qwen3-8b", Speculation("dflash", 15), engine="sglang")
    with pytest.raises(UsageError, match=r"DFlash is not modelled for llama\.cpp"):
        ask("qwen3-8b", Speculation("dflash", 15, None, head), engine="llama.cpp")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_the_lines_of_a_request_add_up_to_its_bytes(engine: str) -> None:
    small = kvcalc.load_model("llama-3.2-1b")
    for asked in (Speculation("eagle", 3), Speculation("eagle1", 3), Speculation("draft", 3, None, small)):
        engine_part = ask("llama-3.1-8b", asked, engine=engine, context_tokens=5000)["engine"]
        lines = engine_part.get("request_lines") or engine_part["pool_lines"]
        assert sum(line["bytes"] for line in lines) == engine_part["request_bytes"]


def test_mlx_counts_a_draft_model_in_its_own_types() -> None:
    small = kvcalc.load_model("llama-3.2-1b")
    asked = Speculation("draft", 3, 2.0, small)
    sizes = [
        ask("llama-3-8b", asked, "m2-ultra", engine="mlx", dtype=dtype)["speculative"]["weights_bytes"]
        for dtype in ("bf16", "int8", "mlx-8bit")
    ]
    assert sizes[0] > sizes[1] == sizes[2]


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(LayoutError, match="--pp 2"):
        ask("llama-3-8b", Speculation("ngram", 3), pipeline_parallel_size=2)


def test_a_draft_model_that_cannot_be_split_is_refused() -> None:
    small = kvcalc.load_model("qwen2.5-0.5b")
    with pytest.raises(LayoutError, match="14 attention heads"):
        ask("qwen2.5-72b", Speculation("draft", 3, draft_model=small), tensor_parallel_size=8)


def test_vllms_own_option_must_agree() -> None:
    settings = {"num-speculative-tokens": "2"}
    with pytest.raises(UsageError, match="--num-speculative-tokens 2 contradicts"):
        ask("deepseek-v3", Speculation("mtp", 3), engine="vllm", engine_settings=settings)
    same = ask("deepseek-v3", Speculation("mtp", 2), engine="vllm", engine_settings=settings)
    assert same["engine"]["num_speculative_tokens"] == 2


ASSISTANT: dict[str, Any] = {
    "model_type": "gemma4_assistant", "backbone_hidden_size": 5376, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma4_text", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
        "vocab_size": 262_144, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 1024,
    },
}  # fmt: skip


@pytest.mark.parametrize("engine", ["vllm", "logical"])
def test_gemma_4s_own_drafter_adds_weights_and_no_cache(engine: str) -> None:
    """Gemma4MTP, gemma4_mtp.py of vLLM 0.33.0: layers without K and V, which read the cache of the model.

    In 16 bits: the embedding, which is the output head, two projections between the widths, and per layer an MLP,
    queries and output of 4 heads of 256 or 512, four norms and one of the queries.
    """
    drafter = kvcalc.read_config(ASSISTANT, "assistant", "x")
    asked: dict[str, Any] = {"engine": engine, "context_tokens": 8192, "batch_size": 3}
    plain, drafted = (
        ask("gemma-4-31b", None, **asked),
        ask("gemma-4-31b", Speculation("draft", 4, 2.0, drafter), **asked),
    )
    assert drafted["kv_cache"]["total_bytes"] == plain["kv_cache"]["total_bytes"]
    layers = 4 * 3 * 1024 * 2048 + 2 * 1024 * (3 * 1024 + 2048) + 4 * 4 * 1024 + 3 * 256 + 512
    weights = 262_144 * 1024 + 3 * 5376 * 1024 + layers + 1024
    assert drafted["speculative"]["weights_bytes"] == 2 * weights == 641_241_600
    assert drafted["speculative"]["cache_bytes"] == 0


def test_gemma_4s_own_drafter_is_for_its_model_and_for_engines_that_let_it_read_the_cache() -> None:
    drafter = kvcalc.read_config(ASSISTANT, "assistant", "x")
    asked = Speculation("draft", 4, 2.0, drafter)
    with pytest.raises(UsageError, match="for a model of a different width than gemma-4-e2b"):
        ask("gemma-4-e2b", asked, engine="vllm")
    with pytest.raises(UsageError, match="reads the model's cache is not modelled for sglang"):
        ask("gemma-4-31b", asked, engine="sglang")
    with pytest.raises(ModelError, match="only reads that model's cache"):
        estimate(drafter, context_tokens=100)
    found = ask("gemma-4-31b", asked, "h100", engine="vllm", context_tokens=8192, tensor_parallel_size=2)
    assert found["throughput"] is None
    assert "drafter that reads the model's cache" in " ".join(texts(found))
    # vLLM calls it MTP with a checkpoint.
    assert drafting_of(asked) == Drafting("mtp", 4, checkpoint_of(drafter).name)
