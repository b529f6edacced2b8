"""The smallest layout of one kind of device that serves the traffic.

A layout is a number of replicas, each split over `tensor_parallel_size` x `pipeline_parallel_size` devices, times the
attention replicas that were asked for (`--dp`). Attention replicas are parts of one replica of the model. The search
uses the figures of `kvcalc estimate`: `fit` says whether the running requests fit, and `throughput.serving` says how
fast they are. More requests per replica are never faster, so bisection finds the largest number that meets the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kvcalc.errors import LayoutError, ModelError
from kvcalc.memory.engines.options import settings_of
from kvcalc.memory.kv_cache import most_that_fit
from kvcalc.planning.case import make_case
from kvcalc.planning.estimate import Answer, answer_case
from kvcalc.planning.layout import SpeedQuestion, prompt_ranks_of
from kvcalc.planning.lengths import Lengths
from kvcalc.planning.question import Question
from kvcalc.throughput.hardware import Devices, Gpu
from kvcalc.units import format_size

# The only range known for a time: from the 10th to the 90th percentile.
RANGE_CONFIDENCE, POINT_CONFIDENCE = 80, 50

# Tensor parallelism stays within the devices joined by a fast link. Pipeline stages are used only if these are too few.
_TENSOR_SIZES, _WIDE_SIZES, _STAGES = (1, 2, 4, 8), (16, 32, 64), (2, 4, 8)
_BOX = 8
# The default maximum of running requests on a large device: vLLM 0.33.0 (get_batch_defaults, arg_utils.py).
_MOST_RUNNING = 1024


class Targets(NamedTuple):
    """The load to serve, as concurrent requests or requests per second, and the longest allowed times in seconds.

    `confidence` says which estimate must meet a target: the upper end of its range (80) or the point estimate (50).
    """

    concurrency: int | None
    requests_per_second: float | None
    max_ttft_seconds: float | None = None
    max_tpot_seconds: float | None = None
    confidence: int = RANGE_CONFIDENCE


class Kind(NamedTuple):
    """One row of a plan: at most `max_devices` of one kind of device, under one engine.

    `is_named_limit` is true if the limit is the number in the device's name, as in h100x8.
    """

    gpu: Gpu
    max_devices: int
    engine: str
    is_named_limit: bool = False


class Trouble(NamedTuple):
    """Why a layout does not serve the traffic, and what to try next, or None."""

    reason: str
    hint: str | None = None


class Probe(NamedTuple):
    """One replica with `running` requests: the memory they take, their speed, and why it does not serve, or None."""

    running: int
    memory: Answer
    speed: Answer | None
    trouble: Trouble | None

    @property
    def is_tight(self) -> bool:
        """Whether the estimated parts may leave too little memory for this number of requests."""
        low = self.memory.fit["free_low_bytes"]
        return low is not None and low < 0

    @property
    def serving(self) -> dict[str, Any]:
        """The `serving` part of the document. Only for probes without `trouble`."""
        if self.speed is None:
            raise ValueError("a replica that does not fit serves nothing")
        found: dict[str, Any] = self.speed.document["throughput"]["serving"]
        return found

    @property
    def energy(self) -> dict[str, Any] | None:
        """The `energy` part of the document, or None if it is not known. Only for probes without `trouble`."""
        found: dict[str, Any] | None = None if self.speed is None else self.speed.document["throughput"]["energy"]
        return found


class Option(NamedTuple):
    """A layout that serves the traffic. `next_layout` is the second choice, and why it was not chosen."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    replicas: int
    probe: Probe
    next_layout: str | None = None
    prompt_ranks: int = 1

    @property
    def num_devices(self) -> int:
        copies = self.replicas * self.data_parallel_size * self.prompt_ranks
        return copies * self.tensor_parallel_size * self.pipeline_parallel_size


class Traffic(NamedTuple):
    """The question for every kind of device. `question` has the model, the types and the engines' settings. `strict`
    leaves out layouts whose fit is tight."""

    question: Question
    lengths: Lengths
    targets: Targets
    allow_beyond_limit: bool
    strict: bool = False

    def prompt_ranks(self, engine: str) -> int:
        """The copies of the attention that divide a prompt under an engine."""
        given = self.question.engine_settings
        return prompt_ranks_of(settings_of(engine, given)) if given else 1

    @property
    def limit(self) -> int | None:
        """The model's limit in tokens if the longest request exceeds it, else None."""
        limit = self.question.model.max_position_embeddings
        return limit if limit is not None and self.lengths.longest_tokens > limit else None

    @property
    def beyond_limit(self) -> str:
        """The message for requests beyond the limit."""
        longest, model = self.lengths.longest_tokens, self.question.model
        return f"requests of {longest:,} tokens exceed the limit of {model.name}, {self.limit:,} tokens"


