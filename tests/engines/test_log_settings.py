"""Settings that a log leaves open are read with their usual values, and lines that only some platforms print.

The lines are from public logs.
"""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from tests.documents import audit

LLAMA_KEYS = """\
llama_model_loader: - kv   0:                       general.architecture str              = llama
llama_model_loader: - kv   2:                          llama.block_count u32              = 32
llama_model_loader: - kv   4:                     llama.embedding_length u32              = 4096
llama_model_loader: - kv   6:                 llama.attention.head_count u32              = 32
llama_model_loader: - kv   7:              llama.attention.head_count_kv u32              = 8
"""


def read(log: str, engine: str, model: str | None, **asked: Any) -> dict[str, Any]:
    spec = None if model is None else kvcalc.load_model(model)
    return audit(log, "log", model=spec, engine=engine, **asked)


def verdicts(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(figure["name"], figure["verdict"]) for figure in document["figures"]]


V0 = "the rest of the memory reserved for KV Cache is {memory}GiB.\n{blocks}\nMaximum concurrency for {of}x\n"


@pytest.mark.parametrize(
    ("memory", "blocks", "of"),
    [
        # vLLM 0.8 and 0.9 name the platform: Qwen3-1.7B on ROCm, Qwen2.5-0.5B on CUDA. The last one fails to start.
        ("11.10", "# rocm blocks: 6495, # CPU blocks: 2340", "40960 tokens per request: 2.54"),
        ("2.88", "# cuda blocks: 15712, # CPU blocks: 21845", "32768 tokens per request: 7.67"),
        ("-0.94", "# cuda blocks: 0, # CPU blocks: 21845", "4200 tokens per request: 0.00"),
    ],
)
def test_v0_names_its_blocks_after_the_platform(memory: str, blocks: str, of: str) -> None:
    log, model = V0.format(memory=memory, blocks=blocks, of=of), "qwen2.5-0.5b"
    document = read(log, "vllm", "qwen3-1.7b" if "rocm" in blocks else model)
    assert verdicts(document)[1:] == [
        ("num_cpu_blocks", "equal"), ("num_gpu_blocks", "equal"), ("max_concurrency", "equal"),
    ]  # fmt: skip
    wrong = log.replace("blocks: ", "blocks: 9", 1)
    assert ("num_gpu_blocks", "unexplained") in verdicts(read(wrong, "vllm", model))


def test_ascends_blocks_have_128_tokens() -> None:
    """vLLM-Ascend 0.7.1, which calls them CPU blocks too."""
    log = """\
Initializing a V0 LLM engine (v0.7.1) with config: device_config=npu
# CPU blocks: 35064, # CPU blocks: 2730
Maximum concurrency for 32768 tokens per request: 136.97x
"""
    assert verdicts(read(log, "vllm", "qwen2.5-0.5b")) == [
        ("num_cpu_blocks", "equal"), ("num_gpu_blocks", "input"), ("max_concurrency", "equal"),
    ]  # fmt: skip


def test_another_swap_space_is_an_input_unless_the_log_has_its_size() -> None:
    log = V0.format(
        memory="3.63", blocks="# cuda blocks: 19813, # CPU blocks: 32768", of="8192 tokens per request: 38.7"
    )
    assert ("num_cpu_blocks", "input") in verdicts(read(log, "vllm", "qwen2.5-0.5b"))
    assert ("num_cpu_blocks", "unexplained") in verdicts(read(f"swap_space=4.0\n{log}", "vllm", "qwen2.5-0.5b"))
    # No whole number of GiB has this many blocks.
    assert ("num_cpu_blocks", "unexplained") in verdicts(read(log.replace("32768", "30001"), "vllm", "qwen2.5-0.5b"))


def test_too_few_tokens_are_named_after_the_ranks_that_the_log_lacks() -> None:
    log = "Available KV cache memory: 8.11 GiB\nGPU KV cache size: 178,880 tokens\n"
    figure = read(log, "vllm", "qwen3-235b-a22b", tensor_parallel_size=4)["figures"][1]
    assert figure["verdict"] == "unexplained"
    assert "may lack the line of some of the 4 ranks" in figure["rule"]
    more = read(log.replace("178,880", "188,880"), "vllm", "qwen3-235b-a22b", tensor_parallel_size=4)["figures"][1]
    assert "ranks" not in more["rule"]


