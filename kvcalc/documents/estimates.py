"""The documents of `estimate`, `fit`, `sweep`, `compare` and `batch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, TypedDict

from kvcalc.documents.fields import Amount, Count, Positive, Share, SimulatedTimes, Whole
from kvcalc.documents.loads import Plan, Simulate
from kvcalc.documents.parts import (
    Document,
    Engine,
    Fit,
    Hardware,
    KvCache,
    Model,
    Reuse,
    Speculative,
    Throughput,
    Variant,
    Warning,
    Weights,
    Workload,
)

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class Estimate(TypedDict):
    """kvcalc estimate"""

    schema_version: Literal[3]
    model: Model
    workload: Workload
    engine: Engine
    kv_cache: KvCache
    variants: list[Variant]
    weights: Weights
    hardware: Hardware | None
    fit: Fit | None
    server: Server | None
    """null without a device, for the formulas and for a library, or if the weights are not known"""
    throughput: Throughput | None
    speculative: Speculative | None
    warnings: list[Warning]
    reuse: NotRequired[Reuse]
    sources: NotRequired[Sources]


class Engines(Document):
    """kvcalc estimate --engine all, or with several engines"""

    model: Model
    workload: Workload
    tensor_parallel_size: Whole
    pipeline_parallel_size: Count
    data_parallel_size: Count
    """DP ranks (--dp), which divide the requests and share the experts"""
    stored_bytes: Whole
    """bytes attention must keep for the whole batch, in the dtype of the formula"""
    engines: list[EngineRow]


class EngineRow(TypedDict):
    """one engine; figures are null if it is refused"""

    model: str
    engine: str
    """as asked for, with its release"""
    version: str | None
    kv_dtype_reason: str | None
    """why `auto` became this dtype, or null"""
    block_size: Whole | None
    num_gpu_blocks: Whole | None
    kv_cache_tokens: Whole | None
    """tokens that fit in the given memory"""
    max_concurrency: float | None
    dtype: str | None
    total_bytes: Whole | None
    bytes_per_sequence: Whole | None
    bytes_per_token: Whole | None
    fixed_bytes_per_sequence: int | None
    bytes_per_device: Whole | None
    devices_total_bytes: Whole | None
    fits: bool | None
    reason: str | None
    """why the engine is not supported for this model or workload"""


class SmallestLayout(TypedDict):
    """a number of devices and how the model is split over them"""

    num_devices: Count
    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    data_parallel_size: Count
    """DP ranks (--dp), which divide the requests and share the experts"""


class HostOffloadNGpuLayers(TypedDict):
    """a number for an option, and the bytes in host memory with it"""

    value: Whole
    host_bytes: Whole


class HostOffloadNCpuMoe(HostOffloadNGpuLayers):
    """a number for an option, and the bytes in host memory with it"""


class HostOffload(TypedDict):
    """what llama.cpp can keep in host memory so that the rest fits"""

    n_gpu_layers: HostOffloadNGpuLayers | None
    """the most layers on the device that fit: -ngl"""
    n_cpu_moe: HostOffloadNCpuMoe | None
    """the fewest layers with experts in host memory, if all layers are on the device: --n-cpu-moe"""


class FitDocument(TypedDict):
    """kvcalc fit"""

    schema_version: Literal[3]
    model: Model
    workload: Workload
    engine: Engine
    kv_cache: KvCache
    weights: Weights
    hardware: Hardware
    fit: Fit
    server: Server | None
    """null for the formulas and for a library"""
    speculative: Speculative | None
    smallest: SmallestLayout | None
    """if it does not fit, the fewest devices of this kind it fits on"""
    offload: HostOffload | None
    """if it does not fit, what to keep in host memory instead; null for other engines than llama.cpp"""
    warnings: list[Warning]
    reuse: NotRequired[Reuse]
    sources: NotRequired[Sources]


class SourcesConfigItem(TypedDict):
    """a key of the config that was read"""

    key: str
    """with the object that it is in: text_config.head_dim"""
    value: str
    """long values are cut"""
    is_default: bool
    """whether the config does not have the key, and the model's class has this value"""


