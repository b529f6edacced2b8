"""The documents of `measure`, `score` and `audit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from kvcalc.documents.fields import Amount, Count, Positive, Share, Whole
from kvcalc.documents.parts import Calibration, Document, Explained, Model

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class AuditLog(TypedDict):
    """the log that was read"""

    name: str
    """the path of the log, or stdin"""
    num_lines: Whole


class AuditEngine(TypedDict):
    """the engine of the log, and how the log was read"""

    name: Literal["vllm", "sglang", "tensorrt-llm", "llama.cpp"]
    version: str | None
    """the version in the log"""
    rules_version: str | None
    """the version of the source the rules were read from"""
    settings: dict[str, str]
    """the engine's own options, from the log or assumed"""
    rules: list[str]
    """the rules that matched, and the assumptions about what the log does not say"""


class AuditModel(TypedDict):
    """the model of the log"""

    name: str
    source: str
    model_type: str
    log_name: str | None
    """the model's name in the log"""


class AuditWorkload(TypedDict):
    """the workload of the log"""

    context_tokens: Whole
    tensor_parallel_size: Whole
    pipeline_parallel_size: Count
    kv_dtype: str
    kv_dtype_reason: str | None
    """why `auto` became this dtype, if the engine has its own rule"""


class AuditUnreadItem(TypedDict):
    """a line of the log that kvcalc could not read"""

    line: Count
    """line number in the log, from 1"""
    text: str
    """start of the line"""


class Audit(Document):
    """kvcalc audit"""

    log: AuditLog
    engine: AuditEngine
    model: AuditModel
    workload: AuditWorkload
    equal: Whole
    """number of figures that follow from the model"""
    unexplained: Whole
    """number of figures that do not"""
    inputs: Whole
    """number of figures that are not checked"""
    explanation: str | None
    """the single other settings that would make all figures equal, or null"""
    figures: list[AuditFigure]
    parts: list[AuditPart]
    """the parts of the device's memory that the log prints, beside the prediction"""
    unread: list[AuditUnreadItem]
    """the first lines that seem to be about the cache and were not understood"""


class AuditPart(TypedDict):
    """one part of the memory of a device; of several ranks, the largest"""

    line: Count
    name: Literal["weights", "consumed", "non_torch", "activation", "graphs", "in_use", "available_memory"]
    """consumed is weights and non_torch together; non_torch is the driver and NCCL; in_use was so before the start;
    available_memory is left for the cache"""
    bytes: int
    """as printed in the log; negative if no memory is left for the cache"""
    predicted_bytes: int | None
    """what kvcalc predicts; null if it predicts nothing"""
    low_bytes: int | None
    """the ends of the 80% range of the prediction"""
    high_bytes: int | None
    sentence: str
    """how the part differs from the prediction, and why if the log tells"""


class AuditFigure(TypedDict):
    """one number of a log"""

    line: Count
    name: str
    printed: str
    """the number as printed in the log"""
    unit: Literal["bytes", "tokens", "blocks", "cells", "layers", "slots", "states", "x"]
    """the unit of computed and difference"""
    computed: float | None
    """the result of the rule; null for an input"""
    difference: float | None
    """printed minus computed; null if they are equal within the printed number's rounding"""
    verdict: Literal["equal", "unexplained", "input"]
    rule: str
    """how the number is computed, or why it is an input"""


class ScoreResultsItem(TypedDict):
    """one file"""

    file: str
    tool: Literal["vllm", "sglang", "guidellm", "llama-bench", "kvcalc-measure"]
    """the benchmark that wrote the file"""
    runs: Count
    """the runs in the file"""


class ScoreSummaryItem(TypedDict):
    """all rows of one metric"""

    metric: Literal["tpot", "ttft", "decode", "prefill", "attention"]
    """tpot and ttft are times of served requests; decode is one step and prefill one prompt, without a server;
    attention is that of all layers in one step, from a record of kvcalc measure"""
    times: Count
    """the number of rows"""
    mean_error: Amount
    """the mean of the errors without their signs"""
    median_error: Amount
    within_a_quarter: Share
    """the share of rows that are off by at most 25%"""
    in_range: Share | None
    """the share of measured times in the range; null if no range is known"""
    uncalibrated_mean_error: Amount | None
    """the mean error without --calibrate"""
    left_out_mean_error: Amount | None
    """the mean error of runs that --calibrate has too, each predicted from the others; null if some are not"""


