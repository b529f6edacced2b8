"""`kvcalc audit`, end to end, with numbers that engines printed in public threads.

The logs around the numbers are written for the tests. The model's dimensions, the flags and the figures are from the
thread that each case names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.documents import audit, texts
from tests.engines.models import gated_delta, gpt_oss, latent, plain, sparse


class Case(NamedTuple):
    """A log, the model's config, the options, and the (name, computed value) of each number that must be equal."""

    source: str
    config: dict[str, object]
    log: str
    equal: list[tuple[str, object]]
    options: tuple[str, ...] = ()


VLLM = [
    Case(
        "club-3090#612, vLLM 0.24",
        gated_delta(),
        """
        INFO [core.py:93] Initializing a V1 LLM engine (v0.24.0) with config: kv_cache_dtype=fp8, max_seq_len=131072
        INFO [gpu_worker.py:377] Available KV cache memory: 5.98 GiB
        INFO [kv_cache_utils.py:1307] GPU KV cache size: 567,978 tokens
        INFO [kv_cache_utils.py:1312] Maximum concurrency for 131,072 tokens per request: 4.33x
        """,
        [("kv_cache_tokens", 567_978), ("max_concurrency", 299 / 69)],
    ),
    Case(
        "club-3090#652, no version in the log",
        gated_delta(),
        """
        Setting attention block size to 2096 tokens to ensure that attention page size is >= mamba page size.
        kv_cache_dtype=fp8
        Available KV cache memory: 6.01 GiB
        GPU KV cache size: 569,878 tokens, Maximum concurrency for 131,072 tokens per request: 4.35x
        """,
        [("attention_block_size", 2096), ("kv_cache_tokens", 569_878), ("max_concurrency", 300 / 69)],
    ),
    Case(
        "vllm-project/vllm#40691, 0.19: blocks solved",
        gated_delta(num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48),
        """
        Initializing a V1 LLM engine (v0.19.0)
        GPU KV cache size: 290,864 tokens
        Maximum concurrency for 32,768 tokens per request: 33.04x
        """,
        [("max_concurrency", 1487 / 45)],
    ),
    Case(
        "noonghunna/club-3090#294, three drafted tokens: blocks solved",
        gated_delta(num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48,
            mtp_num_hidden_layers=1),
        """
        Initializing a V1 LLM engine (v0.24.1), tensor_parallel_size=2, kv_cache_dtype=fp8_e5m2,
        speculative_config={'method': 'mtp', 'num_speculative_tokens': 3}
        GPU KV cache size: 622,408 tokens
        Maximum concurrency for 262,144 tokens per request: 2.37x
        """,
        [("max_concurrency", 425 / 179)],
    ),
    Case(
        "vllm-project/vllm#38516",
        plain(36, 32, 8, 128),
        "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 GiB KV cache is needed,"
        " which is larger than the available KV cache memory (4.89 GiB). Based on the available memory, the estimated "
        "maximum model length is 35600.",
        [("request_bytes", 6_039_797_760), ("max_model_len", 35_600)],
    ),
    Case(
        "eugr/spark-vllm-docker#396",
        plain(62, 48, 8, 128),
        """
        vllm serve some/model --tensor-parallel-size 2
        To serve at least one request with the model's max seq len (196608),
        23.25 GiB KV cache is needed, which is larger than the available KV cache memory (22.5 GiB).
        Based on the available memory, the estimated maximum model length is 190272.
        """,
        [("request_bytes", 24_964_497_408), ("max_model_len", 190_272)],
    ),
    Case(
        "vllm-project/vllm#15457: GB for GiB",
        plain(64, 40, 8, 128),
        """
        Initializing a V1 LLM engine (v0.8.3) with config: tensor_parallel_size=4
        To serve at least one request with the models's max seq len (32768), (2.00 GB KV cache is needed
        """,
        [("request_bytes", 2 * 2**30)],
    ),
    Case(
        "vllm-project/vllm#10517: V0, blocks of the swap space too",
        plain(80, 64, 8, 128),
        """
        INFO 11-20 08:33:01 llm_engine.py:176] Initializing an LLM engine (v0.5.4), tensor_parallel_size=2
        INFO 11-20 08:34:06 distributed_gpu_executor.py:56] # GPU blocks: 1498, # CPU blocks: 1638
        ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in
        ValueError: larger than the maximum number of tokens that can be stored in KV cache (23968). Try increasing
        """,
        [("num_cpu_blocks", 1638), ("kv_cache_tokens", 23_968)],
    ),
    Case(
        "vllm-project/vllm#10517, comment: V0 with its memory",
        plain(32, 32, 8, 128),
        """
        Memory profiling results: total_gpu_memory=23.58GiB non_torch_memory=0.35GiB kv_cache_size=3.81GiB
        # GPU blocks: 1952, # CPU blocks: 2048
        Maximum concurrency for 20000 tokens per request: 1.56x
        """,
        [("num_cpu_blocks", 2048), ("num_gpu_blocks", 1952), ("max_concurrency", 1952 * 16 / 20000)],
    ),
    Case(
        "vllm-project/vllm#27508: windows with the tokens in flight",
        gpt_oss(36),
        """
        max_num_batched_tokens=1024
        ValueError: To serve at least one request with the models's max seq len (131072), (4.54 GiB KV cache is needed,
        """,
        [("request_bytes", 8265 * 589_824)],
    ),
    Case(
        "vllm-project/vllm#16118, Llama 4 at tp 8: chunks at full length",
        plain(48, 40, 8, 128, model_type="llama4_text", attention_chunk_size=8192),
        """
        Initializing a V1 LLM engine (v0.8.3), tensor_parallel_size=8
        To serve at least one request with the models's max seq len (1048576), (24.00 GiB KV cache is needed,
        """,
        [("request_bytes", 24 * 2**30)],
    ),
    Case(
        "alvarobartt/hf-mem#61, gemma-4-31B: six groups of ten layers",
        {"model_type": "gemma4_text", "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
         "num_global_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "hidden_size": 5376,
         "attention_k_eq_v": True, "sliding_window": 1024, "num_kv_shared_layers": 0, "torch_dtype": "bfloat16",
         "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10},
        """
        Available KV cache memory: 24.54 GiB
        GPU KV cache size: 26,800 tokens
        """,
        [("kv_cache_tokens", 26_800)],
    ),
    Case(
        "hand-worked: 656 bytes a latent in fp8 and 132 an indexer's key",
        sparse(61),
        """
        Initializing a V1 LLM engine (v0.33.0) with config: kv_cache_dtype=fp8_ds_mla, block_size=64
        To serve at least one request with the model's max seq len (163840), (7.33 GiB KV cache is needed
        """,
        [("request_bytes", 163_840 * 61 * (656 + 132))],
    ),
    Case(
        "vllm-project/vllm#7992: V0, four of 32 layers attend",
        {"model_type": "jamba", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4,
         "mamba_expand": 2, "mamba_dt_rank": 256, "torch_dtype": "bfloat16"},
        """
        azureuser@vm:~/vllm$ vllm serve ai21labs/AI21-Jamba-1.5-Mini --max-model-len 16384 --kv-cache-dtype fp8
        INFO 08-29 09:57:42 gpu_executor.py:121] # GPU blocks: 112557, # CPU blocks: 32768
        """,
        [("num_cpu_blocks", 32_768)],
    ),
]  # fmt: skip

SGLANG = [
    Case(
        "sgl-project/sglang#4094: the tokens on a later line",
        plain(28, 28, 4, 128),
        """
        [2025-03-05 10:32:31 TP0] KV Cache is allocated. K size: 9.96 GB, V size: 9.96 GB.
        [2025-03-05 10:32:47 TP0] max_total_num_tokens=372945, chunked_prefill_size=8192, context_len=32768
        """,
        [("k_bytes", 372_946 * 28_672), ("v_bytes", 372_946 * 28_672)],
    ),
    Case(
        "sgl-project/sglang#7847: MLA is on every rank",
        latent(61),
        """
        [2025-07-08 06:50:01] server_args=ServerArgs(model_path='deepseek-ai/DeepSeek-R1', tp_size=16, page_size=1)
        [2025-07-08 06:56:36 DP0 TP0] KV Cache is allocated. #tokens: 131072, KV size: 8.58 GB
        """,
        [("kv_bytes", 131_073 * 61 * 1152)],
    ),
    Case(
        "sgl-project/sglang#11309: the indexer's keys left out",
        sparse(61),
        """
        ServerArgs(tp_size=8, dp_size=8, enable_dp_attention=True, kv_cache_dtype='fp8_e4m3')
        [2025-10-07 22:29:11 DP0 TP0] KV Cache is allocated. #tokens: 1462784, KV size: 54.52 GB
        """,
        [("kv_bytes", (1_462_784 + 64) * 61 * 656)],
    ),
    Case(
        "the pool of sgl-project/sglang#4094 on eight devices that are two DP ranks of four copies",
        plain(28, 28, 4, 128),
        """
        ServerArgs(tp_size=8, dp_size=1, attn_dp_size=2, attn_cp_size=4, enable_prefill_cp=True, page_size=1)
        [2026-06-05 10:32:31 TP0] KV Cache is allocated. #tokens: 372945, K size: 9.96 GB, V size: 9.96 GB.
        """,
        [("k_bytes", 372_946 * 28_672), ("v_bytes", 372_946 * 28_672)],
    ),
    Case(
        "Qwen3.5-9B at tp 2, states beside the pool",
        gated_delta(num_hidden_layers=32, num_key_value_heads=4),
        """
        ServerArgs(tp_size=2)
        [2026-04-14 16:08:49 TP0] Mamba Cache is allocated. max_mamba_cache_size: 186, conv_state size: 0.10GB, \
ssm_state size: 4.38GB
        [2026-04-14 16:08:49 TP0] KV Cache is allocated. #tokens: 327310, K size: 2.50 GB, V size: 2.50 GB
        """,
        [
            ("conv_state_bytes", 187 * 24 * 24_576), ("ssm_state_bytes", 187 * 24 * 1_048_576),
            ("k_bytes", 327_311 * 8192), ("v_bytes", 327_311 * 8192),
        ],
    ),
]  # fmt: skip

TENSORRT_LLM = [
    Case(
        "NVIDIA/TensorRT-LLM#1400: to the byte",
        plain(32, 32, 32, 128),
        """
        [TensorRT-LLM][INFO] Allocate 69524783104 bytes for k/v cache.
        [TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache.
        """,
        [("pool_bytes", 69_524_783_104)],
    ),
    Case(
        "triton-inference-server/tutorials#150",
        plain(22, 32, 4, 64),
        """
        Max KV cache blocks per sequence: 65 [window size=2051], tokens per block=32, primary blocks=116617, \
secondary blocks=0
        [MemUsageChange] Allocated 78.30 GiB for max tokens in paged KV cache (3731744).
        """,
        [("blocks_per_sequence", 65), ("num_blocks", 116_617), ("pool_bytes", 3_731_744 * 22_528)],
    ),
    Case(
        "Dynamo's TensorRT-LLM documents",
        plain(32, 32, 8, 128),
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 26.91 GiB for max tokens in paged KV cache (220480).",
        [("pool_bytes", 220_480 * 131_072)],
    ),
]

LLAMA_CPP = [
    Case(
        "ggml-org/llama.cpp#14307",
        plain(48, 32, 4, 128),
        """
        llama_context: n_ctx         = 4096
        llama_kv_cache_unified: size =  384.00 MiB (  4096 cells,  48 layers,  1 seqs), K (f16):  192.00 MiB, V \
(f16):  192.00 MiB
        """,
        [
            ("cells", 4096), ("layers", 48), ("cache_bytes", 384 * 2**20), ("k_bytes", 192 * 2**20),
            ("v_bytes", 192 * 2**20),
        ],
    ),
    Case(
        "ggml-org/llama.cpp#14097: two slots in one stream, windows in a cache of their own",
        plain(62, 32, 16, 128, model_type="gemma3_text", sliding_window=1024, sliding_window_pattern=6),
        """
        llama_context: n_seq_max     = 2
        llama_context: n_ctx         = 32768
        llama_kv_cache_unified: size = 1360.00 MiB ( 32768 cells,  10 layers,  2 seqs), K (q8_0):  680.00 MiB, V \
(q8_0):  680.00 MiB
        llama_kv_cache_unified: size =  552.50 MiB (  2560 cells,  52 layers,  2 seqs), K (q8_0):  276.25 MiB, V \
(q8_0):  276.25 MiB
        """,
        [
            ("cells", 32768), ("layers", 10), ("cache_bytes", 1360 * 2**20), ("k_bytes", 680 * 2**20),
            ("v_bytes", 680 * 2**20), ("cells", 2560), ("layers", 52), ("cache_bytes", 579_338_240),
            ("k_bytes", 289_669_120), ("v_bytes", 289_669_120),
        ],
    ),
    Case(
        "ggml-org/llama.cpp#25721: states beside the cache",
        gated_delta(),
        """
        llama_context: n_ctx         = 262144
        llama_kv_cache: size = 1440.00 MiB (262144 cells,  10 layers,  1/1 seqs), K (q4_0):  720.00 MiB, V (q4_0):  \
720.00 MiB
        llama_memory_recurrent: size =   62.81 MiB (     1 cells,  40 layers,  1 seqs  0 rs_seq), R (f32):    2.81 \
MiB, S (f32):   60.00 MiB
        """,
        [
            ("cells", 262_144), ("layers", 10), ("cache_bytes", 1440 * 2**20), ("k_bytes", 720 * 2**20),
            ("v_bytes", 720 * 2**20), ("slots", 1), ("layers", 40), ("state_bytes", 65_863_680), ("r_bytes", 2_949_120),
            ("s_bytes", 62_914_560),
        ],
    ),
    Case(
        "build 4887, DeepSeek-V2-Lite before MLA: heads expanded",
        latent(27),
        """
        main: build = 4887 (8fcb5636) with cc
        llama_context: n_ctx         = 4096
        llama_context: KV self size  = 1080.00 MiB, K (f16):  648.00 MiB, V (f16):  432.00 MiB
        """,
        [("cache_bytes", 1080 * 2**20), ("k_bytes", 648 * 2**20), ("v_bytes", 432 * 2**20)],
    ),
    Case(
        "ggml-org/llama.cpp#14201: the latent once more as V",
        latent(61),
        """
        llama_context: n_ctx         = 32768
        llama_kv_cache_unified: size = 4148.00 MiB ( 32768 cells,  61 layers,  1 seqs), K (f16): 2196.00 MiB, V \
(f16): 1952.00 MiB
        """,
        [
            ("cells", 32768), ("layers", 61), ("cache_bytes", 4148 * 2**20), ("k_bytes", 2196 * 2**20),
            ("v_bytes", 1952 * 2**20),
        ],
    ),
    Case(
        "ggml-org/llama.cpp#3969, of 2023: a context that is not rounded up",
        plain(62, 56, 8, 128),
        """
        llama_new_context_with_model: n_ctx      = 6120
        llama_new_context_with_model: kv self size  = 1482.19 MB
        """,
        [("cache_bytes", 6120 * 253_952)],
    ),
    Case(
        "ikawrakow/ik_llama.cpp, DeepSeek-V3: the latent alone, in q8_0",
        latent(61),
        """
        llama_new_context_with_model: n_ctx      = 32768
        llama_new_context_with_model: KV self size  = 1166.62 MiB, c^KV (q8_0): 1166.62 MiB, kv^T: not used
        """,
        [("cache_bytes", 32_768 * 61 * 612)],
    ),
    Case(
        "ikawrakow/ik_llama.cpp, Qwen3-30B-A3B: decimal commas",
        plain(48, 32, 4, 128),
        """
        llama_new_context_with_model: n_ctx      = 32768
        llama_new_context_with_model: KV self size  = 3072,00 MiB, K (f16): 1536,00 MiB, V (f16): 1536,00 MiB
        """,
        [("cache_bytes", 3072 * 2**20), ("k_bytes", 1536 * 2**20), ("v_bytes", 1536 * 2**20)],
    ),
    Case(
        "ggml-org/llama.cpp#2209, of 2023: MB for MiB",
        plain(80, 64, 64, 128),
        """
        llama_model_load_internal: n_ctx      = 512
        llama_new_context_with_model: kv self size  = 1280.00 MB
        """,
        [("cache_bytes", 1280 * 2**20)],
    ),
    Case(
        "ggml-org/llama.cpp#6189: a state alone",
        {"model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560, "state_size": 16, "conv_kernel": 4,
         "expand": 2, "intermediate_size": 5120, "torch_dtype": "float16"},
        """
        llama_new_context_with_model: n_ctx      = 2048
        llama_new_context_with_model: KV self size  =   23.75 MiB, K (f32):    3.75 MiB, V (f32):   20.00 MiB
        """,
        [("cache_bytes", 24_903_680), ("k_bytes", 3_932_160), ("v_bytes", 20_971_520)],
    ),
    Case(
        "ggml-org/llama.cpp#9315: RWKV-6, two shifts and a matrix a head",
        {"model_type": "rwkv6", "num_hidden_layers": 32, "hidden_size": 4096, "head_size": 64,
         "attention_hidden_size": 4096, "torch_dtype": "float16"},
        """
        llama_new_context_with_model: n_ctx      = 1048576
        llama_new_context_with_model: KV self size  =   33.00 MiB, K (f32):    1.00 MiB, V (f32):   32.00 MiB
        """,
        [("cache_bytes", 33 * 2**20), ("k_bytes", 2**20), ("v_bytes", 32 * 2**20)],
    ),
    Case(
        "ggml-org/llama.cpp#12817, of early 2025: a cache for an encoder; blanks as a web page has them",
        {"model_type": "nomic_bert", "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768,
         "torch_dtype": "float16"},
        """
        llama_context: n_ctx = 8192
        llama_context: KV self size\xa0 =\xa0 288.00 MiB, K (f16):  144.00 MiB, V (f16):  144.00 MiB
        """,
        [("cache_bytes", 288 * 2**20), ("k_bytes", 144 * 2**20), ("v_bytes", 144 * 2**20)],
    ),
    Case(
        "blocks without attention have a cache of no bytes, and are counted",
        {"model_type": "nemotron-nas", "num_hidden_layers": 4, "num_attention_heads": 16, "hidden_size": 2048,
         "num_key_value_heads": None, "torch_dtype": "float16", "block_configs": [
             {"attention": {"n_heads_in_group": 8 if attends else None, "no_op": not attends,
                            "replace_with_linear": False}} for attends in (True, False, True, True)]},
        """
        llama_context: n_ctx = 1024
        llama_kv_cache_unified: size = 3.00 MiB ( 1024 cells, 4 layers, 1 seqs), K (f16): 1.50 MiB, V (f16): 1.50 MiB
        """,
        [("cells", 1024), ("layers", 4), ("cache_bytes", 3 * 2**20), ("k_bytes", 3 * 2**19), ("v_bytes", 3 * 2**19)],
    ),
    Case(
        "layers shared between processor and device: a buffer on each",
        plain(32, 32, 8, 128),
        """
        llama_context: n_ctx = 4096
        llama_kv_cache_init:        CPU KV buffer size =   192.00 MiB
        llama_kv_cache_init:      CUDA0 KV buffer size =   320.00 MiB
        """,
        [("buffer_bytes", 12 * 2**24), ("buffer_bytes", 20 * 2**24)],
    ),
]  # fmt: skip


def run(kvcalc: Any, folder: Path, config: dict[str, object] | None, log: str | bytes, *options: str) -> Any:
    """The result of the command for a log and a config, both written to files."""
    path = folder / "engine.log"
    path.write_bytes(log.encode() if isinstance(log, str) else log)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
        options = ("--model", str(folder / "config.json"), *options)
    return kvcalc("audit", str(path), *options)


@pytest.mark.parametrize("case", [*VLLM, *SGLANG, *TENSORRT_LLM, *LLAMA_CPP], ids=lambda case: case.source)
def test_every_number_follows_from_the_model(kvcalc: Any, tmp_path: Path, case: Case) -> None:
    result = run(kvcalc, tmp_path, case.config, case.log, "--json", *case.options)
    figures = result.json["figures"]
    found = [(row["name"], row["computed"]) for row in figures if row["verdict"] != "input"]
    assert sorted(found, key=str) == sorted(case.equal, key=str)
    assert {row["verdict"] for row in figures} <= {"equal", "input"}
    assert result.status == 0


VLLM_LOG = """\
(EngineCore_0 pid=412) INFO 08-14 [core.py:91] Initializing a V1 LLM engine (v0.23.1) with config: \
model='meta-llama/Meta-Llama-3-8B', dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, kv_cache_dtype=auto
(EngineCore_0 pid=412) INFO 08-14 [gpu_worker.py:298] Available KV cache memory: 52.80 GiB
(EngineCore_0 pid=412) INFO 08-14 [kv_cache_utils.py:1087] GPU KV cache size: 432,512 tokens
(EngineCore_0 pid=412) INFO 08-14 [kv_cache_utils.py:1091] Maximum concurrency for 8,192 tokens per request: 52.80x
"""


def test_the_log_names_the_model_the_version_and_the_memory(kvcalc: Any, tmp_path: Path) -> None:
    result = run(kvcalc, tmp_path, None, VLLM_LOG, "--json")
    document = result.json
    assert (document["engine"]["name"], document["engine"]["version"]) == ("vllm", "0.23.1")
    assert document["engine"]["rules"] == ["vLLM 0.23 and later"]
    assert (document["model"]["name"], document["model"]["log_name"]) == ("llama-3-8b", "meta-llama/Meta-Llama-3-8B")
    assert (document["equal"], document["unexplained"], document["inputs"]) == (2, 0, 1)
    assert [(row["line"], row["verdict"]) for row in document["figures"]] == [(2, "input"), (3, "equal"), (4, "equal")]
    assert result.status == 0


def test_colours_timestamps_and_a_containers_prefix_are_passed_over(kvcalc: Any, tmp_path: Path) -> None:
    plain_answer = run(kvcalc, tmp_path, None, VLLM_LOG, "--json").json
    dressed = "".join(
        f"2026-08-14T09:12:40.123456789Z stdout F \x1b[36m{line}\x1b[0m\r\n" for line in VLLM_LOG.splitlines()
    ).replace("432,512", "\x1b[1;32m432,512\x1b[0m")
    assert run(kvcalc, tmp_path, None, dressed, "--json").json == plain_answer


def test_interleaved_ranks(kvcalc: Any, tmp_path: Path) -> None:
    """Each rank has its own memory and its own line of tokens. A repeated line counts once."""
    log = """
    (VllmWorker rank=0 pid=7) INFO Available KV cache memory: 10.00 GiB
    (VllmWorker rank=1 pid=8) INFO Available KV cache memory: 9.00 GiB
    (EngineCore pid=5) INFO GPU KV cache size: 163,840 tokens
    (VllmWorker rank=0 pid=7) WARNING something else: 17 tokens
    (EngineCore pid=5) INFO Maximum concurrency for 8,192 tokens per request: 20.00x
    (EngineCore pid=5) INFO GPU KV cache size: 147,456 tokens
    (EngineCore pid=5) INFO GPU KV cache size: 147,456 tokens
    (EngineCore pid=5) INFO Maximum concurrency for 8,192 tokens per request: 18.00x
    """
    whole = run(kvcalc, tmp_path, plain(32, 32, 8, 128), log, "--json", "--tp", "2").json
    assert [row["computed"] for row in whole["figures"] if row["name"] == "kv_cache_tokens"] == [163_840, 147_456]
    assert (whole["equal"], whole["unexplained"], whole["inputs"]) == (4, 0, 2)


def test_what_one_setting_would_explain(kvcalc: Any, tmp_path: Path) -> None:
    log = "Available KV cache memory: 9.00 GiB\nGPU KV cache size: 147,456 tokens\n"
    result = run(kvcalc, tmp_path, plain(32, 32, 8, 128), log, "--json")
    (row,) = [row for row in result.json["figures"] if row["verdict"] == "unexplained"]
    assert (row["computed"], row["difference"]) == (73_728, 73_728)
    assert result.json["explanation"] == "all numbers are equal with --tp 2 or with --kv-dtype fp8"
    assert result.status == 5
    assert result.err == (
        "kvcalc: 1 of the log's numbers unexplained\n  all numbers are equal with --tp 2 or with --kv-dtype fp8\n"
    )
    assert run(kvcalc, tmp_path, plain(32, 32, 8, 128), log, "--get", "unexplained", "--tp", "2").out == "0\n"


def test_a_wrong_model_is_found_out(kvcalc: Any, tmp_path: Path) -> None:
    result = run(kvcalc, tmp_path, None, VLLM_LOG, "--json", "--model", "llama-7b")
    assert result.status == 5
    assert result.json["unexplained"] == 2
    assert result.json["explanation"] == "all numbers are equal with --tp 4"


def test_memory_is_an_input_and_blocks_come_from_it(kvcalc: Any, tmp_path: Path) -> None:
    """5,000 blocks of 2 MiB are printed as 9.77 GiB. So are 5,002 blocks, but 5,010 are printed as 9.79 GiB."""
    for blocks, status in ((5000, 0), (5002, 0), (5010, 5)):
        log = f"the rest of the memory reserved for KV Cache is 9.77GiB.\n# GPU blocks: {blocks}, # CPU blocks: 2048\n"
        assert run(kvcalc, tmp_path, plain(32, 32, 8, 128), log).status == status


def test_tokens_without_memory_are_an_input_and_must_be_whole_blocks(kvcalc: Any, tmp_path: Path) -> None:
    version = "Initializing a V1 LLM engine (v0.10.0)\n"
    for tokens, verdict in ((147_888, "input"), (147_890, "unexplained")):
        log = f"{version}GPU KV cache size: {tokens:,} tokens\n"
        (row,) = run(kvcalc, tmp_path, plain(32, 32, 32, 128), log, "--json").json["figures"]
        assert row["verdict"] == verdict


@pytest.mark.parametrize(
    ("log", "status", "message"),
    [
        ("", 2, "no line of vLLM, SGLang, TensorRT-LLM or llama.cpp with a number about its cache"),
        ("nothing to see\nhere\n", 2, "no line of vLLM, SGLang"),
        (b"\x7fELF\x02\x01\xff\xfe\x00", 2, "no line of vLLM, SGLang"),
        ("GPU KV cache size: tokens\nMaximum concurrency for 8,192 tokens per request: x\n", 2, "no line of vLLM"),
        ("GPU KV cache size: 16 tokens\n", 3, "the log does not name its model"),
        ("model='org/unknown-1b', GPU KV cache size: 16 tokens\n", 3, "names an unknown model, 'org/unknown-1b'"),
        ("model='gpt2', kv_cache_dtype=weird, GPU KV cache size: 16 tokens\n", 2, "'weird': not a dtype"),
        ("model='gpt2', tensor_parallel_size=0, GPU KV cache size: 16 tokens\n", 2, "must be at least 1"),
        ("model='bert-base', GPU KV cache size: 16 tokens\n", 3, "pool for encoders is not counted"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    kvcalc: Any, tmp_path: Path, log: str | bytes, status: int, message: str
) -> None:
    result = run(kvcalc, tmp_path, None, log)
    assert (result.status, result.out) == (status, "")
    assert message in result.err
    assert len(result.err.splitlines()) <= 2


def test_a_log_that_is_missing_is_refused(kvcalc: Any, tmp_path: Path) -> None:
    assert kvcalc("audit", tmp_path / "missing.log").status == 2
    assert kvcalc("audit", tmp_path).status == 2


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_an_encoding_of_windows_is_read(kvcalc: Any, tmp_path: Path, encoding: str) -> None:
    expected = run(kvcalc, tmp_path, None, VLLM_LOG, "--json").json
    assert run(kvcalc, tmp_path, None, VLLM_LOG.encode(encoding), "--json").json == expected
    # A piece may end within a character.
    data = VLLM_LOG.encode(encoding)
    assert audit([data[:4097], data[4097:4100], data[4100:]], expected["log"]["name"]) == expected


def test_bytes_that_are_not_text_are_replaced(kvcalc: Any, tmp_path: Path) -> None:
    expected = run(kvcalc, tmp_path, None, VLLM_LOG, "--json").json
    data = VLLM_LOG.encode()
    for place in (0, 1, data.index(b"\n"), len(data)):
        found = run(kvcalc, tmp_path, None, data[:place] + b"\xff\x80 " + data[place:], "--json")
        assert found.json["equal"] == expected["equal"] > 0


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10**6])
def test_a_log_may_come_in_pieces_of_any_size(size: int) -> None:
    noise = "\r".join(f"progress {n} %" for n in range(30)) + "\r\n" + "x" * 200_000 + "\r\n"
    log = ("\x1b[32mINFO\x1b[0m start\r\n" + noise + VLLM_LOG.replace("\n", "\r\n") + "\n\n\r\n").encode()
    if size < 7:
        log = log.replace(b"x" * 200_000, b"x" * 2000)
    whole = audit(log.decode())
    assert audit(log[place : place + size] for place in range(0, len(log), size)) == whole
    assert whole["log"]["num_lines"] == 33 + VLLM_LOG.strip().count("\n")


def test_lines_like_others_are_read_if_they_have_a_number() -> None:
    """Lines that differ in their digits alone are compared instead of searched."""
    noise = [f"INFO 10:00:{n % 60:02d} engine: {n} tokens/s, cache usage {n % 100} %, no error" for n in range(40_000)]
    lines = VLLM_LOG.splitlines()
    mixed = [*noise[:20_000], *lines[:3], *noise[20_000:], *lines[3:]]
    expected = audit(VLLM_LOG)
    log = "\n".join(mixed).encode()
    found = audit(log[place : place + 2**20] for place in range(0, len(log), 2**20))
    assert [(row["name"], row["printed"]) for row in found["figures"]] == [
        (row["name"], row["printed"]) for row in expected["figures"]
    ]
    assert found["log"]["num_lines"] == len(mixed)
    # The numbers of lines are right behind a skipped block.
    assert {row["line"] for row in found["figures"]} <= {mixed.index(line) + 1 for line in lines}


@pytest.mark.parametrize("cut", range(0, len(VLLM_LOG), 37))
def test_a_log_cut_anywhere_is_audited_or_refused(kvcalc: Any, tmp_path: Path, cut: int) -> None:
    result = run(kvcalc, tmp_path, None, VLLM_LOG[:cut])
    assert result.status in (0, 2, 5)
    assert "internal error" not in result.err


@pytest.mark.long
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=st.sampled_from([*VLLM, *SGLANG, *TENSORRT_LLM, *LLAMA_CPP]),
    changes=st.lists(st.tuples(st.integers(0, 2000), st.sampled_from("09.,-x =\x1b\n/")), min_size=1, max_size=6),
)
def test_a_log_damaged_anywhere_is_audited_or_refused(
    kvcalc: Any, tmp_path: Path, case: Case, changes: list[tuple[int, str]]
) -> None:
    characters = list(case.log)
    for place, character in changes:
        characters[place % len(characters)] = character
    result = run(kvcalc, tmp_path, case.config, "".join(characters))
    assert result.status in (0, 2, 3, 5), result.err


