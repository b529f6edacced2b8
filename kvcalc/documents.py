"""The types of the documents, for type checkers: `answer: kvcalc.documents.Estimate`.

Generated from schema.json by `python -m tests.typed_documents --write`. Do not edit.
"""

# ruff: noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class Estimate(TypedDict):
    """kvcalc estimate."""

    schema_version: Literal[2]
    model: Model
    workload: Workload
    engine: Engine
    kv_cache: KvCache
    variants: list[Variant]
    weights: Weights
    hardware: Hardware | None
    fit: Fit | None
    throughput: Throughput | None
    speculative: Speculative | None
    warnings: list[Warning]
    reuse: NotRequired[Reuse]


class Engines(TypedDict):
    """kvcalc estimate --engine all, or with several engines."""

    schema_version: Literal[2]
    model: Model
    workload: Workload
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    stored_bytes: int
    engines: list[EngineRow]
    warnings: list[Warning]


class EngineRow(TypedDict):
    """one engine; figures are null if it is refused."""

    model: str
    engine: str
    version: str | None
    kv_dtype_reason: str | None
    block_size: int | None
    num_gpu_blocks: int | None
    kv_cache_tokens: int | None
    max_concurrency: float | None
    dtype: str | None
    total_bytes: int | None
    bytes_per_sequence: int | None
    bytes_per_token: int | None
    fixed_bytes_per_sequence: int | None
    bytes_per_device: int | None
    devices_total_bytes: int | None
    fits: bool | None
    reason: str | None


class AuditLog(TypedDict):
    """the log that was read."""

    name: str
    num_lines: int


class AuditEngine(TypedDict):
    """the engine of the log, and how the log was read."""

    name: Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp"]
    version: str | None
    rules_version: str | None
    settings: dict[str, str]
    rules: list[str]


class AuditModel(TypedDict):
    """the model of the log."""

    name: str
    source: str
    model_type: str
    log_name: str | None


class AuditWorkload(TypedDict):
    """the workload of the log."""

    context_tokens: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    kv_dtype: str
    kv_dtype_reason: str | None


class AuditUnreadItem(TypedDict):
    """a line of the log that kvcalc could not read."""

    line: int
    text: str


class Audit(TypedDict):
    """kvcalc audit."""

    schema_version: Literal[2]
    log: AuditLog
    engine: AuditEngine
    model: AuditModel
    workload: AuditWorkload
    equal: int
    unexplained: int
    inputs: int
    explanation: str | None
    figures: list[AuditFigure]
    unread: list[AuditUnreadItem]
    warnings: list[Warning]


class AuditFigure(TypedDict):
    """one number of a log."""

    line: int
    name: str
    printed: str
    unit: Literal["bytes", "tokens", "blocks", "cells", "layers", "slots", "states", "x"]
    computed: float | None
    difference: float | None
    verdict: Literal["equal", "unexplained", "input"]
    rule: str


class ScoreResultsItem(TypedDict):
    """one file."""

    file: str
    tool: Literal["vllm", "sglang", "guidellm", "llama-bench"]
    runs: int


class ScoreSummaryItem(TypedDict):
    """all rows of one metric."""

    metric: Literal["tpot", "ttft", "decode", "prefill"]
    times: int
    mean_error: float
    median_error: float
    within_a_quarter: float
    in_range: float | None
    uncalibrated_mean_error: float | None
    left_out_mean_error: float | None


class ScoreRefusedItem(TypedDict):
    """a run that cannot be compared."""

    file: str
    run: int
    reason: str
    hint: str | None


class Score(TypedDict):
    """kvcalc score: measured times beside the predicted ones."""

    schema_version: Literal[2]
    results: list[ScoreResultsItem]
    scores: list[ScoreRow]
    summary: list[ScoreSummaryItem]
    setups: list[ScoreSetup]
    refused: list[ScoreRefusedItem]
    warnings: list[Warning]


class ScoreRow(TypedDict):
    """one measured time beside the predicted one."""

    file: str
    run: int
    tool: Literal["vllm", "sglang", "guidellm", "llama-bench"]
    model: str
    engine: str
    gpu: str
    num_devices: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    input_tokens: int
    output_tokens: int
    context_tokens: int
    concurrency: int
    concurrency_is_average: bool
    metric: Literal["tpot", "ttft", "decode", "prefill"]
    measured_seconds: float
    mean_seconds: float | None
    median_seconds: float | None
    predicted_seconds: float
    low_seconds: float | None
    high_seconds: float | None
    error: float
    in_range: bool | None
    largest_part: Literal["weights", "kv", "compute", "overhead", "communication", "prefill", "waiting"]
    largest_part_seconds: float
    largest_part_factor: float | None
    uncalibrated_seconds: float | None
    left_out_seconds: float | None


class ScoreSetup(TypedDict):
    """the runs of one setup."""

    model: str
    engine: str
    gpu: str
    num_devices: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    explained: Explained | None
    calibration: Calibration | None


class ExplainedFactorsItem(TypedDict):
    """a factor on several of the engine's constants."""

    name: Literal["step", "sequence", "prefill", "communication", "reading", "waiting"]
    factor: float
    low_factor: float
    high_factor: float
    changed: bool


class ExplainedErrorsItem(TypedDict):
    """the mean errors of one metric, without their signs."""

    metric: Literal["tpot", "ttft", "decode", "prefill"]
    times: int
    uncalibrated_mean_error: float
    mean_error: float
    left_out_mean_error: float | None


