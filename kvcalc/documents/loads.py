"""The documents of `plan`, `simulate` and `prefix`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from kvcalc.documents.fields import AllLayoutSizes, Amount, Count, Positive, Share, SimulatedTimes, Whole
from kvcalc.documents.parts import Document, Hardware, Model

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class PlanLengths(TypedDict):
    """the lengths of the requests, in tokens"""

    input_tokens: Count
    """the mean of all requests"""
    output_tokens: Count
    """the mean of all requests"""
    longest_tokens: Count
    """prompt and answer of the longest request together, for which the server is started: lengths end at their 99.9th
    percentile, and at the model's limit"""
    held_tokens: Count
    """the tokens a running request is assumed to hold"""
    num_requests: Count
    """rows of the file; 1 if no file is given"""
    file: str | None


class PlanTargets(TypedDict):
    """the traffic to serve, and the limits for its times"""

    concurrency: Count | None
    requests_per_second: Amount | None
    """that of a job with a deadline is the rate that it needs at least"""
    users: Count | None
    think_seconds: Amount | None
    """how long a client thinks on average before the next request; null if requests arrive at a rate"""
    session_turns: Count | None
    session_growth_tokens: Count | None
    """by how many tokens the context of a session grows each turn"""
    num_requests: Count | None
    """the requests of a job with a deadline"""
    deadline_seconds: Amount | None
    """within which all requests of the job must end"""
    max_ttft_seconds: Amount | None
    max_tpot_seconds: Amount | None
    confidence: Count
    """in per cent, with which a time is to be at most the judged one, which is compared with the limit: 50 is the
    estimate, 80 the upper end of its range"""
    max_e2e_seconds: Amount | None
    ttft_percentile: Literal[50, 90, 95, 99] | None
    """the percentile that max_ttft_seconds limits; null for the mean"""
    tpot_percentile: Literal[50, 90, 95, 99] | None
    """the percentile that max_tpot_seconds limits; null for the mean"""
    e2e_percentile: Literal[50, 90, 95, 99] | None
    """the percentile that max_e2e_seconds limits; null for the mean"""


class PlanSpeculative(TypedDict):
    """how tokens are drafted"""

    method: Literal["mtp", "eagle", "eagle1", "dflash", "draft", "ngram"]
    num_draft_tokens: Count
    """tokens drafted per step"""
    acceptance_length: Annotated[float, {"minimum": 1}] | None
    """mean number of tokens that a step gives a sequence; null if not given"""
    draft_model: str | None
    """the model that drafts, or the EAGLE head, if one is named"""


class Plan(Document):
    """kvcalc plan: for each kind of device, the smallest layout that serves the traffic"""

    model: Model
    checkpoint: str
    """what the commands load: a repository on the Hugging Face Hub, a path, or a placeholder in angle brackets"""
    lengths: PlanLengths
    targets: PlanTargets
    headroom: Share
    """layouts are for a load that is larger than that of the targets by this share"""
    spare_replicas: Whole
    """replicas in each row that the load does not need"""
    router: Literal["round-robin", "random", "least-loaded", "prefix-aware"] | None
    """which replica gets a request in the simulation; null without one"""
    trace: PlanTrace | None
    """the trace whose requests are served; null without --trace"""
    engines: list[str]
    dtype: str | None
    """as asked for: one type of weights, or several with commas"""
    kv_dtype: str
    prefix_hit_rate: Annotated[float, {"exclusiveMinimum": 0, "exclusiveMaximum": 1}] | None
    """share of a prompt that is found in the prefix cache; null if none is"""
    prefix_tokens: NotRequired[Count]
    """tokens that all prompts begin with, if given"""
    speculative: PlanSpeculative | None
    ranked_by: Literal["cost_per_hour", "cost_per_million_output_tokens", "num_devices"]
    """what the best row has least of: the cost per hour with targets, per token without. Without prices this is the
    number of devices, which says nothing about the cost of devices of different kinds"""
    best: PlanRow | None
    """the cheapest row, or the row with the fewest devices; null if no device serves the traffic"""
    gives_up: str | None
    """a row that is much faster than the best one, and what it costs, if rows are ranked by the cost per token"""
    commands: list[PlanCommand]
    """one for each engine with a layout, that of the best row first; empty for separate instances"""
    plans: list[PlanRow]
    finalists: list[PlanFinalist] | None
    """the layouts that were simulated; null without a percentile, --simulate and --trace"""
    pareto: list[ParetoPoint] | None
    """the layouts of one replica that are cheaper, or faster for one user, than every other, the fastest first; null
    without --pareto"""