def test_numbers_no_engine_prints_are_passed_over_or_refused(kvcalc: Any, tmp_path: Path) -> None:
    for log in ("GPU KV cache size: " + "9" * 5000 + " tokens", "Available KV cache memory: 1.2.3.4 GiB"):
        assert run(kvcalc, tmp_path, None, log).status == 2
    many = "".join(f"GPU KV cache size: {16 * n} tokens\n" for n in range(300))
    result = run(kvcalc, tmp_path, None, many)
    assert (result.status, "a start prints at most 200" in result.err) == (2, True)


def test_a_model_of_states_alone(kvcalc: Any, tmp_path: Path) -> None:
    """One block holds one request of full length. V0 has no blocks for such a model."""
    log = "Initializing a V1 LLM engine (v0.11.0)\nGPU KV cache size: 16,384 tokens\n"
    log += "Maximum concurrency for 2,048 tokens per request: 8.00x\n"
    (mamba,) = (case.config for case in LLAMA_CPP if case.config["model_type"] == "mamba")
    result = run(kvcalc, tmp_path, mamba, log, "--json")
    assert [(row["name"], row["verdict"]) for row in result.json["figures"]] == [
        ("kv_cache_tokens", "input"), ("max_concurrency", "equal"),
    ]  # fmt: skip
    assert run(kvcalc, tmp_path, mamba, "# GPU blocks: 10, # CPU blocks: 20").status == 3