class ExplainedResidualsItem(TypedDict):
    """one measured time."""

    file: str
    run: int
    metric: Literal["tpot", "ttft", "decode", "prefill"]
    measured_seconds: float
    uncalibrated_seconds: float
    calibrated_seconds: float
    left_out_seconds: float | None


class Explained(TypedDict):
    """the factors that fit the runs: what the prediction has wrong."""

    runs: int
    factors: list[ExplainedFactorsItem]
    errors: list[ExplainedErrorsItem]
    residuals: list[ExplainedResidualsItem]


class CalibrationRecord(TypedDict):
    """the constants from a record of kvcalc measure."""

    device: str
    read_bytes_per_second: float
    kv_overhead: float
    kernel_seconds: float | None
    weight_overhead: float | None


class CalibrationFactorsItem(TypedDict):
    """a factor on several of the engine's constants."""

    name: Literal["step", "sequence", "prefill", "communication", "reading", "waiting"]
    factor: float
    low_factor: float
    high_factor: float
    changed: bool


class CalibrationErrorsItem(TypedDict):
    """the mean errors of one metric, without their signs."""

    metric: Literal["tpot", "ttft", "decode", "prefill"]
    times: int
    uncalibrated_mean_error: float
    mean_error: float
    left_out_mean_error: float | None


class CalibrationResidualsItem(TypedDict):
    """one measured time."""

    file: str
    run: int
    metric: Literal["tpot", "ttft", "decode", "prefill"]
    measured_seconds: float
    uncalibrated_seconds: float
    calibrated_seconds: float
    left_out_seconds: float | None


class Calibration(TypedDict):
    """what --calibrate changed."""

    record: CalibrationRecord | None
    applied: Literal["all", "partly", "record", "none"]
    runs: int
    factors: list[CalibrationFactorsItem]
    errors: list[CalibrationErrorsItem]
    residuals: list[CalibrationResidualsItem]


class Model(TypedDict):
    """the model, with the what-if applied."""

    name: str
    source: str
    model_type: str
    attention: Literal["mha", "mqa", "gqa", "mla", "hybrid", "none"]
    is_encoder: bool
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int | None
    head_dim: int
    v_head_dim: int
    hidden_size: int | None
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    sliding_window: int | None
    max_position_embeddings: int | None


class Workload(TypedDict):
    """the workload that the figures are for."""

    context_tokens: int
    batch_size: int
    encoder_tokens: int | None
    input_tokens: int | None
    output_tokens: int | None
    concurrency: int | None
    prefix_hit_rate: float | None
    images: Images | None


class Images(TypedDict):
    """the images in every request, and the tokens and bytes that they take."""

    count: int
    width: int
    height: int
    tokens_per_image: int
    tokens: int
    encoder_cache_tokens: int | None
    encoder_cache_bytes: int | None


class Engine(TypedDict):
    """the engine, with the settings used."""

    name: Literal["logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx"]
    version: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    kv_dtype_reason: str | None
    device_defaults: list[DeviceDefault] | None
    request_lines: NotRequired[list[Line]]
    pool_lines: NotRequired[list[Line]]


class DeviceDefaultOnDevicesItem(TypedDict):
    """the default on some devices."""

    value: str | int
    devices: str


class DeviceDefault(TypedDict):
    """a default that depends on the device."""

    option: str
    value: str | int
    on_devices: list[DeviceDefaultOnDevicesItem]


class Line(TypedDict):
    """one part of a sum of bytes."""

    name: str
    bytes: int


class KvCache(TypedDict):
    """the bytes of the cache."""

    dtype: str
    stored_bytes: int
    total_bytes: int
    bytes_per_sequence: int
    bytes_per_token: int
    fixed_bytes_per_sequence: int
    bytes_per_device: int
    devices_total_bytes: int
    decode_read_bytes: int
    formulas: list[Formula]
    layers: list[LayerRow]


class Weights(TypedDict):
    """the weights of the language model, without layers that predict further tokens; vision and audio towers are in towers; figures that are not known are null."""

    parameters: int | None
    active_parameters_per_token: int | None
    input_embedding_parameters: int | None
    bytes: int | None
    active_bytes_per_token: int | None
    dtype: str | None
    bytes_source: Literal["config", "safetensors", "gguf"] | None
    reason: str | None
    towers: list[Tower]


class Tower(TypedDict):
    """a vision or audio tower, and its weights."""

    name: str
    type: str
    parameters: int | None
    bytes: int | None
    reason: str | None


class LayerRow(TypedDict):
    """consecutive layers with the same cache."""

    first: int
    last: int
    kind: str
    window: int | None
    bytes_per_layer: int


class Variant(TypedDict):
    """the model with one kind of attention; figures are null if that is not possible."""

    attention: Literal["mha", "mqa", "gqa", "mla"]
    own: bool
    num_kv_heads: int | None
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    bytes_per_token: int | None
    total_bytes: int | None
    ratio_to_mha: float | None
    attention_parameters_per_layer: int | None
    reason: str | None