class PlanCommand(TypedDict):
    """how one replica of an engine's best layout is started"""

    engine: str
    gpu: str
    replicas: Count
    """replicas to start"""
    command: str
    nodes: list[str] | None
    """what starts on each machine of a replica, if it needs several; node-0, node-1, ... stand for their names"""
    router: str | None
    """the command of the simulated router in front of the replicas; replica-0, replica-1, ... stand for the names of
    their machines; null for one replica, without a simulation, and if the engine has no such router"""


class PlanTrace(TypedDict):
    """the trace of a plan: its requests with an answer"""

    name: str
    """the file"""
    scale_rate: Positive
    """the times between arrivals are divided by this"""
    requests: Count
    duration_seconds: Positive
    """seconds from the first arrival to the last one"""
    requests_per_second: Positive
    """mean rate, for which the costs of a token are"""
    peak_requests_per_second: Positive
    """rate of the busiest minute, for which the short form chooses layouts. The mean rate for a shorter trace"""


class PlanRow(TypedDict):
    """one kind of device with one engine; figures are null if it does not serve the traffic"""

    model: str
    gpu: str
    engine: str
    fits: bool
    """whether this device serves the traffic"""
    verdict: Literal["fits", "tight", "does_not_fit"]
    """tight: the free memory is within the range of the estimated parts"""
    reason: str | None
    """what is missing, or null"""
    hint: str | None
    """what to try next, or null"""
    next_layout: str | None
    """the second choice for this device, and why it was not chosen; null if there is none"""
    tensor_parallel_size: Count | None
    pipeline_parallel_size: Count | None
    data_parallel_size: Count | None
    """DP ranks (--dp), which divide the requests and share the experts"""
    expert_parallel_size: Count | None
    """devices that each hold whole experts; 1 if every expert is split"""
    decode_context_parallel_size: Count | None
    """tensor-parallel ranks that divide the tokens of the cache"""
    replicas: Count | None
    num_devices: Count | None
    """devices of all replicas together, the spare ones too"""
    requests_per_replica: Count | None
    """concurrent requests per replica"""
    utilization: Positive | None
    """the load as a share of what the replicas without the spare ones serve at most; null for clients and separate
    instances"""
    kv_dtype: str | None
    weights_dtype: str | None
    weights_bytes: Whole | None
    """the weights of the language model in one replica, on all devices"""
    free_bytes: int | None
    """free memory per device"""
    max_batch_size: Whole | None
    """requests that fit in one replica"""
    ttft_seconds: Amount | None
    ttft_low_seconds: Amount | None
    """80% range"""
    ttft_high_seconds: Amount | None
    """null if the range is wider than fourfold"""
    ttft_judged_seconds: Amount | None
    """the time at targets.confidence, which the targets are compared with, even if its range is too wide to be known"""
    tpot_seconds: Amount | None
    tpot_low_seconds: Amount | None
    """the low end of its range"""
    tpot_high_seconds: Amount | None
    """the high end of its range"""
    tpot_judged_seconds: Amount | None
    """the same for the time per output token"""
    simulated_ttft_seconds: Amount | None
    """the simulated time that the target limits"""
    simulated_tpot_seconds: Amount | None
    """the simulated time that the target limits"""
    simulated_e2e_seconds: Amount | None
    """the simulated time that the target limits"""
    simulated_requests: Count | None
    tokens_per_second: Amount | None
    """answer tokens per second of all replicas"""
    tokens_per_second_low: Amount | None
    """from the high end of TPOT's 80% range"""
    tokens_per_second_high: Amount | None
    requests_per_second: Amount | None
    tokens_per_second_per_device: Amount | None
    price_per_hour: Amount | None
    """price of one device per hour, as given"""
    cost_per_hour: Amount | None
    cost_per_million_output_tokens: Amount | None
    cost_per_million_tokens: Amount | None
    """per million prompt and answer tokens together"""
    watts: Positive | None
    """power of all devices; null if the TDP is not known"""
    kwh_per_million_output_tokens: Positive | None
    vllm: str | None
    """the command that starts one replica, in rows of vLLM; null in other rows"""
    sglang: str | None
    """the same for SGLang"""
    tensorrt_llm: str | None
    """the same for TensorRT-LLM"""
    llama_cpp: str | None
    """the same for llama.cpp"""
    disaggregated: NotRequired[SplitPools | None]
    """the pools of a row with prefill and decode on separate instances; null in other rows; only with --disaggregate"""
    next_mode: NotRequired[str | None]
    """why the other row of this device and engine lost, aggregated or disaggregated; null in that row; only with
    --disaggregate"""


