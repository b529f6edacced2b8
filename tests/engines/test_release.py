"""Releases of engines: every way to write one, their order, and the rules they count by."""

from __future__ import annotations

import re
from typing import Any

import pytest

import kvcalc
from kvcalc.engines import ENGINES
from kvcalc.engines.declarations import table
from kvcalc.errors import LayoutError, UsageError
from kvcalc.model.presets import list_presets, shipped_table
from kvcalc.model.resolve import load_model, spec_of
from kvcalc.releases import Release, dates_of, parse_release, release_of, split_engine, step_at
from tests.documents import estimate
from tests.engines.models import ask, plain
from tests.rows import every_row

# Versions of one engine, oldest first. No two of them are equal.
IN_ORDER = (
    "0.9.2", "0.12.0.dev3", "0.12.0a1", "0.12.0b2", "0.12.0rc1.dev9+g123", "0.12.0rc1", "0.12.0rc2", "0.12.0rc2.post1",
    "0.12.0", "0.12.0.post1", "0.12.0.post2", "0.12.1rc1", "v0.12.1", "0.12", "0.13.0rc1", "0.13.0", "1.0.0rc3", "1.0",
)  # fmt: skip


def test_versions_are_ordered_by_age() -> None:
    found = [release_of(f"vllm@{text}") for text in IN_ORDER]
    assert None not in found
    assert found == sorted(set(found), key=lambda release: release or Release.of(0))


@pytest.mark.parametrize(
    ("engine", "text", "same"),
    [
        ("vllm", "v0.11.2", "0.11.2"),
        ("vllm", "0.12.0-rc1", "0.12.0rc1"),
        ("vllm", "0.19.0+cu129", "0.19.0"),
        ("sglang", "v0.5.9-cu129-amd64", "0.5.9"),
        ("sglang", "0.5.6.post2-rocm700-mi35x", "0.5.6.post2"),
        ("vllm", "rocm7.0-vllm_0.11.1_instinct", "0.11.1"),
        ("tensorrt-llm", "release:1.2.0rc6.post2", "1.2.0rc6.post2"),
        ("llama.cpp", "6097", "b6097"),
        ("llama.cpp", "6097 (9515c613)", "b6097"),
        ("llama.cpp", "server-cuda-b6097", "b6097"),
        ("vllm", "2026-05-01", "0.20.0"),
        ("vllm", "2026-02", "0.16.0"),
        ("vllm", "2025-12", "0.13.0"),
        ("vllm", "nightly-20260501", "0.20.0"),
        ("vllm", "nightly-dev-20260501-5b8c30d6", "0.20.0"),
        ("llama.cpp", "2025-08-06", "b6097"),
        ("mlx", "v0.30.7", "0.30.7"),
        ("mlx", "mlx-lm-0.28.4", "0.28.4"),
        ("mlx", "2026-02-20", "0.30.7"),
    ],
)
def test_two_spellings_of_one_release(engine: str, text: str, same: str) -> None:
    release = parse_release(engine, text).release
    assert release is not None
    assert release == parse_release(engine, same).release


RELEASED = [name for name in ENGINES if name != "logical"]


@pytest.mark.parametrize("engine", RELEASED)
def test_nightly_is_the_newest_release_and_latest_the_newest_stable_one(engine: str) -> None:
    for text in ("nightly", "Nightly", "main"):
        asked = parse_release(engine, text)
        assert (asked.release, asked.is_placed) == (None, True)
    for text in ("latest", "stable"):
        asked = parse_release(engine, text)
        assert (asked.release, asked.is_placed) == (release_of(engine), True)


@pytest.mark.parametrize("engine", RELEASED)
def test_without_a_release_the_newest_stable_one_counts(engine: str) -> None:
    """Its version is printed, and no pre-release among the known ones comes into it."""
    dated = [(release_of(f"{engine}@{text}"), text) for _, text in dates_of(engine)]
    is_stable = not dated or (dated[-1][0] or Release.of(0)).phase == 0
    default = release_of(engine)
    assert (default is None) == is_stable
    assert (default or Release.of(0)).phase == 0
    document = ask(plain(), engine, 1000)
    version = document["engine"]["version"].split()[-1]
    if engine != "llama.cpp":  # its rules were read through its Python package, which has versions of its own
        assert default in (None, release_of(f"{engine}@{version}"))
        assert (release_of(f"{engine}@{version}") or Release.of(0)).phase == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert [one for one in document["warnings"] if one["code"] == "release"] == []