def find_layout(traffic: Traffic, kind: Kind) -> Option | Trouble:
    """The fastest of the layouts with the fewest devices, or why the largest layout does not serve the traffic."""
    if traffic.limit is not None and not traffic.allow_beyond_limit:
        return Trouble(traffic.beyond_limit, "to plan them anyway, add --allow-beyond-limit")
    trouble = None
    for sizes in _layouts(kind.gpu):
        found = [_smallest(traffic, kind, tensor, stages) for tensor, stages in _within(traffic, kind, sizes)]
        options = sorted((one for one in found if isinstance(one, Option)), key=_devices_then_speed)
        trouble = next((one for one in reversed(found) if isinstance(one, Trouble)), trouble)
        if options:
            return options[0]._replace(next_layout=_why_not(options, trouble))
    if trouble is None and traffic.question.data_parallel_size > 1:
        probe(traffic, kind, 1, 1, 1)  # raises the reason why there can be no attention replicas
    return trouble or Trouble("the model cannot be split over these devices")


def _why_not(options: list[Option], trouble: Trouble | None) -> str | None:
    """Why the second choice lost. If only one layout serves, the largest of the others is the second choice."""
    if len(options) == 1:
        return None if trouble is None else trouble.reason
    first, second = options[:2]
    shape = _shape(second.data_parallel_size, second.tensor_parallel_size, second.pipeline_parallel_size)
    shape = f"{second.replicas} x {shape}" if second.replicas > 1 else shape
    if second.num_devices > first.num_devices:
        return f"{shape}: {second.num_devices:,} devices"
    slower, faster = (option.replicas * option.probe.serving["tokens_per_second"] for option in (second, first))
    return f"{shape}: as many devices, but {slower:,.0f} tokens per second instead of {faster:,.0f}"