class SourcesModel(TypedDict):
    """where the model is described"""

    file: str | None
    """the preset; null for another config"""
    source: str
    """where it was published"""
    date: str | None
    """when it was published or read"""
    config: list[SourcesConfigItem]
    """empty if the config cannot be read again, as from stdin"""


class SourcesEngine(TypedDict):
    """the files of the engine's source that the rules were read from"""

    release: str
    cache: str
    reserve: str | None
    defaults: str | None


class SourcesDevice(TypedDict):
    """the data sheet of the device"""

    file: str | None
    """null for a device that was described by options"""
    source: str
    date: str | None


class SourcesReserveLogsItem(TypedDict):
    """a log of the engine's start"""

    model: str
    release: str | None
    """or the month of the log"""
    device: str
    reserved_bytes: Whole
    """what the engine kept beside weights and cache, without shares that it does not use"""
    estimated_bytes: Whole
    error: float
    """of the estimate, as a share of the device"""
    sets_constant: bool
    """whether a constant was read from this log; if not, it tests the estimate"""
    source: str


class SourcesReserve(TypedDict):
    """the logs behind the estimated parts of a device's memory"""

    low_factor: Positive
    """low end of the 80 % range, times the estimate"""
    high_factor: Positive
    num_tested: Count
    """logs that set no constant"""
    within_range: Whole
    """how many of these are within the range that the logs of other model families give"""
    median_error: Share
    """of these, as a share of the device, without the sign"""
    largest_error: Share
    logs: list[SourcesReserveLogsItem]


class Sources(TypedDict):
    """where the facts come from, with --explain"""

    model: SourcesModel
    engine: SourcesEngine | None
    """null for the formula"""
    device: SourcesDevice | None
    reserve: SourcesReserve | None
    """null if nothing is estimated, or if no logs of the engine are known"""


class ServerCommand(TypedDict):
    """the command of a server, as it was read"""

    service: str | None
    """the service or the resource that it is from; null for a command"""
    engine: str
    """with the release that its image names"""
    model: str | None
    """what the command loads; null if the engine refuses options before the model counts"""
    copies: Count
    """whole copies behind one server, of which one is checked"""
    ignored: list[str]
    """options without an effect on the memory or the speed"""
    not_counted: list[str]
    """options and variables that are not counted, each with what it changes in parentheses"""


class Server(TypedDict):
    """the server that the answer is about, as fit, check and estimate with a device share it"""

    starts: bool | None
    """null: it may start or not, since the range of the free memory has both"""
    reason: str | None
    """why it does not start, or may not"""
    try_: list[ServerChange]
    """each is one of the smallest changes with which it starts; empty if it starts"""
    command: str | None
    """the command that starts it; null if kvcalc cannot print one"""
    one_user: OneUser | None
    """null if it does not start, or if the speed is not known"""


class OneUser(TypedDict):
    """one request alone on the server"""

    context_tokens: Count
    """its prompt, and the tokens that a decode step reads"""
    tpot_seconds: Positive
    tpot_low_seconds: Positive | None
    """low end of the 80 % range; null if it is not known"""
    tpot_high_seconds: Positive | None
    prefill_seconds: Positive
    tokens_per_second: Positive


class ServerRefusal(Document):
    """kvcalc fit and estimate, if the engine refuses to start; --get prints null for all other fields"""

    starts: bool
    """false"""
    reason: str
    """why it does not start"""
    try_: list[ServerChange]
    """empty if no single option is known to help"""


class ServerChange(TypedDict):
    """one change with which the server starts"""

    option: str
    value: str


class CheckRequests(TypedDict):
    """requests of the given lengths"""

    input_tokens: Count
    output_tokens: Count
    max_requests: Whole | None
    """how many of them run at once; null for any number, 0 if the server refuses them"""
    memory_requests: Whole | None
    """how many of them fit in memory, whatever limit of running requests the command sets"""
    refused: str | None
    """why the server refuses them; null if it does not"""