def test_pinned_memory_and_a_backends_own_block_size_are_read() -> None:
    log = "reserved 12.0 GiB memory for KV Cache as specified\nGPU KV cache size: 98,304 tokens\n"
    assert verdicts(read(log, "vllm", "llama-3.1-8b")) == [("available_memory", "input"), ("kv_cache_tokens", "equal")]
    head = "Setting kv cache block size to 32 for FLASHINFER_MLA backend.\n"
    document = read(head + log.replace("98,304", "183,360"), "vllm", "kimi-k2.5")
    assert document["engine"]["settings"]["block-size"] == "32"
    # Blocks of 16 tokens explain this number. They are not tried if the log says that blocks have 64.
    other = log.replace("98,304", "183,328")
    assert verdicts(read(other, "vllm", "kimi-k2.5"))[-1] == ("kv_cache_tokens", "equal")
    stated = f"Initializing a V1 LLM engine (v0.33.0) with config: block_size=64\n{other}"
    assert verdicts(read(stated, "vllm", "kimi-k2.5"))[-1] == ("kv_cache_tokens", "unexplained")


@pytest.mark.parametrize(
    ("log", "model", "taken"),
    [
        (
            "KV Cache is allocated. dtype: torch.float8_e5m2, #tokens: 281216, K size: 17.17 GB, V size: 17.17 GB",
            "qwen3-32b", "pages of 64 tokens",
        ),
        ("KV Cache is allocated. #tokens: 131072, KV size: 7.51 GB", "glm-5.1", "a cache in fp8, the default"),
        (
            "max_mamba_cache_size: 10, conv_state size: 0.03GB, ssm_state size: 0.77GB",
            "qwen3.6-27b", "states in bfloat16",
        ),
    ],
)  # fmt: skip
def test_sglangs_open_settings(log: str, model: str, taken: str) -> None:
    document = read(log, "sglang", model)
    assert (document["unexplained"], document["equal"] > 0) == (0, True)
    assert any(taken in rule for rule in document["engine"]["rules"])


def test_a_log_that_the_defaults_explain_takes_nothing_for_given() -> None:
    pool = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 199999, K size: 12.21 GB, V size: 12.21 GB"
    document = read(pool, "sglang", "llama-3.1-8b")  # 200,000 rows of 32 x 8 x 128 elements
    assert (document["unexplained"], document["equal"], document["engine"]["rules"]) == (0, 2, [])


def test_a_stated_setting_of_sglang_is_held() -> None:
    pool = "KV Cache is allocated. dtype: torch.float8_e5m2, #tokens: 281216, K size: 17.17 GB, V size: 17.17 GB"
    assert read(f"page_size=1\n{pool}", "sglang", "qwen3-32b")["unexplained"] == 2
    states = "max_mamba_cache_size: 10, conv_state size: 0.03GB, ssm_state size: 0.77GB"
    assert read(f"mamba_ssm_dtype='float32'\n{states}", "sglang", "qwen3.6-27b")["unexplained"] == 1


def test_the_name_of_a_device_of_another_machine() -> None:
    """llama.cpp build 5935, Llama-3.1-405B."""
    log = """\
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 4096
llama_kv_cache_unified: RPC[172.31.110.11:50052] KV buffer size =   800.00 MiB
llama_kv_cache_unified: RPC[172.31.110.12:50052] KV buffer size =   784.00 MiB
llama_kv_cache_unified:        CPU KV buffer size =   432.00 MiB
llama_kv_cache_unified: size = 2016.00 MiB (  4096 cells, 126 layers,  1/ 1 seqs), K (f16): 1008.00 MiB, V (f16): 1008.00 MiB
"""  # noqa: E501
    document = read(log, "llama.cpp", "llama-3.1-405b")
    assert [name for name, verdict in verdicts(document) if verdict == "equal"].count("buffer_bytes") == 3
    assert (document["unexplained"], document["unread"]) == (0, [])


def test_windows_follow_from_a_step_that_the_log_does_not_have() -> None:
    """gpt-oss-20b on Hexagon: 256 cells for a window of 128 and a step of 128."""
    log = """\
llama_kv_cache_iswa: creating non-SWA KV cache, size = 8192 cells
llama_kv_cache: size =  102.00 MiB (  8192 cells,  12 layers,  1/1 seqs), K (q8_0):   51.00 MiB, V (q8_0):   51.00 MiB
llama_kv_cache_iswa: creating     SWA KV cache, size = 256 cells
llama_kv_cache: size =    3.19 MiB (   256 cells,  12 layers,  1/1 seqs), K (q8_0):    1.59 MiB, V (q8_0):    1.59 MiB
"""
    document = read(log, "llama.cpp", "gpt-oss-20b")
    assert document["unexplained"] == 0
    assert "--ubatch-size 128" in document["engine"]["rules"]
    stated = read(f"llama-server --ubatch-size 512\n{log}", "llama.cpp", "gpt-oss-20b")
    assert stated["unexplained"]


