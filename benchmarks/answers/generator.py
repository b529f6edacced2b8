"""Random questions: the same ones for the same seed and the same declared options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, NamedTuple

from benchmarks.answers.consistent import keep_consistent
from benchmarks.answers.declared import Declared
from benchmarks.answers.python_calls import WITHOUT_ARGUMENT, python_call
from benchmarks.answers.values import (
    DRAFT_MODELS,
    MOST_ASKED,
    NEEDS_DEVICE,
    RELEASES,
    SELDOM_RUN,
    WITH_MTP,
    WITH_VISION,
    billions_of,
    value_of,
)  # fmt: skip

Options = dict[str, Any]
Mix = Callable[["Asking"], None]

GPUS = {
    "h100": 80, "h200": 141, "b200": 180, "a100-80gb": 80, "l40s": 48, "mi300x": 192, "rtx-4090": 24, "l4": 24,
    "rtx-5090": 32, "h20": 96, "gb200": 186,
}  # fmt: skip
APPLE = {"m3-ultra": 512, "m2-ultra": 192, "m4-max": 128}
"""Device -> GB of memory."""

# How often each command is asked, in parts of 1,000.
SHARES = {
    "estimate": 350, "batch": 150, "plan": 120, "simulate": 120, "fit": 80, "sweep": 60, "compare": 60, "prefix": 30,
    "audit": 10, "score": 10, "models": 5, "gpus": 5,
}  # fmt: skip
ENGINES = {"vllm": 8, "sglang": 6, "tensorrt-llm": 4, "llama.cpp": 6, "mlx": 2, "transformers": 2, "logical": 2}
# The share of questions that Python is asked too, of those that print human text, and of those that write a page.
PYTHON, HUMAN, PAGES = 0.25, 0.06, 0.005
EMITTED = ("vllm", "sglang", "trtllm", "llama-server", "compose", "k8s")

TRACES = ("mooncake.jsonl", "prompts.jsonl", "trace.csv")
LOGS = ("vllm.log", "sglang.log")
RESULTS = ("vllm-bench.json", "sglang-bench.jsonl", "llama-bench.json", "guidellm.json")
FILES = (*TRACES, *LOGS, *RESULTS, "lengths.csv")
"""The files in tests/logs that questions name."""


class Asking(NamedTuple):
    """A question while it is drawn."""

    random: Random
    declared: Declared
    command: str
    model: str
    engine: str
    options: Options

    def takes(self, *names: str) -> bool:
        """Whether the command has all of these options."""
        return self.declared.commands[self.command].issuperset(names)

    def give(self, **values: Any) -> None:
        """Set those options that the command has."""
        for name, value in values.items():
            option = name.replace("_", "-")
            if self.takes(option):
                self.options[option] = value if value is True else str(value)

    @property
    def name(self) -> str:
        """The engine without its release."""
        return self.engine.partition("@")[0]


def questions(declared: Declared, number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Random questions about every command and engine, each followed by the same one in Python for a part of them."""
    random = Random(seed)
    asked = 0
    while asked < number:
        (command,) = random.choices([*SHARES], [*SHARES.values()])
        for question in MAKERS.get(command, _ask_one)(random, declared, command):
            asked += 1
            yield question


def screens(declared: Declared) -> Iterator[dict[str, Any]]:
    """Every help screen."""
    for command in ("", *declared.commands):
        for option in ("-h", "--help"):
            yield _command([*command.split(), option])
        if command in ("estimate", "fit", "compare", "sweep", "plan", "simulate", "prefix", "score"):
            for engine in (*declared.engines, "all"):
                yield _command([command, "--engine", engine, "--help"])