def test_the_engine_is_seen_or_said(kvcalc: Any, tmp_path: Path) -> None:
    assert run(kvcalc, tmp_path, None, VLLM_LOG, "--engine", "sglang").status == 2
    result = run(kvcalc, tmp_path, None, VLLM_LOG, "--engine", "vlm")
    assert (result.status, "did you mean vllm" in result.err) == (2, True)
    assert run(kvcalc, tmp_path, None, VLLM_LOG, "--engine", "vLLM", "--get", "engine.name").out == "vllm\n"


def test_the_first_of_two_contradicting_lines_is_taken_with_a_warning(kvcalc: Any, tmp_path: Path) -> None:
    log = VLLM_LOG + "INFO engine args: tensor_parallel_size=4, enable_prefix_caching=True, --enable-prefix-caching\n"
    result = run(kvcalc, tmp_path, None, log, "--json")
    assert result.status == 0
    assert texts(result.json) == ["line 5 says tensor_parallel_size is '4', but line 1 says '1', which is used"]


def test_a_path_in_a_log_is_not_opened(kvcalc: Any, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(plain(1, 1, 1, 16)))
    log = VLLM_LOG.replace("meta-llama/Meta-Llama-3-8B", str(tmp_path / "other.json"))
    assert run(kvcalc, tmp_path, None, log).status == 3
    log = VLLM_LOG.replace("meta-llama/Meta-Llama-3-8B", "/srv/weights/meta_llama-3-8B/")
    assert run(kvcalc, tmp_path, None, log, "--get", "model.name").out == "llama-3-8b\n"