@pytest.mark.parametrize(
    ("preset", "changed"),
    [("gpt-oss-120b", "1.3.0rc28"), ("gemma-3-27b", "1.3.0rc28"), ("qwen3-next-80b-a3b", "1.3.0rc24")],
)
def test_tensorrt_llms_pools_of_a_pre_release_count_only_by_its_name(preset: str, changed: str) -> None:
    def cache(engine: str) -> Any:
        return estimate(load_model(preset), context_tokens=32768, batch_size=8, engine=engine)["kv_cache"][
            "total_bytes"
        ]

    assert cache("tensorrt-llm") == cache("tensorrt-llm@1.2.1") == cache("tensorrt-llm@latest")
    assert cache("tensorrt-llm") != cache(f"tensorrt-llm@{changed}") == cache("tensorrt-llm@nightly")


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("vllm", "nightly-5b8c30d62b754b57"),
        ("vllm", "5b8c30d62b75"),
        ("tensorrt-llm", "gpt-oss-dev"),
        ("sglang", "rocm7.1.1-ubuntu24.04-pytorch2.9-atom0.1.1-MI350x"),
        ("llama.cpp", "0.3.16"),
        ("transformers", "2026-05-01"),
        ("sglang", "glm5-hopper"),
        ("sglang", "deepseek_v4"),
        ("vllm", "qwen3.5"),
        ("llama.cpp", "server-vulkan"),
    ],
)
def test_a_name_without_a_known_place_is_the_newest_and_says_so(engine: str, text: str) -> None:
    asked = parse_release(engine, text)
    assert (asked.release, asked.is_placed) == (None, False)
    [warning] = [one for one in ask(plain(), f"{engine}@{text}", 64)["warnings"] if one["code"] == "release"]
    assert warning["text"].startswith(f"{engine}@{text.casefold()} counts by the rules read from ")
    assert "the place of this name among the releases is not known" in warning["text"]


@every_row("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers"])
@every_row("text", [
        "nope", "newest", "0.9.x", "0", "2026-13-45", "1" * 200, "-", "@", "rc1", "v0.9.x", "v0,9", "b6o97",
        "release-0.9.x", "glm5-v0.9.x", "lastest", "glm5 hopper", "ab-1",
    ])  # fmt: skip
def test_what_is_no_release_is_refused_with_an_example(engine: str, text: str) -> None:
    with pytest.raises(UsageError, match="not a release") as caught:
        parse_release(engine, text)
    assert caught.value.exit_code == 2
    example = str(caught.value.hint).removeprefix("write ").split(",")[0]
    assert split_engine(example)[1] is not None


@pytest.mark.parametrize("engine", [name for name in shipped_table("engine_releases") if dates_of(name)])
def test_release_dates_are_in_order_and_readable(engine: str) -> None:
    days = [day for day, _ in dates_of(engine)]
    releases = [release_of(f"{engine}@{text}") for _, text in dates_of(engine)]
    assert days == sorted(set(days))
    assert None not in releases
    assert len(set(releases)) == len(releases)
    # A day's release is the one of that day, and on the day before, the one before.
    for (_, before), (day, text) in zip(dates_of(engine), dates_of(engine)[1:]):
        assert release_of(f"{engine}@{day}") == release_of(f"{engine}@{text}") != release_of(f"{engine}@{before}")


