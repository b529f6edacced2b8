"""llama.cpp's logs: what each device holds, llama-server's own slots, drafting, and lines that were shortened."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from tests.documents import audit
from tests.engines.models import plain

MIB = 2**20

# b5622, Qwen3-30B-A3B on an RTX 4090 and an RTX 5090. 12 of 49 layers are 9,862 / (9,862 + 31,518) of them.
TWO_DEVICES = """\
llama_model_load_from_file_impl: using device CUDA0 (NVIDIA GeForce RTX 4090) - 9862 MiB free
llama_model_load_from_file_impl: using device CUDA1 (NVIDIA GeForce RTX 5090) - 31518 MiB free
load_tensors: offloaded 49/49 layers to GPU
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 16384
llama_context: n_ubatch      = 512
llama_kv_cache_unified:      CUDA0 KV buffer size =   384.00 MiB
llama_kv_cache_unified:      CUDA1 KV buffer size =  1152.00 MiB
llama_kv_cache_unified: size = 1536.00 MiB ( 16384 cells,  48 layers,  1 seqs), K (f16):  768.00 MiB, V (f16): \
 768.00 MiB
"""

# Qwen3.6-27B with its MTP layer, which counts as a layer: 38 of 66 layers are on the first device.
STATES = """\
llama_prepare_model_devices: using device CUDA0 (NVIDIA GeForce RTX 5060 Ti) (0000:01:00.0) - 15900 MiB free
llama_prepare_model_devices: using device CUDA1 (NVIDIA GeForce RTX 5060 Ti) (0000:02:00.0) - 15900 MiB free
load_tensors: offloaded 66/66 layers to GPU
llama-server -ts 17,13 -kvu
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 262144
llama_kv_cache:      CUDA0 KV buffer size =  4896.00 MiB
llama_kv_cache:      CUDA1 KV buffer size =  3808.00 MiB
llama_kv_cache: size = 8704.00 MiB (262144 cells,  16 layers,  1/1 seqs), K (q8_0): 4352.00 MiB, V (q8_0): 4352.00 MiB
llama_memory_recurrent:      CUDA0 RS buffer size =   361.59 MiB
llama_memory_recurrent:      CUDA1 RS buffer size =   236.91 MiB
llama_memory_recurrent: size =  598.50 MiB (     1 cells,  64 layers,  1 seqs  3 rs_seq), R (f32):   22.50 MiB, S \
(f32):  576.00 MiB
"""

# b9849 without --parallel and with --ubatch-size 2048. The log does not print the size of either cache.
GEMMA = {
    "model_type": "gemma4_text", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "head_dim": 256, "global_head_dim": 512,
    "hidden_size": 3840, "sliding_window": 1024, "num_kv_shared_layers": 0, "torch_dtype": "bfloat16",
}  # fmt: skip
OWN_SLOTS = """\
0.00.153.956 I srv  llama_server: n_parallel is set to auto, using n_parallel = 4 and kv_unified = true
0.05.441.651 I llama_context: n_ctx         = 8192
0.05.441.653 I llama_context: n_ubatch      = 2048
0.05.441.654 I llama_context: kv_unified    = true
0.05.442.099 I llama_kv_cache_iswa: creating non-SWA KV cache, size = 8192 cells
0.05.442.575 I llama_kv_cache:    Vulkan0 KV buffer size =   128.00 MiB
0.05.471.085 I llama_kv_cache_iswa: creating     SWA KV cache, size = 6144 cells
0.05.472.586 I llama_kv_cache:    Vulkan0 KV buffer size =  1920.00 MiB
0.06.466.752 I srv    load_model: initializing, n_slots = 4, n_ctx_slot = 8192, kv_unified = 'true'
"""


def figures(log: str, config: dict[str, Any] | str, **asked: Any) -> list[tuple[str, str, int | None]]:
    """The name, the verdict and the computed number of every figure."""
    spec = kvcalc.load_model(config) if isinstance(config, str) else kvcalc.read_config(config, "log", "log")
    found = audit(log, "log", model=spec, engine="llama.cpp", **asked)["figures"]
    return [(row["name"], row["verdict"], row["computed"]) for row in found]


def buffers(log: str, config: dict[str, Any] | str) -> list[tuple[str, int | None]]:
    return [(verdict, size) for name, verdict, size in figures(log, config) if name.endswith("buffer_bytes")]


def test_each_device_has_the_layers_of_its_share_of_the_free_memory() -> None:
    config = plain(48, 32, 4, 128)
    assert buffers(TWO_DEVICES, config) == [("equal", 384 * MIB), ("equal", 1152 * MIB)]
    rules = audit(TWO_DEVICES, "log", model=kvcalc.read_config(config, "log", "log"), engine="llama.cpp")["figures"]
    assert "layers 0 to 11 on CUDA0" in rules[0]["rule"]
    # The fit of llama-server may have changed the split, so another number of whole layers is equal too.
    assert buffers(TWO_DEVICES.replace("384.00 MiB\n", "352.00 MiB\n"), config)[0] == ("equal", 352 * MIB)
    assert buffers(TWO_DEVICES.replace("384.00 MiB\n", "380.00 MiB\n"), config)[0] == ("unexplained", 384 * MIB)


def test_a_stated_split_is_held() -> None:
    config = plain(48, 32, 4, 128)
    stated = TWO_DEVICES + "llama-server --tensor-split 9862,31518\n"
    assert buffers(stated, config) == [("equal", 384 * MIB), ("equal", 1152 * MIB)]
    assert buffers(stated.replace("384.00 MiB\n", "352.00 MiB\n"), config)[0] == ("unexplained", 384 * MIB)


def test_a_device_to_which_the_split_gives_no_layer_has_none_if_the_split_is_stated() -> None:
    config = plain(48, 32, 4, 128)
    log = TWO_DEVICES.replace("31518 MiB free", "9 MiB free")
    # The split may have been changed, and all buffers are whole layers.
    assert buffers(log, config) == [("equal", 384 * MIB), ("equal", 1152 * MIB)]
    found = audit(
        log + "llama-server --tensor-split 9862,9\n", "log", model=kvcalc.read_config(config, "log", "log"),
        engine="llama.cpp",
    )["figures"]  # fmt: skip
    second = next(row for row in found if row["line"] == 8)
    assert (second["verdict"], second["computed"]) == ("unexplained", 0)
    assert second["rule"].startswith("0 of 48 layers")
    # A device that the log does not name may have any of the layers.
    assert buffers(log.replace("CUDA1 KV", "Vulkan0 KV"), config)[1] == ("equal", 1152 * MIB)


def test_states_are_on_the_device_of_their_layer() -> None:
    state = 48 * (10240 * 3 + 48 * 128 * 128) * 4 // 48 * 4
    found = buffers(STATES, "qwen3.6-27b")
    assert found == [
        ("equal", 4896 * MIB), ("equal", 3808 * MIB), ("equal", 29 * state), ("equal", 19 * state),
    ]  # fmt: skip
    assert all(verdict != "unexplained" for _, verdict, _ in figures(STATES, "qwen3.6-27b"))
    # The states for drafted tokens are as many as the line says.
    fewer = figures(STATES.replace("3 rs_seq", "2 rs_seq"), "qwen3.6-27b")
    assert ("state_bytes", "unexplained", 48 * (10240 * 3 + 48 * 128 * 128) * 4 * 3) in fewer
    wrong = STATES.replace("361.59", "374.06").replace("-ts 17,13", "-ts 1,1")
    assert buffers(wrong, "qwen3.6-27b")[2][0] == "unexplained"


def test_layers_in_host_memory_come_first() -> None:
    log = """
    llama_model_load: using device CUDA0 (NVIDIA GeForce RTX 3090) - 24000 MiB free
    load_tensors: offloaded 20/49 layers to GPU
    llama_context: n_seq_max     = 1
    llama_context: n_ctx         = 4096
    llama_kv_cache:        CPU KV buffer size =   232.00 MiB
    llama_kv_cache:      CUDA0 KV buffer size =   152.00 MiB
    """
    # The output is one of the 20, so 19 layers of 8 MiB are on the device.
    assert buffers(log, plain(48, 32, 4, 128)) == [("equal", 29 * 8 * MIB), ("equal", 19 * 8 * MIB)]
    # The output alone is on the device.
    alone = log.replace("20/49", "1/49").replace("232.00", "384.00").partition("llama_kv_cache:      CUDA0")[0]
    assert buffers(alone, plain(48, 32, 4, 128)) == [("equal", 48 * 8 * MIB)]


def test_the_layers_that_a_stated_split_leaves_in_host_memory_come_first() -> None:
    """20 of 49 layers are on two devices with as much each: 10, then 9 and the output. Others are in host memory."""
    log = """
    llama_model_load: using device CUDA0 (NVIDIA GeForce RTX 3090) - 24000 MiB free
    llama_model_load: using device CUDA1 (NVIDIA GeForce RTX 3090) - 24000 MiB free
    load_tensors: offloaded 20/49 layers to GPU
    llama-server -ts 1,1
    llama_context: n_seq_max     = 1
    llama_context: n_ctx         = 4096
    llama_kv_cache:        CPU KV buffer size =   232.00 MiB
    llama_kv_cache:      CUDA0 KV buffer size =    80.00 MiB
    llama_kv_cache:      CUDA1 KV buffer size =    72.00 MiB
    """
    config = plain(48, 32, 4, 128)
    split = [("equal", 29 * 8 * MIB), ("equal", 10 * 8 * MIB), ("equal", 9 * 8 * MIB)]
    assert buffers(log, config) == split
    rules = audit(log, "log", model=kvcalc.read_config(config, "log", "log"), engine="llama.cpp")["figures"]
    for row, layers in zip(rules, ("0 to 28 on CPU", "29 to 38 on CUDA0", "39 to 47 on CUDA1")):
        assert f"layers {layers}" in row["rule"]
    moved = log.replace(" 80.00", " 88.00").replace(" 72.00", " 64.00")
    assert buffers(moved, config) == [split[0], *(("unexplained", size) for _, size in split[1:])]
    assert buffers(log.replace("232.00", "224.00"), config)[0] == ("unexplained", 29 * 8 * MIB)
    # The output alone is on a device.
    few = log.partition("llama_kv_cache:      CUDA0")[0].replace("20/49", "1/49")
    assert buffers(few, config) == [("unexplained", 48 * 8 * MIB)]
    assert buffers(few.replace("232.00", "384.00"), config) == [("equal", 48 * 8 * MIB)]
    # Shares of other devices than the log has, or the layers of another model, say nothing.
    for other in (few.replace("1,1", "1,1,1"), few.replace("1/49", "1/98"), few.replace("1/49", "0/49")):
        assert buffers(other, config) == [("equal", 29 * 8 * MIB)]
    assert buffers(few.replace("1/49", "1/97"), config)[0][0] == "unexplained"
    # More layers than there are: all of them are on devices.
    assert buffers(log.replace("20/49", "60/49"), config) == buffers(log.replace("20/49", "49/49"), config)


def test_llama_servers_own_slots_are_read() -> None:
    assert figures(OWN_SLOTS, GEMMA) == [
        ("cells", "equal", 8192), ("buffer_bytes", "equal", 128 * MIB), ("cells", "equal", 6144),
        ("buffer_bytes", "equal", 1920 * MIB),
    ]  # fmt: skip
    # Without the number of slots, four are tried.
    silent = "\n".join(line for line in OWN_SLOTS.splitlines() if "parallel" not in line and "n_slots" not in line)
    document = audit(silent, "log", model=kvcalc.read_config(GEMMA, "log", "log"), engine="llama.cpp")
    assert (document["equal"], document["unexplained"]) == (4, 0)
    assert "4 slots, which llama-server starts by default" in document["engine"]["rules"]


def test_slots_that_llama_server_starts_by_default_share_one_stream() -> None:
    log = "llama_context: n_ctx = 8192\nllama_context: kv_unified = {}\ncreating non-SWA KV cache, size = {} cells\n"
    for unified, cells, verdict in (("true", 8192, "equal"), ("false", 8192, "equal"), ("false", 2048, "unexplained")):
        assert [row[:2] for row in figures(log.format(unified, cells), GEMMA)] == [("cells", verdict)]


@pytest.mark.parametrize(
    ("slots", "stated", "cells", "taken"),
    [
        (4, "", 8192, "one stream for all slots"), (4, "", 2048, "one stream per slot"), (1, "", 8192, None),
        (4, "llama_context: kv_unified = true\n", 8192, None), (4, "llama_context: kv_unified = false\n", 2048, None),
    ],
)  # fmt: skip
def test_the_streams_of_several_slots_are_told_by_their_cells(
    slots: int, stated: str, cells: int, taken: str | None
) -> None:
    log = f"llama_context: n_seq_max = {slots}\nllama_context: n_ctx = 8192\n{stated}"
    log += f"creating non-SWA KV cache, size = {cells} cells\n"
    spec = kvcalc.read_config(GEMMA, "log", "log")
    found = audit(log, "log", model=spec, engine="llama.cpp")
    assert [(row["verdict"], row["computed"]) for row in found["figures"]] == [("equal", cells)]
    said = [rule for rule in found["engine"]["rules"] if "stream" in rule]
    assert said == ([] if taken is None else [taken])


def test_a_stated_number_of_slots_is_not_replaced() -> None:
    one = OWN_SLOTS.replace("n_parallel = 4", "n_parallel = 1").replace("n_slots = 4", "n_slots = 1")
    assert [row[:2] for row in figures(one, GEMMA)] == [
        ("cells", "equal"), ("buffer_bytes", "equal"), ("cells", "unexplained"), ("buffer_bytes", "equal"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "model", "found"),
    [
        ("llama_memory_recurrent: size = 448.88 MiB (1 seqs 2 rs_seq)", "qwen3.6-27b",
         [("state_bytes", "equal", 470_679_552)]),
        ("llama_memory_recurrent: size = 1047.38 MiB (1 cells, 64 layers)", "qwen3.6-27b",
         [("slots", "input", None), ("layers", "equal", 64), ("state_bytes", "equal", 1_098_252_288)]),
        ("llama_memory_recurrent: size = 1000.38 MiB (1 cells, 64 layers)", "qwen3.6-27b",
         [("slots", "input", None), ("layers", "equal", 64), ("state_bytes", "unexplained", 1_098_252_288)]),
        ("RS 251.25 MiB (4 cells, 40 layers, 4 seqs)", "qwen3.6-35b-a3b",
         [("slots", "input", None), ("layers", "equal", 40), ("state_bytes", "equal", 263_454_720)]),
        ("1536.00 MiB (24576 cells, 16 layers)", "qwen3.6-27b",
         [("cells", "input", None), ("layers", "equal", 16), ("cache_bytes", "equal", 1536 * MIB)]),
    ],
)  # fmt: skip
def test_shortened_lines_are_read(line: str, model: str, found: list[tuple[str, str, int | None]]) -> None:
    assert figures(line, model) == found


# b10969, Qwen3.8-Flash-Next: the cache of K and V, that of the indexer's keys, and states with those of n-grams (P).
TWO_CACHES = """\
llama_context: n_seq_max     = 1
llama_context: n_ctx         = 8192
llama_kv_cache:      CUDA0 KV buffer size =   192.00 MiB
llama_kv_cache: size =  192.00 MiB (  8192 cells,  12 layers,  1/1 seqs), K (f16):   96.00 MiB, V (f16):   96.00 MiB
llama_memory_recurrent:      CUDA0 RS buffer size =   112.57 MiB
llama_memory_recurrent: size =  112.57 MiB (     1 cells,  48 layers,  1 seqs  0 rs_seq), R (f32):    4.22 MiB, \
S (f32):  108.00 MiB, P (f32):    0.35 MiB
llama_memory_hybrid_idx: creating indexer KV cache, size = 8192 cells
llama_kv_cache:      CUDA0 KV buffer size =    24.00 MiB
llama_kv_cache: size =   24.00 MiB (  8192 cells,  12 layers,  1/1 seqs), K (f16):   24.00 MiB, V (f16):    0.00 MiB
"""


def test_two_caches_and_three_parts_of_states_are_read() -> None:
    rows = figures(TWO_CACHES, "qwen3.8-flash-next")
    assert {verdict for _, verdict, _ in rows} == {"equal"}
    assert [size for name, _, size in rows if name == "buffer_bytes"] == [192 * MIB, 24 * MIB]
    assert ("p_bytes", "equal", 4 * 2560 * 9 * 4) in rows


def test_the_cache_of_mtp_layers_is_a_cache_of_its_own() -> None:
    log = """
    llama_context: n_ctx = 262144
    llama_kv_cache: size = 16384.00 MiB (262144 cells, 16 layers)
    llama_kv_cache: size = 1024.00 MiB (262144 cells, 1 layers)
    """
    sizes = [row for row in figures(log, "qwen3.6-27b") if row[0] == "cache_bytes"]
    assert sizes == [("cache_bytes", "equal", 16384 * MIB), ("cache_bytes", "equal", 1024 * MIB)]
    two = log.replace("1024.00 MiB (262144 cells, 1 layers)", "2048.00 MiB (262144 cells, 2 layers)")
    assert [verdict for name, verdict, _ in figures(two, "qwen3.6-27b") if name == "layers"] == ["equal", "unexplained"]
