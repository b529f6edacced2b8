"""What `kvcalc check` reads and searches, case by case."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvcalc import check
from kvcalc.errors import DoesNotFitError, UsageError
from kvcalc.planning.check.answer import capacity_of, runs
from kvcalc.planning.check.asked import asked_by
from kvcalc.planning.check.servers import choose_server, of_release, servers_in
from kvcalc.planning.plan.judge import STATISTICS
from kvcalc.planning.plan.targets import Simulated, Targets
from kvcalc.question.question import SpeedQuestion
from kvcalc.releases import release_of
from kvcalc.throughput.hardware import find_devices

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
IMAGE = "vllm/vllm-openai:v0.33.0"


@pytest.mark.parametrize(
    ("options", "devices"),
    [("--gpus 4", 4), ("--gpus=1", 1), ("--gpus '\"device=0,1,5\"'", 3), ("--gpus all", None), ("--rm -p 80:80", None)],
)
def test_a_container_gets_the_devices_that_docker_is_told(options: str, devices: int | None) -> None:
    (server,) = servers_in(f"docker run {options} {IMAGE} --model {LLAMA} -tp 2")
    assert server.num_devices == devices
    assert server.words == ["--model", LLAMA, "-tp", "2"]
    assert server.release == of_release(server, None).release == "0.33.0"
    assert of_release(server, "0.19") == server._replace(release="0.19")


def test_a_container_has_the_variables_and_the_program_that_docker_is_told() -> None:
    (server,) = servers_in(f"docker run -e A=1 --env B=2=3 -e C --entrypoint vllm {IMAGE} serve {LLAMA}")
    assert (server.words, {**server.environment}) == ([LLAMA], {"A": "1", "B": "2=3"})


@pytest.mark.parametrize(
    "text",
    [
        f"services: {{a: {{image: '{IMAGE}', command: '--model x/y', environment: {{A: 1, B: x=y, C: }}}}}}",
        f"services: {{a: {{image: '{IMAGE}', command: '--model x/y', environment: [A=1, B=x=y, C]}}}}",
        f"spec: {{containers: [{{image: '{IMAGE}', args: [--model, x/y], env: [{{name: A, value: 1}}, "
        "{name: B, value: x=y}, {value: z}, name, 3]}]}",
    ],
)
def test_variables_are_a_mapping_a_list_of_texts_or_a_list_of_names(text: str) -> None:
    (server,) = servers_in(text)
    assert {**server.environment} == {"A": "1", "B": "x=y"}


@pytest.mark.parametrize(
    ("devices", "number"),
    [
        ("[{count: 4}]", 4), ("[{count: all}]", None), ("[{count: '2'}]", None), ("[{capabilities: [gpu]}]", None),
        ("[{device_ids: ['0', '3', '5']}]", 3), ("[{device_ids: '0,3', count: 2}]", 2),
        ("[text, {capabilities: [gpu]}, {count: 2}, {count: 8}]", 2), ("text", None), ("{count: 4}", None),
        ("[]", None),
    ],
)  # fmt: skip
def test_a_service_gets_the_devices_that_it_reserves(devices: str, number: int | None) -> None:
    """deploy.md of the compose specification: `count` or `device_ids`, the first entry that has one of them."""
    service = (
        f"image: '{IMAGE}', command: '--model x/y', deploy: {{resources: {{reservations: {{devices: {devices}}}}}}}"
    )
    (server,) = servers_in(f"services: {{a: {{{service}}}}}")
    assert server.num_devices == number
    for deploy in ("text", "{resources: text}", "{resources: {reservations: [a]}}"):
        (server,) = servers_in(f"services: {{a: {{image: '{IMAGE}', command: '--model x/y', deploy: {deploy}}}}}")
        assert server.num_devices is None


@pytest.mark.parametrize(
    ("limits", "number"),
    [
        ("{nvidia.com/gpu: 4}", 4), ("{amd.com/gpu: '8'}", 8), ("{cpu: 8}", None), ("{nvidia.com/gpu: $N}", None),
        ("{nvidia.com/gpu: 2, amd.com/gpu: 3}", 2), ("{}", None), ("", None),
    ],
)  # fmt: skip
def test_a_container_of_a_manifest_gets_the_devices_of_its_limits(limits: str, number: int | None) -> None:
    container = f"{{name: c, image: '{IMAGE}', args: [--model, x/y], resources: {{limits: {limits}}}}}"
    (server,) = servers_in(f"kind: Pod\nspec: {{containers: [{container}]}}")
    assert (server.name, server.num_devices) == ("c", number)


def test_documents_that_are_no_mapping_start_no_server() -> None:
    pod = f"spec: {{containers: [text, {{image: '{IMAGE}', args: [--model, x/y]}}]}}"
    assert len(servers_in(f"- a\n- b\n---\ntext\n---\n{pod}\n")) == 1


def test_docker_commands_that_run_nothing_start_no_server() -> None:
    assert servers_in(f"docker pull {IMAGE}\ndocker compose up -d\n") == []
    (server,) = servers_in(f"docker --debug run {IMAGE} --model {LLAMA}")
    assert server.words == ["--model", LLAMA]


@pytest.mark.parametrize(("text", "said"), [("docker run --gpus", "--gpus has no value"),
                                            ("docker run --rm", "names no image")])  # fmt: skip
def test_a_docker_command_that_ends_early_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        servers_in(text)


def test_a_program_of_the_same_name_that_serves_no_model_is_no_server() -> None:
    assert servers_in("trtllm-serve disaggregated -c x.yaml\nmpirun -n 2 trtllm-serve disaggregated_mpi_worker") == []
    (server,) = servers_in("trtllm-serve x/y --tp_size 2")
    assert server.words == ["x/y", "--tp_size", "2"]


def test_a_service_is_chosen_by_its_name() -> None:
    services = ", ".join(f"{name}: {{image: '{IMAGE}', command: '--model x/{name}'}}" for name in "ab")
    text = f"services: {{{services}}}"
    assert choose_server(text, "b").read().model == "x/b"
    with pytest.raises(UsageError, match="not found"):
        choose_server(text, "c")
    with pytest.raises(UsageError, match="2 servers: a, b"):
        choose_server(text, None)


def test_an_empty_value_is_no_value_and_a_word_for_a_number_is_refused() -> None:
    """optional_type (engine/arg_utils.py): --max-model-len may be empty, and --tensor-parallel-size may not."""
    answer = check(f'vllm serve {LLAMA} --max-model-len ""', "h100")
    assert answer["workload"]["context_tokens"] == 131_072
    for option in ("--max-model-len all", '-tp ""', '--dtype ""'):
        with pytest.raises(DoesNotFitError, match="does not start: argument"):
            check(f"vllm serve {LLAMA} {option}", "h100x2")


@pytest.mark.parametrize(
    ("command", "dtype"),
    [
        (f"vllm serve {LLAMA} --dtype float32", "fp32"), (f"vllm serve {LLAMA} --dtype auto", None),
        (f"vllm serve {LLAMA} --quantization fp8", "fp8"),
        ("vllm serve openai/gpt-oss-20b --dtype bfloat16", None),
        ("vllm serve Qwen/Qwen3.6-27B-FP8 --quantization fp8", None),
    ],
)  # fmt: skip
def test_a_type_is_that_of_the_weights_unless_the_checkpoint_is_quantized(command: str, dtype: str | None) -> None:
    (server,) = servers_in(command)
    question, _ = asked_by(server.read(), server.reader, find_devices("h100"))
    assert question.dtype == dtype


@pytest.mark.parametrize(
    ("text", "tokens"), [("auto", None), ("AUTO", None), ("-1", None), ("4k", 4000), ("4K", 4096), ("5000", 5000)]
)
def test_a_context_is_a_number_or_the_longest_that_fits(text: str, tokens: int | None) -> None:
    """`--max-model-len auto` or -1: the longest context that fits (vLLM). Other options have an `auto` of their own."""
    (server,) = servers_in(f"vllm serve {LLAMA} --max-model-len {text} --kv-cache-dtype auto")
    question, _ = asked_by(server.read(), server.reader, find_devices("h100"))
    assert (question.context_tokens, question.fits_context, question.kv_dtype) == (tokens, tokens is None, "auto")


@pytest.mark.parametrize(
    "command",
    [
        f"bash -c 'vllm serve {LLAMA} -tp 2'", f"/bin/bash -lc 'cd /x && exec vllm serve {LLAMA} -tp 2'",
        f"sh -euc 'A=1\nvllm serve {LLAMA} -tp 2\n'", f"srun --comment 'two words' bash -c 'vllm serve {LLAMA} -tp 2'",
        f"bash -c 'vllm serve {LLAMA} -tp 2' 'vllm serve other/model'",
    ],
)  # fmt: skip
def test_the_words_of_a_shell_are_a_script(command: str) -> None:
    (server,) = servers_in(command)
    assert server.words == [LLAMA, "-tp", "2"]


def test_a_shell_without_a_script_starts_no_server() -> None:
    assert servers_in("bash start.sh\nsrun -n 1 bash run.sh") == []


@pytest.mark.parametrize(
    ("command", "shape"),
    [
        (f"llama-server -hf {LLAMA}", (2, 1)),
        (f"llama-server -hf {LLAMA} -sm tensor", (1, 2)),
        (f"vllm serve {LLAMA}", (1, 1)),
        (f"vllm serve {LLAMA} -tp 2", (1, 2)),
        (f"vllm serve {LLAMA} -pp 2", (2, 1)),
    ],
)
def test_devices_are_divided_as_the_command_says(command: str, shape: tuple[int, int]) -> None:
    """llama.cpp divides the layers among all devices, or with `tensor` the rows of the matrices."""
    (server,) = servers_in(command)
    question, _ = asked_by(server.read(), server.reader, find_devices("h100x2"))
    assert (question.pipeline_parallel_size, question.tensor_parallel_size) == shape


def test_the_draft_model_of_a_command_drafts_and_a_placeholder_is_none() -> None:
    for named, layers in (("meta-llama/Llama-3.2-1B-Instruct", 16), ("<DRAFT_MODEL>", None)):
        speculative = f'{{"method":"draft_model","model":"{named}","num_speculative_tokens":3}}'
        (server,) = servers_in(f"vllm serve {LLAMA} --speculative-config '{speculative}'")
        question, notes = asked_by(server.read(), server.reader, find_devices("h100"))
        asked = question.speculative
        assert asked is not None
        assert (asked.method, asked.num_tokens) == ("draft", 3)
        assert (asked.draft_model and asked.draft_model.num_layers) == layers, notes


def test_experts_of_dp_ranks_are_whole_only_if_the_command_says_so() -> None:
    for model, more, size in (
        ("deepseek-ai/DeepSeek-R1", "-dp 8", 1),
        ("deepseek-ai/DeepSeek-R1", "-dp 8 --enable-expert-parallel", 8),
        ("deepseek-ai/DeepSeek-R1", "-dp 1", None),
        (LLAMA, "-dp 8", None),
    ):
        (server,) = servers_in(f"vllm serve {model} {more}")
        question, _ = asked_by(server.read(), server.reader, find_devices("h200x8"))
        assert question.speed_asked.expert_parallel_size == size, (model, more)


def test_a_server_whose_cache_does_not_grow_starts_without_a_longest_context() -> None:
    answer = check("mlx_lm.server --model mistralai/Mamba-Codestral-7B-v0.1", "m4-max")
    assert answer["fit"] is not None
    assert answer["fit"]["max_context_tokens"] is None
    assert answer["starts"]


def test_a_limit_of_requests_is_said_once_and_other_warnings_stay() -> None:
    """The warning `start-limit` is the reason here."""
    answer = check("vllm serve Qwen/Qwen3.6-27B-FP8 --max-model-len 131072 --max-num-seqs 256", "l40s")
    assert (answer["reason"] or "").startswith("--max-num-seqs 256: ")
    codes = {warning["code"] for warning in answer["warnings"]}
    assert "start-limit" not in codes
    assert codes


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vllm serve google/gemma-2-9b-it -tp 2 --enable-expert-parallel", "vLLM 0.33.0 does not start: --ep 2: "),
        (f"vllm serve {LLAMA} -tp 3", "does not start: "),
    ],
)
def test_that_a_server_does_not_start_is_said_once(command: str, said: str) -> None:
    with pytest.raises(DoesNotFitError) as raised:
        check(command, "h100x8")
    assert raised.value.message.startswith(said)
    assert raised.value.message.count("not start") == 1


def test_only_a_server_that_starts_is_asked_for_requests() -> None:
    text = f"vllm serve {LLAMA} --max-model-len "
    lengths: dict[str, Any] = {"input_tokens": 500, "output_tokens": 100}
    assert check(f"{text}1M", "l40s", **lengths)["requests"] is None
    assert check(f"{text}4k", "l40s", **lengths)["requests"] is not None
    assert check(f"{text}4k", "l40s")["requests"] is None


def test_an_encoder_starts_and_its_speed_is_not_known() -> None:
    answer = check("vllm serve BAAI/bge-m3", "h100", input_tokens=500, output_tokens=1)
    assert (answer["starts"], answer["capacity"]) == (True, None)


@pytest.fixture
def no_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is simulated."""
    monkeypatch.setattr("kvcalc.planning.check.answer.capacity_of", lambda *_: None)