class ScoreRefusedItem(TypedDict):
    """a run that cannot be compared"""

    file: str
    run: Count
    reason: str
    hint: str | None
    """what to type next"""


class Score(Document):
    """kvcalc score: measured times beside the predicted ones"""

    results: list[ScoreResultsItem]
    scores: list[ScoreRow]
    summary: list[ScoreSummaryItem]
    setups: list[ScoreSetup]
    refused: list[ScoreRefusedItem]


class ScoreRow(TypedDict):
    """one measured time beside the predicted one"""

    file: str
    """the path of the file, or stdin"""
    run: Count
    """the number of the run in its file, starting at 1"""
    tool: Literal["vllm", "sglang", "guidellm", "llama-bench", "kvcalc-measure"]
    """the benchmark that wrote the file"""
    model: str
    engine: str
    gpu: str
    num_devices: Count
    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    data_parallel_size: Count
    """DP ranks (--dp), which divide the requests and share the experts"""
    input_tokens: Whole
    """the mean length of a prompt; for decode, the tokens cached before the first step"""
    output_tokens: Whole
    """the mean length of an answer; 0 for prefill"""
    context_tokens: Count
    """the context of the estimate: prompt and answer; for decode, the mean context of the steps"""
    concurrency: Count
    """requests at the same time"""
    concurrency_is_average: bool
    """whether the concurrency is a mean over the run, computed from its throughput and latency (Little's law)"""
    metric: Literal["tpot", "ttft", "decode", "prefill", "attention"]
    """tpot and ttft are times of served requests; decode is one step and prefill one prompt, without a server;
    attention is that of all layers in one step, from a record of kvcalc measure"""
    measured_seconds: Positive
    """the figure that is compared: the mean, for ttft the median; the other one if it is missing"""
    mean_seconds: Positive | None
    median_seconds: Positive | None
    predicted_seconds: Positive
    """the estimate's figure for the same question"""
    low_seconds: Positive | None
    """the low end of the 80% range; null if no range is known"""
    high_seconds: Positive | None
    """the high end of the 80% range; null if no range is known"""
    error: float
    """predicted divided by measured, minus 1: positive if the prediction is too slow"""
    in_range: bool | None
    """whether the measured time is in the range; null if no range is known"""
    largest_part: Literal["weights", "kv", "compute", "overhead", "communication", "prefill", "waiting"]
    """the largest part of the predicted time; prefill in tpot is the delay by other requests' prompts, waiting in ttft
    is all but the prefill"""
    largest_part_seconds: Amount
    largest_part_factor: Positive | None
    """the factor on the largest part that would make the prediction the measured time; null if no factor does"""
    uncalibrated_seconds: Positive | None
    """the prediction without --calibrate; null if it is not given"""
    left_out_seconds: Positive | None
    """for a run that --calibrate has too: the prediction from its other runs"""


class ScoreSetup(TypedDict):
    """the runs of one setup"""

    model: str
    engine: str
    gpu: str
    num_devices: Count
    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    data_parallel_size: Count
    explained: Explained | None
    """the factors that fit these runs; null if there are fewer than three"""
    calibration: Calibration | None


class MeasureWorkload(TypedDict):
    """the workload that was run"""

    context_tokens: Whole
    """the final length of a sequence; of the longest one with --lengths"""
    batch_size: Whole
    lengths: NotRequired[list[Whole] | None]
    """the final length of every sequence, if they differ (--lengths)"""
    steps: Whole
    dtype: str
    seed: Whole
    tensor_parallel_size: Whole
    """number of ranks the heads are split over"""
    kv_dtype: str
    """the dtype of the cache's rows"""
    cache_scales: NotRequired[Literal["row", "head", "tensor"] | None]
    """what has a scale of its own: every row of 8 bits, every head, or K and V; null for wider rows"""
    cache: Literal["preallocated", "grow", "none"]
    block_size: Whole | None
    """tokens per block; null if the cache is not paged"""
    mla: Literal["absorbed", "expanded"]
    backend: str
    """the requested backend, or auto"""
    without_backends: NotRequired[list[str]]
    """backends that auto did not run (--without-backend)"""
    prefill: Literal["sample", "full"]


class MeasureDevice(TypedDict):
    """the device the run used"""

    kind: Literal["cpu", "cuda", "mps", "xpu"]
    name: str
    memory_bytes: Whole
    free_bytes: Whole
    last_level_cache_bytes: Whole
    """the cache that is flushed before each timed call"""
    threads: Whole | None
    torch_version: str