class Fit(TypedDict):
    """per device."""

    fits: bool
    verdict: Literal["fits", "tight", "does_not_fit"]
    device_bytes: int | None
    weights_bytes: int | None
    weights_replicated_bytes: int | None
    kv_cache_bytes: int
    activation_bytes: int | None
    reserve_bytes: int | None
    kv_cache_memory_bytes: int
    free_bytes: int
    free_low_bytes: int | None
    free_high_bytes: int | None
    max_context_tokens: int | None
    max_batch_size: int | None
    lines: list[Held] | None
    host: HostShare | None
    devices: list[DeviceShare] | None


class DeviceShare(TypedDict):
    """the layers on one device."""

    device: int
    first_layer: int | None
    last_layer: int | None
    weights_bytes: int
    kv_cache_bytes: int
    free_bytes: int
    fits: bool


class HostShare(TypedDict):
    """the part of the model in host memory (llama.cpp)."""

    n_gpu_layers: int
    host_layers: int
    n_cpu_moe: int
    kv_offload: bool
    weights_bytes: int
    kv_cache_bytes: int
    host_bytes: int
    memory_bytes: int | None
    host_free_bytes: int | None


class MeasureWorkload(TypedDict):
    """the workload that was run."""

    context_tokens: int
    batch_size: int
    steps: int
    dtype: str
    seed: int
    tensor_parallel_size: int
    kv_dtype: str
    cache: Literal["preallocated", "grow", "none"]
    block_size: int | None
    mla: Literal["absorbed", "expanded"]
    backend: str
    without_backends: NotRequired[list[str]]
    prefill: Literal["sample", "full"]


class MeasureDevice(TypedDict):
    """the device the run used."""

    kind: Literal["cpu", "cuda", "mps"]
    name: str
    memory_bytes: int
    free_bytes: int
    last_level_cache_bytes: int
    threads: int | None
    torch_version: str


class MeasureRoof(TypedDict):
    """the rates measured on the device in the same run: the fastest pass over a buffer, and the median of many matrix products."""

    read_bytes_per_second: float
    buffer_bytes: int
    matmul_flop_per_second: float
    matmul_dtype: str


class MeasureSweep(TypedDict):
    """the values of --sweep."""

    context_tokens: list[int | None]
    batch_size: list[int]


class MeasureSkippedItem(TypedDict):
    """one kind of attention that was not run, and why."""

    attention: str
    reason: str


class Measure(TypedDict):
    """kvcalc measure; a record (--save) is this document."""

    schema_version: Literal[2]
    model: Model
    workload: MeasureWorkload
    device: MeasureDevice
    environment: Environment
    roof: MeasureRoof
    runs: list[Run]
    sweep: MeasureSweep | None
    curve: list[CurveRow] | None
    capacity: Capacity | None
    skipped: list[MeasureSkippedItem]
    warnings: list[Warning]


class Environment(TypedDict):
    """the machine and software of a run."""

    taken_at: str
    kvcalc_version: str
    python_version: str
    system: str
    system_release: str
    machine: str
    logical_cores: int | None
    memory_bytes: int
    device_count: int
    compute_capability: str | None
    driver_version: str | None
    cuda_version: str | None
    hip_version: str | None
    cudnn_version: str | None
    nccl_version: str | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_watts: float | None
    power_limit_watts: float | None
    omp_num_threads: str | None
    libraries: dict[str, str]


class RunFractionOfRoof(TypedDict):
    """share of the read roof: of the attention core, and of the whole step."""

    attention_core: float | None
    step: float


class RunFractionOfMatmulRoof(TypedDict):
    """share of the matmul roof: of the attention core, of the whole step, and of the prefill."""

    attention_core: float | None
    step: float | None
    prefill: float | None


class RunBindingRoof(TypedDict):
    """the roof that limits the attention core, and the whole step, and the share of it that is reached."""

    attention_core: BindingRoof | None
    step: BindingRoof | None


class RunPrefill(TypedDict):
    """a prefill, timed: tokens and chunk_tokens are for one of batch_size sequences, the rest for all of them."""

    kind: Literal["sample", "full"]
    batch_size: int
    tokens: int
    chunk_tokens: int
    seconds: float
    tokens_per_second: float
    flop: int
    flop_per_second: float


class RunMemory(TypedDict):
    """growth of the peak during the run, the allocator's reserve, and the unused share of the reserve."""

    peak_bytes: int | None
    reserved_bytes: int | None
    fragmentation: float | None


class RunBackendsItem(TypedDict):
    """one backend in one layer."""

    layer: int
    is_chosen: bool
    name: str
    seconds: float | None
    relative_error: float | None
    reason: str | None


class RunScaled(TypedDict):
    """figures for all layers, in proportion to the bytes a step reads; null if all layers were run."""

    num_layers: int
    factor: float
    predicted_bytes: int
    decode_step_seconds: float


class RunVerified(TypedDict):
    """the self-check on a small shape."""

    max_abs_error: float | None
    tolerance: float
    ok: bool


class Run(TypedDict):
    """the measurement of one kind of attention."""

    attention: Literal["mha", "mqa", "gqa", "mla", "hybrid", "none"]
    num_layers: int
    context_tokens: int
    batch_size: int
    predicted_bytes: int
    held_bytes: int
    allocator_bytes: int
    expected_allocator_bytes: int | None
    decode_step_seconds: Timing
    attention_core_seconds: Timing | None
    predicted_step_seconds: float | None
    tokens_per_second: float
    kv_read_bytes_per_second: float | None
    attention_core_flop_per_second: float | None
    fraction_of_roof: RunFractionOfRoof
    fraction_of_matmul_roof: RunFractionOfMatmulRoof
    binding_roof: RunBindingRoof
    prefill: RunPrefill | None
    memory: RunMemory
    backend: str
    backends: list[RunBackendsItem]
    scaled: RunScaled | None
    verified: RunVerified
    ranks: list[Rank] | None


