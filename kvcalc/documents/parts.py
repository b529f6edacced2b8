"""Parts that several documents have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, TypedDict

from kvcalc.documents.fields import Amount, Count, Open, Positive, Share, Whole

if TYPE_CHECKING:
    from typing_extensions import NotRequired


class ExplainedFactorsItem(TypedDict):
    """a factor on several of the engine's constants"""

    name: Literal["step", "sequence", "prefill", "communication", "reading", "waiting"]
    """step: launches and host time per step; sequence: time per running sequence; prefill: multiplying, most of the
    work of prompts; communication: between devices; reading: reading weights and cache; waiting: what a request
    waits for its first token"""
    factor: Positive
    """1 leaves the constants as they are"""
    low_factor: Positive
    """low end of the 80% range of the factor"""
    high_factor: Positive
    changed: bool
    """whether the runs determine the factor, and it carries over; if not, it is 1"""


class ExplainedErrorsItem(TypedDict):
    """the mean errors of one metric, without their signs"""

    metric: Literal["tpot", "ttft", "decode", "prefill"]
    times: Count
    uncalibrated_mean_error: Amount
    """without the factors"""
    mean_error: Amount
    """with the factors"""
    left_out_mean_error: Amount | None
    """each time predicted without its own run; null if there are fewer than three runs"""


class ExplainedResidualsItem(TypedDict):
    """one measured time"""

    file: str
    run: Count
    metric: Literal["tpot", "ttft", "decode", "prefill"]
    measured_seconds: Positive
    uncalibrated_seconds: Positive
    """the prediction without the factors"""
    calibrated_seconds: Positive
    """with the factors"""
    left_out_seconds: Positive | None
    """with the factors that follow from the other runs; null if there are fewer than three"""


class Explained(TypedDict):
    """the factors that fit the runs"""

    runs: Whole
    """the runs that the factors are fitted to"""
    factors: list[ExplainedFactorsItem]
    errors: list[ExplainedErrorsItem]
    residuals: list[ExplainedResidualsItem]


class CalibrationRecord(TypedDict):
    """the constants from a record of kvcalc measure"""

    device: str
    read_bytes_per_second: Positive
    kv_overhead: Annotated[float, {"minimum": 1}] | None
    """null if the runs are of one size of cache, or not of CUDA: an engine has kernels of its own there"""
    kernel_seconds: Amount | None
    """always null: the time of a launch is the engine's"""
    weight_overhead: Annotated[float, {"minimum": 1}] | None
    """always null: the rate over the weights is the engine's"""


class Calibration(Explained):
    """what --calibrate changed"""

    record: CalibrationRecord | None
    records: Whole
    """the records of kvcalc measure that are used; record has what is fitted to the runs of all"""
    applied: Literal["all", "partly", "record", "none"]
    """all: the runs are of this model and type of weights; partly: of another model, and only some factors carry over;
    record: there is only a record; none: of another engine or device"""


class Model(TypedDict):
    """the model, with the what-if applied"""

    name: str
    source: str
    model_type: str
    attention: Literal["mha", "mqa", "gqa", "mla", "hybrid", "none"]
    is_encoder: bool
    num_layers: Whole
    num_attention_heads: Whole
    num_kv_heads: Whole | None
    """null for MLA, which keeps nothing per head"""
    head_dim: Whole
    """width of a query head and of a key head"""
    v_head_dim: Whole
    hidden_size: Whole | None
    kv_lora_rank: Whole | None
    qk_rope_head_dim: Whole | None
    sliding_window: Whole | None
    max_position_embeddings: Whole | None


class Workload(TypedDict):
    """the workload that the figures are for"""

    context_tokens: Whole
    batch_size: Whole
    """sequences; with requests to serve, the requests that fit at their full length"""
    encoder_tokens: Whole | None
    input_tokens: Whole | None
    """prompt tokens of one request to serve"""
    output_tokens: Whole | None
    """answer tokens of one request to serve"""
    concurrency: Whole | None
    """requests to serve at once; null: as many as fit"""
    prefix_hit_rate: Annotated[float, {"exclusiveMinimum": 0, "exclusiveMaximum": 1}] | None
    """share of a prompt that is found in the prefix cache; null if none is"""
    images: Images | None
    """the images in every request; null if none was asked for"""