class MeasureRoof(TypedDict):
    """the rates measured on the device in the same run: the fastest pass over a buffer, and the median of many matrix
    products"""

    read_bytes_per_second: float
    buffer_bytes: Whole
    matmul_flop_per_second: float
    matmul_dtype: str
    """the dtype of the fastest products: float32 if the CPU emulates those of the run"""


class MeasureSweep(TypedDict):
    """the values of --sweep"""

    context_tokens: list[Whole | None]
    batch_size: list[Whole]


class MeasureSkippedItem(TypedDict):
    """one kind of attention that was not run, and why"""

    attention: str
    reason: str


class Measure(Document):
    """kvcalc measure; a record (--save) is this document"""

    model: Model
    workload: MeasureWorkload
    device: MeasureDevice
    environment: Environment
    roof: MeasureRoof
    runs: list[Run]
    sweep: MeasureSweep | None
    curve: list[CurveRow] | None
    """with --sweep, one row per run"""
    capacity: Capacity | None
    skipped: list[MeasureSkippedItem]


class Environment(TypedDict):
    """the machine and software of a run"""

    taken_at: str
    """UTC, ISO 8601"""
    kvcalc_version: str
    python_version: str
    system: str
    system_release: str
    machine: str
    logical_cores: Whole | None
    memory_bytes: Whole
    device_count: Whole
    compute_capability: str | None
    driver_version: str | None
    cuda_version: str | None
    hip_version: str | None
    cudnn_version: str | None
    nccl_version: str | None
    sm_clock_mhz: float | None
    """clocks and power are read at the end of the runs"""
    memory_clock_mhz: float | None
    power_watts: float | None
    power_limit_watts: float | None
    omp_num_threads: str | None
    libraries: dict[str, str]
    """versions of the installed libraries"""


class RunFractionOfRoof(TypedDict):
    """share of the read roof: of the attention core, and of the whole step"""

    attention_core: float | None
    step: float


class RunFractionOfMatmulRoof(TypedDict):
    """share of the matmul roof: of the attention core, of the whole step, and of the prefill"""

    attention_core: float | None
    step: float | None
    prefill: float | None


class RunBindingRoof(TypedDict):
    """the roof that limits the attention core, and the whole step, and the share of it that is reached"""

    attention_core: BindingRoof | None
    step: BindingRoof | None


class RunPrefill(TypedDict):
    """a prefill, timed: tokens and chunk_tokens are for one of batch_size sequences, the rest for all of them"""

    kind: Literal["sample", "full"]
    """sample: one prompt with caches of its own, while the caches of the run were filled with random rows; full: the
    run's own prompt"""
    batch_size: Whole
    tokens: Whole
    chunk_tokens: Whole
    seconds: float
    tokens_per_second: float
    flop: Whole
    flop_per_second: float


class RunMemory(TypedDict):
    """growth of the peak during the run, the allocator's reserve, and the unused share of the reserve"""

    peak_bytes: int | None
    reserved_bytes: Whole | None
    fragmentation: float | None


class RunBackendsItem(TypedDict):
    """one backend in one layer"""

    layer: Whole
    is_chosen: bool
    name: str
    seconds: float | None
    relative_error: float | None
    reason: str | None


class RunScaled(TypedDict):
    """figures for all layers, in proportion to the bytes a step reads; null if all layers were run"""

    num_layers: Whole
    factor: float
    predicted_bytes: Whole
    decode_step_seconds: float


class RunVerified(TypedDict):
    """the self-check on a small shape"""

    max_abs_error: float | None
    tolerance: float
    ok: bool


class Run(TypedDict):
    """the measurement of one kind of attention"""

    attention: Literal["mha", "mqa", "gqa", "mla", "hybrid", "none"]
    num_layers: Whole
    context_tokens: Whole
    batch_size: Whole
    lengths: NotRequired[list[Whole] | None]
    """the length of every sequence, if they differ; context_tokens is then the longest one"""
    predicted_bytes: Whole
    """from the formula only"""
    held_bytes: Whole
    """bytes of the storage behind the cache's tensors"""
    allocator_bytes: int
    """growth reported by the device's allocator"""
    expected_allocator_bytes: Whole | None
    """what the allocator should report: the tensors, each rounded as the allocator does, and block tables; null if the
    rounding is not known"""
    decode_step_seconds: Timing
    attention_core_seconds: Timing | None
    """null if no layer has attention or nothing is cached"""
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
    """every backend for the first layer of each kind: its time and its error against fp32 at the same shape, length and
    dtype, relative to the output; or why it was not run"""
    scaled: RunScaled | None
    verified: RunVerified
    ranks: list[Rank] | None
    """with --tp, the bytes of each rank; the run's own bytes are those of rank 0, and its times are those of the
    slowest rank in each step"""