@pytest.mark.usefixtures("no_capacity")
def test_a_request_holds_its_prompt_and_its_answer() -> None:
    text = f"vllm serve {LLAMA} --max-num-seqs 1000"
    numbers = []
    for lengths in ((3000, 1000), (1000, 3000), (3000, 3000)):
        requests: Any = check(text, "h100", input_tokens=lengths[0], output_tokens=lengths[1])["requests"]
        numbers.append(requests["max_requests"])
    assert numbers[0] == numbers[1]
    assert numbers[0] > numbers[2] > 0


@pytest.mark.usefixtures("no_capacity")
def test_drafts_are_counted_without_lengths_because_memory_does_not_depend_on_what_is_accepted() -> None:
    text = "vllm serve deepseek-ai/DeepSeek-R1 -tp 8 --max-model-len 8k --speculative-config.method mtp"
    text += " --speculative-config.num_speculative_tokens 1"
    alone = check(text, "h200x8")
    assert alone["speculative"] is not None
    assert alone["speculative"]["acceptance_length"] is None
    served = check(text, "h200x8", input_tokens=100, output_tokens=10)
    assert served["speculative"] is None
    assert any(one["text"].startswith("drafting is not counted: ") for one in served["warnings"])


@pytest.mark.parametrize(("options", "copies"), [("--dp-size 4", 4), ("--dp-size 1", 1), ("", 1)])
def test_of_the_whole_copies_behind_a_server_one_is_checked(options: str, copies: int) -> None:
    """SGLang's --dp-size starts copies unless --enable-dp-attention makes them DP ranks."""
    answer = check(f"sglang serve --model-path {LLAMA} {options}", "h100x4")
    assert answer["command"]["copies"] == copies
    said = [one["text"] for one in answer["warnings"] if "copies" in one["text"]]
    assert said == ["the command starts 4 copies of the server, of which one is checked"] * (copies > 1)