class BindingRoof(TypedDict):
    """the larger of the two shares: reading the bytes and multiplying are compared with their own roofs."""

    roof: Literal["read", "matmul"]
    fraction: float


class Rank(TypedDict):
    """one tensor-parallel rank."""

    rank: int
    device: str
    predicted_bytes: int
    held_bytes: int
    allocator_bytes: int
    read_bytes_per_second: float


class CurveRow(TypedDict):
    """one run of a sweep: medians, and attention's shares of the read roof and of the roof that limits it."""

    model: str
    context_tokens: int
    batch_size: int
    attention: str
    num_layers: int
    predicted_bytes: int
    held_bytes: int
    decode_step_seconds: float
    tokens_per_second: float
    attention_core_seconds: float | None
    kv_read_bytes_per_second: float | None
    fraction_of_roof: float | None
    binding_roof: Literal["read", "matmul"] | None
    fraction_of_binding_roof: float | None
    spread: float
    backend: str


class Capacity(TypedDict):
    """with --until-full, the most tokens or sequences that actually fit."""

    axis: Literal["context", "batch"]
    limit_bytes: int
    predicted: int
    measured: int
    ratio: float
    trials: int


class MeasureCompareA(TypedDict):
    """the first record."""

    file: str
    model: str | None
    device: str | None
    taken_at: str | None


class MeasureCompareB(TypedDict):
    """the second record."""

    file: str
    model: str | None
    device: str | None
    taken_at: str | None


class MeasureCompareDifferencesItem(TypedDict):
    """one setting in which the records differ."""

    path: str
    a: Any
    b: Any


class MeasureCompareFiguresItem(TypedDict):
    """one figure in both records."""

    attention: str | None
    figure: str
    a: float
    b: float
    ratio: float | None


class MeasureCompareLeftOutItem(TypedDict):
    """one kind of attention that is not compared, and why."""

    attention: str
    reason: str


class MeasureCompare(TypedDict):
    """kvcalc measure --compare A B."""

    schema_version: Literal[2]
    a: MeasureCompareA
    b: MeasureCompareB
    differences: list[MeasureCompareDifferencesItem]
    figures: list[MeasureCompareFiguresItem]
    left_out: list[MeasureCompareLeftOutItem]
    warnings: list[Warning]


class Timing(TypedDict):
    """seconds."""

    p50: float
    p90: float
    min: float
    n: int
    spread: float
    cpu_p50: float | None
    method: Literal["CUDA graph", "CUDA events", "wall clock"]


class ModelsModelsItem(TypedDict):
    """one preset."""

    name: str
    family: str | None
    attention: str
    num_layers: int
    num_attention_heads: int | None
    num_kv_heads: int | None
    head_dim: int | None
    sliding_window: int | None
    max_position_embeddings: int | None
    bytes_per_token_16_bit: int
    aliases: list[str]
    source: str
    date: str
    file: str | None


class Models(TypedDict):
    """kvcalc models."""

    schema_version: Literal[2]
    models: list[ModelsModelsItem]
    warnings: list[Warning]


class ModelsShow(TypedDict):
    """kvcalc models show."""

    schema_version: Literal[2]
    name: str
    family: str | None
    aliases: list[str]
    source: str
    date: str
    note: str | None
    file: str | None
    config: dict[str, Any]


class ModelsCheckFilesItem(TypedDict):
    """one file, and its error if it is not valid."""

    file: str
    name: str | None
    ok: bool
    exit_code: int
    error: str | None
    hint: str | None


class ModelsCheck(TypedDict):
    """kvcalc models check."""

    schema_version: Literal[2]
    exit_code: int
    files: list[ModelsCheckFilesItem]


class Formula(TypedDict):
    """one kind of cache, for all its layers and the whole batch."""

    kind: str
    window: int | None
    num_layers: int
    symbols: str
    numbers: str
    bytes: int


class Held(TypedDict):
    """one part of a device's memory."""

    kind: Literal["weights", "kv_cache", "activation", "reserve", "free"]
    name: str
    bytes: int
    estimated: bool
    low_bytes: int | None
    high_bytes: int | None


class Interconnect(TypedDict):
    """the link between devices."""

    name: str
    bytes_per_second: int
    devices: int


class Hardware(TypedDict):
    """the figures of one device, and the number of devices."""

    name: str
    vendor: str | None
    device_class: str | None
    num_devices: int
    replicas: int
    memory_bytes: int
    memory_type: str | None
    bandwidth_bytes_per_second: int | None
    flops_per_second: dict[str, int]
    interconnect: Interconnect | None
    pcie_bytes_per_second: int | None
    tdp_watts: int | None
    source: str
    date: str | None
    note: str | None


class GpusShow(TypedDict):
    """kvcalc gpus show."""

    schema_version: Literal[2]
    name: str
    vendor: str | None
    device_class: str | None
    memory_bytes: int
    memory_type: str | None
    bandwidth_bytes_per_second: int | None
    flops_per_second: dict[str, int]
    interconnect: Interconnect | None
    pcie_bytes_per_second: int | None
    tdp_watts: int | None
    aliases: list[str]
    source: str
    date: str | None
    note: str | None