def test_a_current_build_with_a_file_that_has_every_head() -> None:
    log = """\
llama_context: n_seq_max     = 8
llama_context: n_ctx         = 16384
llama_context: kv_unified    = false
llama_kv_cache: size = 4320.00 MiB (  2048 cells,  27 layers, 8/8 seqs), K (f16): 2592.00 MiB, V (f16): 1728.00 MiB
"""
    document = read(log, "llama.cpp", "deepseek-v2-lite")
    assert (document["equal"], document["unexplained"]) == (5, 0)
    assert "a file with K and V of every head" in document["engine"]["rules"]


def test_the_layers_of_a_file_include_those_of_mtp() -> None:
    """Qwen3.6-27B. The lines about rotation have no size and are not unread."""
    log = """\
llama_context: n_seq_max     = 4
llama_kv_cache: attn_rot_k = 1, n_embd_head_k_all = 256
llama_memory_recurrent: size =  598.50 MiB (     4 cells,  {layers} layers,  4 seqs), R (f32):   22.50 MiB, S (f32):  576.00 MiB
"""  # noqa: E501
    document = read(log.format(layers=65), "llama.cpp", "qwen3.6-27b")
    assert (document["unexplained"], document["unread"]) == (0, [])
    assert read(log.format(layers=66), "llama.cpp", "qwen3.6-27b")["unexplained"] == 1


@pytest.mark.parametrize(
    ("log", "model", "equal"),
    [
        # The scheduler's estimate, for all slots.
        ('memory.required.kv="896.0 MiB"\nollama_llama_server --ctx-size 8192 --parallel 4', "llama-3.2-3b", 1),
        ('memory.required.kv="1.0 GiB"\nollama runner --ctx-size 8192 --parallel 2\n' + LLAMA_KEYS, None, 1),
        # The buffers of each device, which are printed for every try.
        ('KvSize:4096 KvCacheType:\nmsg="kv cache" device=CPU size="384.0 MiB"', "qwen3-30b-a3b", 1),
        (
            'KvSize:32768 KvCacheType:\nmsg="kv cache" device=CUDA0 size="3.0 GiB"\n'
            'msg="kv cache" device=CUDA0 size="1.9 GiB"\nmsg="kv cache" device=CPU size="1.1 GiB"',
            "qwen3-30b-a3b", 1,
        ),
        # Ollama has its own rules for windows, and the size depends on the context.
        ('KvSize:8192\nmsg="kv cache" device=ROCm0 size="450.0 MiB"', "gpt-oss-120b", 0),
        ('msg="kv cache" device=CPU size="384.0 MiB"', "qwen3-30b-a3b", 0),
    ],
)  # fmt: skip
def test_ollamas_own_lines(log: str, model: str | None, equal: int) -> None:
    document = read(log, "llama.cpp", model)
    assert (document["equal"], document["unexplained"]) == (equal, 0)
    if equal:
        wrong = log.replace("8192", "4096").replace("KvSize:4096", "KvSize:2048").replace("32768", "65536")
        assert read(wrong, "llama.cpp", model)["unexplained"] == 1


def test_the_sum_of_ollamas_buffers_is_too_large_by_what_is_printed_more() -> None:
    """4,096 cells of 48 layers with 4 KV heads of 128 are 384 MiB, and 400 and 2 MiB are printed."""
    sizes = 'msg="kv cache" device=CUDA0 size="400.0 MiB"\nmsg="kv cache" device=CPU size="2.0 MiB"'
    log = f"KvSize:4096 KvCacheType:\n{sizes}"
    (row,) = [row for row in read(log, "llama.cpp", "qwen3-30b-a3b")["figures"] if row["verdict"] == "unexplained"]
    assert (row["computed"], row["difference"]) == (384 * 2**20, 18 * 2**20)


def test_auto_deploy_counts_blocks_only() -> None:
    log = """\
Using fake cache manager with head_dim=0 and num pages: 61848
Max KV cache blocks per sequence: 256 [window size=16384], tokens per block=64, primary blocks=61848
[MemUsageChange] Allocated 0.00 GiB for max tokens in paged KV cache (3958272).
"""
    document = read(log, "tensorrt-llm", "nemotron-3-nano-30b-a3b")
    assert (document["equal"], document["unexplained"]) == (2, 0)


def test_early_releases_of_ascends_plugin_have_vllms_blocks() -> None:
    """vLLM-Ascend 0.7.4.dev with V1: blocks of 16 tokens, which blocks of 128 cannot explain."""
    log = """\
Initializing a V1 LLM engine (v0.7.4.dev353) with config: device_config=npu
GPU KV cache size: 744,048 tokens
Maximum concurrency for 26,240 tokens per request: 28.36x
"""
    assert verdicts(read(log, "vllm", "qwen2.5-7b")) == [("kv_cache_tokens", "input"), ("max_concurrency", "equal")]