@pytest.mark.parametrize(("gpus", "given", "devices"), [(1, 1, 1), (4, 1, 4), (2, 4, 2), (8, 4, 8)])
def test_a_container_has_the_devices_that_docker_gives_it(gpus: int, given: int, devices: int) -> None:
    answer = check(f"docker run --gpus {gpus} {IMAGE} --model {LLAMA} -tp {gpus}", f"h100x{given}")
    hardware = answer["hardware"]
    assert hardware is not None
    assert hardware["num_devices"] == devices


def test_a_container_without_a_name_has_none_and_one_inside_another_is_no_other() -> None:
    container = f"{{image: '{IMAGE}', args: [--model, x/y], extra: {{containers: [{{image: '{IMAGE}', args: [a]}}]}}}}"
    (server,) = servers_in(f"spec: {{containers: [{container}]}}")
    assert (server.name, server.words) == (None, ["--model", "x/y"])


class Knee:
    """A simulation in which requests alone take 0.1 s. Up to a `rate` they take 0.2 s, and beyond it 2 s.

    Long runs have a `long` rate. `ran` are the runs: rate, number of requests, step factor and seed.
    """

    def __init__(self, rate: float, long: float, alone: float = 0.1, seed: int = 0, ran: Any = None) -> None:
        self.rate, self.long, self.alone, self.seed = rate, long, alone, seed
        self.ran: list[Any] = [] if ran is None else ran

    def seeded(self, more: int) -> Knee:
        return Knee(self.rate, self.long, self.alone, self.seed + more, self.ran)

    def run(self, question: Any, targets: Targets, replicas: int | None, requests: int, step: float) -> Simulated:
        rate = targets.requests_per_second
        self.ran.append((rate, replicas, requests, step, self.seed))
        if replicas is None:
            seconds = self.alone
        else:
            assert rate is not None
            seconds = 0.2 if rate <= (self.rate if requests == 1000 else self.long) else 2.0
        times: Any = {metric: {"mean": seconds, "p50": seconds} for metric in ("ttft", "tpot", "e2e")}
        for statistics in times.values():
            statistics.update(dict.fromkeys(STATISTICS, seconds))
        return Simulated(times, requests, 0, 7)