class GpusGpusItem(TypedDict):
    """one known device."""

    name: str
    vendor: str | None
    device_class: str | None
    memory_bytes: int
    memory_type: str | None
    bandwidth_bytes_per_second: int | None
    flops_per_second: dict[str, int]
    interconnect: Interconnect | None
    pcie_bytes_per_second: int | None
    tdp_watts: int | None
    aliases: list[str]
    source: str
    date: str | None
    note: str | None


class Gpus(TypedDict):
    """kvcalc gpus."""

    schema_version: Literal[2]
    gpus: list[GpusGpusItem]
    warnings: list[Warning]


class FitDocumentSmallest(TypedDict):
    """a number of devices and how the model is split over them."""

    num_devices: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int


class FitDocumentOffloadNGpuLayers(TypedDict):
    """a number for an option, and the bytes in host memory with it."""

    value: int
    host_bytes: int


class FitDocumentOffloadNCpuMoe(TypedDict):
    """a number for an option, and the bytes in host memory with it."""

    value: int
    host_bytes: int


class FitDocumentOffload(TypedDict):
    """what llama.cpp can keep in host memory so that the rest fits."""

    n_gpu_layers: FitDocumentOffloadNGpuLayers | None
    n_cpu_moe: FitDocumentOffloadNCpuMoe | None


class FitDocument(TypedDict):
    """kvcalc fit."""

    schema_version: Literal[2]
    model: Model
    workload: Workload
    engine: Engine
    kv_cache: KvCache
    weights: Weights
    hardware: Hardware
    fit: Fit
    speculative: Speculative | None
    smallest: FitDocumentSmallest | None
    offload: FitDocumentOffload | None
    warnings: list[Warning]
    reuse: NotRequired[Reuse]


class ThroughputParts(TypedDict):
    """the sum of the parts is decode_step_seconds."""

    weights_seconds: float
    kv_seconds: float
    compute_seconds: float
    overhead_seconds: float
    communication_seconds: float


class Throughput(TypedDict):
    """one replica of the model on all its devices."""

    decode_step_seconds: float
    decode_tokens_per_second: float
    tokens_per_second_per_sequence: float
    prefill_seconds: float
    bound_by: Literal["weights", "kv", "compute", "overhead", "communication"]
    parts: ThroughputParts
    roofline_decode_step_seconds: float
    low_seconds: float
    high_seconds: float
    serving: Serving | None
    calibration: Calibration | None
    host: HostSpeed | None
    energy: Energy | None
    kv_transfer: NotRequired[KvTransfer]


class Serving(TypedDict):
    """requests served at the same time by one replica."""

    input_tokens: int
    output_tokens: int
    concurrency: int
    running_requests: int
    tpot_seconds: float
    tpot_low_seconds: float
    tpot_high_seconds: float
    ttft_seconds: float
    ttft_low_seconds: float
    ttft_high_seconds: float
    steady_ttft_seconds: float
    tokens_per_second: float
    tokens_per_second_low: float
    tokens_per_second_high: float
    tokens_per_second_per_device: float
    requests_per_second: float
    prefill_share: float


class Speculative(TypedDict):
    """drafted tokens (speculative decoding), on one device of one replica; seconds are null if the speed is not known."""

    method: Literal["mtp", "eagle", "eagle1", "dflash", "draft", "ngram"]
    num_draft_tokens: int
    acceptance_length: float | None
    draft_model: str | None
    num_layers: int
    first_layer: int | None
    lookahead_tokens: int
    weights_bytes: int | None
    cache_bytes: int
    verify_seconds: float | None
    draft_seconds: float | None
    seconds_without_drafting: float | None
    speedup: float | None
    break_even_batch: int | None


class HostSpeed(TypedDict):
    """the time that the part of the model in host memory takes."""

    bandwidth_bytes_per_second: int
    decode_seconds: float
    prefill_copied_bytes: int


class Energy(TypedDict):
    """the energy of the devices of one replica; the host is not counted."""

    watts: float
    joules_per_token: float
    low_joules_per_token: float
    high_joules_per_token: float
    kwh_per_million_tokens: float


class Sweep(TypedDict):
    """kvcalc sweep --json; --format jsonl prints only the points, one per line."""

    schema_version: Literal[2]
    model: Model
    kv_memory_bytes: int | None
    num_points: int
    points: list[SweepPoint]
    warnings: list[Warning]


class SweepPoint(TypedDict):
    """one point of a grid; the bytes are those of the estimate's kv_cache."""

    model: str
    engine: str
    kv_dtype: str
    gpu: str | None
    num_devices: int | None
    tensor_parallel_size: int
    data_parallel_size: int
    context_tokens: int
    batch_size: int
    stored_bytes: int | None
    total_bytes: int | None
    bytes_per_sequence: int | None
    bytes_per_token: int | None
    fixed_bytes_per_sequence: int | None
    bytes_per_device: int | None
    devices_total_bytes: int | None
    decode_read_bytes: int | None
    fits: bool | None
    free_bytes: int | None
    decode_step_seconds: float | None
    decode_step_low_seconds: float | None
    decode_step_high_seconds: float | None
    decode_tokens_per_second: float | None
    prefill_seconds: float | None
    reason: str | None