def test_a_release_uses_the_newest_step_that_is_not_newer() -> None:
    since = [Release.of(0, 5), Release.of(0, 5, 9), Release.of(1)]
    chosen = {text: step_at(since, release_of(f"sglang@{text}")) for text in ("0.4.9", "0.5.0", "0.5.9rc1", "0.5.9")}
    assert chosen == {"0.4.9": None, "0.5.0": 0, "0.5.9rc1": 0, "0.5.9": 1}
    assert step_at(since, release_of("sglang@0.5")) == 1
    assert step_at(since, release_of("sglang@7.0")) == step_at(since, None) == 2


OTHERS = {"sglang": "0.5.9", "tensorrt-llm": "1.1", "llama.cpp": "b6097", "transformers": "4.50"}
OWN = {"sglang": "v0.5.23", "llama.cpp": "0.3.36", "transformers": "5.24.0"}


@pytest.mark.parametrize("engine", OTHERS)
def test_engines_with_one_set_of_rules_count_every_release_by_them(engine: str) -> None:
    settings = {"parallel": "1"} if engine == "llama.cpp" else {}  # the default number changed with a build
    newest = ask(plain(), engine, 1000, settings=settings)
    for release in (OTHERS[engine], *([OWN[engine]] if engine in OWN else []), "nightly"):
        found = ask(plain(), f"{engine}@{release}", 1000, settings=settings)
        assert found["kv_cache"] == newest["kv_cache"]
        assert found["engine"] == {**newest["engine"], "version": release}
        added = [one for one in found["warnings"] if one not in newest["warnings"]]
        assert [one["code"] for one in added] == (["release"] if release == OTHERS[engine] else [])
    assert [one for one in newest["warnings"] if one["code"] == "release"] == []


def test_the_note_says_how_to_count_an_older_build_of_llama_cpp() -> None:
    warnings = ask(plain(), "llama.cpp@b6097", 1000)["warnings"]
    assert "; --before-pull counts an older build" in warnings[-1]["text"]


BERT = load_model("bert-base")


def test_an_encoder_repeats_the_release_too() -> None:
    assert estimate(BERT, context_tokens=64, engine="vllm@0.11")["engine"]["version"] == "0.11"


ON_A_DEVICE = ("--gpu", "h100", "--context", "8k")


