"""How many requests run at once: the engine says it, and every answer has its figure."""

from __future__ import annotations

from typing import Any

import pytest

import kvcalc
from kvcalc.model.drafting import Speculation
from kvcalc.planning.answers.simulate import simulate
from kvcalc.question.lengths import lengths_of
from kvcalc.question.question import CacheReuse, Question, SpeedQuestion
from kvcalc.simulation.loads.load import Load
from tests.documents import estimate

# A state in all layers of Qwen3.6-35B-A3B: 30 layers with states of 32 heads of 128 x 128 elements in fp32, and three
# inputs of 8,192 channels in bf16.
STATE = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
HYBRID = "qwen3.6-35b-a3b"


class Figures:
    """The answers about one server: those of `estimate`, and those of a simulation with the same requests."""

    def __init__(
        self, model: str, engine: str, gpu: str, lengths: tuple[int, int], concurrency: int, **settings: str
    ) -> None:
        asked: dict[str, Any] = {
            "engine": engine, "devices": kvcalc.find_devices(gpu),
            "engine_settings": {name.replace("_", "-"): text for name, text in settings.items()},
        }  # fmt: skip
        # All requests have the same length, so that a number of them is a number of tokens.
        prompt, answer = (f"fixed:{tokens}" for tokens in lengths)
        speed = SpeedQuestion(input_tokens=prompt, output_tokens=answer, concurrency=concurrency)
        document = estimate(kvcalc.load_model(model), **asked, speed=speed)
        self.fit, self.batch = document["fit"]["max_batch_size"], document["workload"]["batch_size"]
        self.memory = document["fit"]["kv_cache_memory_bytes"]
        self.max_concurrency = document["engine"].get("max_concurrency")
        self.blocks = document["engine"].get("num_gpu_blocks")
        self.serving = document["throughput"]["serving"]
        self.running = self.serving["running_requests"]
        load = Load(lengths_of(prompt, "tokens"), lengths_of(answer, "tokens"), concurrency=concurrency)
        self.simulated = simulate(
            Question(kvcalc.load_model(model), **asked), load._replace(num_requests=2 * concurrency)
        )
        self.limit = self.simulated["engine"]["max_running_requests"]
        self.most = max(sample["running_requests"] for sample in self.simulated["timeline"])

    def runs_nearly(self, requests: int) -> bool:
        """Whether so many run on average. Those that start together end together, and then come in one by one."""
        return requests >= int(self.running) >= 0.65 * requests