def _within(traffic: Traffic, kind: Kind, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tensor-parallel sizes and stages for which there are enough devices."""
    replicas = traffic.question.data_parallel_size * traffic.prompt_ranks(kind.engine)
    return [(tensor, stages) for tensor, stages in sizes if tensor * stages * replicas <= kind.max_devices]


def sizes_of(traffic: Traffic, kind: Kind) -> list[tuple[int, int]]:
    """All tensor-parallel sizes and pipeline stages of `find_layout` for which there are enough devices."""
    return [pair for sizes in _layouts(kind.gpu) for pair in _within(traffic, kind, sizes)]


def _devices_then_speed(option: Option) -> tuple[int, float]:
    return option.num_devices, -option.replicas * float(option.probe.serving["tokens_per_second"])


def _layouts(gpu: Gpu) -> Iterator[list[tuple[int, int]]]:
    """Tensor-parallel sizes and pipeline stages to try. A list is tried only if no layout in earlier lists serves."""
    joined = gpu.interconnect.devices if gpu.interconnect is not None else _BOX
    yield [(size, 1) for size in _TENSOR_SIZES if size <= max(joined, 1)]
    yield [(size, 1) for size in _WIDE_SIZES if size <= joined]
    widest = max(size for size in _TENSOR_SIZES if size <= max(joined, 1))
    yield [(widest, stages) for stages in _STAGES]


def _smallest(traffic: Traffic, kind: Kind, tensor: int, stages: int) -> Option | Trouble | None:
    """The fewest replicas of this shape, or why it does not serve. None if the model cannot be split this way."""
    targets, attention_replicas = traffic.targets, traffic.question.data_parallel_size
    ranks = traffic.prompt_ranks(kind.engine)

    def at(running: int) -> Probe:
        return probe(traffic, kind, tensor, stages, running)

    try:
        alone = at(1)
    except LayoutError:
        return None
    if alone.trouble is not None:
        shape = _shape(attention_replicas, tensor, stages)
        return alone.trouble._replace(reason=f"{shape}: {alone.trouble.reason}")
    if targets.concurrency is not None:
        most = _most_running(at, targets.concurrency)
        replicas = -(-targets.concurrency // most)
        chosen = at(-(-targets.concurrency // replicas))
    else:
        rate = targets.requests_per_second or 0.0
        most = _most_running(at, _MOST_RUNNING * attention_replicas)
        replicas = max(1, -int(-rate // at(most).serving["requests_per_second"]))
        # Fewer concurrent requests may also reach the rate, and each is answered sooner.
        too_few = most_that_fit(
            lambda running: int(replicas * at(running).serving["requests_per_second"] >= rate), 0, most
        )
        chosen = at(too_few + 1)
    needed = replicas * attention_replicas * ranks * tensor * stages
    if needed > kind.max_devices:
        shape = f"{replicas:,} replicas of {_shape(attention_replicas, tensor, stages)}"
        more = f"--gpu {kind.gpu.name}x{needed}" if kind.is_named_limit else f"--max-gpus {needed}"
        return Trouble(f"{shape} need {needed:,} devices, but the limit is {kind.max_devices:,}", more)
    return Option(tensor, stages, attention_replicas, replicas, chosen, prompt_ranks=ranks)


def _most_running(probe: Callable[[int], Probe], most: int) -> int:
    """The most requests, up to `most`, that one replica serves within the targets. It is known to serve one."""
    if probe(most).trouble is None:
        return most
    return most_that_fit(lambda running: int(probe(running).trouble is not None), 0, most)


def _shape(attention_replicas: int, tensor: int, stages: int) -> str:
    shape = f"dp {attention_replicas} x tp {tensor}" if attention_replicas > 1 else f"tp {tensor}"
    return shape + (f" x pp {stages}" if stages > 1 else "")


def probe(traffic: Traffic, kind: Kind, tensor: int, stages: int, running: int) -> Probe:
    """One replica with `running` requests. LayoutError if the model cannot be split this way."""
    lengths, attention_replicas = traffic.lengths, traffic.question.data_parallel_size
    replica = traffic.question._replace(
        engine=kind.engine, engine_settings=settings_of(kind.engine, traffic.question.engine_settings or {}),
        tensor_parallel_size=tensor, pipeline_parallel_size=stages,
        devices=Devices(kind.gpu, attention_replicas * traffic.prompt_ranks(kind.engine) * tensor * stages),
    )  # fmt: skip
    total = lengths.input_tokens + lengths.output_tokens
    served = (replica.speed or SpeedQuestion())._replace(
        input_tokens=lengths.input_tokens, output_tokens=lengths.output_tokens, concurrency=running
    )
    case = make_case(replica._replace(speed=served))
    if case.rules.placement is not None:
        from kvcalc.planning.offload import place_layers

        case = place_layers(case)
    memory = answer_case(case.at(lengths.held_tokens, running))
    if memory.fit["free_bytes"] < 0:
        short = format_size(-memory.fit["free_bytes"])
        reason = f"a request of {lengths.held_tokens:,} tokens does not fit: {short} more is needed per device"
        return Probe(running, memory, None, Trouble(reason))
    if traffic.strict and Probe(running, memory, None, None).is_tight:
        more = format_size(-memory.fit["free_low_bytes"])
        reason = f"{running:,} {'request' if running == 1 else 'requests'} of {lengths.held_tokens:,} tokens may need "
        return Probe(running, memory, None, Trouble(f"{reason}{more} more per device", "--strict leaves this out"))
    longest = lengths.longest_tokens
    if longest > lengths.held_tokens and not answer_case(case.at(longest, 1)).fit["fits"]:
        return Probe(running, memory, None, Trouble(f"the longest request, {longest:,} tokens, does not fit"))
    # All these requests run: the memory was checked above with the tokens that running requests hold.
    speed = memory if total == lengths.held_tokens else answer_case(case.at(total, running))
    throughput = speed.document["throughput"]
    if throughput is None and speed.fit["max_batch_size"] == 0:
        return Probe(running, memory, None, Trouble(f"a request of {total:,} tokens does not fit"))
    if throughput is None:
        unknown = "; ".join(note.text for note in speed.notes if note.part == "throughput")
        raise ModelError(f"{traffic.question.model.name} cannot be planned for {kind.gpu.name}: {unknown}")
    return Probe(running, memory, speed, _too_slow(traffic.targets, throughput["serving"]))


def _too_slow(targets: Targets, serving: Mapping[str, Any]) -> Trouble | None:
    """The first target that these times miss. For a time without a range, the point estimate is used."""
    for name, most in (("ttft", targets.max_ttft_seconds), ("tpot", targets.max_tpot_seconds)):
        point, high = serving[f"{name}_seconds"], serving.get(f"{name}_high_seconds")
        judged = high if high is not None and targets.confidence == RANGE_CONFIDENCE else point
        if most is not None and judged > most:
            found = _time(point) if judged == point else f"{_time(point)}, up to {_time(judged)},"
            hint = "--confidence 50 uses the point estimate" if point <= most else None
            return Trouble(f"{name.upper()} of one request is {found} and the limit is {_time(most)}", hint)
    return None


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