class SplitPoolsTransfer(TypedDict):
    """the cache of a prompt, sent from a prefill to a decode instance"""

    link: str | None
    """the link's name, if one was given"""
    bandwidth_bytes_per_second: Count
    """rate of one device's link"""
    prompt_tokens: Count
    """tokens of the prompt"""
    bytes_per_device: Whole
    """what the busiest device sends or receives"""
    request_bytes: Whole
    """what all devices of the decode instance receive together"""
    seconds: Amount
    """time to send it"""


class SplitPoolsTtftParts(TypedDict):
    """the parts of ttft_seconds, which add up to it"""

    host_seconds: Amount
    """the engine's host time"""
    queue_seconds: Amount
    """mean wait for a prefill instance, and for the link of a decode instance"""
    prefill_seconds: Amount
    """the prefill, with other prompts in the same step if prompts wait"""
    transfer_seconds: Amount
    """sending the cache"""
    first_step_seconds: Amount
    """the decode steps until the first token"""


class SplitPoolsCommands(TypedDict):
    """the commands that start an instance of each kind, and the router; prefill-0, decode-0, ... stand for the names of
    machines"""

    prefill: str
    decode: str
    router: str


class SplitPools(TypedDict):
    """prefill and decode on separate instances"""

    prefill: SplitPool
    decode: SplitPool
    transfer: SplitPoolsTransfer
    ttft_parts: SplitPoolsTtftParts
    commands: SplitPoolsCommands


class SplitPool(TypedDict):
    """the prefill or the decode instances"""

    gpu: str
    """the kind of device"""
    instances: Count
    """instances in the pool"""
    tensor_parallel_size: Count
    """of one instance"""
    pipeline_parallel_size: Count
    """of one instance"""
    data_parallel_size: Count
    """of one instance"""
    expert_parallel_size: Count
    """of one instance"""
    num_devices: Count
    """devices of all instances"""
    requests_per_instance: Amount
    """prompts in a prefill step, or the mean number of requests in a decode batch"""
    requests_held: Count
    """requests in the cache of an instance, those being sent or received included"""
    max_requests_held: Count | None
    """requests whose cache fits in an instance; null if memory sets no limit"""
    max_requests_per_second: Amount
    """the most requests per second of the pool within the target for TPOT"""
    utilization: Share
    """requests per second as a share of the most"""
    transfer_buffer_bytes: Whole
    """buffers for the transfer on each device"""
    free_bytes: int
    """free memory of a device with the requests held"""


class PlanFinalist(SimulatedTimes):
    """a layout that was simulated. Its times are those at the confidence of the targets"""

    gpu: str
    engine: str
    tensor_parallel_size: Count | None
    """null for separate instances"""
    pipeline_parallel_size: Count | None
    """null for separate instances"""
    data_parallel_size: Count | None
    """null for separate instances"""
    expert_parallel_size: Count | None
    """null for separate instances"""
    decode_context_parallel_size: Count | None
    """null for separate instances"""
    disaggregated: FinalistPools | None
    """prefill and decode on separate instances; null if one kind of instance does both"""
    replicas: Count | None
    """null: each request alone, one after the other, or separate instances"""
    num_devices: Count | None
    cost_per_hour: Amount | None
    passes: bool
    """whether all targets are met"""
    reason: str | None
    """the target that is missed most; null if all are met"""
    keeps_up: bool
    """false if the queue grows without bound: TTFT and whole requests then take longer the longer one simulates"""
    requests: Count
    """simulated requests"""
    seed: Whole | None
    """seed of the arrivals and the lengths: that of the longest run, or of the one with the longest times"""
    seeds: Count
    """runs with different seeds; the layouts that win have two to five, one of them for 20 minutes"""
    max_running_requests: Count
    """the engine's limit per replica"""
    step_factor: Positive
    """factor on the times of all steps: the judged TPOT as a multiple of the estimate"""
    ttft_factor: Annotated[float, {"minimum": 1}]
    """factor on the simulated TTFT, whose range is wider than that of steps"""


