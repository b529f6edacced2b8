"""Logs as llama.cpp writes them, from its rules computed here: each number is explained, and a wrong one is not.

Sources: load_tensors (src/llama-model.cpp) divides the layers. llama_kv_cache (src/llama-kv-cache.cpp) makes a tensor
for K and one for V in each layer, and prints them. ggml_backend_cuda_buffer_type_get_alloc_size lengthens the last row
of a quantized tensor to 512 elements.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from random import Random
from typing import Any

import pytest

import kvcalc
from tests.documents import audit
from tests.engines.models import gpt_oss, plain

MIB = 2**20
# Elements and bytes of a block.
TYPES = {"f16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24), "q4_0": (32, 18)}


def read(log: str, config: dict[str, object]) -> dict[str, Any]:
    return audit(log, "log", model=kvcalc.read_config(config, "log", "log"), engine="llama.cpp")


def tensor_bytes(elements: int, kind: str, cells: int, device: str) -> int:
    """A tensor with `cells` rows of `elements` elements."""
    per_block, size = TYPES[kind]
    held = cells * elements * size // per_block
    if not device.startswith("CUDA") or kind == "f16" or elements % 512 == 0:
        return held
    return -(-(held + (512 - elements % 512) * size // per_block) // 128) * 128


def devices_of(layers: int, offloaded: int, free: list[int]) -> list[str]:
    """The device of each layer. The output is one more layer."""
    ends = list(accumulate(free))
    first = layers + 1 - offloaded
    return [
        "CPU" if layer < first else f"CUDA{bisect_right([end * offloaded for end in ends], (layer - first) * ends[-1])}"
        for layer in range(layers)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_every_number_of_a_log_follows_from_the_rules(seed: int) -> None:
    random = Random(seed)
    layers, heads, width = random.randint(2, 40), random.choice((1, 2, 3, 8)), random.choice((64, 96, 128))
    slots = random.randint(1, 4)
    streams = random.choice((1, slots))
    cells = 256 * random.randint(1, 40)
    k, v = random.choice(list(TYPES)), random.choice(list(TYPES))
    free = [random.randint(4000, 24000) for _ in range(random.randint(1, 3))]
    offloaded = random.choice((layers + 1, random.randint(1, layers + 1)))
    of_layers = devices_of(layers, offloaded, free)
    sizes = {
        device: of_layers.count(device)
        * (
            tensor_bytes(heads * width, k, cells * streams, device)
            + tensor_bytes(heads * width, v, cells * streams, device)
        )
        for device in dict.fromkeys(of_layers)
    }
    all_k, all_v = (layers * tensor_bytes(heads * width, kind, cells * streams, "CPU") for kind in (k, v))
    log = [f"using device CUDA{number} (GPU) - {size} MiB free" for number, size in enumerate(free)]
    if seed % 2 and len(free) > 1:  # without it, llama-server may have changed the split
        log.append(f"llama-server --tensor-split {','.join(map(str, free))}")
    log += [
        f"load_tensors: offloaded {offloaded}/{layers + 1} layers to GPU",
        *([f"llama_context: n_seq_max     = {slots}"] if seed % 3 else []),  # the line of the cache has it too
        f"llama_context: n_ctx         = {cells * streams}",
        "llama_context: flash_attn    = 1",
        f"llama_context: kv_unified    = {str(streams == 1).lower()}",
        *(f"llama_kv_cache:      {name} KV buffer size = {size / MIB:8.2f} MiB" for name, size in sizes.items()),
        f"llama_kv_cache: size = {(all_k + all_v) / MIB:7.2f} MiB ({cells:6} cells, {layers:3} layers, {slots:2}/"
        f"{streams} seqs), K ({k}): {all_k / MIB:7.2f} MiB, V ({v}): {all_v / MIB:7.2f} MiB",
    ]
    config = plain(layers, heads, heads, width)
    found = read("\n".join(log), config)
    assert [(row["name"], row["computed"]) for row in found["figures"] if row["verdict"] == "equal"] == [
        *(("buffer_bytes", size) for size in sizes.values()),
        ("cells", cells), ("layers", layers), ("cache_bytes", all_k + all_v), ("k_bytes", all_k), ("v_bytes", all_v),
    ]  # fmt: skip
    assert found["unexplained"] == 0
    assert all(": layers " in row["rule"] for row in found["figures"] if row["name"] == "buffer_bytes")
    # A buffer that is not a number of whole layers.
    for place, line in enumerate(log):
        if "buffer size" in line:
            size = float(line.split()[-2])
            wrong = line.replace(f"{size:.2f}", f"{size + 0.4 * size / layers + 0.02:.2f}")
            assert read("\n".join([*log[:place], wrong, *log[place + 1 :]]), config)["unexplained"] == 1


@pytest.mark.parametrize("backend", ["CUDA", "ROCm", "MUSA", "SYCL", "CANN", "Vulkan", "CPU"])
def test_some_backends_lengthen_the_last_row_of_a_quantized_tensor(backend: str) -> None:
    """Copies of ggml's CUDA backend, and those of SYCL and CANN, have the same MATRIX_ROW_PADDING."""
    is_padded = backend not in ("Vulkan", "CPU")
    size = 24 * 2 * tensor_bytes(128, "q8_0", 4096, "CUDA" if is_padded else backend)
    log = f"""
    llama_context: n_ctx = 4096
    llama_context: flash_attn = 1
    llama_kv_cache: {backend}{"" if backend == "CPU" else 0} KV buffer size = {size / MIB:.2f} MiB
    llama_kv_cache: size = 25.50 MiB (4096 cells, 24 layers, 1/1 seqs), K (q8_0): 12.75 MiB, V (q8_0): 12.75 MiB
    """
    assert (size / MIB > 25.51) == is_padded
    rows = read(log, plain(24, 2, 2, 64))["figures"]
    assert [(row["verdict"], row["computed"]) for row in rows if row["name"] == "buffer_bytes"] == [("equal", size)]


