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
}


@every_row("name", list(FILES))
def test_a_named_file_holds_the_layers_that_draft_if_its_model_is_newer_than_they_are(name: str) -> None:
    size = estimate(name, context_tokens=64, engine="llama.cpp")["weights"]["bytes"]
    assert size is not None
    assert abs(size / FILES[name] - 1) < 0.0025


def bytes_of(name: str) -> int:
    size = estimate(name, context_tokens=64, engine="llama.cpp")["weights"]["bytes"]
    assert size is not None
    return size


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
    assert estimate("deepseek-coder-v2:16b", **question)["kv_cache"]["total_bytes"] == (1296 + 864) * 2**20
    # A file that is made now has the latent.
    assert estimate("deepseek-v2-lite", **question)["kv_cache"]["total_bytes"] == 8192 * 27 * 576 * 2