def _command(arguments: list[str], **more: Any) -> dict[str, Any]:
    return {"kind": "command", "arguments": arguments, **more}


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line. True is a flag."""
    return [
        word for name, value in options.items() for word in ((f"--{name}",) if value is True else (f"--{name}", value))
    ]


# Questions of each command.


def _ask_one(random: Random, declared: Declared, command: str) -> Iterator[dict[str, Any]]:
    models, options = draw(random, declared, command)
    line = [command, *models, *words_of(options)]
    chance = random.random()
    if command == "plan" and chance < 0.2:
        own = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm", "llama.cpp": "llama-server"}
        engine = options.get("engine", "vllm").partition("@")[0]
        kind = own.get(engine, "k8s") if random.random() < 0.5 else random.choice(EMITTED)
        yield _command([*line, "--emit", kind])
        return
    if chance < HUMAN:
        yield _command([*line, "--format", random.choice(("human", "human", "tsv", "csv"))])
        return
    page = ["--report", "page.html"] if chance > 1 - PAGES and "report" in declared.commands[command] else []
    yield _command([*line, *page, "--json"])
    if random.random() < PYTHON and not WITHOUT_ARGUMENT & {*options}:
        yield {"kind": "python", **python_call(command, models, options, declared), "command_line": [*line, "--json"]}


def _ask_batch(random: Random, declared: Declared, command: str) -> Iterator[dict[str, Any]]:
    """Lines that share a model and differ in one field, which a line that remembers another one would get wrong."""
    command = random.choices(("estimate", "plan", "simulate"), (8, 1, 1))[0]
    (model,), options = draw(random, declared, command)
    fields = {"model": model, **({} if command == "estimate" else {"command": command})}
    fields |= {name.replace("-", "_"): value for name, value in options.items()}
    if random.random() < 0.8:
        fields = {name: as_number(value) for name, value in fields.items()}
    lines = [fields]
    for _ in range(random.randint(1, 3) if command == "estimate" else 1):
        lines.append(changed(random, declared, fields))
    if random.random() < 0.5:
        lines.append(fields)
    random.shuffle(lines)
    yield _command(["batch", "-"], lines=lines)


def as_number(value: Any) -> Any:
    """A count as JSON's number. Numbers and texts take different ways through a batch."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


# Fields whose change makes another question, or that a question cannot do without.
_KEPT = ("model", "engine", "command", "gpu", "input_tokens", "output_tokens", "prompt_tokens", "answer_tokens")
# Other counts of a question.
_COUNTS = {
    "context": (700, 3000, 9000), "batch": (3, 5, 33), "input_tokens": (300, 1100), "output_tokens": (70, 300),
    "concurrency": (2, 9, 90), "prompt_tokens": (300, 1100), "requests": (7, 20),
}  # fmt: skip