class Images(TypedDict):
    """the images in every request, and the tokens and bytes that they take"""

    count: Count
    width: Count
    """in pixels"""
    height: Count
    """in pixels"""
    tokens_per_image: Count
    tokens: Count
    """of all images of a request, a part of its context"""
    encoder_cache_tokens: Whole | None
    """tokens of images whose embeddings vLLM keeps for later steps; null for other engines"""
    encoder_cache_bytes: Whole | None


class Engine(Open):
    """the engine, with the settings used"""

    name: Literal["logical", "transformers", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx"]
    version: str | None
    tensor_parallel_size: Whole
    pipeline_parallel_size: Count
    data_parallel_size: Count
    """DP ranks (--dp), which divide the requests and share the experts"""
    expert_parallel_size: Count
    """devices that each hold whole experts; 1: every expert is split"""
    kv_dtype_reason: str | None
    """why `auto` became this dtype, if the engine has its own rule"""
    device_defaults: list[DeviceDefault] | None
    """the defaults in use that a device would change; null with a device, and without an engine"""
    request_lines: NotRequired[list[Line]]
    """where the bytes of one request go, per device"""
    pool_lines: NotRequired[list[Line]]
    """where the bytes of the batch go, per device"""


class DeviceDefaultOnDevicesItem(TypedDict):
    """the default on some devices"""

    value: str | int
    devices: str


class DeviceDefault(TypedDict):
    """a default that depends on the device"""

    option: str
    """the engine's option, such as max-num-batched-tokens"""
    value: str | int
    """the default without a device"""
    on_devices: list[DeviceDefaultOnDevicesItem]


class Line(TypedDict):
    """one part of a sum of bytes"""

    name: str
    bytes: int
    """negative if an engine keeps less than the stored bytes"""


class KvCache(TypedDict):
    """the bytes of the cache"""

    dtype: str
    stored_bytes: Whole
    """bytes attention must keep for the whole batch, independent of the engine"""
    total_bytes: Whole
    """bytes the engine holds for the whole batch in one replica, before sharding"""
    bytes_per_sequence: Whole
    bytes_per_token: Whole
    """bytes that one more token adds at this context"""
    fixed_bytes_per_sequence: Whole
    """bytes that do not grow with the context"""
    bytes_per_device: Whole
    devices_total_bytes: Whole
    decode_read_bytes: Whole
    """bytes one decode step must read for the whole batch"""
    formulas: list[Formula]
    layers: list[LayerRow]


class Weights(TypedDict):
    """the weights of the language model, without layers that predict further tokens; vision and audio towers are in
    towers; figures that are not known are null"""

    parameters: Whole | None
    """all parameters, a tied embedding counted once; null if they are not counted for the family or for this attention
    (reason says why)"""
    active_parameters_per_token: Whole | None
    """parameters read in the step of one token: all except tables of which it reads one row (the input embedding unless
    tied, learned positions, per-layer embeddings), and only the experts the token is routed to"""
    input_embedding_parameters: Whole | None
    bytes: Whole | None
    """all weights as stored, including quantisation scales"""
    active_bytes_per_token: Whole | None
    """the bytes of active_parameters_per_token, according to the config"""
    dtype: str | None
    """the dtype of the quantised layers if there are any; mixed if they differ; null if the quantisation is not
    modelled"""
    bytes_source: Literal["config", "safetensors", "gguf", "published"] | None
    """safetensors: from the headers of the files in MODEL's folder, including everything in them; gguf: from the header
    of MODEL itself; published: the size of this release that its publisher or a server's log states"""
    reason: str | None
    """why parameters is null"""
    towers: list[Tower]
    """the vision and audio towers, which are not in the figures above"""


class Tower(TypedDict):
    """a vision or audio tower, and its weights"""

    name: str
    type: str
    """the published type"""
    parameters: Whole | None
    """with the projector; null if the tower is not counted"""
    bytes: Whole | None
    """in 16 bits"""
    reason: str | None
    """why it is not counted"""


class LayerRow(TypedDict):
    """consecutive layers with the same cache"""

    first: Whole
    last: Whole
    kind: str
    window: Whole | None
    bytes_per_layer: Whole
    """one sequence in one layer"""


class Variant(TypedDict):
    """the model with one kind of attention; figures are null if that is not possible"""

    attention: Literal["mha", "mqa", "gqa", "mla"]
    own: bool
    """true for the model as published"""
    num_kv_heads: Whole | None
    kv_lora_rank: Whole | None
    qk_rope_head_dim: Whole | None
    bytes_per_token: Whole | None
    total_bytes: Whole | None
    ratio_to_mha: float | None
    attention_parameters_per_layer: Whole | None
    """matrices only, without biases and norms"""
    reason: str | None
    """why this kind of attention is not possible for the model"""


class Fit(TypedDict):
    """per device"""

    fits: bool
    """whether the workload fits; with requests to serve, whether at least one request runs"""
    verdict: Literal["fits", "tight", "does_not_fit"]
    """tight: it fits, but the free memory is within the range of the estimated parts"""
    device_bytes: Whole | None
    weights_bytes: Whole | None
    weights_replicated_bytes: Whole | None
    """the part of weights_bytes that every device of a pipeline stage holds"""
    kv_cache_bytes: Whole
    activation_bytes: Whole | None
    reserve_bytes: Whole | None
    kv_cache_memory_bytes: int
    """memory available for the cache; negative if weights and reserve are larger than the device"""
    free_bytes: int
    """negative if it does not fit"""
    free_low_bytes: int | None
    """the lower end of the 80 % range of free_bytes; null if the range of the estimated parts is not known"""
    free_high_bytes: int | None
    """the upper end of that range"""
    max_context_tokens: Whole | None
    """the longest context that can be used at this batch: no more than the model takes; null if neither the memory nor
    the model sets a limit"""
    memory_context_tokens: Whole | None
    """the longest context whose cache the memory holds at this batch, which may be more than the model takes; null if
    memory sets no limit"""
    sure_context_tokens: Whole | None
    """the longest context that can be used at this batch with the least free memory of the range; null if that range is
    not known"""
    max_batch_size: Whole | None
    """at this context, and no more than the engine runs at once; null if neither memory nor the engine sets a limit"""
    memory_batch_size: Whole | None
    """how many sequences of this context the memory holds, however many the engine runs at once; null if memory sets no
    limit"""
    start_limit: Whole | None
    """the largest limit of running requests (vLLM's --max-num-seqs) with which the engine starts: CUDA graphs of a
    model with recurrent states need a block of the cache for each; null if there is none"""
    lines: list[Held] | None
    """where a device's memory goes; the lines add up to device_bytes"""
    host: HostShare | None
    """null if the device holds the whole model"""
    devices: list[DeviceShare] | None
    """what each device holds, if they have different layers (llama.cpp); the other figures are those of the device with
    the least free memory"""


class DeviceShare(TypedDict):
    """the layers on one device"""

    device: Whole
    first_layer: Whole | None
    """null if the device has no layers"""
    last_layer: Whole | None
    weights_bytes: Whole
    kv_cache_bytes: Whole
    free_bytes: int
    """negative if it does not fit"""
    fits: bool


class HostShare(TypedDict):
    """the part of the model in host memory (llama.cpp)"""

    n_gpu_layers: Whole
    """-ngl: the layers on the device, counted from the last; the output is one of them"""
    host_layers: Whole
    """the layers in host memory"""
    n_cpu_moe: Whole
    """the number of leading layers whose experts are in host memory"""
    kv_offload: bool
    """whether the cache of a layer on the device is on the device too"""
    weights_bytes: Whole
    """weights in host memory, with the input embedding"""
    kv_cache_bytes: Whole
    host_bytes: Whole
    memory_bytes: Whole | None
    """--host-memory; null if it is not given, and then not checked"""
    host_free_bytes: int | None
    """negative if it does not fit"""


class Formula(TypedDict):
    """one kind of cache, for all its layers and the whole batch"""

    kind: str
    window: Whole | None
    num_layers: Whole
    symbols: str
    numbers: str
    bytes: Whole


class Held(TypedDict):
    """one part of a device's memory"""

    kind: Literal["weights", "kv_cache", "activation", "reserve", "free"]
    name: str
    bytes: int
    estimated: bool
    """false: exact; true: an estimate"""
    low_bytes: Whole | None
    """null until a range is known"""
    high_bytes: Whole | None


class Interconnect(TypedDict):
    """the link between devices"""

    name: str
    bytes_per_second: Count
    """from one device, in one direction, over all its links"""
    devices: Annotated[int, {"minimum": 2}]
    mesh: bool
    """each pair of devices has an equal part of the links"""


class DeviceFigures(TypedDict):
    """the figures of one device"""

    name: str
    vendor: str | None
    device_class: str | None
    """the microarchitecture"""
    memory_bytes: Count
    memory_type: str | None
    bandwidth_bytes_per_second: Count | None
    flops_per_second: dict[str, Count]
    """dense FLOP/s by dtype"""
    interconnect: Interconnect | None
    pcie_bytes_per_second: Count | None
    tdp_watts: Count | None
    source: str
    date: str | None
    note: str | None
    inline_ecc: bool
    """error correction is on by default and kept in the memory: reading is slower than the bandwidth"""
    machine_devices: Count
    """the most devices in one machine"""
    network_bytes_per_second: Count
    """from one device to other machines, in one direction"""


class Hardware(DeviceFigures):
    """the figures of one device, and the number of devices"""

    num_devices: Count
    replicas: Count
    """replicas of the model on all devices"""


class ThroughputParts(TypedDict):
    """the sum of the parts is decode_step_seconds"""

    weights_seconds: Amount
    kv_seconds: Amount
    compute_seconds: Amount
    overhead_seconds: Amount
    communication_seconds: Amount


class Throughput(TypedDict):
    """one replica of the model on all its devices"""

    decode_step_seconds: Positive
    """one step: one token for each sequence of the batch, or speculative.acceptance_length tokens if tokens are drafted
    """
    decode_tokens_per_second: Positive
    """tokens per second of the whole batch"""
    tokens_per_second_per_sequence: Positive
    prefill_seconds: Positive
    """prefill of the whole batch's contexts, except the share in the prefix cache (workload.prefix_hit_rate)"""
    bound_by: Literal["weights", "kv", "compute", "overhead", "communication"]
    """the largest of parts"""
    parts: ThroughputParts
    roofline_decode_step_seconds: Positive
    """all bytes at full bandwidth or all operations at full speed, whichever takes longer"""
    low_seconds: Positive | None
    """low end of the range of decode_step_seconds; 8 of 10 measurements left out of the fit were within the range. Null
    if the range is wider than fourfold: it is not known"""
    high_seconds: Positive | None
    serving: Serving | None
    calibration: Calibration | None
    """what --calibrate changed; null if it is not given"""
    host: HostSpeed | None
    """null if the device holds the whole model"""
    energy: Energy | None
    """null if the TDP is not known, or if a part of the model is in host memory"""
    evidence: SpeedEvidence
    kv_transfer: NotRequired[KvTransfer]


class SpeedEvidence(TypedDict):
    """the measurements behind the speed of this engine, and its errors on model families left out of the fit"""

    measured_times: Whole
    sources: list[str]
    mean_error: float | None
    """of decode steps, with the model's family left out of the fit; null without such a fit"""
    median_error: float | None
    within_a_quarter: float | None
    """share of the times that were predicted within 25 %"""
    region: str
    """the device kind, weight class and batch whose errors give the range; empty: all of the engine"""
    low_factor: Positive
    """10th percentile of measured / predicted in the region, with the family left out"""
    high_factor: Positive
    """the 90th percentile"""
    outside: list[str]
    """what of this question no measurement covered; the range is then wider"""


class Serving(TypedDict):
    """requests served at the same time by one replica"""

    input_tokens: Count
    """mean tokens of a prompt"""
    output_tokens: Count
    input_lengths: str
    """distribution of the prompts: a number is the mean of lengths that vary by a third, fixed:1000 are equal"""
    output_lengths: str
    longest_tokens: Count
    """prompt and answer of the longest request: the 99.9th percentile of both"""
    concurrency: Count
    """concurrent requests; if not given, as many as run at once"""
    is_benchmark: bool
    """whether times count all requests from the first one on, as a benchmark's client does, or those of the steady
    state"""
    running_requests: Count
    """mean number of requests in the batch; the others wait. More than batch_size if the engine does not reserve the
    whole answer"""
    confidence: Count
    """in per cent, with which a time is to be at most the judged one: 50 is the estimate, 80 the upper end of the
    range"""
    tpot_seconds: Positive
    """time per output token of a running request, including the prefills of other requests in between"""
    tpot_low_seconds: Positive | None
    tpot_high_seconds: Positive | None
    tpot_judged_seconds: Positive
    """the time at this confidence, with which kvcalc plan and kvcalc check compare a limit"""
    ttft_seconds: Positive
    """mean time to first token"""
    ttft_low_seconds: Positive | None
    """80% range"""
    ttft_high_seconds: Positive | None
    ttft_judged_seconds: Positive
    """the same for the time to first token"""
    tokens_per_second: Positive
    """output tokens per second of all requests"""
    tokens_per_second_low: Positive | None
    """from the high end of TPOT's 80% range"""
    tokens_per_second_high: Positive | None
    tokens_per_second_per_device: Positive
    requests_per_second: Positive
    prefill_share: Share
    """share of the devices' time"""


class Speculative(TypedDict):
    """drafted tokens (speculative decoding), on one device of one replica; seconds are null if the speed is not
    known"""

    method: Literal["mtp", "eagle", "eagle1", "dflash", "draft", "ngram"]
    num_draft_tokens: Count
    """tokens drafted per step"""
    acceptance_length: Annotated[float, {"minimum": 1}] | None
    """mean number of tokens that a step gives a sequence; null if not given"""
    draft_model: str | None
    """the model that drafts, or the EAGLE head, if one is named"""
    num_layers: Whole
    """layers that draft and keep a cache"""
    first_layer: Whole | None
    """the number of the first of these layers in kv_cache.layers; null if there are none"""
    lookahead_tokens: Whole
    """slots of the cache that a running request takes beyond its own tokens"""
    weights_bytes: Whole | None
    """weights that only draft tokens, included in fit.weights_bytes; null if not known"""
    cache_bytes: int
    """what drafting adds to the cache of the batch, included in kv_cache.bytes_per_device"""
    verify_seconds: Amount | None
    """the model's share of throughput.decode_step_seconds: it computes the drafted tokens and one more"""
    draft_seconds: Amount | None
    """the share of drafting"""
    seconds_without_drafting: Amount | None
    """one decode step of the same batch without drafting"""
    speedup: Amount | None
    """the time per output token without drafting, divided by the time with it"""
    break_even_batch: Count | None
    """the smallest batch at which drafting does not shorten the time per output token; null if it always does, up to
    65,536"""


class HostSpeed(TypedDict):
    """the time that the part of the model in host memory takes"""

    bandwidth_bytes_per_second: Count
    """theoretical bandwidth of the host's memory"""
    decode_seconds: Amount
    """the share of decode_step_seconds for the host's part and for transfers"""
    prefill_copied_bytes: Whole
    """weights copied to the device during the prefill, once for every micro-batch"""


class Energy(TypedDict):
    """the energy of the devices of one replica; the host is not counted"""

    watts: Positive
    """all devices of the replica"""
    joules_per_token: Positive
    """per output token: of one decode step, or of serving"""
    low_joules_per_token: Positive | None
    """null if the range of the time is not known"""
    high_joules_per_token: Positive | None
    kwh_per_million_tokens: Positive
    """per million output tokens"""


class Warning(TypedDict):
    """a note about the answer"""

    part: str
    """the part of the document that the warning is about"""
    code: str
    """the kind of warning, for programs; unknown: the part is null because a fact is missing"""
    text: str


class Document(TypedDict):
    """What nearly all documents have. In the schema, the version is their first key."""

    schema_version: Literal[3]
    warnings: list[Warning]


class Reuse(TypedDict):
    """reuse of the cache; bytes are those of one device unless a field says otherwise"""

    prefix: ReusePrefix | None
    sessions: ReuseSessions | None
    tiers: ReuseTiers | None


class ReusePrefix(TypedDict):
    """tokens that all prompts begin with (--prefix-tokens)"""

    prefix_tokens: Count
    """as given"""
    block_tokens: Count
    """the engine finds prefixes in steps of this many tokens"""
    found_tokens: Whole
    """tokens of a prompt that are found in the cache and are not computed again"""
    shared_tokens: Whole
    """tokens whose rows all requests keep once; 0 if the engine copies them"""
    kept_bytes: Whole
    """what must stay in the cache so that the next request finds the prefix"""
    saved_bytes: Whole
    """what the batch takes less than without the prefix"""
    next_request_bytes: Whole
    """what one more request takes"""
    max_batch_size_alone: Whole | None
    """the largest batch if requests share nothing; null if not known or without a limit"""
    more_requests: int | None
    """by how much the prefix raises fit.max_batch_size; null if one of the two is not known"""


class ReuseSessions(TypedDict):
    """sessions of several turns (--turns), of which the last one has the lengths asked for"""

    turns: Annotated[int, {"minimum": 2}]
    """turns of a session"""
    idle_tokens: Whole
    """tokens of a session that stay in the cache until its last turn"""
    idle_session_bytes: Whole
    """what such a session keeps in the cache, without the shared prefix"""
    kept_sessions: Whole | None
    """idle sessions that the cache keeps if no request runs, in one replica; null if the memory is not known"""
    kept_sessions_beside_batch: Whole | None
    """idle sessions that it keeps while the batch runs"""
    reused_tokens: Whole
    """tokens of the last prompt that are found"""
    computed_tokens: Count
    """tokens of the last prompt that are computed"""
    reuse_rate: Annotated[float, {"minimum": 0, "exclusiveMaximum": 1}]
    """share of the prompts of all turns that is found"""
    prefill_seconds: Amount | None
    """prefill of the last prompt; null if the speed is not known"""
    prefill_seconds_alone: Amount | None
    """prefill of the last prompt if nothing is found"""
    rows: list[ReuseTurn]


class ReuseTurn(TypedDict):
    """one turn of a session"""

    turn: Count
    """from 1"""
    prompt_tokens: Count
    """the session so far and the new prompt"""
    reused_tokens: Whole
    """tokens found in the cache"""
    computed_tokens: Count
    """tokens that take prefill"""
    end_tokens: Count
    """tokens of the session after the answer"""
    idle_bytes: Whole
    """what the session then keeps, without the shared prefix"""


class ReuseTiers(TypedDict):
    """memory for blocks evicted from the device's cache (--offload), of one replica"""

    unit_tokens: Count
    """tokens that are kept and moved as a whole"""
    unit_bytes: Whole
    """what a context of that many tokens takes in a tier"""
    session_tokens: Count
    """tokens that a tier keeps for each session: an idle session's tokens with --turns, otherwise the whole context"""
    prefix_bytes: Whole
    """what the prefix that all contexts share takes in a tier, once"""
    session_bytes: Whole
    """what such a context takes in a tier beside that"""
    loaded_bytes_per_device: Whole
    """what one device loads of it"""
    prefill_seconds: Amount | None
    """time to compute these tokens again; null if the speed is not known"""
    rows: list[ReuseTier]


class ReuseTier(TypedDict):
    """one tier"""

    name: Literal["cpu", "disk", "remote"]
    memory_bytes: Count
    """as given"""
    bandwidth_bytes_per_second: Count | None
    """rate at which it is read: cpu by each device, others by all devices together; null if not known"""
    sessions: Whole | None
    """whole contexts that it keeps; null if a context takes nothing"""
    tokens: Whole | None
    """tokens that it keeps, with those of one more context in part"""
    load_seconds: Amount | None
    """time to load a context; null if the rate is not known"""
    break_even_tokens: Count | None
    """the shortest context that is loaded no slower than computed again; null if there is none up to the model's limit,
    or if it is not known"""


class KvTransfer(TypedDict):
    """the cache of a prompt, sent from a prefill instance to a decode instance of the same layout
    (--transfer-bandwidth)"""

    link: str | None
    """the link's name, if one was given"""
    bandwidth_bytes_per_second: Count
    """rate of one device's link"""
    prompt_tokens: Count
    """tokens of the prompt"""
    bytes_per_device: Whole
    """what each device sends"""
    seconds: Amount
    """time to send it"""
    share_of_ttft: Amount | None
    """seconds as a share of the time to the first token without the transfer; null without requests to serve"""