class SustainedRate(SimulatedTimes):
    """the largest rate of requests that keeps the targets, and the simulated times at it"""

    requests_per_second: Amount
    """0 if no rate keeps the targets: kvcalc then exits with code 4"""
    confidence: Count
    """in per cent, with which times are to be at most those given here: 50 is the estimate, 80 the upper end of the
    range"""
    limited_by: str | None
    """what is missed at a larger rate"""
    step_factor: Positive
    """factor on the times of all steps: the judged TPOT as a multiple of the estimate"""
    ttft_factor: Annotated[float, {"minimum": 1}]
    """factor on the simulated TTFT, whose range is wider than that of steps"""
    simulated_requests: Count
    """in the run whose times these are"""
    max_running_requests: Count
    """the limit of running requests"""


class AdvisedChange(TypedDict):
    """one change of the command, alone"""

    change: str
    """the options as they are typed, or `without` those that are left out"""
    starts: bool
    capacity: SustainedRate | None
    """null if the change gains nothing"""
    gain: float
    """the share by which the server sustains more requests: 0 if that is not worth a change, and 1 if it sustains some
    where it sustained none"""
    free_bytes: int
    max_requests: int | None
    """requests of the given lengths that fit at once"""
    risk: str


class ImprovedServer(TypedDict):
    """the command with the changes that gain most together"""

    command: str
    changes: list[str]
    risks: list[str]
    """what each of them may cost"""
    gain: float
    capacity: SustainedRate | None
    free_bytes: int


class Advice(TypedDict):
    """what to change in the command"""

    binds: str
    """the limit that keeps the server from more requests per second"""
    changes: list[AdvisedChange]
    """each change alone that alters the rate or the memory"""
    improved: ImprovedServer | None
    """null if no change gains anything"""


class LiveRow(TypedDict):
    """one figure of a running server, beside the prediction"""

    name: Literal[
        "running_requests", "waiting_requests", "cache_usage", "cache_tokens", "cache_blocks", "prefix_hit_rate",
        "finished_requests", "preemptions", "input_tokens", "output_tokens", "ttft_mean_seconds", "tpot_mean_seconds",
    ]  # fmt: skip
    """requests, tokens and seconds are numbers, usage and hit rate are shares; cache_tokens are those of one rank, and
    cache_blocks those of all; times, lengths, hit rate and preemptions are since the server started"""
    server: Amount
    """what the server shows"""
    predicted: Amount | None
    """of running_requests, what fits at once; of cache_usage, at most; null without a prediction"""
    low: Amount | None
    """the lower end of the range of the prediction; null if it is not known"""
    high: Amount | None
    remark: str
    """how it compares, or what it means"""


class Live(TypedDict):
    """what a running server measures, beside the prediction for its command"""

    source: str
    """the file, or the address without credentials"""
    engine: str
    model: str | None
    """the name under which the model is served"""
    ranks: Count
    """replicas behind the server, each with its own cache"""
    rows: list[LiveRow]
    """the figures that the server shows"""
    differs: list[str]
    """options whose value the server shows, and which have another in the command"""


class Check(FitDocument):
    """kvcalc check: whether the command of a server starts, and what load it sustains"""

    command: ServerCommand
    starts: bool | None
    """that of server"""
    reason: str | None
    """that of server"""
    requests: CheckRequests | None
    """null without the lengths of requests"""
    capacity: SustainedRate | None
    """null without the lengths of requests, if it does not start, or if the speed is not known"""
    advice: Advice | None
    """null if it is not asked for"""
    live: NotRequired[Live]
    """with --live"""


class CheckRefusal(Document):
    """kvcalc check, if the engine refuses to start; --get prints null for all other fields of a check"""

    command: ServerCommand
    starts: bool
    """false"""
    reason: str
    """why it does not start"""
    try_: list[ServerChange]
    """empty if no single option is known to help"""
    requests: None
    capacity: None
    advice: None


class Sweep(Document):
    """kvcalc sweep --json; --format jsonl prints only the points, one per line"""

    model: Model
    kv_memory_bytes: Whole | None
    """memory for the cache on each device"""
    num_points: Whole
    points: list[SweepPoint]