def test_a_request_has_states_in_every_answer() -> None:
    """SGLang gives the states 0.9 / 1.9 of the memory, less a spare one, and five of them to each request."""
    found = Figures(HYBRID, "sglang", "h200", (8192, 1024), 200, mem_fraction_static="0.8")
    states = int((found.memory * 0.9 / 1.9 - STATE) // STATE)
    assert states // 5 == 72
    assert (found.max_concurrency, found.fit, found.batch, found.most, found.limit) == (72, 72, 72, 72, 72)
    assert found.runs_nearly(72)


def test_the_states_leave_room_for_fewer_tokens() -> None:
    """At 64k tokens, the memory that is not for states holds 19 requests. With states for 19 only, it held 29."""
    found = Figures(HYBRID, "sglang", "h200", (65_536, 1024), 50, mem_fraction_static="0.8")
    tokens = (found.memory - (int((found.memory * 0.9 / 1.9 - STATE) // STATE) + 1) * STATE) // 20_480
    assert tokens // 66_560 == 19
    assert (int(found.max_concurrency), found.fit, found.batch, found.most) == (19, 19, 19, 19)
    assert found.runs_nearly(19)
    assert found.limit == 72


SERVERS: list[tuple[str, str, str, dict[str, str], int | None]] = [
    ("llama-3.1-8b", "vllm", "h100", {"max_num_seqs": "16"}, 16),
    ("llama-3.1-8b", "sglang", "h100", {"max_running_requests": "16"}, 16),
    ("llama-3.1-8b", "tensorrt-llm", "h100", {"max_batch_size": "16"}, 16),
    ("llama-3.1-8b", "llama.cpp", "h100", {"parallel": "16"}, 16),
    ("llama-3.1-8b", "vllm", "h100", {}, 1024),
    ("llama-3.1-8b", "tensorrt-llm", "h100", {}, 2048),
    ("llama-3.1-8b", "llama.cpp", "h100", {}, 256),
    ("gpt-oss-20b", "vllm", "h100", {"max_num_seqs": "24"}, 24),
    ("gpt-oss-20b", "sglang", "h100", {"max_running_requests": "24"}, 24),
    ("gpt-oss-20b", "tensorrt-llm", "h100", {"max_batch_size": "24"}, 24),
    ("gpt-oss-20b", "vllm", "h100", {}, 1024),
    ("deepseek-v2-lite", "vllm", "h100", {"max_num_seqs": "24"}, 24),
    ("deepseek-v2-lite", "sglang", "h100", {"max_running_requests": "24"}, 24),
    ("deepseek-v4-flash", "sglang", "h200x8", {}, 256),
    (HYBRID, "vllm", "h200", {"max_num_seqs": "24"}, 24),
    (HYBRID, "vllm", "h200", {}, 1024),
    (HYBRID, "tensorrt-llm", "h200", {"max_batch_size": "24"}, 24),
    (HYBRID, "tensorrt-llm", "h200", {}, 2048),
    (HYBRID, "llama.cpp", "h200", {"parallel": "24"}, 24),
    (HYBRID, "sglang", "h200", {"max_running_requests": "24"}, 24),
    (HYBRID, "sglang", "h200", {"max_mamba_cache_size": "64"}, 12),
    (HYBRID, "sglang", "h200", {"max_mamba_cache_size": "64", "disable_radix_cache": "true"}, 64),
    (HYBRID, "sglang", "h200", {"max_running_requests": "24", "disable_radix_cache": "true"}, 24),
    ("lfm2-8b-a1b", "sglang", "h100", {"max_mamba_cache_size": "64"}, 21),
]


@pytest.mark.parametrize(("model", "engine", "gpu", "settings", "limit"), SERVERS)
def test_no_answer_runs_more_than_the_engine(
    model: str, engine: str, gpu: str, settings: dict[str, str], limit: int
) -> None:
    found = Figures(model, engine, gpu, (4096, 512), 300, **settings)
    # Every slot of llama.cpp has the cells of a whole request, and TensorRT-LLM has a state for every request that may
    # run, so no more are started than fit.
    reserves = engine == "llama.cpp" or (engine == "tensorrt-llm" and model == HYBRID)
    assert found.limit == (min(limit, found.fit) if reserves else limit)
    assert 1 <= found.batch <= found.fit <= limit
    assert found.running <= limit
    assert found.most <= limit
    # vLLM's log says how many requests the pool holds, whatever --max-num-seqs is. llama.cpp has no such figure.
    if engine not in ("vllm", "llama.cpp"):
        assert found.max_concurrency <= limit
    # With more clients than that, all answers are the limit itself if the memory holds so many.
    if found.fit == limit:
        assert found.batch == found.most == min(limit, 300)
        assert found.runs_nearly(found.most)


def ask(model: str = HYBRID, engine: str = "sglang", gpu: str = "h200", **asked: Any) -> dict[str, Any]:
    speed = SpeedQuestion(input_tokens=8192, output_tokens=1024, concurrency=200)
    return estimate(kvcalc.load_model(model), engine=engine, devices=kvcalc.find_devices(gpu), speed=speed, **asked)


@pytest.mark.parametrize(
    "more",
    [
        {"reuse": CacheReuse(prefix_tokens=16)},
        {"reuse": CacheReuse(prefix_tokens=4096)},
        {"speculative": Speculation("ngram", 3, acceptance_length=2.0)},
        {"speculative": Speculation("ngram", 3, acceptance_length=2.0), "reuse": CacheReuse(prefix_tokens=4096)},
        {
            "speculative": Speculation("draft", 3, acceptance_length=2.0, draft_model=kvcalc.load_model("qwen3-0.6b")),
            "reuse": CacheReuse(prefix_tokens=4096),
        },
    ],
    ids=["a prefix that is not found", "a prefix", "n-grams", "n-grams and a prefix", "a draft model and a prefix"],
)
def test_the_limit_holds_with_prefixes_and_drafts(more: dict[str, Any]) -> None:
    settings = {"max-mamba-cache-size": "64"}
    found = ask(engine_settings=settings, **more)
    assert found["fit"]["max_batch_size"] == 12
    assert found["throughput"]["serving"]["running_requests"] == 12
    assert found["engine"]["max_concurrency"] == 12


def test_a_prefix_leaves_room_for_more_requests_of_tokens() -> None:
    """Requests that share half of their tokens need half of the pool each, but as many states."""
    settings = {"mem-fraction-static": "0.8"}
    speed = SpeedQuestion(input_tokens=65_536, output_tokens=1024, concurrency=200)
    model, devices = kvcalc.load_model(HYBRID), kvcalc.find_devices("h200")
    alone, shared = (
        estimate(
            model, engine="sglang", devices=devices, engine_settings=settings, speed=speed,
            reuse=CacheReuse(prefix_tokens=tokens) if tokens else None,
        )["fit"]["max_batch_size"]
        for tokens in (0, 33_280)
    )  # fmt: skip
    assert (alone, shared) == (19, (1_265_556 - 33_280) // 33_280)


def test_every_dp_rank_has_its_part_of_the_states() -> None:
    """SGLang divides --max-mamba-cache-size and --max-running-requests among the replicas."""
    settings = {"max-mamba-cache-size": "128"}
    found = ask(gpu="h200x2", data_parallel_size=2, engine_settings=settings)
    assert (found["fit"]["max_batch_size"], found["engine"]["max_concurrency"]) == (24, 12)
    drafts = Speculation("ngram", 3, acceptance_length=2.0)
    found = ask("qwen3-30b-a3b", gpu="h200x2", data_parallel_size=2, speculative=drafts)
    assert found["fit"]["max_batch_size"] == 48


def test_a_batch_beyond_the_limit_does_not_fit(kvcalc: Any) -> None:
    asked = ("fit", HYBRID, "--gpu", "h200", "--engine", "sglang", "--mem-fraction-static", "0.8", "--context", "9k")
    assert kvcalc(*asked, "--batch", "72").status == 0
    found = kvcalc(*asked, "--batch", "73", "--json")
    assert found.status == 4
    assert found.json["fit"]["free_bytes"] > 0
    said = [note["text"] for note in found.json["warnings"] if note["code"] == "does-not-fit"]
    assert said == ["73 requests of 9,216 tokens: sglang runs at most 72 at once"]


@pytest.mark.parametrize(("engine", "option"), [("vllm", "max_num_seqs"), ("sglang", "max_running_requests")])
def test_nothing_is_preempted_while_the_cache_has_room(engine: str, option: str) -> None:
    """Requests that wait because of a limit take no memory. Their steps were a third longer than in the simulation."""
    found = Figures("llama-3.1-8b", engine, "h100", (512, 2048), 64, **{option: "32"})
    assert found.simulated["results"]["preemptions"] == 0
    tpot = next(row for row in found.simulated["times"] if row["metric"] == "tpot")
    assert found.serving["tpot_seconds"] == pytest.approx(tpot["mean_seconds"], rel=0.05)


def test_the_simulation_has_the_pool_of_the_document() -> None:
    """TensorRT-LLM's pools have states for the requests that fit. The simulation had states for one."""
    found = Figures(HYBRID, "tensorrt-llm", "h200", (8192, 1024), 300)
    assert (found.blocks, found.most) == (found.simulated["engine"]["blocks"], found.fit)


def test_a_plan_starts_no_more_than_run(kvcalc: Any) -> None:
    load = ("--input-tokens", "8k", "--output-tokens", "1k", "--concurrency", "200", "--engine", "sglang")
    given = ("--gpu", "h200", "--max-gpus", "8", "--mem-fraction-static", "0.8")
    best = kvcalc("plan", HYBRID, *load, *given, "--max-mamba-cache-size", "300", "--json").json["best"]
    assert best["requests_per_replica"] <= best["max_batch_size"] == 60
    assert f"--max-running-requests {best['max_batch_size']} " in best["sglang"]


def test_a_plan_with_dp_ranks_starts_what_was_simulated(kvcalc: Any) -> None:
    """--max-running-requests counts the requests of all replicas: a quarter of them was printed."""
    found = kvcalc(
        "plan", "qwen3-30b-a3b", "--gpu", "h100", "--max-gpus", "4", "--dp", "4", "--engine", "sglang",
        "--max-running-requests", "100", "--input-tokens", "2k", "--output-tokens", "100", "--concurrency", "64",
        "--max-ttft", "60s@p90", "--json",
    ).json  # fmt: skip
    assert "--max-running-requests 100 " in found["best"]["sglang"]