class FinalistPool(AllLayoutSizes):
    """the instances of one pool that was simulated, and how each is split"""

    gpu: str
    instances: Count | None
    """null: each request alone, on one instance"""


class FinalistPools(TypedDict):
    """both pools of a layout that was simulated"""

    prefill: FinalistPool
    decode: FinalistPool


class PrefixTrace(TypedDict):
    """the trace that was read"""

    file: str
    format: Literal["csv", "azure", "burstgpt", "mooncake", "qwen", "token-ids"]
    num_requests: Count
    warm_up_requests: Whole
    """the first ones, which fill the cache and are not counted in rates and times"""
    num_bad_rows: Whole
    """the rows that were skipped"""
    first_bad_row: str | None
    """the line of the first one, and what is wrong with it"""
    duration_seconds: Amount | None
    """from the first request to the last; null if the rows have no times"""
    prompt_tokens: Whole
    """of all requests"""
    answer_tokens: Whole
    """of all requests"""
    longest_prompt_tokens: Whole
    block_tokens: Count
    """the tokens of a block"""
    num_blocks: Whole
    """the blocks of all prompts"""
    distinct_blocks: Whole
    """the different ones among them; an estimate if they are sampled"""
    largest_request_blocks: Whole
    """the blocks of the longest prompt"""
    sampling_rate: Share
    """the share of the distinct blocks that is counted"""


class PrefixEngine(TypedDict):
    """the engine's prefix cache"""

    name: str
    version: str | None
    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    kv_dtype: str
    block_tokens: Count
    """prefixes are found in steps of this many tokens"""
    bytes_per_trace_block: Whole
    """a block of the trace, over all devices of a replica"""
    bytes_per_trace_block_per_device: Whole
    offloaded_bytes_per_trace_block: Whole
    """the same in a tier of slower memory"""


class PrefixPrefill(TypedDict):
    """the prefill of all prompts without a cache"""

    seconds: Amount
    """for the whole trace, on one replica"""
    gpu_seconds: Amount
    """the same times the devices of the replica"""
    mean_seconds: Amount
    """per request"""
    worst_error: Amount
    """how far the time of a single prompt may be off, because it is fitted by a square function"""


class PrefixPrices(TypedDict):
    """prices per hour"""

    device_per_hour: Amount | None
    """of one device"""
    cpu_per_gib_hour: Amount | None
    """of a GiB of host memory"""
    disk_per_gib_hour: Amount | None
    """of a GiB of disk"""


class Prefix(Document):
    """kvcalc prefix: the hit rate of a prefix cache of every size"""

    trace: PrefixTrace
    model: Model | None
    engine: PrefixEngine | None
    hardware: Hardware | None
    prefill: PrefixPrefill | None
    """null if the speed is not known"""
    prices: PrefixPrices
    curve: list[PrefixRow]
    knee: PrefixRow
    knee_share: Share
    """the knee is the smallest cache with this share of the hits of a cache without a limit"""
    unlimited: PrefixRow
    tiers: list[PrefixTier]
    """in the order in which they are searched; empty without a model"""