def capacity_with(monkeypatch: pytest.MonkeyPatch, knee: Knee, confidence: int = 50) -> Any:
    """The capacity of a server on an H100, which the short form says is far more than the knee's rate."""
    found: list[Any] = []

    def kept(question: Any, *asked: Any) -> Any:
        found.append(capacity_of(question, 500, 100, Targets(None, None, max_ttft_seconds=1.0), knee, []))  # type: ignore[arg-type]

    monkeypatch.setattr("kvcalc.planning.check.answer.capacity_of", kept)
    speed = SpeedQuestion(confidence=confidence)
    lengths: dict[str, Any] = {"input_tokens": 500, "output_tokens": 100}
    check(f"vllm serve {LLAMA} --max-model-len 4k", "h100", **lengths, max_ttft_seconds=1.0, speed=speed)
    return found[0]


def test_the_capacity_is_that_within_the_targets_that_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("kvcalc.planning.check.answer.capacity_of", lambda *given: asked.append(given[1:4]))
    every: list[dict[str, Any]] = [{"max_ttft_seconds": 1.5, "max_tpot_seconds": 0.05}, {}]
    for limits in every:
        check(f"vllm serve {LLAMA} --max-model-len 4k", "h100", input_tokens=500, output_tokens=100, **limits)
    first, second = asked
    assert first[:2] == second[:2] == (500, 100)
    assert [(limit.metric, limit.seconds) for limit in first[2].limits] == [("ttft", 1.5), ("tpot", 0.05)]
    assert second[2].limits == []