class BindingRoof(TypedDict):
    """the larger of the two shares: reading the bytes and multiplying are compared with their own roofs"""

    roof: Literal["read", "matmul"]
    fraction: float


class Rank(TypedDict):
    """one tensor-parallel rank"""

    rank: Whole
    device: str
    predicted_bytes: Whole
    held_bytes: Whole
    allocator_bytes: int
    read_bytes_per_second: float


class CurveRow(TypedDict):
    """one run of a sweep: medians, and attention's shares of the read roof and of the roof that limits it"""

    model: str
    context_tokens: Whole
    batch_size: Whole
    attention: str
    num_layers: Whole
    predicted_bytes: Whole
    held_bytes: Whole
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
    """with --until-full, the most tokens or sequences that actually fit"""

    axis: Literal["context", "batch"]
    limit_bytes: Whole
    predicted: Whole
    measured: Whole
    ratio: float
    trials: Whole


class MeasureCompareA(TypedDict):
    """the first record"""

    file: str
    model: str | None
    device: str | None
    taken_at: str | None


class MeasureCompareB(MeasureCompareA):
    """the second record"""


class MeasureCompareDifferencesItem(TypedDict):
    """one setting in which the records differ"""

    path: str
    a: Any
    b: Any


class MeasureCompareFiguresItem(TypedDict):
    """one figure in both records"""

    attention: str | None
    figure: str
    a: float
    b: float
    ratio: float | None


class MeasureCompareLeftOutItem(TypedDict):
    """one kind of attention that is not compared, and why"""

    attention: str
    reason: str


class MeasureCompare(Document):
    """kvcalc measure --compare A B"""

    a: MeasureCompareA
    b: MeasureCompareB
    differences: list[MeasureCompareDifferencesItem]
    figures: list[MeasureCompareFiguresItem]
    """ratio is b / a"""
    left_out: list[MeasureCompareLeftOutItem]


class MeasureProfileLaunch(TypedDict):
    """the time of a kernel that does nothing else"""

    launched_seconds: Positive
    replayed_seconds: Positive | None
    """in a CUDA graph; null if the device has none"""


class MeasureProfileAllReduce(TypedDict):
    """a sum over the ranks of torchrun: the median"""

    ranks: Count
    bytes: Count
    """the size of each rank's numbers, in fp32"""
    seconds: Positive
    method: Literal["CUDA graph", "CUDA events", "wall clock"]


class MeasureProfileDevice(MeasureDevice):
    """the device"""


class MeasureProfileRoof(MeasureRoof):
    """the rates measured on the device, which all points are compared with"""


class MeasureProfilePointsItem(TypedDict):
    """attention of one layer over the cache: medians"""

    model: str
    attention: str
    kv_dtype: str
    context_tokens: Count
    batch_size: Count
    layer_seconds: Positive | None
    predicted_layer_seconds: Positive | None
    """the estimate's time to read the cache and to attend in a layer, without a calibration; null if the device has no
    preset"""
    kv_read_bytes_per_second: Positive | None
    binding_roof: Literal["read", "matmul"] | None
    fraction_of_binding_roof: Amount | None
    backend: str


class MeasureProfileSkippedItem(TypedDict):
    """a point that could not be measured, and why"""

    model: str
    kv_dtype: str | None
    context_tokens: Count
    batch_size: Count
    reason: str


class MeasureProfile(Document):
    """kvcalc measure --profile"""

    device: MeasureProfileDevice
    environment: Environment
    roof: MeasureProfileRoof
    launch: MeasureProfileLaunch
    all_reduces: list[MeasureProfileAllReduce]
    """empty if there is one rank"""
    records: list[Measure]
    """a record of every model and type of cache, with all its runs"""
    points: list[MeasureProfilePointsItem]
    skipped: list[MeasureProfileSkippedItem]
    not_measured: Whole
    """the points for which there was no time"""


class Timing(TypedDict):
    """seconds"""

    p50: float
    p90: float
    min: float
    n: Whole
    spread: float
    """(p90 - min) / p50"""
    cpu_p50: float | None
    """CPU time of the process, all threads"""
    method: Literal["CUDA graph", "CUDA events", "wall clock"]