def changed(random: Random, declared: Declared, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields with one of them changed, left out or added."""
    found, action = dict(fields), random.random()
    counts = [name for name in _COUNTS if name in fields]
    others = [name for name in fields if name not in _KEPT and name not in _COUNTS]
    own = declared.engines[fields.get("engine", "vllm").partition(",")[0].partition("@")[0]]
    own = [option for option in own if "gpu" in fields or option.name not in NEEDS_DEVICE]
    if action < 0.35 and counts:
        name = random.choice(counts)
        found[name] = random.choice(_COUNTS[name])
    elif action < 0.55 and others:
        found.pop(random.choice(others))
    elif action < 0.75 or not own:
        name, value = random.choice((("kv_memory", "3GiB"), ("kv_dtype", "auto"), ("dtype", "bf16"), ("tp", 1)))
        found[name] = value
    else:
        option = random.choice(own)
        found[option.name.replace("-", "_")] = value_of(random, option)
    return found


def _ask_log(random: Random, declared: Declared, command: str) -> Iterator[dict[str, Any]]:
    options: Options = {}
    if random.random() < 0.5:
        options["model"] = random.choice(("llama-3-8b", "llama-3.1-8b"))
    if random.random() < 0.3:
        options["kv-dtype"] = random.choice(("fp8", "bf16"))
    if command == "score":
        options["gpu"] = random.choice(("h100", "h200", "a100-80gb"))
    file = random.choice(LOGS if command == "audit" else RESULTS)
    yield _command([command, file, *words_of(options), "--json"])


def _ask_list(random: Random, declared: Declared, command: str) -> Iterator[dict[str, Any]]:
    if command == "models":
        name = random.choice(declared.models)["name"]
        yield _command(["models", *random.choice(([], [name], ["--family", "Llama"])), "--json"])
    else:
        yield _command(["gpus", *random.choice(([], [random.choice([*GPUS, *APPLE])])), "--json"])


MAKERS: dict[str, Callable[[Random, Declared, str], Iterator[dict[str, Any]]]] = {
    "batch": _ask_batch, "audit": _ask_log, "score": _ask_log, "models": _ask_list, "gpus": _ask_list,
}  # fmt: skip


# Options.


def draw(random: Random, declared: Declared, command: str) -> tuple[list[str], Options]:
    """The models and the options of a random question."""
    engines = dict(ENGINES)
    if command in ("plan", "simulate"):
        engines = {name: part for name, part in engines.items() if name not in ("logical", "transformers", "mlx")}
    (engine,) = random.choices([*engines], [*engines.values()])
    if random.random() < 0.12 and engine in RELEASES:
        engine += f"@{random.choice(RELEASES[engine])}"
    model = _model(random, declared, engine)
    asking = Asking(random, declared, command, model, engine, {})
    if engine != "vllm" or command not in ("plan", "simulate") or random.random() < 0.5:
        asking.give(engine=engine)
    for mix, chance in MIXES[command if command in MIXES else "estimate"]:
        if random.random() < chance:
            mix(asking)
    keep_consistent(asking)
    if command == "prefix":
        names = TRACES[:2]
        return [random.choice(names), *([model] if random.random() < 0.9 else [])], asking.options
    if command == "compare":
        others = [_model(random, declared, engine) for _ in range(random.randint(0, 2))]
        return list(dict.fromkeys([model, *others])), asking.options
    return [model], asking.options


def _model(random: Random, declared: Declared, engine: str) -> str:
    if random.random() < 0.5:
        return random.choice(MOST_ASKED)
    names = [str(model["name"]) for model in declared.models]
    if engine not in ("logical", "transformers") and random.random() < 0.9:
        names = [name for name in names if not name.startswith(SELDOM_RUN)]
    return random.choice(names)


def _devices(asking: Asking) -> None:
    """Devices on which the model probably fits, and how it is split over them."""
    random, name = asking.random, asking.name
    if name == "mlx":
        asking.give(gpu=random.choice([*APPLE]))
        return
    dtype = random.choice(("fp8", "fp8", "bf16", "int4")) if random.random() < 0.25 else None
    if name == "llama.cpp":
        dtype = random.choice(("q4_0", "q8_0", "q4_k_m")) if random.random() < 0.5 else None
    if dtype:
        asking.give(dtype=dtype)
    bits = {None: 16, "bf16": 16, "fp8": 8, "q8_0": 9}.get(dtype, 5)
    wanted = billions_of(asking.model) * bits / 8 * 1.25 + 2
    fitting = [(gpu, n) for gpu, memory in GPUS.items() for n in (1, 2, 4, 8) if n * memory * 0.85 > wanted]
    gpu, count = random.choice(fitting or [("b200", 8)])
    smallest = min((n for other, n in fitting if other == gpu), default=8)
    count = count if random.random() < 0.4 else smallest
    asking.give(gpu=f"{gpu}x{count}")
    if name == "llama.cpp" and wanted < GPUS[gpu] and random.random() < 0.85:
        asking.give(gpu=f"{gpu}x1")
    elif count > 1 and random.random() < 0.35:
        _split(asking, count)


def _split(asking: Asking, count: int) -> None:
    random = asking.random
    way = random.choice(("pp", "dp", "ep", "tp", "num-gpus"))
    if way == "pp":
        asking.give(tp=count // 2, pp=2)
    elif way == "dp" and asking.name in ("vllm", "sglang"):
        asking.give(tp=1 if random.random() < 0.5 else count // 2)
        asking.give(dp=count // int(asking.options.get("tp", "1")))
    elif way == "ep":
        asking.give(ep=count)
    elif way == "tp" and asking.name != "llama.cpp":
        asking.give(tp=count)


def _lengths(asking: Asking) -> None:
    random = asking.random
    if asking.command == "sweep":
        asking.give(context=random.choice(("1k..8k", "4096", "1k,5000,32k")), batch=random.choice(("1", "1,8,64")))
    else:
        asking.give(context=random.choice((100, 1000, 2048, 4096, 8192, 16384, 30000, 100_000)))
        asking.give(batch=random.choice((1, 1, 2, 7, 16, 64)))
        if random.random() < 0.03 and asking.command in ("estimate", "fit"):
            asking.give(context="auto")


def _load(asking: Asking) -> None:
    """Requests to serve."""
    random = asking.random
    asking.options.pop("context", None)
    asking.options.pop("batch", None)
    most = min(max(_limit(asking) - 1100, 200), 16000)
    asking.give(input_tokens=random.choice([n for n in (100, 500, 1000, 2048, 4000, 8000, 16000) if n <= most] or [64]))
    asking.give(output_tokens=random.choice((20, 128, 500, 1000)))
    if random.random() < 0.85 and "input-tokens" in asking.options:
        asking.give(concurrency=random.choice((1, 4, 16, 64, 128, 300)))


def _limit(asking: Asking) -> int:
    found = [model for model in asking.declared.models if model["name"] == asking.model]
    return (found and found[0]["max_position_embeddings"]) or 2048


def _types(asking: Asking) -> None:
    if asking.name == "mlx":
        return
    types = ("q8_0", "f16", "q4_0") if asking.name == "llama.cpp" else ("fp8", "bf16", "fp8", "fp16")
    asking.give(kv_dtype=asking.random.choice(types))


def _own(asking: Asking) -> None:
    """Some of the engine's own options, drawn from those that it declares."""
    own = asking.declared.engines[asking.name]
    count = min(len(own), asking.random.choice((1, 1, 2, 3)))
    for option in asking.random.sample(own, count):
        asking.options[option.name] = value_of(asking.random, option)


def _placed(asking: Asking) -> None:
    """Parts of the model in the host's memory, which llama.cpp can do."""
    random = asking.random
    if asking.name != "llama.cpp":
        return
    own = {option.name for option in asking.declared.engines["llama.cpp"]}
    way = random.choice(("n-gpu-layers", "cpu-moe", "n-cpu-moe", "no-kv-offload"))
    if way in own and "host-memory" in own:
        value: Any = {"n-gpu-layers": random.choice(("10", "20", "auto")), "n-cpu-moe": "8"}.get(way, True)
        asking.options.update({way: value, "host-memory": "256GiB"})


def _prefix(asking: Asking) -> None:
    random = asking.random
    way = random.random()
    if way < 0.5 and asking.takes("prefix-tokens"):
        asking.give(prefix_tokens=random.choice((10, 64, 100, 512, 1024, 2000)))
    elif way < 0.7:
        asking.give(prefix_hit_rate=random.choice(("0", "0.3", "0.9", "45%")))
    elif way < 0.8 and asking.takes("turns"):
        asking.give(turns=random.choice((2, 5)))
    elif asking.takes("offload", "offload-bandwidth"):
        asking.give(offload=random.choice(("cpu=100GiB", "cpu=200GiB,disk=2TiB")))
        asking.give(prefix_tokens=1024)
        if random.random() < 0.3:
            asking.give(offload_bandwidth="cpu=40GB/s")


def _drafted(asking: Asking) -> None:
    random, model = asking.random, asking.model
    small = next((draft for name, draft in DRAFT_MODELS.items() if model.startswith(name)), None)
    method = "ngram" if random.random() < 0.3 else "mtp" if model in WITH_MTP else "draft" if small else "ngram"
    if asking.name in ("transformers", "mlx", "llama.cpp") and small:
        method = "draft"
    if method == "draft" and asking.name in ("vllm", "sglang") and random.random() < 0.5:
        method, small = "eagle", None
    number = random.choice((1, 2, 3, 4))
    asking.give(speculative=f"{method}:{number}", acceptance_length=random.choice(("1", "1.4", "1.9")))
    if method == "draft":
        asking.give(draft_model=small)


def _images(asking: Asking) -> None:
    if asking.model in WITH_VISION and asking.takes("images", "image-size"):
        asking.give(images=asking.random.choice((1, 2)), image_size=asking.random.choice(("640x480", "1920x1080")))


def _what_if(asking: Asking) -> None:
    random = asking.random
    kind = random.choice(("mha", "mqa", "gqa", "mla"))
    asking.give(attention=kind)
    if kind == "gqa" and random.random() < 0.5 and asking.command != "compare":
        asking.give(kv_heads=random.choice((2, 4)))


def _memory(asking: Asking) -> None:
    asking.give(kv_memory=asking.random.choice(("2GiB", "4GiB", "10GiB")))


def _rest(asking: Asking) -> None:
    """Options without a group."""
    random = asking.random
    way = random.choice(("encoder", "transfer", "gpu-bandwidth", "flops", "calibrate", "strict", "variants"))
    if way == "encoder" and asking.model.startswith(("bart", "t5", "whisper", "llama-3.2-")):
        asking.give(encoder_tokens=500)
    elif way == "transfer" and asking.command in ("estimate", "fit"):
        asking.give(transfer_bandwidth=random.choice(("50GB/s", "nvlink", "infiniband-400g")))
    elif way == "gpu-bandwidth" and "gpu" in asking.options:
        asking.give(gpu_bandwidth="2TB/s")
    elif way == "strict" and asking.command != "estimate":
        asking.give(strict=True)


def _grid(asking: Asking) -> None:
    random = asking.random
    way = random.choice(("types", "engines", "devices", "sizes"))
    if way == "types" and asking.command == "sweep":
        asking.give(kv_dtype="auto,fp8")
    elif way == "engines":
        asking.give(engine=random.choice(("vllm,sglang", "vllm,tensorrt-llm", "logical,vllm")))
        for option in [each for own in asking.declared.engines.values() for each in own]:
            asking.options.pop(option.name, None)
    elif way == "devices" and "gpu" in asking.options and asking.command != "estimate":
        asking.give(gpu=f"{asking.options['gpu']},b200x{asking.options['gpu'].rpartition('x')[2]}")
    elif way == "sizes" and asking.command == "sweep":
        asking.give(tp="1..4")


def _planned(asking: Asking) -> None:
    """The load and the kinds of device of a plan."""
    random = asking.random
    asking.options.pop("gpu", None)
    asking.options.pop("ep", None)
    wanted = billions_of(asking.model) * 2.4
    fitting = [gpu for gpu, memory in GPUS.items() if 8 * memory > wanted] or ["b200"]
    kinds = random.sample(fitting, min(len(fitting), random.choice((1, 1, 2))))
    asking.give(gpu=",".join(kinds))
    _load(asking)
    asking.give(concurrency=random.choice((4, 16, 64)))
    if random.random() < 0.3:
        asking.options.pop("concurrency", None)
        asking.give(requests_per_second=random.choice(("0.5", "2", "10")))
    if random.random() < 0.4:
        asking.give(max_tpot=random.choice(("30ms", "60ms", "200ms")))
    if random.random() < 0.4:
        asking.give(max_ttft=random.choice(("1s", "5s")))
    if random.random() < 0.2:
        asking.give(price=",".join(f"{kind}={random.choice(('2', '3.5'))}" for kind in kinds))
    if random.random() < 0.1:
        asking.give(pareto=True)
    if random.random() < 0.05:
        asking.give(all_layouts=True)
    if random.random() < 0.1:
        asking.give(confidence="50")


def _percentiles(asking: Asking) -> None:
    random = asking.random
    asking.give(max_ttft=random.choice(("2s@p90", "5s@p50")), requests=40, seed=random.randint(0, 9), simulate=1)


def _pools(asking: Asking) -> None:
    """Prefill and decode on instances of their own."""
    random = asking.random
    if asking.name == "llama.cpp":
        return
    link = random.choice(("infiniband-400g", "nvlink", "50GB/s"))
    if asking.command == "plan":
        asking.give(disaggregate=True, transfer_bandwidth=link)
    else:
        count = int(asking.options.get("gpu", "h100x1").rpartition("x")[2])
        asking.give(prefill_replicas=random.choice((1, 2)), transfer_bandwidth=link, replicas=1, tp=count)
        for name in ("pp", "dp", "ep"):
            asking.options.pop(name, None)
        asking.give(gpu=asking.options.get("gpu", "h100x1").rpartition("x")[0])
        if random.random() < 0.3:
            asking.give(prefill_tp=count)
        if random.random() < 0.2:
            asking.give(prefill_gpu=random.choice(("h100", "h200")))


def _simulated(asking: Asking) -> None:
    random = asking.random
    asking.give(
        input_tokens=random.choice(("100", "600", "1000", "uniform:100..1500", "lognormal:600,0.5")),
        output_tokens=random.choice(("1", "20", "60", "uniform:10..80")),
        requests=random.choice((10, 30, 50)), seed=random.randint(0, 9),
    )  # fmt: skip
    if random.random() < 0.5:
        asking.give(concurrency=random.choice((1, 4, 16, 64)))
    else:
        asking.give(requests_per_second=random.choice(("0.5", "3", "20")))
        if random.random() < 0.3:
            asking.give(burstiness=random.choice(("0.25", "4")))
    if random.random() < 0.3:
        asking.give(max_ttft="1s", max_tpot="50ms")
    if random.random() < 0.1:
        asking.give(step_factor="1.5")


def _trace(asking: Asking) -> None:
    """The requests of a file in place of drawn ones."""
    for name in (
        "input-tokens", "output-tokens", "concurrency", "requests-per-second",
        "burstiness", "requests", "seed",
    ):  # fmt: skip
        asking.options.pop(name, None)
    asking.give(trace=asking.random.choice(TRACES[::2]), scale_rate=asking.random.choice(("1", "2")))
    if asking.command == "plan":
        asking.give(max_ttft="10s", requests=30, simulate=1)
    else:
        asking.give(requests=30)


def _cached(asking: Asking) -> None:
    random = asking.random
    if random.random() < 0.5:
        asking.give(cache_memory=random.choice(("1GiB..8GiB", "4GiB")))
    elif random.random() < 0.5:
        asking.give(cache_tokens="8k..64k")
    if random.random() < 0.3:
        asking.give(offload="cpu=100GiB")
    if random.random() < 0.2 and "gpu" in asking.options:
        asking.give(price=f"{asking.options['gpu'].rpartition('x')[0]}=2.5,cpu=0.003")


_ALL: tuple[tuple[Mix, float], ...] = (
    (_own, 0.5), (_placed, 0.35), (_prefix, 0.2), (_drafted, 0.2), (_types, 0.25),
)  # fmt: skip
MIXES: dict[str, tuple[tuple[Mix, float], ...]] = {
    "estimate": (
        (_lengths, 0.9), (_devices, 0.85), (_load, 0.4), *_ALL, (_images, 0.4), (_what_if, 0.07), (_memory, 0.1),
        (_rest, 0.1), (_grid, 0.03),
    ),
    "sweep": ((_lengths, 1), (_devices, 0.7), *_ALL, (_what_if, 0.05), (_memory, 0.1), (_rest, 0.1), (_grid, 0.3)),
    "compare": ((_lengths, 0.9), (_devices, 0.8), *_ALL, (_what_if, 0.1), (_memory, 0.1), (_rest, 0.1), (_grid, 0.3)),
    "fit": ((_lengths, 0.9), (_devices, 1), (_load, 0.4), *_ALL, (_images, 0.4), (_what_if, 0.05), (_memory, 0.1)),
    "plan": (
        (_devices, 0.3), (_planned, 1), (_own, 0.3), (_prefix, 0.2), (_drafted, 0.2), (_types, 0.2), (_images, 0.3),
        (_percentiles, 0.1), (_pools, 0.12), (_trace, 0.06), (_rest, 0.05),
    ),
    "simulate": (
        (_devices, 1), (_simulated, 1), *_ALL, (_memory, 0.1), (_pools, 0.15), (_trace, 0.1), (_rest, 0.1),
    ),
    "prefix": ((_devices, 0.8), (_own, 0.3), (_types, 0.2), (_cached, 1), (_memory, 0.1)),
}  # fmt: skip
"""Command -> what may be in a question, and how often."""
