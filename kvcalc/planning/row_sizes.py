"""The bytes of the weights on each device with llama.cpp's --split-mode row."""

from __future__ import annotations

from kvcalc.engines.llama_cpp.placed_weights import without_tables
from kvcalc.engines.llama_cpp.row_split import divide_rows, tile_rows
from kvcalc.engines.llama_cpp.settings import NO_ROWS, parse_settings
from kvcalc.engines.llama_cpp.splitting import SPLIT, parse_shares
from kvcalc.memory.sharding import stage_weights
from kvcalc.model.spec import has_states, weights_of
from kvcalc.model.tensors import ModelWeights
from kvcalc.planning.case import Case
from kvcalc.planning.device_weights import part_bytes

_BACKENDS = ("NVIDIA", "AMD")


def row_sizes(case: Case, tables_on_host: bool) -> list[int] | str:
    """The bytes of the weights on every device that has a layer or the output, or the reason if they are not known.

    `tables_on_host` is whether the input embedding is in host memory.
    """
    gpu, model, spec = case.devices.gpu, case.model, case.spec
    if gpu.vendor not in _BACKENDS:
        return f"--split-mode row is not modelled for {gpu.name}; the cache is as with layer"
    if not parse_settings(case.settings).is_before(NO_ROWS):
        return (
            "llama.cpp has no --split-mode row on these devices since pull request 24216 of June 2026 (device CUDA0 "
            "does not support split buffers); --before-pull 24216 counts an older build"
        )
    weights, bounds = weights_of(spec), case.engine.bounds
    if spec.gguf is not None or weights is None:
        return f"--split-mode row: the matrices of {spec.name} are not counted one by one"
    if has_states(spec):
        return f"--split-mode row is not modelled for the recurrent layers of {spec.name}"
    if spec.attention.is_latent:
        return f"--split-mode row is not modelled for MLA, whose matrices {spec.name} has one for each head"
    stages, last = stage_weights(weights, bounds), len(bounds) - 1
    parts = [without_tables(part, number == last) for number, part in enumerate(stages)]
    number = case.workload.pipeline_parallel_size
    shares = parse_shares(case.settings[SPLIT]) if SPLIT in case.settings else (1,) * number
    divided, head = divide_rows(parts, shares, tile_rows(gpu.device_class))
    # The last one is the whole table, of which the devices have rows if it is also the output head.
    whole = [*divided, ModelWeights(weights.embedding, weights.tied, ())]
    found = part_bytes(model, spec, case.question.dtype, case.workload.model_dtype, whole)
    if found is None:
        return "the bytes of the weights are not known"
    *sizes, table = found
    sizes = [size + table * rows // weights.embedding.rows for size, rows in zip(sizes, head)]
    if not tables_on_host:
        sizes[0] += table if not weights.tied else 0
    if any(sizes[len(bounds) :]):
        return "--split-mode row: a device with rows and without layers is not modelled; use more even shares"
    return sizes