class CompareWorkload(TypedDict):
    """the workload of all rows."""

    context_tokens: int
    batch_size: int


class CompareEnginesItem(TypedDict):
    """one engine."""

    name: str
    version: str | None


class Compare(TypedDict):
    """kvcalc compare."""

    schema_version: Literal[2]
    workload: CompareWorkload
    hardware: list[Hardware]
    engines: list[CompareEnginesItem]
    models: list[CompareRow]
    warnings: list[Warning]


class CompareRow(TypedDict):
    """one model with one kind of attention, one engine and one layout; figures are null if it is refused."""

    model: str
    engine: str
    gpu: str | None
    num_devices: int | None
    tensor_parallel_size: int | None
    data_parallel_size: int | None
    attention: str | None
    num_layers: int | None
    num_kv_heads: int | None
    max_position_embeddings: int | None
    kv_dtype: str | None
    stored_bytes: int | None
    total_bytes: int | None
    bytes_per_sequence: int | None
    bytes_per_token: int | None
    fixed_bytes_per_sequence: int | None
    bytes_per_device: int | None
    devices_total_bytes: int | None
    decode_read_bytes: int | None
    parameters: int | None
    active_parameters_per_token: int | None
    weights_bytes: int | None
    weights_dtype: str | None
    fits: bool | None
    free_bytes: int | None
    max_context_tokens: int | None
    max_batch_size: int | None
    decode_step_seconds: float | None
    decode_step_low_seconds: float | None
    decode_step_high_seconds: float | None
    decode_tokens_per_second: float | None
    prefill_seconds: float | None
    bound_by: str | None
    joules_per_token: float | None
    reason: str | None
    exit_code: int


class BatchErrorError(TypedDict):
    """the error of the line."""

    message: str
    hint: str | None
    exit_code: int
    line: int


class BatchError(TypedDict):
    """a line without an answer."""

    error: BatchErrorError


class PlanLengths(TypedDict):
    """the lengths of the requests, in tokens."""

    input_tokens: int
    output_tokens: int
    longest_tokens: int
    held_tokens: int
    num_requests: int
    file: str | None


class PlanTargets(TypedDict):
    """the traffic to serve, and the limits for its times."""

    concurrency: int | None
    requests_per_second: float | None
    max_ttft_seconds: float | None
    max_tpot_seconds: float | None
    confidence: Literal[50, 80]
    max_e2e_seconds: float | None
    ttft_percentile: Literal[50, 90, 95, 99] | None
    tpot_percentile: Literal[50, 90, 95, 99] | None
    e2e_percentile: Literal[50, 90, 95, 99] | None


class PlanSpeculative(TypedDict):
    """how tokens are drafted."""

    method: Literal["mtp", "eagle", "eagle1", "dflash", "draft", "ngram"]
    num_draft_tokens: int
    acceptance_length: float | None
    draft_model: str | None


class Plan(TypedDict):
    """kvcalc plan: for each kind of device, the smallest layout that serves the traffic."""

    schema_version: Literal[2]
    model: Model
    checkpoint: str
    lengths: PlanLengths
    targets: PlanTargets
    trace: PlanTrace | None
    engines: list[str]
    dtype: str | None
    kv_dtype: str
    prefix_hit_rate: float | None
    prefix_tokens: NotRequired[int]
    speculative: PlanSpeculative | None
    ranked_by: Literal["cost_per_hour", "num_devices"]
    best: PlanRow | None
    plans: list[PlanRow]
    finalists: list[PlanFinalist] | None
    pareto: list[ParetoPoint] | None
    warnings: list[Warning]


class PlanTrace(TypedDict):
    """the trace of a plan: its requests with an answer."""

    name: str
    scale_rate: float
    requests: int
    duration_seconds: float
    requests_per_second: float
    peak_requests_per_second: float


class PlanRow(TypedDict):
    """one kind of device with one engine; figures are null if it does not serve the traffic."""

    model: str
    gpu: str
    engine: str
    fits: bool
    verdict: Literal["fits", "tight", "does_not_fit"]
    reason: str | None
    hint: str | None
    next_layout: str | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    expert_parallel_size: int | None
    decode_context_parallel_size: int | None
    replicas: int | None
    num_devices: int | None
    requests_per_replica: int | None
    kv_dtype: str | None
    weights_dtype: str | None
    free_bytes: int | None
    max_batch_size: int | None
    ttft_seconds: float | None
    ttft_low_seconds: float | None
    ttft_high_seconds: float | None
    tpot_seconds: float | None
    tpot_low_seconds: float | None
    tpot_high_seconds: float | None
    simulated_ttft_seconds: float | None
    simulated_tpot_seconds: float | None
    simulated_e2e_seconds: float | None
    simulated_requests: int | None
    tokens_per_second: float | None
    tokens_per_second_low: float | None
    tokens_per_second_high: float | None
    requests_per_second: float | None
    tokens_per_second_per_device: float | None
    price_per_hour: float | None
    cost_per_hour: float | None
    cost_per_million_output_tokens: float | None
    cost_per_million_tokens: float | None
    watts: float | None
    kwh_per_million_output_tokens: float | None
    vllm: str | None
    sglang: str | None
    tensorrt_llm: str | None
    llama_cpp: str | None
    disaggregated: NotRequired[SplitPools | None]
    next_mode: NotRequired[str | None]


