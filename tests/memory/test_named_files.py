"""Models by the names of their GGUF files: what the file holds beside the model, and what llama.cpp makes of it."""

from __future__ import annotations

import kvcalc
from tests.documents import estimate, fit
from tests.rows import every_row

# Files on the Hugging Face Hub (October 2026). A name without "MTP" holds the layer if its model came out after the
# converter learned it.
FILES = {
    "unsloth/GLM-5.3-GGUF:BF16": 1_507_988_027_936,
    "unsloth/GLM-5.3-GGUF:Q8_0": 801_357_677_216,
    "unsloth/GLM-5.3-Flash-GGUF:BF16": 641_641_064_288,
    "unsloth/GLM-5.3-Flash-GGUF:Q8_0": 340_981_966_208,
    "unsloth/Qwen3.8-27B-GGUF:BF16": 54_657_735_616,
    "unsloth/Qwen3.8-27B-GGUF:Q8_0": 29_047_086_048,
    "unsloth/Qwen3.6-35B-A3B-GGUF:Q8_0": 36_903_140_320,
    "unsloth/Qwen3.5-4B-GGUF:BF16": 8_424_393_632,
    # Fine-tunes and a release that are known by a rule; the down-projection of the last is called output_linear.
    "HauhauCS/Qwen3.5-9B-Uncensored-HauhauCS-Aggressive:Q4_K_M": 5_627_044_224,
    "AnkitAI/Parable-Qwen3-8B-Claude-Fable-5-GGUF:Q4_K_M": 5_027_783_648,
    "AnkitAI/Parable-Granite-4.1-3B-Claude-Fable-5-GGUF:Q4_K_M": 2_099_501_696,
    "ibm-granite/granite-4.2-3b-GGUF:Q4_K_M": 2_244_011_552,
    "ibm-granite/granite-4.2-8b-GGUF:Q2_K": 3_412_312_192,
    # lmstudio-community's is made with llama-quantize alone, and holds the layer that drafts.
    "lmstudio-community/Qwen3.8-27B-GGUF:Q4_K_M": 16_810_714_336,
    "lmstudio-community/Qwen3.8-27B-GGUF:Q6_K": 22_430_999_776,
}


@every_row("name", list(FILES))
def test_a_named_file_holds_the_layers_that_draft_if_its_model_is_newer_than_they_are(name: str) -> None:
    size = estimate(name, context_tokens=64, engine="llama.cpp")["weights"]["bytes"]
    assert size is not None
    assert abs(size / FILES[name] - 1) < 0.0025


def bytes_of(name: str) -> int:
    size = estimate(name, context_tokens=64, engine="llama.cpp")["weights"]["bytes"]
    assert size is not None
    return int(size)


def test_a_trained_copy_has_lost_them_and_a_name_with_mtp_keeps_them() -> None:
    whole = bytes_of("unsloth/Qwen3.8-27B-GGUF:Q8_0")
    assert bytes_of("someone/Qwen3.8-27B-Claude-Opus-Distilled-GGUF:Q8_0") < 0.985 * whole
    assert bytes_of("unsloth/Qwen3.6-27B-MTP-GGUF:Q8_0") == bytes_of("unsloth/Qwen3.8-27B-GGUF:Q8_0")
    assert bytes_of("unsloth/Qwen3.6-27B-GGUF:Q8_0") < 0.985 * whole


def test_a_device_holds_them_only_to_draft() -> None:
    devices, question = kvcalc.find_devices("rtx-5090"), {"engine": "llama.cpp", "context_tokens": 4096}

    def parts(name: str, **more: object) -> list[int]:
        found = fit(name, devices, **question, **more)["fit"]
        return [found["weights_bytes"], found["weights_bytes"] + found["activation_bytes"] - found["free_bytes"]]

    old, new = (f"unsloth/Qwen3.{release}-27B-GGUF:Q8_0" for release in (6, 8))
    assert parts(new) == parts(old)
    drafting = {"speculative": kvcalc.Speculation("mtp", 2, acceptance_length=2.0)}
    assert parts(new, **drafting) == parts(old, **drafting)