def test_the_largest_rate_is_found_to_two_percent_and_confirmed_by_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    knee = Knee(10.0, 99.0)
    found = capacity_with(monkeypatch, knee)
    assert 10 * 0.98 <= found["requests_per_second"] <= 10
    assert found["limited_by"] == "TTFT mean is 2 s and the limit is 1 s"
    assert (found["ttft_mean_seconds"], found["max_running_requests"]) == (0.2, 7)
    alone, *short, long = knee.ran
    assert alone == (None, None, 1, 1.0, 0)
    assert {run[1:] for run in short} == {(1, 1000, 1.0, 0)}
    assert long == (found["requests_per_second"], 1, int(found["requests_per_second"] * 1200), 1.0, 1)


def test_a_capacity_is_judged_with_slower_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a request that takes 0.9 s by the estimate is later than the limit of 1 s."""
    knee = Knee(10.0, 99.0, alone=0.9)
    found = capacity_with(monkeypatch, knee, 80)
    ((_, _, _, step, _),) = knee.ran
    assert found["confidence"] == 80
    assert step == found["step_factor"] > 1
    assert found["ttft_mean_seconds"] == pytest.approx(0.9 * found["ttft_factor"])
    assert found["ttft_mean_seconds"] > 1
    assert found["requests_per_second"] == 0


def test_a_long_run_has_a_limited_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    knee = Knee(20.0, 99.0)
    capacity_with(monkeypatch, knee)
    assert knee.ran[-1][2] == 20_000


def test_a_rate_that_a_long_run_refuses_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    found = capacity_with(monkeypatch, Knee(10.0, 9.0))
    assert 9 * 0.95 <= found["requests_per_second"] <= 9
    assert found["limited_by"] == "TTFT mean is 2 s and the limit is 1 s"
    assert capacity_with(monkeypatch, Knee(10.0, 1.0))["requests_per_second"] == 0


def test_no_rate_is_enough_if_none_or_not_even_a_request_alone_meets_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    knee = Knee(0.0, 0.0)
    found = capacity_with(monkeypatch, knee)
    assert (found["requests_per_second"], found["limited_by"]) == (0.0, "TTFT mean is 2 s and the limit is 1 s")
    assert len(knee.ran) > 10
    slow = Knee(10.0, 10.0, alone=1.5)
    found = capacity_with(monkeypatch, slow)
    assert found["requests_per_second"] == 0.0
    assert found["limited_by"] == "TTFT mean of requests alone is 1.5 s and the limit is 1 s"
    assert found["ttft_mean_seconds"] == 1.5
    assert len(slow.ran) == 1


SEVENTY, GGUF = "meta-llama/Llama-3.3-70B-Instruct", "llama-server -hf bartowski/Llama-3.3-70B-Instruct-GGUF:Q4_K_M"


@pytest.mark.parametrize(
    ("command", "gpu", "options"),
    [
        (f"vllm serve {LLAMA}", "l4", ["--max-model-len", "--tensor-parallel-size"]),
        (f"vllm serve {LLAMA} --max-model-len 30000", "l4",
         ["--max-model-len", "--kv-cache-dtype", "--tensor-parallel-size"]),
        # A cache in fp8 would be tight.
        (f"vllm serve {LLAMA} --max-model-len 50000", "l4", ["--max-model-len", "--tensor-parallel-size"]),
        (f"vllm serve {LLAMA} --max-model-len 80000 --kv-cache-dtype fp8", "l4",
         ["--max-model-len", "--tensor-parallel-size"]),
        (f"vllm serve {LLAMA} --max-model-len 262144", "l4", ["--max-model-len"]),  # beyond the model's
        (f"vllm serve {LLAMA} --max-model-len 262144", "h100", ["--max-model-len"]),
        (f"vllm serve {SEVENTY}", "h100x4", ["--tensor-parallel-size"]),
        (f"vllm serve {SEVENTY} -tp 2", "h100x4", ["--max-model-len", "--tensor-parallel-size"]),
        (f"sglang serve --model-path {LLAMA} --context-length 131072", "l4", ["--tensor-parallel-size"]),
        (f"trtllm-serve {SEVENTY}", "h100x4", ["--tp-size"]),
        (f"{GGUF} -c 131072 -np 2 --fit off", "l40s", ["--ctx-size", "--n-gpu-layers"]),
        (f"{GGUF} -c 8192 --fit off", "rtx-4090", ["--n-gpu-layers"]),
        ("llama-server -hf unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M -c 32768 --fit off", "rtx-4080",
         ["--n-gpu-layers", "--n-cpu-moe"]),
    ],
)  # fmt: skip
def test_each_change_alone_lets_the_server_start_and_a_smaller_one_does_not(
    command: str, gpu: str, options: list[str]
) -> None:
    answer = check(command, gpu)
    assert not answer["starts"]
    server: Any = answer["server"]
    assert [change["option"] for change in server["try"]] == options
    for option, value in ((change["option"], change["value"]) for change in server["try"]):
        changed = check(f"{command} {option} {value}", gpu)
        # If no context is sure to fit, the longest one that may.
        is_sure = (
            option not in ("--max-model-len", "--n-gpu-layers", "--n-cpu-moe") or answer["fit"]["sure_context_tokens"]
        )
        assert changed["starts"] if is_sure else runs(changed), option
        # A length or number of layers that is larger by a block or a layer, or fewer devices or experts.
        step = {"--max-model-len": 16, "--ctx-size": 512, "--n-gpu-layers": 1, "--n-cpu-moe": -1}.get(option)
        if step is not None and (option, gpu) != ("--max-model-len", "h100"):
            larger = check(f"{command} {option} {int(value) + step}", gpu)
            assert not (larger["starts"] if is_sure else runs(larger)), option


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("lmsysorg/sglang:nightly-dev-20261020-abcdef", "0.5.22"),
        ("lmsysorg/sglang:dev", None),
        ("lmsysorg/sglang:nightly", None),
        ("lmsysorg/sglang:0.0.0.dev1", None),
        ("lmsysorg/sglang:latest", None),
        ("lmsysorg/sglang:v0.5.9rc1-cu129", "0.5.9rc1"),
        ("lmsysorg/sglang:v0.5.9-cu129", "0.5.9"),
        ("lmsysorg/sglang", None),
        ("localhost:5000/lmsysorg/sglang", None),
        ("lmsysorg/sglang@sha256:00", None),
        ("vllm/vllm-openai:nightly-5b8c30d62b75", None),
        ("rocm/vllm:rocm7.0.0_vllm_0.11.2_20251210", "0.11.2"),
        ("nvcr.io/nvidia/vllm:25.09-py3", "2025-09"),
        ("nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1", "1.4.0rc1"),
        ("nvcr.io/nvidia/tensorrt-llm/release:nightly", None),
        ("nvcr.io/nvidia/tensorrt-llm/release", "1.2.1"),
        ("ghcr.io/ggml-org/llama.cpp:server-cuda-b6097", "b6097"),
        ("ghcr.io/ggml-org/llama.cpp:server-cuda", None),
    ],
)
def test_the_tag_of_an_image_is_a_release_a_day_or_the_newest(image: str, release: str | None) -> None:
    programs = {
        "nvcr.io/nvidia/tensorrt-llm": "trtllm-serve x/y", "nvcr.io/nvidia/vllm": "vllm serve x/y",
        "rocm/vllm": "vllm serve x/y", "lmsysorg/sglang": "sglang serve --model-path x/y",
    }  # fmt: skip
    command = next((command for name, command in programs.items() if name in image), "--model x/y")
    (server,) = servers_in(f"docker run --gpus all {image} {command}")
    engine = server.reader.engine
    place = release_of(engine if server.release is None else f"{engine}@{server.release}")
    assert place == (None if release is None else release_of(f"{engine}@{release}"))


@pytest.mark.parametrize("image", ["lmsysorg/sglang:v0.5.9", "rocm/vllm:rocm7.0.0_vllm_0.11.2_20251210"])
def test_an_image_that_starts_no_server_by_itself_needs_a_program(image: str) -> None:
    """Their entrypoints run the words of the container as a command (docker/Dockerfile of both projects)."""
    with pytest.raises(UsageError, match="starts no server by itself") as error:
        servers_in(f"docker run --gpus all {image} --model-path Qwen/Qwen3-8B")
    assert "before the options" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("words", "option", "context"),
    [
        ("bartowski/Qwen3-32B-GGUF:Q4_K_M -c 8192", "n-gpu-layers", 8192),
        ("bartowski/Qwen3-32B-GGUF:Q4_K_M", "n-gpu-layers", 4096),
        ("Qwen/Qwen3-8B-GGUF:Q8_0 -c 0", "n-gpu-layers", 40960),
        ("unsloth/Qwen3.6-35B-A3B-GGUF:Q4_K_M -c 8192", "n-cpu-moe", 8192),
    ],
)
def test_llama_server_places_the_model_itself(words: str, option: str, context: int) -> None:
    """--fit is on by default: it leaves 1,024 MiB free (common_params_fit_impl, common/fit.cpp)."""
    found = check(f"llama-server -hf {words}", "rtx-3060")
    assert (found["starts"], found["workload"]["context_tokens"]) == (True, context)
    note = next(one["text"] for one in found["warnings"] if one["code"] == "placed")
    assert f"it starts as with --{option} " in note
    chosen = int(note.rpartition(" ")[2])
    host = cast("dict[str, Any]", found["fit"]["host"])
    assert host[option.replace("-", "_")] == chosen
    assert found["fit"]["free_bytes"] >= 2**30
    # One layer more would leave less free, and without --fit the server does not start.
    more = chosen + (1 if option == "n-gpu-layers" else -1)
    given = words.replace("-c 0", "-c 40960") if "-c" in words else f"{words} -c {context}"
    assert check(f"llama-server -hf {given} --{option} {more}", "rtx-3060")["fit"]["free_bytes"] < 2**30
    assert not check(f"llama-server -hf {given} --fit off", "rtx-3060")["starts"]


def test_llama_server_lowers_no_context_that_is_given() -> None:
    roomy, long = (check(f"llama-server -hf Qwen/Qwen3-8B-GGUF:Q8_0{more}", "rtx-3060") for more in ("", " -c 0"))
    assert roomy["workload"]["context_tokens"] < long["workload"]["context_tokens"] == 40960
    assert roomy["fit"]["host"] is None


def test_a_head_that_a_command_names_is_counted() -> None:
    """A log of vLLM 0.25.1 on a GB10: 69.34 GiB of weights, 35.2 GiB for 950,420 tokens."""
    config = '{"model": "poolside/Laguna-S-2.1-DFlash-INT4", "num_speculative_tokens": 15}'
    options = f"--speculative-config '{config}' --max-num-seqs 32 --max-model-len 65536 --gpu-memory-utilization 0.89"
    image = "docker run --gpus all vllm/vllm-openai:v0.25.1"
    fit: Any = check(f"{image} --model poolside/Laguna-S-2.1-INT4 {options}", "gb10")["fit"]
    assert fit["weights_bytes"] / 2**30 == pytest.approx(69.34, rel=0.015)
    assert fit["max_context_tokens"] == pytest.approx(950_420, rel=0.05)