def test_rows_of_sparse_attention_on_b200() -> None:
    """fp8 rows without scales: SGLang on 8 B300 (flashinfer-ai/flashinfer#3333), and vLLM on 4 B200."""
    log = "KV Cache is allocated. #tokens: 4636736, KV size: 186.50 GB\n"
    document = read(log, "sglang", "deepseek-v3.2", tensor_parallel_size=8)
    assert verdicts(document) == [("tokens", "input"), ("kv_bytes", "equal")]
    log = """\
Available KV cache memory: 33.04 GiB
GPU KV cache size: 743,680 tokens
Maximum concurrency for 400,000 tokens per request: 1.86x
"""
    for kv_dtype in (None, "fp8"):
        document = read(log, "vllm", "glm-5.2", tensor_parallel_size=4, kv_dtype=kv_dtype)
        assert verdicts(document)[1:] == [("kv_cache_tokens", "equal"), ("max_concurrency", "equal")]


def test_cuda_lengthens_the_last_row_of_a_quantized_cache() -> None:
    """DeepSeek-R1 in ik_llama.cpp: rows of 576 elements, and buffers of multiples of 512."""
    log = """\
llama_new_context_with_model: n_ctx      = 32768
llama_kv_cache_init:      CUDA0 KV buffer size =  1166.65 MiB
llama_new_context_with_model: KV self size  = 1166.62 MiB, c^KV (q8_0): 1166.62 MiB, kv^T: not used
"""
    document = read(log, "llama.cpp", "deepseek-r1")
    assert verdicts(document) == [("buffer_bytes", "equal"), ("cache_bytes", "equal")]
    other = read(log.replace("CUDA0", "Vulkan0"), "llama.cpp", "deepseek-r1")
    assert ("buffer_bytes", "unexplained") in verdicts(other)
    unpadded = read(log.replace("CUDA0", "Vulkan0").replace("1166.65", "1166.62"), "llama.cpp", "deepseek-r1")
    assert ("buffer_bytes", "equal") in verdicts(unpadded)


def test_a_chosen_number_of_blocks_counts_instead_of_those_that_fit() -> None:
    """--num-gpu-blocks-override: Qwen2.5-0.5B with 65,536 of 110,679 blocks."""
    log = """\
Available KV cache memory: 20.27 GiB
Overriding num_gpu_blocks=110679 with num_gpu_blocks_override=65536
GPU KV cache size: 1,048,576 tokens
Maximum concurrency for 8,192 tokens per request: 128.00x
"""
    found = [("fitting_blocks", "equal"), ("kv_cache_tokens", "equal"), ("max_concurrency", "equal")]
    assert verdicts(read(log, "vllm", "qwen2.5-0.5b"))[1:] == found
    assert ("fitting_blocks", "unexplained") in verdicts(read(log.replace("110679", "99999"), "vllm", "qwen2.5-0.5b"))
    option = log.replace("Overriding num_gpu_blocks=110679 with num_gpu_blocks_override=", "--num-gpu-blocks-override ")
    assert verdicts(read(option, "vllm", "qwen2.5-0.5b"))[1:] == found[1:]
    # V0 prints the number that it takes, which no memory determines.
    printed = log.replace("GPU KV", "# GPU blocks: 65536, CPU blocks: 0\nGPU KV")
    assert ("num_gpu_blocks", "input") in verdicts(read(printed, "vllm", "qwen2.5-0.5b"))
    other = printed.replace("65536, CPU", "65535, CPU")
    assert ("num_gpu_blocks", "unexplained") in verdicts(read(other, "vllm", "qwen2.5-0.5b"))


def test_blocks_while_the_memory_of_graphs_is_measured_are_not_the_pools() -> None:
    """vLLM 0.17 to 0.19 print the same line for the few blocks with which they measure CUDA graphs."""
    log = """\
Overriding num_gpu_blocks=0 with num_gpu_blocks_override=512
Available KV cache memory: 26.43 GiB
GPU KV cache size: 216,496 tokens
Maximum concurrency for 8,192 tokens per request: 26.43x
"""
    document = read(log, "vllm", "llama-3.1-8b")
    assert verdicts(document)[1:] == [("kv_cache_tokens", "equal"), ("max_concurrency", "equal")]


def test_the_memory_on_a_cpu() -> None:
    """SmolLM2-135M in fp32 on vLLM 0.30, whose blocks have 128 tokens or 16."""
    log = """\
device_config=cpu
Explicitly set (1.0/31.28) GiB for KV cache on node 0.
GPU KV cache size: 23,296 tokens, Maximum concurrency for 4,096 tokens per request: 5.69x
"""
    smollm = {
        "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "max_position_embeddings": 8192,
    }  # fmt: skip
    document = audit(log, "log", model=kvcalc.read_config(smollm, "smollm", "smollm"), kv_dtype="fp32")
    assert verdicts(document) == [
        ("available_memory", "input"), ("kv_cache_tokens", "equal"), ("max_concurrency", "equal"),
    ]  # fmt: skip
