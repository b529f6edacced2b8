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


@pytest.mark.parametrize("seed", range(8))
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
    log += [
        f"load_tensors: offloaded {offloaded}/{layers + 1} layers to GPU",
        f"llama_context: n_seq_max     = {slots}",
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
    # A buffer that is not a number of whole layers.
    for place, line in enumerate(log):
        if "buffer size" in line:
            size = float(line.split()[-2])
            wrong = line.replace(f"{size:.2f}", f"{size + 0.4 * size / layers + 0.02:.2f}")
            assert read("\n".join([*log[:place], wrong, *log[place + 1 :]]), config)["unexplained"] == 1


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