LLAMA_CPP_LOG = """\
build: 5716 (d27b3ca1) with cc
print_info: arch             = qwen3moe
print_info: n_embd           = 2048
print_info: n_layer          = 48
print_info: n_head           = 32
print_info: n_head_kv        = 4
print_info: n_swa            = 0
print_info: n_embd_head_k    = 128
print_info: n_embd_head_v    = 128
print_info: general.name     = Unheard 30B A3B
llama_context: n_ctx         = 4096
llama_kv_cache_unified: size =  384.00 MiB (  4096 cells,  48 layers,  1 seqs), \
K (f16):  192.00 MiB, V (f16):  192.00 MiB
"""


def test_the_dimensions_llama_cpp_prints_are_the_model(kvcalc: Any, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#14307."""
    document = run(kvcalc, tmp_path, None, LLAMA_CPP_LOG, "--json").json
    assert (document["equal"], document["unexplained"]) == (5, 0)
    assert (document["model"]["name"], document["model"]["source"]) == ("Unheard 30B A3B", "the log's dimensions")
    for spoilt in ("n_swa            = 1024", "n_swa            = [0, 1]"):
        log = LLAMA_CPP_LOG.replace("n_swa            = 0", spoilt)
        assert run(kvcalc, tmp_path, None, log).status == 3
    assert run(kvcalc, tmp_path, None, LLAMA_CPP_LOG.replace("qwen3moe", "gemma3")).status == 3


def test_every_format(kvcalc: Any, tmp_path: Path) -> None:
    head, *rows = run(kvcalc, tmp_path, None, VLLM_LOG, "--format", "tsv").out.splitlines()
    assert head.split("\t") == ["line", "name", "printed", "unit", "computed", "difference", "verdict", "rule"]
    assert rows[1].split("\t")[:7] == ["3", "kv_cache_tokens", "432,512", "tokens", "432512", "null", "equal"]
    assert run(kvcalc, tmp_path, None, VLLM_LOG, "--format", "csv").out.startswith("line,name,printed,unit,computed,")
    human = run(kvcalc, tmp_path, None, VLLM_LOG, "--format", "human").out
    assert "2 equal, 0 unexplained, 1 taken as inputs" in human
    assert run(kvcalc, tmp_path, None, VLLM_LOG, "--get", "figures.1.computed").out == "432512\n"
    assert run(kvcalc, tmp_path, None, VLLM_LOG, "--get", "figure").status == 2


def test_an_intel_gpu_has_blocks_of_64_beside_states() -> None:
    # A public log of vLLM 0.24 with Qwen3.6-27B on an XPU. On other devices, blocks are multiples of 16: 784.
    line = "Setting attention block size to {} tokens to ensure that attention page size is >= mamba page size."
    start = "vLLM API server version 0.24.0\ndevice_config={}, enable_prefix_caching=True\n"
    for platform, block in (("xpu", 832), ("cuda", 784)):
        found = audit(start.format(platform) + line.format(block), model="qwen3.6-27b")
        assert [figure["verdict"] for figure in found["figures"]] == ["equal"], platform


def test_the_pool_of_sglangs_windows_is_named() -> None:
    """Llama 4: 12 layers of all tokens and 36 of windows, each with 8 heads of 128 in 16 bits."""
    pools = [(154_265, 12, ""), (20_497, 36, " in the sliding-window layers")]
    sizes = [(tokens + 1) * layers * 8 * 128 * 2 for tokens, layers, _ in pools]
    log = "server_args=ServerArgs(model_path='meta-llama/Llama-4-Scout-17B-16E', page_size=1)\n" + "".join(
        f"KV Cache is allocated. #tokens: {pool[0]}, K size: {size / 2**30:.2f} GB, V size: {size / 2**30:.2f} GB\n"
        for pool, size in zip(pools, sizes)
    )
    found: Any = audit(log, "log")
    rows = [row for row in found["figures"] if row["name"] == "k_bytes"]
    assert [row["computed"] for row in rows] == sizes
    assert [row["rule"] for row in rows] == [
        f"({tokens:,} tokens + a page of 1) x {layers * 8 * 128 * 2:,} bytes{whose}" for tokens, layers, whose in pools
    ]


@pytest.mark.parametrize(("layers", "verdict"), [(40, "equal"), (41, "unexplained")])
def test_states_are_of_the_models_layers(kvcalc: Any, tmp_path: Path, layers: int, verdict: str) -> None:
    """A file has more only if it has layers for MTP, and this model has none."""
    log = f"""
    llama_context: n_seq_max     = 1
    llama_context: n_ctx         = 262144
    llama_memory_recurrent: size =   62.81 MiB (     1 cells,  {layers} layers,  1 seqs), R (f32):    2.81 MiB, \
S (f32):   60.00 MiB
    """
    result = run(kvcalc, tmp_path, gated_delta(), log, "--json")
    assert [row["verdict"] for row in result.json["figures"] if row["name"] == "layers"] == [verdict]