class PrefixRow(TypedDict):
    """a prefix cache of one size"""

    cache_blocks: Whole
    """the size in blocks of the trace"""
    cache_tokens: Whole
    """the size in tokens"""
    cache_bytes: Whole | None
    """the size in bytes, over all devices of a replica; null without a model"""
    cache_bytes_per_device: Whole | None
    """the size in bytes on one device"""
    hit_rate: Share
    """the share of the counted prompt tokens that the cache has"""
    hit_rate_low: Share
    """the low end of the 99% range; the same as hit_rate if no blocks are sampled"""
    hit_rate_high: Share
    """the high end of the 99% range"""
    optimal_hit_rate: Share | None
    """what the best possible policy finds; null without --optimal, or if blocks are sampled"""
    saved_prefill_seconds: Amount | None
    """the prefill time of the tokens that are found, for the whole trace; null if the speed is not known"""
    saved_prefill_share: Amount | None
    """the same as a share of all prefill time"""
    saved_ttft_seconds: Amount | None
    """the same per request: average TTFT saved, without waiting"""
    saved_gpu_seconds: Amount | None
    """saved_prefill_seconds times the devices of a replica"""
    device_cost_per_gpu_second: Amount | None
    """the cost of the cache in device memory for the time of the trace, per saved GPU second; null without prices"""
    cpu_cost_per_gpu_second: Amount | None
    """the same in host memory"""
    disk_cost_per_gpu_second: Amount | None
    """the same on disk"""


class PrefixTier(TypedDict):
    """a tier of memory, and what is found there and not in the tiers before it"""

    name: Literal["device", "cpu", "disk", "remote"]
    memory_bytes: Whole
    """the memory for the cache: of one device, or of the tier for a replica"""
    cache_blocks: Whole
    """the blocks of the trace that fit"""
    hit_rate: Share
    """the share of all prompt tokens that is found in this tier"""
    prefill_seconds: Amount | None
    """how long computing these tokens takes; null if the speed is not known"""
    bandwidth_bytes_per_second: Whole | None
    """the rate of each device's link for cpu, else of the whole tier; null if it is not known"""
    load_seconds: Amount | None
    """how long loading these tokens takes"""


class SimulateEngine(TypedDict):
    """the engine's scheduler, and the blocks; both of one DP rank if there are several"""

    name: str
    version: str | None
    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    data_parallel_size: Count
    expert_parallel_size: Count
    kv_dtype: str
    scheduler: Literal["running first", "prefill first", "guaranteed no evict", "slots"]
    """how the engine chooses the requests of a step"""
    step_tokens: Count
    """the most tokens of one step"""
    max_running_requests: Count
    tokens_per_step: Annotated[float, {"minimum": 1}]
    """mean tokens that a decode step gives a sequence; more than 1 if tokens are drafted"""
    blocks: Whole | None
    """blocks of the cache of a replica, or of each DP rank; tokens for SGLang; null if slots limit the
    requests"""
    block_tokens: Count | None


class SimulateLoad(TypedDict):
    """the requests"""

    arrivals: Literal["poisson", "gamma", "closed_loop", "users", "trace"]
    requests_per_second: Amount | None
    burstiness: Amount | None
    """shape of the gamma distribution of the times between arrivals; 1 is a Poisson process"""
    concurrency: Count | None
    """requests in flight: clients that send the next one as soon as they have an answer"""
    users: Count | None
    """clients that think before they send the next request"""
    think_seconds: Amount | None
    """mean time that a client thinks; null if requests have times of their own"""
    session_turns: Count | None
    session_growth_tokens: Count | None
    """how much longer the context of a turn is than that of the turn before"""
    trace: str | None
    scale_rate: Amount | None
    """the times between the arrivals of the trace are divided by it"""
    seed: Whole | None
    is_cold: bool
    """whether the server has just started, so that its first step takes longer"""
    is_benchmark: bool
    """whether times count all requests from the first one on"""
    distinct_prompts: Count | None
    """so many prompts are sent in turn; null if each is sent once"""
    router: Literal["round-robin", "random", "least-loaded", "prefix-aware"]
    """which replica gets a request"""
    requests: Count
    refused_requests: Whole
    """requests that are too long for the cache; they are not simulated"""
    prompt_tokens: str | None
    """the distribution, as it was given"""
    answer_tokens: str | None
    """the distribution, as it was given"""
    mean_prompt_tokens: Amount
    mean_answer_tokens: Amount


class SimulateLimits(TypedDict):
    """the limits that a good request keeps to"""

    max_ttft_seconds: Amount | None
    max_tpot_seconds: Amount | None