class SweepPoint(TypedDict):
    """one point of a grid; the bytes are those of the estimate's kv_cache"""

    model: str
    engine: str
    """the requested engine, including its release"""
    kv_dtype: str
    gpu: str | None
    num_devices: Count | None
    """devices of the layout"""
    tensor_parallel_size: Count
    data_parallel_size: Count
    """DP ranks (--dp), which divide the requests and share the experts"""
    context_tokens: Count
    batch_size: Count
    stored_bytes: Whole | None
    total_bytes: Whole | None
    bytes_per_sequence: Whole | None
    bytes_per_token: Whole | None
    fixed_bytes_per_sequence: int | None
    bytes_per_device: Whole | None
    devices_total_bytes: Whole | None
    decode_read_bytes: Whole | None
    fits: bool | None
    """whether bytes_per_device fits in the memory"""
    free_bytes: int | None
    """free memory per device; negative if it does not fit"""
    decode_step_seconds: Amount | None
    """one step of the whole batch; null if it does not fit"""
    decode_step_low_seconds: Amount | None
    """the low end of the step's range: its 10th percentile, but at least the roofline"""
    decode_step_high_seconds: Amount | None
    """the high end of the step's range: its 90th percentile"""
    decode_tokens_per_second: Amount | None
    """tokens per second of the whole batch"""
    prefill_seconds: Amount | None
    """prefill of the whole batch; each sequence is as long as the context"""
    reason: str | None
    """why the point is refused, or null"""


class CompareWorkload(TypedDict):
    """the workload of all rows"""

    context_tokens: Count
    batch_size: Count


class CompareEnginesItem(TypedDict):
    """one engine"""

    name: str
    version: str | None


class Compare(Document):
    """kvcalc compare"""

    workload: CompareWorkload
    hardware: list[Hardware]
    """the devices of all rows, each once"""
    engines: list[CompareEnginesItem]
    """the engines of all rows, each once"""
    models: list[CompareRow]


class CompareRow(TypedDict):
    """one model with one kind of attention, one engine and one layout; figures are null if it is refused"""

    model: str
    """its name, or the requested name if the model is unknown"""
    engine: str
    """the requested engine, including its release"""
    gpu: str | None
    num_devices: Count | None
    """devices of the layout"""
    tensor_parallel_size: Count | None
    data_parallel_size: Count | None
    """DP ranks (--dp), which divide the requests and share the experts"""
    attention: str | None
    num_layers: Whole | None
    num_kv_heads: Whole | None
    max_position_embeddings: Whole | None
    kv_dtype: str | None
    stored_bytes: Whole | None
    total_bytes: Whole | None
    bytes_per_sequence: Whole | None
    bytes_per_token: Whole | None
    fixed_bytes_per_sequence: int | None
    bytes_per_device: Whole | None
    devices_total_bytes: Whole | None
    decode_read_bytes: Whole | None
    parameters: Whole | None
    active_parameters_per_token: Whole | None
    weights_bytes: Whole | None
    weights_dtype: str | None
    fits: bool | None
    free_bytes: int | None
    max_context_tokens: Whole | None
    max_batch_size: Whole | None
    decode_step_seconds: Amount | None
    decode_step_low_seconds: Amount | None
    """the low end of the step's range: its 10th percentile, but at least the roofline"""
    decode_step_high_seconds: Amount | None
    """the high end of the step's range: its 90th percentile"""
    decode_tokens_per_second: Amount | None
    prefill_seconds: Amount | None
    bound_by: str | None
    joules_per_token: Positive | None
    """energy of the devices per output token"""
    reason: str | None
    """why the model is refused, or null"""
    exit_code: Whole
    """the exit code estimate would have"""


Batch: TypeAlias = "Estimate | Engines | Plan | Simulate | Check | BatchError"
"""kvcalc batch: one line of its output"""


class BatchErrorError(TypedDict):
    """the error of the line"""

    message: str
    hint: str | None
    exit_code: Count
    """the exit code estimate would have"""
    line: Count
    """the line number, starting at 1"""


class BatchError(TypedDict):
    """a line without an answer"""

    error: BatchErrorError