def test_the_sum_after_the_buffers_tells_which_cache_they_are_of() -> None:
    """gpt-oss-20b: 12 layers with a window of 128, and 12 without. The log does not announce its caches."""
    log = """
    llama_context: n_seq_max = 1
    llama_context: n_ctx = 8192
    llama_context: n_ubatch = 512
    llama_kv_cache: CUDA0 KV buffer size = 192.00 MiB
    llama_kv_cache: size = 192.00 MiB (8192 cells, 12 layers, 1/1 seqs), K (f16): 96.00 MiB, V (f16): 96.00 MiB
    llama_kv_cache: CUDA0 KV buffer size = 18.00 MiB
    llama_kv_cache: size = 18.00 MiB (768 cells, 12 layers, 1/1 seqs), K (f16): 9.00 MiB, V (f16): 9.00 MiB
    """
    buffers = [row for row in read(log, gpt_oss())["figures"] if row["name"] == "buffer_bytes"]
    assert [(row["verdict"], row["computed"]) for row in buffers] == [("equal", 192 * MIB), ("equal", 18 * MIB)]


@pytest.mark.parametrize("seed", range(8))
def test_states_are_where_their_layers_are_for_every_slot_and_drafted_token(seed: int) -> None:
    """Qwen3.6-27B: 48 of 64 layers keep 10,240 channels x 3 inputs and 48 heads of 128 x 128, in fp32."""
    random = Random(seed)
    slots, drafted = random.randint(1, 4), random.choice((0, 0, 3))
    free = [random.randint(4000, 24000) for _ in range(random.randint(1, 3))]
    offloaded = random.choice((65, random.randint(10, 65)))
    of_states = [device for layer, device in enumerate(devices_of(64, offloaded, free)) if layer % 4 != 3]
    inputs, elements = (slots * (1 + drafted) * size * 4 for size in (10240 * 3, 48 * 128 * 128))
    sizes = {device: of_states.count(device) * (inputs + elements) for device in dict.fromkeys(of_states)}
    log = [f"using device CUDA{number} (GPU) - {size} MiB free" for number, size in enumerate(free)]
    if seed % 2 and len(free) > 1:
        log.append(f"llama-server --tensor-split {','.join(map(str, free))}")
    log += [
        f"load_tensors: offloaded {offloaded}/65 layers to GPU",
        f"llama_context: n_seq_max     = {slots}",
        *(f"llama_memory_recurrent: {name} RS buffer size = {size / MIB:8.2f} MiB" for name, size in sizes.items()),
        f"llama_memory_recurrent: size = {48 * (inputs + elements) / MIB:7.2f} MiB ({slots:6} cells,  64 layers, "
        f"{slots:2} seqs {drafted:2} rs_seq), R (f32): {48 * inputs / MIB:7.2f} MiB, "
        f"S (f32): {48 * elements / MIB:7.2f} MiB",
    ]  # fmt: skip
    found = audit("\n".join(log), "log", model=kvcalc.load_model("qwen3.6-27b"), engine="llama.cpp")
    assert [(row["name"], row["computed"]) for row in found["figures"] if row["verdict"] == "equal"] == [
        *(("state_buffer_bytes", size) for size in sizes.values()), ("slots", slots), ("layers", 64),
        ("state_bytes", 48 * (inputs + elements)), ("r_bytes", 48 * inputs), ("s_bytes", 48 * elements),
    ]  # fmt: skip
    rules = [row["rule"] for row in found["figures"] if row["name"] == "state_buffer_bytes"]
    assert all(": layers " in rule for rule in rules)
    for place, line in enumerate(log):
        if "buffer size" in line:
            size = float(line.split()[-2])
            wrong = line.replace(f"{size:.2f}", f"{size + 0.4 * (inputs + elements) / MIB:.2f}")
            lines = "\n".join([*log[:place], wrong, *log[place + 1 :]])
            document = audit(lines, "log", model=kvcalc.load_model("qwen3.6-27b"), engine="llama.cpp")
            assert document["unexplained"] == 1


@pytest.mark.parametrize("model", ["qwen3.6-27b", "qwen3-8b"])
def test_a_buffer_of_states_is_checked_only_with_the_line_of_all_states(model: str) -> None:
    """A model without states has none to check, whatever the log says."""
    line = "llama_memory_recurrent: {} RS buffer size = {} MiB\n"
    total = "llama_memory_recurrent: size = 149.62 MiB (1 cells, 64 layers, 1 seqs)\n"
    spec = kvcalc.load_model(model)
    logs = [line.format("CUDA0", 149.62), line.format("CUDA0", 149.62) + total]
    alone, whole = (audit("n_seq_max = 1\n" + log, "log", model=spec, engine="llama.cpp")["figures"] for log in logs)
    assert not alone
    checked = [row["verdict"] for row in whole if row["name"] == "state_buffer_bytes"]
    assert checked == (["equal"] if model == "qwen3.6-27b" else [])