@pytest.mark.parametrize("engine", ["vllm@0.12", "sglang@0.5.9", "tensorrt-llm@1.1", "llama.cpp@b6097"])
@pytest.mark.parametrize(
    "command",
    [
        ("estimate", "llama-3-8b", *ON_A_DEVICE),
        ("fit", "llama-3-8b", *ON_A_DEVICE),
        ("compare", "llama-3-8b", "qwen3-8b", *ON_A_DEVICE),
        ("sweep", "llama-3-8b", *ON_A_DEVICE),
        ("plan", "llama-3-8b", "--gpu", "h100", "--input-tokens", "1k", "--output-tokens", "200", "--concurrency", "8"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_takes_a_release(kvcalc: Any, command: tuple[str, ...], engine: str) -> None:
    document = kvcalc(*command, "--engine", engine, "--json").json
    warned = [one["text"] for one in document["warnings"] if one["code"] == "release"]
    name, _, release = engine.partition("@")
    assert len(warned) == (name != "vllm")
    assert all(f"{engine} counts by the rules read from" in text for text in warned)
    if command[0] in ("estimate", "fit"):
        assert (document["engine"]["name"], document["engine"]["version"]) == (name, release)


def test_a_table_of_engines_says_whose_rules_count(kvcalc: Any) -> None:
    document = kvcalc("estimate", "llama-3-8b", "--engine", "sglang@0.5.9,vllm@0.12", "--json").json
    assert [(row["engine"], row["version"]) for row in document["engines"]] == [
        ("sglang@0.5.9", "0.5.9"),
        ("vllm@0.12", "0.12"),
    ]
    assert [one["text"] for one in document["warnings"] if one["code"] == "release"] == [
        "sglang@0.5.9 counts by the rules read from 0.5.23, with the default --mem-fraction-static and prefill steps "
        "of that release"
    ]


def test_an_unreadable_release_exits_with_2(kvcalc: Any) -> None:
    failed = kvcalc("estimate", "llama-3-8b", "--engine", "sglang@nope")
    assert failed.status == 2
    assert "--engine sglang@nope: not a release" in failed.err
    assert "write sglang@0.5.9" in failed.err


@pytest.mark.parametrize(
    ("model", "engine", "since"),
    [
        ("qwen3.6-27b", "vllm@0.16", "0.17.1"),
        ("deepseek-v3.2", "vllm@0.10.2", "0.11.0"),
        ("kimi-linear-48b", "vllm@0.11.0", "0.11.2"),
        # It has no class of its own, and the class of Transformers kept no latents then.
        ("youtu-llm-2b", "vllm@0.25", "0.28.0"),
        ("qwen3-next-80b-a3b", "sglang@0.4.10", "0.5.2"),
    ],
)
def test_a_release_without_a_class_for_the_model_does_not_start(model: str, engine: str, since: str) -> None:
    with pytest.raises(LayoutError, match=r"does not start: .* has no class for") as error:
        kvcalc.estimate(model, engine=engine)
    assert error.value.hint is not None
    assert since in error.value.hint
    name = engine.partition("@")[0]
    assert kvcalc.estimate(model, engine=f"{name}@{since}")["kv_cache"]["total_bytes"]


@pytest.mark.parametrize(
    ("engine", "said"), [("vllm@0.7", True), ("vllm@0.8.5", False), ("vllm", False), ("sglang@0.4.3", True)]
)
def test_the_class_of_transformers_may_run_plain_attention(engine: str, said: bool) -> None:
    notes = kvcalc.estimate("qwen3-8b", engine=engine)["warnings"]
    assert any(note["code"] == "no-class" for note in notes) is said


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_types_with_a_first_release_are_read(engine: str) -> None:
    presets = {str(preset.config.get("model_type")) for preset in list_presets().presets}
    presets |= {spec_of(preset).model_type for preset in list_presets().presets}
    rows = table(engine, "classes")["releases"]
    types = [name for row in rows for name in row["types"].split()]
    assert set(types) <= presets
    assert len(types) == len(set(types))
    for row in rows:
        until, since = (parse_release(engine, str(row[name])).release for name in ("until", "since"))
        assert until is not None
        assert since is not None
        assert until < since


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize(
    "text",
    [
        "dev", "devel", "nightly-dev", "dev-cu13", "nightly-dev-cu12", "cu130-nightly", "nightly-aarch64",
        "0.0.0.dev1+g5b8c30d", "v0.0.0.dev0", "0.0.0",
        "0.0.0rc1", "0.1.dev1+g5b8c30d", "0.1.dev10000+g5b8c30d.d20261101",
    ],
)  # fmt: skip
def test_a_build_without_a_version_is_the_newest(engine: str, text: str) -> None:
    """setuptools-scm calls a build from a clone without tags 0.0.0 or 0.1.dev, as no release of an engine is."""
    assert parse_release(engine, text).release is None


@pytest.mark.parametrize(
    "text",
    [
        "nightly-dev-20261020-abcdef", "nightly-dev-20261020-5b8c30d6", "nightly-dev-cu13-20261020-5b8c30d6",
        "nightly-20261020-cu13", "dev-20261020", "base_main_20261020", "nightly_main_20261020", "weekly-2026-10-20",
    ],
)  # fmt: skip
def test_a_nightly_build_counts_as_of_its_day(text: str) -> None:
    for engine, release in (("sglang", "0.5.22"), ("vllm", "0.32.0"), ("tensorrt-llm", "1.4.0rc0")):
        requested = parse_release(engine, text)
        assert (requested.release, requested.is_date) == (parse_release(engine, release).release, True)


def test_a_development_version_with_its_day_and_hour_is_read() -> None:
    earlier, later = (parse_release("tensorrt-llm", f"1.4.0.dev{day}00").release for day in (20261101, 20261102))
    assert earlier is not None
    assert later is not None
    assert earlier < later < Release.of(1, 4)
    # A month of NVIDIA's containers is no version.
    assert parse_release("vllm", "25.09-py3") == parse_release("vllm", "2025-09")