class SplitPoolsTransfer(TypedDict):
    """the cache of a prompt, sent from a prefill to a decode instance."""

    link: str | None
    bandwidth_bytes_per_second: int
    prompt_tokens: int
    bytes_per_device: int
    request_bytes: int
    seconds: float


class SplitPoolsTtftParts(TypedDict):
    """the parts of ttft_seconds, which add up to it."""

    host_seconds: float
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    first_step_seconds: float


class SplitPoolsCommands(TypedDict):
    """the commands that start an instance of each kind, and the router; prefill-0, decode-0, ... stand for the names of machines."""

    prefill: str
    decode: str
    router: str


class SplitPools(TypedDict):
    """prefill and decode on separate instances."""

    prefill: SplitPool
    decode: SplitPool
    transfer: SplitPoolsTransfer
    ttft_parts: SplitPoolsTtftParts
    commands: SplitPoolsCommands


class SplitPool(TypedDict):
    """the prefill or the decode instances."""

    gpu: str
    instances: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    num_devices: int
    requests_per_instance: float
    requests_held: int
    max_requests_held: int | None
    max_requests_per_second: float
    utilization: float
    transfer_buffer_bytes: int
    free_bytes: int


class PlanFinalist(TypedDict):
    """a layout that was simulated. Its times are at the end of the range that is judged."""

    gpu: str
    engine: str
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    expert_parallel_size: int | None
    decode_context_parallel_size: int | None
    disaggregated: FinalistPools | None
    replicas: int | None
    num_devices: int | None
    cost_per_hour: float | None
    passes: bool
    reason: str | None
    requests: int
    seed: int | None
    max_running_requests: int
    step_factor: float
    ttft_factor: float
    ttft_mean_seconds: float | None
    ttft_p50_seconds: float | None
    ttft_p90_seconds: float | None
    ttft_p95_seconds: float | None
    ttft_p99_seconds: float | None
    tpot_mean_seconds: float | None
    tpot_p50_seconds: float | None
    tpot_p90_seconds: float | None
    tpot_p95_seconds: float | None
    tpot_p99_seconds: float | None
    e2e_mean_seconds: float | None
    e2e_p50_seconds: float | None
    e2e_p90_seconds: float | None
    e2e_p95_seconds: float | None
    e2e_p99_seconds: float | None


class FinalistPool(TypedDict):
    """the instances of one pool that was simulated, and how each is split."""

    gpu: str
    instances: int | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    decode_context_parallel_size: int


class FinalistPools(TypedDict):
    """both pools of a layout that was simulated."""

    prefill: FinalistPool
    decode: FinalistPool


class PrefixTrace(TypedDict):
    """the trace that was read."""

    file: str
    format: Literal["csv", "azure", "burstgpt", "mooncake", "qwen", "token-ids"]
    num_requests: int
    num_bad_rows: int
    first_bad_row: str | None
    duration_seconds: float | None
    prompt_tokens: int
    answer_tokens: int
    longest_prompt_tokens: int
    block_tokens: int
    num_blocks: int
    distinct_blocks: int
    largest_request_blocks: int
    sampling_rate: float


class PrefixEngine(TypedDict):
    """the engine's prefix cache."""

    name: str
    version: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    kv_dtype: str
    block_tokens: int
    bytes_per_trace_block: int
    bytes_per_trace_block_per_device: int
    offloaded_bytes_per_trace_block: int


class PrefixPrefill(TypedDict):
    """the prefill of all prompts without a cache."""

    seconds: float
    gpu_seconds: float
    mean_seconds: float
    worst_error: float


class PrefixPrices(TypedDict):
    """prices per hour."""

    device_per_hour: float | None
    cpu_per_gib_hour: float | None
    disk_per_gib_hour: float | None


class Prefix(TypedDict):
    """kvcalc prefix: what a prefix cache of every size finds."""

    schema_version: Literal[2]
    trace: PrefixTrace
    model: Model | None
    engine: PrefixEngine | None
    hardware: Hardware | None
    prefill: PrefixPrefill | None
    prices: PrefixPrices
    curve: list[PrefixRow]
    knee: PrefixRow
    knee_share: float
    unlimited: PrefixRow
    tiers: list[PrefixTier]
    warnings: list[Warning]


class PrefixRow(TypedDict):
    """a prefix cache of one size."""

    cache_blocks: int
    cache_tokens: int
    cache_bytes: int | None
    cache_bytes_per_device: int | None
    hit_rate: float
    hit_rate_low: float
    hit_rate_high: float
    saved_prefill_seconds: float | None
    saved_prefill_share: float | None
    saved_ttft_seconds: float | None
    saved_gpu_seconds: float | None
    device_cost_per_gpu_second: float | None
    cpu_cost_per_gpu_second: float | None
    disk_cost_per_gpu_second: float | None


class PrefixTier(TypedDict):
    """a tier of memory, and what is found there and not in the tiers before it."""

    name: Literal["device", "cpu", "disk", "remote"]
    memory_bytes: int
    cache_blocks: int
    hit_rate: float
    prefill_seconds: float | None
    bandwidth_bytes_per_second: int | None
    load_seconds: float | None


class SimulateEngine(TypedDict):
    """the engine's scheduler, and the blocks; both of one attention replica if there are several."""

    name: str
    version: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    kv_dtype: str
    scheduler: Literal["running first", "prefill first", "guaranteed no evict", "slots"]
    step_tokens: int
    max_running_requests: int
    tokens_per_step: float
    blocks: int | None
    block_tokens: int | None


