"""llama.cpp measures a model before it loads it. The lines of the model that is loaded count.

The lines are from public logs of llama-server b9752 on ROCm and of Ollama on two CUDA devices, shortened.
"""

from __future__ import annotations

from tests.engines.test_log_settings import read, verdicts

CONTEXT = "llama_context: n_ctx         = {n}\nllama_context: n_ubatch      = 512\n"
NO_BUFFER = "llama_kv_cache:      ROCm0 KV buffer size =     0.00 MiB\n"
BUFFER = "llama_kv_cache:      ROCm0 KV buffer size =   576.00 MiB\n"
SIZE = (
    "llama_kv_cache: size = {mib}.00 MiB ({n} cells,  36 layers,  1/1 seqs), K (f16): {k}.00 MiB, V (f16): {k}.00 MiB\n"
)
MEASURED = CONTEXT.format(n=40960) + NO_BUFFER + SIZE.format(mib=5760, n=40960, k=2880)
AGAIN = CONTEXT.format(n=8192) + NO_BUFFER + SIZE.format(mib=1152, n=8192, k=576)
LOADED = CONTEXT.format(n=4096) + BUFFER + SIZE.format(mib=576, n=4096, k=288)
SIZES = [(name, "equal") for name in ("cells", "layers", "cache_bytes", "k_bytes", "v_bytes")]


def test_a_model_is_measured_with_other_contexts_before_it_is_loaded() -> None:
    document = read(MEASURED + AGAIN + LOADED, "llama.cpp", "qwen3-4b")
    assert verdicts(document) == [("buffer_bytes", "equal"), *SIZES]
    assert document["workload"]["context_tokens"] == 4096
    assert not [text for text in document["warnings"] if "context_tokens" in str(text)]
    wrong = read(MEASURED + LOADED.replace("576.00", "592.00"), "llama.cpp", "qwen3-4b")
    assert ("buffer_bytes", "unexplained") in verdicts(wrong)


def test_a_model_that_is_only_measured_has_buffers_without_bytes() -> None:
    document = read(MEASURED, "llama.cpp", "qwen3-4b")
    assert verdicts(document) == [("buffer_bytes", "input"), *SIZES]


def test_a_draft_model_is_measured_after_the_model_is_loaded() -> None:
    """The lines of the loaded model are kept, and its context is the one that counts."""
    draft = CONTEXT.format(n=2048) + NO_BUFFER + SIZE.format(mib=999, n=2048, k=111)
    document = read(MEASURED + LOADED + draft, "llama.cpp", "qwen3-4b")
    assert document["workload"]["context_tokens"] == 4096
    assert verdicts(document)[:6] == [("buffer_bytes", "equal"), *SIZES]
    loaded = draft.replace("0.00 MiB", "288.00 MiB", 1).replace("ROCm0", "ROCm1")
    document = read(MEASURED + LOADED + draft + loaded, "llama.cpp", "qwen3-4b")
    assert verdicts(document)[:6] == [("buffer_bytes", "equal"), *SIZES]
    assert [figure["line"] for figure in document["figures"]].count(8) == 5


def test_two_devices_without_the_lines_of_the_context() -> None:
    lines = "llama_kv_cache: CUDA0 KV buffer size = {} MiB\nllama_kv_cache: CUDA1 KV buffer size = {} MiB\n"
    log = lines.format("0.00", "0.00") + lines.format("9216.00", "7168.00")
    document = read(log, "llama.cpp", "qwen3.6-27b", context_tokens=262144)
    assert verdicts(document) == [("buffer_bytes", "equal")] * 2


def test_the_caches_that_the_loaded_model_announces_count() -> None:
    """gpt-oss-20b announces a cache for all tokens and one for windows, when it is measured and when it is loaded."""
    text = """\
llama_context: n_seq_max     = 1
llama_context: n_ctx         = {n}
llama_kv_cache_iswa: creating non-SWA KV cache, size = {n} cells
llama_kv_cache:      CUDA0 KV buffer size =   {full:.2f} MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 768 cells
llama_kv_cache:      CUDA0 KV buffer size =    {window:.2f} MiB
"""
    log = text.format(n=32768, full=0, window=0) + text.format(n=8192, full=192, window=18)
    document = read(log, "llama.cpp", "gpt-oss-20b")
    assert [(row["name"], row["verdict"], row["computed"]) for row in document["figures"]] == [
        ("cells", "equal", 8192), ("buffer_bytes", "equal", 192 * 2**20), ("cells", "equal", 768),
        ("buffer_bytes", "equal", 18 * 2**20),
    ]  # fmt: skip
    assert not [rule for rule in document["engine"]["rules"] if "stream" in rule], "one slot has one stream"
