"""The note about the longest context names the same limit as `fit`."""

import pytest

import kvcalc


@pytest.mark.parametrize(
    ("model", "settings", "gpu"),
    [
        ("llama-3.1-8b", {}, "rtx-3090x2"),
        ("llama-3.1-8b", {"tensor-split": "2,1"}, "rtx-3090x2"),
        ("llama-3.1-8b", {"n-gpu-layers": "16", "host-memory": "24GiB"}, "rtx-4090"),
    ],
)
def test_the_note_names_the_longest_context(model: str, settings: dict[str, str], gpu: str) -> None:
    found = kvcalc.fit(model, kvcalc.find_devices(gpu), engine="llama.cpp", engine_settings=settings)
    (text,) = [note["text"] for note in found["warnings"] if note["code"] == "beyond-model"]
    assert text.startswith(f"a context of {found['fit']['max_context_tokens']:,} tokens fits in memory")