def test_files_of_deepseek_v2_keep_k_and_v_of_every_head_in_every_build() -> None:
    # A log of DeepSeek-Coder-V2-Lite in a build of September 2026: K 1,296 MiB and V 864 MiB for 8,192 cells.
    name = "bartowski/DeepSeek-Coder-V2-Lite-Instruct-GGUF:Q4_K_M"
    question = {"context_tokens": 4096, "batch_size": 2, "engine": "llama.cpp", "engine_settings": {"parallel": "2"}}
    answer = estimate(name, **question)
    assert answer["kv_cache"]["total_bytes"] == (1296 + 864) * 2**20
    assert any("made before April 2025" in note["text"] for note in answer["warnings"])
    assert not any(note["code"] == "latent-twice" for note in answer["warnings"])
    assert estimate("deepseek-coder-v2:16b", **question)["kv_cache"]["total_bytes"] == (1296 + 864) * 2**20
    # A file that is made now has the latent.
    assert estimate("deepseek-v2-lite", **question)["kv_cache"]["total_bytes"] == 8192 * 27 * 576 * 2


# unsloth chooses the type of every tensor of its UD files. The same list of files.
DYNAMIC = {
    "unsloth/Qwen3.8-27B-GGUF:UD-Q4_K_XL": 17_559_178_144,
    "unsloth/Qwen3.8-27B-GGUF:UD-Q5_K_XL": 20_876_938_144,
    "unsloth/Qwen3.8-27B-GGUF:UD-Q6_K_XL": 25_299_061_664,
    "unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_XL": 22_360_456_160,
    "unsloth/Qwen3.6-35B-A3B-GGUF:UD-IQ4_XS": 17_730_509_792,
    "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF:UD-Q4_K_XL": 17_665_334_432,
    "unsloth/GLM-5.2-GGUF:UD-Q2_K_XL": 253_878_401_856,
    "unsloth/GLM-5.3-Flash-GGUF:UD-Q4_K_XL": 199_707_321_472,
}


@every_row("name", list(DYNAMIC))
def test_a_file_of_chosen_types_has_the_plain_types_size_and_a_range(name: str) -> None:
    answer = estimate(name, context_tokens=64, engine="llama.cpp")
    size = answer["weights"]["bytes"]
    assert abs(size / DYNAMIC[name] - 1) < 0.09
    note = next(note["text"] for note in answer["warnings"] if "unsloth chooses" in note["text"])
    low, high = (float(word) for word in note.split("llama.cpp of ")[1].split(" times")[0].split(" to "))
    plain = name.replace("UD-", "").replace("Q2_K_XL", "Q2_K").replace("Q6_K_XL", "Q6_K").replace("_XL", "_M")
    assert low * bytes_of(plain) <= DYNAMIC[name] <= high * bytes_of(plain)


def test_an_answer_within_that_range_is_not_flat() -> None:
    question = {"engine": "llama.cpp", "context_tokens": 8192}
    name = "unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_XL"

    devices = kvcalc.find_devices("rtx-4090")

    def verdict(gib: float) -> tuple[str, int, bool]:
        gpu = devices.gpu._replace(memory_bytes=int(gib * 2**30))
        answer = fit(name, devices._replace(gpu=gpu), **question)
        says_maybe = (answer["server"] or {"starts": False})["starts"] is None
        return answer["fit"]["verdict"], answer["fit"]["free_high_bytes"], says_maybe

    assert verdict(30)[0] == "fits"
    assert verdict(21.5)[0] == "tight"
    assert verdict(21.5)[2]
    refused, high, says_maybe = verdict(20.5)
    assert refused == "does_not_fit"
    assert high > 0
    assert says_maybe
    assert verdict(10) == ("does_not_fit", verdict(10)[1], False)
    # A type of the user's own is exact.
    lines = fit(name, devices, dtype="q8_0", **question)["fit"]["lines"]
    assert [line["estimated"] for line in lines if line["kind"] == "weights"] == [False]