class SimulateResults(TypedDict):
    """rates, means over time, and totals of all replicas"""

    duration_seconds: Amount
    """from the first arrival to the last answer"""
    requests: Count
    counted_requests: Count
    """requests whose times count: without those of the warm-up, unless load.is_benchmark or a trace"""
    requests_per_second: Amount
    tokens_per_second: Amount
    """tokens of answers"""
    keeps_up: bool
    """false if the queue grows without bound: its times then grow with the length of the simulation"""
    good_requests: Whole | None
    """counted requests that meet the limits; null without limits"""
    goodput_requests_per_second: Amount | None
    mean_running_requests: Amount
    mean_waiting_requests: Amount
    busy_share: Amount
    """the share of the time in which steps run"""
    preemptions: Whole
    preempted_requests: Whole
    cached_tokens: Whole
    """prompt tokens that are found in the prefix cache"""
    most_used_blocks: Whole | None
    """of the replica that uses most"""


class SimulateStepRange(TypedDict):
    """the 80 % range of the time of a decode step, as factors"""

    low_factor: Amount | None
    """null if the range is wider than fourfold: it is not known"""
    high_factor: Amount | None


class SimulatePrefill(TypedDict):
    """the prefill instances and the transfer; only with --prefill-replicas"""

    gpu: str
    replicas: Count
    """prefill instances"""
    tensor_parallel_size: Count
    """of one prefill instance"""
    pipeline_parallel_size: Count
    data_parallel_size: Count
    """DP ranks of one prefill instance"""
    expert_parallel_size: Count
    """ranks of one prefill instance that hold whole experts"""
    link: str | None
    """the link's name, if one was given"""
    bandwidth_bytes_per_second: Count
    """rate of one device's link"""
    sent_bytes: Whole
    """the caches of all requests, each on the busiest device"""
    busy_share: Share
    """share of the time in which the prefill instances compute"""
    mean_queue_seconds: Amount
    """until a prefill starts"""
    mean_prefill_seconds: Amount
    """from its start to its end, in steps that it may share with others"""
    mean_transfer_seconds: Amount
    """from the end of the prefill until the cache has arrived"""


class Simulate(Document):
    """kvcalc simulate: the requests of a server, scheduled as its engine does"""

    model: Model
    hardware: Hardware
    engine: SimulateEngine
    load: SimulateLoad
    limits: SimulateLimits
    results: SimulateResults
    times: list[SimulateTime]
    """ttft: to the first token; tpot: per token after it; itl: between two tokens, to 1 %; e2e: the whole request;
    queue: until it runs"""
    timeline: list[SimulateState]
    """the state of all replicas together at equal distances"""
    step_factor: Positive
    """factor on the times of all steps, as asked for"""
    step_range: SimulateStepRange
    prefill: NotRequired[SimulatePrefill]


class SimulateTime(TypedDict):
    """one time of all requests"""

    metric: Literal["ttft", "tpot", "itl", "e2e", "queue"]
    mean_seconds: Amount | None
    p50_seconds: Amount | None
    p90_seconds: Amount | None
    p95_seconds: Amount | None
    p99_seconds: Amount | None
    max_seconds: Amount | None


class SimulateState(TypedDict):
    """the state at one time"""

    seconds: Amount
    waiting_requests: Whole
    running_requests: Whole
    used_blocks: Whole | None


class ParetoPoint(TypedDict):
    """a layout of one replica with a number of running requests"""

    gpu: str
    engine: str
    tensor_parallel_size: Count
    pipeline_parallel_size: Count
    data_parallel_size: Count
    expert_parallel_size: Count
    """devices that each hold whole experts; 1 if every expert is split"""
    decode_context_parallel_size: Count
    """tensor-parallel ranks that divide the tokens of the cache"""
    num_devices: Count
    """devices of one replica"""
    requests_per_replica: Count
    ttft_seconds: Positive
    tpot_seconds: Positive
    tokens_per_second_per_user: Positive
    """one user's tokens per second: 1 / tpot_seconds"""
    tokens_per_second_per_device: Positive
    cost_per_million_output_tokens: Amount | None
    """null without a price"""