class SimulateLoad(TypedDict):
    """the requests."""

    arrivals: Literal["poisson", "gamma", "closed_loop", "trace"]
    requests_per_second: float | None
    burstiness: float | None
    concurrency: int | None
    trace: str | None
    scale_rate: float | None
    seed: int | None
    requests: int
    refused_requests: int
    prompt_tokens: str | None
    answer_tokens: str | None
    mean_prompt_tokens: float
    mean_answer_tokens: float


class SimulateLimits(TypedDict):
    """the limits that a good request keeps to."""

    max_ttft_seconds: float | None
    max_tpot_seconds: float | None


class SimulateResults(TypedDict):
    """rates, means over time, and totals of all replicas."""

    duration_seconds: float
    requests: int
    requests_per_second: float
    tokens_per_second: float
    good_requests: int | None
    goodput_requests_per_second: float | None
    steady_ttft_seconds: float | None
    mean_running_requests: float
    mean_waiting_requests: float
    busy_share: float
    preemptions: int
    preempted_requests: int
    cached_tokens: int
    most_used_blocks: int | None


class SimulateStepRange(TypedDict):
    """the 80 % range of the time of a decode step, as factors."""

    low_factor: float
    high_factor: float


class SimulatePrefill(TypedDict):
    """the prefill instances and the transfer; only with --prefill-replicas."""

    gpu: str
    replicas: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    link: str | None
    bandwidth_bytes_per_second: int
    sent_bytes: int
    busy_share: float
    mean_queue_seconds: float
    mean_prefill_seconds: float
    mean_transfer_seconds: float


class Simulate(TypedDict):
    """kvcalc simulate: the requests of a server, scheduled as its engine does."""

    schema_version: Literal[2]
    model: Model
    hardware: Hardware
    engine: SimulateEngine
    load: SimulateLoad
    limits: SimulateLimits
    results: SimulateResults
    times: list[SimulateTime]
    timeline: list[SimulateState]
    step_factor: float
    step_range: SimulateStepRange
    prefill: NotRequired[SimulatePrefill]
    warnings: list[Warning]


class SimulateTime(TypedDict):
    """one time of all requests."""

    metric: Literal["ttft", "tpot", "itl", "e2e", "queue"]
    mean_seconds: float | None
    p50_seconds: float | None
    p90_seconds: float | None
    p95_seconds: float | None
    p99_seconds: float | None
    max_seconds: float | None


class SimulateState(TypedDict):
    """the state at one time."""

    seconds: float
    waiting_requests: int
    running_requests: int
    used_blocks: int | None


class Warning(TypedDict):
    """a note about the answer."""

    part: str
    code: str
    text: str


class ParetoPoint(TypedDict):
    """a layout of one replica with a number of running requests."""

    gpu: str
    engine: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    expert_parallel_size: int
    decode_context_parallel_size: int
    num_devices: int
    requests_per_replica: int
    ttft_seconds: float
    tpot_seconds: float
    tokens_per_second_per_user: float
    tokens_per_second_per_device: float
    cost_per_million_output_tokens: float | None
    layout: NotRequired[str | None]


class Reuse(TypedDict):
    """a cache that is used again; bytes are those of one device unless a field says otherwise."""

    prefix: ReusePrefix | None
    sessions: ReuseSessions | None
    tiers: ReuseTiers | None


class ReusePrefix(TypedDict):
    """tokens that all prompts begin with (--prefix-tokens)."""

    prefix_tokens: int
    block_tokens: int
    found_tokens: int
    shared_tokens: int
    kept_bytes: int
    saved_bytes: int
    next_request_bytes: int
    max_batch_size_alone: int | None
    more_requests: int | None


class ReuseSessions(TypedDict):
    """sessions of several turns (--turns), of which the last one has the lengths asked for."""

    turns: int
    idle_tokens: int
    idle_session_bytes: int
    kept_sessions: int | None
    kept_sessions_beside_batch: int | None
    reused_tokens: int
    computed_tokens: int
    reuse_rate: float
    prefill_seconds: float | None
    prefill_seconds_alone: float | None
    rows: list[ReuseTurn]


class ReuseTurn(TypedDict):
    """one turn of a session."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    end_tokens: int
    idle_bytes: int


class ReuseTiers(TypedDict):
    """memory that keeps what the device's cache drops (--offload), of one replica."""

    backend: Literal["native", "lmcache"]
    unit_tokens: int
    unit_bytes: int
    session_tokens: int
    prefix_bytes: int
    session_bytes: int
    loaded_bytes_per_device: int
    prefill_seconds: float | None
    rows: list[ReuseTier]


class ReuseTier(TypedDict):
    """one tier."""

    name: Literal["cpu", "disk", "remote"]
    memory_bytes: int
    bandwidth_bytes_per_second: int | None
    sessions: int | None
    tokens: int | None
    load_seconds: float | None
    break_even_tokens: int | None


class KvTransfer(TypedDict):
    """the cache of a prompt, sent from a prefill instance to a decode instance of the same layout (--transfer-bandwidth)."""

    link: str | None
    bandwidth_bytes_per_second: int
    prompt_tokens: int
    bytes_per_device: int
    seconds: float
    share_of_ttft: float | None
