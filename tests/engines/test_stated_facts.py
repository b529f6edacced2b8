"""What a log states is in every reading of it, and what it leaves open is read with each usual value."""

from __future__ import annotations

import pytest

import kvcalc
from kvcalc.engines import log_reader
from kvcalc.engines.log_lines import Fact, Log
from kvcalc.model.spec import ModelSpec


def values(engine: str, spec: ModelSpec, option: str, **facts: str) -> set[str | None]:
    """The values of an option in all readings of a log with these facts. None if a reading does not set it.

    Readings with other caches than the model's leave out what does not change those.
    """
    if engine == "vllm":
        facts["version"] = "0.33.0"  # the releases differ in what changes a pool
    log = Log(engine, 1, {name: Fact(text, 1) for name, text in facts.items()}, [], [], [])
    readings = log_reader(engine).readings(log, spec)
    return {reading.settings.get(option) for reading in readings if reading.spec in (None, spec)}


@pytest.mark.parametrize(
    ("engine", "model", "option", "fact", "left_open", "stated"),
    [
        ("llama.cpp", "llama-3.1-8b", "parallel", "parallel", {"1", "4"}, {"1": {"1"}, "3": {"3"}, "0": {"1", "4"}}),
        ("llama.cpp", "llama-3.1-8b", "kv-unified", "kv_unified", {None, ""}, {"true": {""}, "false": {None}}),
        ("llama.cpp", "gpt-oss-20b", "swa-full", "swa_full", {None, ""}, {"true": {""}}),
        ("llama.cpp", "llama-3.1-8b", "flash-attn", "flash_attn", {None, "off"},
         {"0": {"off"}, "false": {"off"}, "1": {"on"}, "true": {"on"}, "auto": {None, "off"}}),
        ("llama.cpp", "llama-3.1-8b", "ubatch-size", "ubatch_size", {None}, {"256": {"256"}}),
        ("llama.cpp", "gpt-oss-20b", "ubatch-size", "ubatch_size", {None, "64", "128", "256", "1024", "2048"},
         {"256": {"256"}}),
        ("vllm", "gpt-oss-20b", "max-num-batched-tokens", "max_num_batched_tokens",
         {"2048", "8192", "16384"},
         {"1024": {"1024"}, "0": {"2048", "8192", "16384"}}),
        ("vllm", "llama-3.1-8b", "max-num-batched-tokens", "max_num_batched_tokens", {None}, {"1024": {"1024"}}),
        ("vllm", "gpt-oss-20b", "no-async-scheduling", "async_scheduling", {None, ""},
         {"True": {None}, "False": {""}}),
        ("vllm", "qwen3.6-27b", "enable-prefix-caching", "enable_prefix_caching", {None, ""},
         {"True": {""}, "False": {None}}),
        ("vllm", "qwen3.6-27b", "no-enable-prefix-caching", "enable_prefix_caching", {None, ""},
         {"True": {None}, "False": {""}}),
        ("vllm", "deepseek-v3", "block-size", "block_size", {"16", "32", "64", "128"}, {"32": {"32"}}),
        ("vllm", "llama-3.1-8b", "decode-context-parallel-size", "token_ranks", {None}, {"2": {"2"}}),
        ("sglang", "llama-3.1-8b", "page-size", "page_size", {None}, {"16": {"16"}}),
        ("sglang", "gpt-oss-20b", "swa-full-tokens-ratio", "swa_full_tokens_ratio", {None}, {"0.5": {"0.5"}}),
        ("tensorrt-llm", "llama-3.1-8b", "tokens-per-block", "tokens_per_block", {"16", "32", "64", "128"},
         {"8": {"8"}}),
    ],
)  # fmt: skip
def test_a_stated_setting_is_in_every_reading(
    engine: str, model: str, option: str, fact: str, left_open: set[str | None], stated: dict[str, set[str | None]]
) -> None:
    spec = kvcalc.load_model(model)
    assert values(engine, spec, option) == left_open
    assert {text: values(engine, spec, option, **{fact: text}) for text in stated} == stated


@pytest.mark.parametrize(
    ("model", "has_windows", "has_latent"),
    [("llama-3.1-8b", False, False), ("gpt-oss-20b", True, False), ("deepseek-v3", False, True)],
)
def test_llama_cpp_reads_a_log_in_more_ways_only_for_what_the_model_has(
    model: str, has_windows: bool, has_latent: bool
) -> None:
    log, spec = Log("llama.cpp", 1, {}, [], [], []), kvcalc.load_model(model)
    readings = list(log_reader("llama.cpp").readings(log, spec))
    remarks = {remark for reading in readings for remark in reading.taken}
    assert any(remark.startswith("--ubatch-size") for remark in remarks) is has_windows
    assert ("a file with K and V of every head" in remarks) is has_latent
    # Any other model is read as it is.
    assert {reading.spec in (None, spec) for reading in readings} == ({True, False} if has_latent else {True})
