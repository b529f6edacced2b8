"""Requests to serve: `kvcalc plan` and `kvcalc simulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.api.arguments import asked, takes
from kvcalc.errors import UsageError
from kvcalc.model.spec import ModelSpec
from kvcalc.model.variants import WhatIf
from kvcalc.question.question import DEFAULT_CONFIDENCE, SpeedQuestion

if TYPE_CHECKING:
    from kvcalc.documents import Check, Plan, Simulate
    from kvcalc.model.drafting import Speculation
    from kvcalc.planning.plan.planned import PlannedLoad
    from kvcalc.question.question import CacheReuse, ImagesAsked
    from kvcalc.throughput.hardware import Devices, Gpu


@takes(
    either=(
        *(
            ("trace", name)
            for name in ("concurrency", "requests_per_second", "burstiness", "deadline_seconds", "users", "sessions")
        ),
        ("engine", "engines"),
    ),
    fields={"speed": "calibration", "reuse": "prefix_tokens turns"},
    instead={
        "context_tokens": "the context is input_tokens plus output_tokens",
        "batch_size": "concurrency=... is the number of requests",
        "devices": 'gpus=["h100"] are the kinds of device, of which plan finds the number',
        "tensor_parallel_size": "plan chooses it; kvcalc.estimate takes a layout",
        "pipeline_parallel_size": "plan chooses it; kvcalc.estimate takes a layout",
        "fits_context": "the context is input_tokens plus output_tokens",
        "weights_bytes": "kvcalc.fit takes it, of one layout",
        "prompt_tokens": "input_tokens=...",
        "answer_tokens": "output_tokens=...",
    },
)
def plan(
    model: ModelSpec | str,
    gpus: Sequence[str | Gpu | Devices],
    *,
    input_tokens: int | str | None = None,
    output_tokens: int | str | None = None,
    concurrency: int | None = None,
    requests_per_second: float | None = None,
    users: int | None = None,
    think_seconds: float | None = None,
    sessions: str | None = None,
    deadline_seconds: float | None = None,
    trace: str | None = None,
    trace_format: str | None = None,
    scale_rate: float = 1.0,
    max_ttft_seconds: float | None = None,
    max_tpot_seconds: float | None = None,
    confidence: int = DEFAULT_CONFIDENCE,
    max_e2e_seconds: float | None = None,
    ttft_percentile: int | None = None,
    tpot_percentile: int | None = None,
    e2e_percentile: int | None = None,
    simulate: int | None = None,
    burstiness: float = 1.0,
    requests: int | None = None,
    seed: int = 0,
    router: str = "random",
    headroom: float = 0.0,
    spare_replicas: int = 0,
    engine: str = "auto",
    engines: Sequence[str] | None = None,
    engine_settings: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    data_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    prices: Mapping[str, float] | None = None,
    max_devices: int = 1024,
    allow_beyond_limit: bool = False,
    prefix_hit_rate: float = 0.0,
    strict: bool = False,
    all_layouts: bool = False,
    with_front: bool = False,
    disaggregate: bool = False,
    transfer: int | str | None = None,
    images: ImagesAsked | None = None,
    speculative: Speculation | None = None,
    reuse: CacheReuse | None = None,
    speed: SpeedQuestion | None = None,
    what_if: WhatIf = WhatIf(),
    jobs: int = 1,
) -> Plan:
    """The document of `kvcalc plan`: for each kind of device, the smallest layout that serves the requests.

    Give `input_tokens` and `output_tokens` (numbers, or distributions as in `simulate`) with `concurrency`,
    `requests_per_second` or `users` with `think_seconds`, or a job of `requests` that must end within
    `deadline_seconds`. Or give `trace`, the path of a file with the times and lengths of its requests. `sessions` are
    as in `simulate`. With a `confidence` of 50, times are judged at the estimate, with 80 at the upper end of their
    range. A time limits the mean, or the percentile that is given for it: 50, 90, 95 or 99. The load is simulated, with
    `burstiness`, `requests`, `seed` and `router` as in `simulate`. The load is larger by the share `headroom`, and each
    layout has `spare_replicas` more than it needs. `simulate` is the number of layouts of each kind of device to
    simulate. `jobs` processes search, for one kind of device each.

    `engines` are several, and "all" is every engine; `engine` is one. `prices` maps the name of a device to its price
    per hour. `gpus` are names; `Devices` limit the number of their kind. With `disaggregate` there are also rows with
    prefill and decode on separate instances, joined by the link `transfer`: bytes per second of one device, or a name
    such as `infiniband-400g`. Of `speed`, only the calibration is used, and of `reuse` the prefix and the turns. The
    other arguments are those of `estimate` and the options of the command.
    """
    from kvcalc.planning.answers.axis import parse_engines
    from kvcalc.planning.plan.document import plan as ask
    from kvcalc.planning.plan.planned import PlannedLoad, planned_trace
    from kvcalc.planning.plan.targets import Targets, check_percentiles, of_job
    from kvcalc.question.request_lengths import drawn_lengths, one_length
    from kvcalc.question.sessions import parse_sessions
    from kvcalc.throughput.hardware import find_gpu

    targets = Targets(
        concurrency, requests_per_second, max_ttft_seconds, max_tpot_seconds, max_e2e_seconds,
        ttft_percentile, tpot_percentile, e2e_percentile, users=users, think_time=think_seconds,
        sessions=None if sessions is None else parse_sessions(sessions, "sessions"),
    )  # fmt: skip
    check_percentiles(targets)
    if deadline_seconds is not None:
        targets, requests = of_job(targets, requests, deadline_seconds), None
    simulation: PlannedLoad | None = None
    pairs: list[tuple[int, int]] | None = None
    if trace is not None:
        simulation = planned_trace(trace, trace_format, scale_rate, requests)
        lengths, targets = simulation.lengths, simulation.rated(targets)
    elif input_tokens is None or output_tokens is None:
        raise UsageError("plan needs input_tokens and output_tokens, or a trace")
    elif isinstance(input_tokens, int) and isinstance(output_tokens, int):
        lengths = one_length(input_tokens, output_tokens)
    else:
        lengths, pairs = drawn_lengths(input_tokens, output_tokens)
    simulation = simulation or PlannedLoad(lengths, pairs, burstiness, seed, requests)
    kinds = [find_gpu(gpu) if isinstance(gpu, str) else gpu for gpu in gpus]
    speed = (speed or SpeedQuestion())._replace(prefix_hit_rate=prefix_hit_rate, confidence=confidence)
    return ask(
        asked({**locals(), "engine": "auto"}), kinds, lengths, targets, engines=parse_engines(engines or (engine,)),
        prices=prices, max_devices=max_devices, allow_beyond_limit=allow_beyond_limit, strict=strict,
        all_layouts=all_layouts, with_front=with_front, disaggregate=disaggregate, transfer=transfer,
        simulation=simulation._replace(router=router), num_simulated=simulate, headroom=headroom,
        spare_replicas=spare_replicas, jobs=jobs,
    )  # fmt: skip


@takes(
    fields={
        "speed": "expert_parallel_size prefix_hit_rate calibration",
        # The others are refused by the simulation, which `plan` asks too.
        "reuse": "prefix_tokens turns offload bandwidths transfer",
    },
    instead={
        "batch_size": "concurrency=... is the number of requests",
        "fits_context": "requests that are too long for the cache are refused anyway",
        "input_tokens": "prompt_tokens=...",
        "output_tokens": "answer_tokens=...",
        "gpus": 'devices="h100x4"',
        "engines": 'engine="vllm": one at a time',
    },
    also={"devices": str},
)  # fmt: skip
def simulate(
    model: ModelSpec | str,
    devices: Devices | str,
    *,
    prompt_tokens: int | str | None = None,
    answer_tokens: int | str | None = None,
    requests_per_second: float | None = None,
    concurrency: int | None = None,
    burstiness: float = 1.0,
    trace: str | None = None,
    trace_format: str | None = None,
    scale_rate: float = 1.0,
    requests: int | None = None,
    distinct_prompts: int | None = None,
    router: str = "round-robin",
    cold: bool | None = None,
    benchmark: bool = False,
    users: int | None = None,
    think_seconds: float | None = None,
    sessions: str | None = None,
    seed: int = 0,
    max_ttft_seconds: float | None = None,
    max_tpot_seconds: float | None = None,
    replicas: int | None = None,
    prefill_replicas: int | None = None,
    prefill_tensor_parallel_size: int | None = None,
    prefill_data_parallel_size: int | None = None,
    prefill_expert_parallel_size: int | None = None,
    prefill_gpu: str | None = None,
    transfer: int | str | None = None,
    step_factor: float = 1.0,
    engine: str = "auto",
    engine_settings: Mapping[str, Any] | None = None,
    context_tokens: int | None = None,
    dtype: str | None = None,
    kv_dtype: str = "auto",
    tensor_parallel_size: int | None = None,
    pipeline_parallel_size: int = 1,
    data_parallel_size: int = 1,
    encoder_tokens: int | None = None,
    kv_memory_bytes: int | None = None,
    weights_bytes: int | None = None,
    speculative: Speculation | None = None,
    reuse: CacheReuse | None = None,
    speed: SpeedQuestion | None = None,
    what_if: WhatIf = WhatIf(),
    images: ImagesAsked | None = None,
) -> Simulate:
    """The document of `kvcalc simulate`: percentiles of the times that clients see, goodput, and the state over time.

    Give one of `requests_per_second`, `concurrency`, `users` with `think_seconds`, and `trace`, the path of a file.
    Lengths are means, or distributions as on the command line: `"fixed:1000"`. With `sessions`, such as
    `"turns:8,growth:1500"`, requests are the turns of sessions. With `distinct_prompts`, request i has prompt i % N.
    `router` says which replica gets a request. `devices` may be a name: `"h100x4"`. `cold` is whether
    the server has just started; by default only a short benchmark of clients finds such a server. Times are those of
    the steady state, unless `benchmark` is true. With
    `prefill_replicas`, prompts are computed on instances of their own, on the kind of device `prefill_gpu` if it is
    another one, and `transfer` is the link to those that answer: bytes per second of one device, or a name such as
    `infiniband-400g`. The times of all steps are multiplied by `step_factor`. `context_tokens` is the longest request
    that the server takes. The other arguments are those of `estimate`. Of `reuse`, the common prefix is used, and of
    `speed` the hit rate, the calibration and the expert-parallel size. `images` must fit in the longest request.
    """
    from functools import partial

    from kvcalc.planning.answers.simulate import simulate as simulate_replicas
    from kvcalc.question.lengths import lengths_of
    from kvcalc.question.sessions import parse_sessions
    from kvcalc.simulation.loads.load import Load
    from kvcalc.simulation.results import Limits
    from kvcalc.throughput.hardware import find_devices, find_gpu

    ask: Callable[..., Simulate] = simulate_replicas
    rows = None
    if trace is not None:
        from kvcalc.traces import read_trace

        rows = read_trace(trace, trace_format)
    load = Load(
        lengths_of(prompt_tokens, "prompt_tokens"), lengths_of(answer_tokens, "answer_tokens"), requests_per_second,
        concurrency, burstiness, rows, trace, scale_rate, requests, seed, cold, distinct_prompts=distinct_prompts,
        router=router, is_benchmark=benchmark, users=users, think_time=think_seconds,
        sessions=None if sessions is None else parse_sessions(sessions, "sessions"),
    )  # fmt: skip
    question = asked({**locals(), "devices": find_devices(devices) if isinstance(devices, str) else devices})
    limits = Limits(max_ttft_seconds, max_tpot_seconds)
    if prefill_replicas is not None and transfer is not None:
        from kvcalc.model.layout import LayoutAsked
        from kvcalc.planning.answers.simulate_pools import Prefills, simulate_pools

        layout = LayoutAsked(prefill_tensor_parallel_size, 1, prefill_data_parallel_size, prefill_expert_parallel_size)
        prefills = Prefills(
            prefill_replicas, transfer, layout, gpu=None if prefill_gpu is None else find_gpu(prefill_gpu)
        )
        ask = partial(simulate_pools, prefills=prefills)
    return ask(question, load, limits=limits, replicas=replicas, step_factor=step_factor)


@takes(fields={"speed": "prefix_hit_rate calibration confidence"}, also={"devices": str})
def check(
    command: str,
    devices: Devices | str,
    *,
    service: str | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    max_ttft_seconds: float | None = None,
    max_tpot_seconds: float | None = None,
    max_e2e_seconds: float | None = None,
    ttft_percentile: int | None = None,
    tpot_percentile: int | None = None,
    e2e_percentile: int | None = None,
    seed: int = 0,
    weights_bytes: int | None = None,
    speed: SpeedQuestion | None = None,
) -> Check:
    """The document of `kvcalc check`: whether the command of a server starts, and what load it sustains.

    `command` is the text of a command, a script, a compose file or a manifest; of several servers in it, `service`
    names one. `weights_bytes` replaces the counted weights on a device. With `input_tokens` and `output_tokens`, the
    document has the largest rate that keeps the limits, which are those of `plan`.
    """
    from kvcalc.planning.check.answer import check as ask
    from kvcalc.planning.check.servers import choose_server
    from kvcalc.planning.plan.planned import PlannedLoad
    from kvcalc.planning.plan.targets import Targets, check_percentiles
    from kvcalc.question.request_lengths import one_length
    from kvcalc.throughput.hardware import find_devices

    if (input_tokens is None) != (output_tokens is None):
        raise UsageError("input_tokens and output_tokens belong together")
    targets = Targets(
        None, None, max_ttft_seconds, max_tpot_seconds, max_e2e_seconds, ttft_percentile, tpot_percentile,
        e2e_percentile,
    )  # fmt: skip
    check_percentiles(targets)
    if targets.limits and input_tokens is None:
        raise UsageError("a target needs the lengths of requests", "input_tokens=2000, output_tokens=250")
    simulation = None
    if input_tokens is not None and output_tokens is not None:
        simulation = PlannedLoad(one_length(input_tokens, output_tokens), seed=seed, router="round-robin")
    parsed = find_devices(devices) if isinstance(devices, str) else devices
    return ask(
        choose_server(command, service), parsed, input_tokens=input_tokens, output_tokens=output_tokens,
        targets=targets, simulation=simulation, speed=speed, weights_bytes=weights_bytes,
    )  # fmt: skip
