"""`kvcalc check`: commands of engines as people write them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvcalc import check
from kvcalc.engines.reading import readers
from kvcalc.model.resolve import load_model
from kvcalc.notes import sentence
from kvcalc.planning.check.servers import servers_in
from tests.conftest import ROOT

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
_LISTS = {
    "vllm": "vllm-0.33.0", "sglang": "sglang-0.5.23", "tensorrt-llm": "tensorrt-llm-1.3",
    "llama.cpp": "llama-server-2026", "mlx": "mlx-lm-0.32.2",
}  # fmt: skip


def read(text: str) -> dict[str, Any]:
    (server,) = servers_in(text)
    found = server.read()
    return {"engine": found.engine, "model": found.model, **found.fields, **found.settings, "drafting": found.drafting}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"vllm serve {LLAMA} -tp 4 --max_model_len=8k", {"tensor_parallel_size": "4", "max_model_len": "8000"}),
        (f"vllm serve \\\n  {LLAMA} \\\n  --kv-cache-dtype fp8_e4m3 # half", {"kv_dtype": "fp8"}),
        (f"python3 -m vllm.entrypoints.openai.api_server --model {LLAMA} --max-num-seqs 8", {"max-num-seqs": "8"}),
        (f"M={LLAMA}\nvllm serve $M --enforce-eager 2>&1 | tee log", {"model": LLAMA, "enforce-eager": "true"}),
        (f"vllm serve {LLAMA} -tp 2 -dp 4 --enable-expert-parallel", {"expert_parallel_size": "8"}),
        (
            f'vllm serve {LLAMA} --speculative-config \'{{"method": "mtp", "num_speculative_tokens": 2}}\'',
            {"drafting": ("mtp", 2, None)},
        ),
        (
            f"vllm serve {LLAMA} --speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
            {"drafting": ("ngram", 3, None)},
        ),
        (
            f"docker run --rm -it --gpus all -p 80:80 vllm/vllm-openai:v0.11.0 --model {LLAMA}",
            {"engine": "vllm@0.11.0", "model": LLAMA},
        ),
        (
            'docker run -v $(realpath $(pwd)/m):/m --name a$(id -u) -v "$(echo a b)":/x vllm/vllm-openai:v0.11.0 '
            f"--model {LLAMA} -tp 2",
            {"model": LLAMA, "tensor_parallel_size": "2"},
        ),
        (
            f"vllm serve {LLAMA} --no-enable-prefix-caching --no-async-scheduling --enforce-eager",
            {"no-enable-prefix-caching": "true", "no-async-scheduling": "true", "enforce-eager": "true"},
        ),
        (
            "python -m sglang.launch_server --model a/b --chunked-prefill-size -1",
            {"chunked-prefill-size": "16384"},
        ),
        (f"VLLM_PP_LAYER_PARTITION=10,22 vllm serve {LLAMA} -pp 2", {"pp-layer-partition": "10,22"}),
        (f"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 vllm serve {LLAMA}", {"graph-estimate": "0"}),
        (f"docker run vllm/vllm-openai:v0.11.0 --model {LLAMA}", {"flashinfer-sampler": "1"}),
        (
            f"docker run -e VLLM_USE_FLASHINFER_SAMPLER=0 vllm/vllm-openai:v0.10.2 --model {LLAMA}",
            {"flashinfer-sampler": "0"},
        ),
        (f"VLLM_USE_FLASHINFER_SAMPLER=0 vllm serve {LLAMA}", {"flashinfer-sampler": "0"}),
        (f"vllm serve {LLAMA} --attention-config.backend FLASHINFER", {"attention-backend": "FLASHINFER"}),
        (f"""vllm serve {LLAMA} -ac '{{"backend": "FLASHMLA"}}'""", {"attention-backend": "FLASHMLA"}),
        # What people paste: a log, srun, a container behind other programs.
        (f"nohup vllm serve {LLAMA} -tp 4 > vllm.log 2>&1 &", {"tensor_parallel_size": "4"}),
        (f"vllm serve {LLAMA} -tp 4 2>err >out", {"tensor_parallel_size": "4"}),
        (f'srun --nodes=1 --gpus-per-node=8 bash -c "vllm serve {LLAMA} -tp 8"', {"tensor_parallel_size": "8"}),
        (f"srun -N1 docker run --rm vllm/vllm-openai:v0.11.0 --model {LLAMA} -tp 8", {"engine": "vllm@0.11.0"}),
        (
            f"cat > c.yaml <<EOF\nmodel: {LLAMA}\nmax-model-len: 8192\nenforce-eager: true\nenable-lora: false\n"
            "speculative-config: {method: ngram, num_speculative_tokens: 3}\nEOF\n"
            "vllm serve --config c.yaml --max-model-len 4096",
            {"model": LLAMA, "max_model_len": "4096", "enforce-eager": "true", "drafting": ("ngram", 3, None)},
        ),
        (
            f"cat > c.yaml <<EOF\nmodel-path: {LLAMA}\ntp-size: 2\nEOF\nsglang serve --config=c.yaml",
            {"model": LLAMA, "tensor_parallel_size": "2"},
        ),
        (f"bash -c 'vllm serve {LLAMA} -pp 2'", {"pipeline_parallel_size": "2"}),
        (
            "sglang serve --model-path a/b --tp 8 --dp 4 --enable-dp-attention",
            {"tensor_parallel_size": "2", "data_parallel_size": "4"},
        ),
        (
            "python -m sglang.launch_server --model a/b --speculative-algorithm EAGLE --speculative-num-steps 3",
            {"drafting": ("mtp", 3, None)},
        ),
        (
            "python -m sglang.launch_server --model a/b --speculative-algorithm NEXTN --speculative-num-steps 2",
            {"drafting": ("mtp", 2, None)},
        ),
        (
            "cat > c.yaml <<EOF\nkv_cache_config:\n  dtype: fp8\nenable_attention_dp: true\nEOF\n"
            "trtllm-serve a/b --tp_size 4 --extra_llm_api_options c.yaml",
            {"kv_dtype": "fp8", "tensor_parallel_size": "1", "data_parallel_size": "4"},
        ),
        (
            # The files of TensorRT-LLM's examples/configs/database have their keys in the order of the alphabet.
            "cat > c.yaml <<EOF\nenable_attention_dp: true\nmoe_expert_parallel_size: 8\ntensor_parallel_size: 8\nEOF\n"
            "trtllm-serve a/b --config c.yaml",
            {"tensor_parallel_size": "1", "data_parallel_size": "8", "expert_parallel_size": "8"},
        ),
        (
            # The type of the model and that of the cache have the same key.
            "cat > c.yaml <<EOF\ndtype: float16\nkv_cache_config:\n  dtype: fp8\n  tokens_per_block: 64\nEOF\n"
            "trtllm-serve a/b --config c.yaml",
            {"kv_dtype": "fp8", "dtype": "fp16", "tokens-per-block": "64"},
        ),
        ("llama-server -hf ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF", {"model": "ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF"}),
        (
            "llama-server -hf x/Qwen3-32B-GGUF:Q4_K_M -c 32768 -np 4",
            {"model": "x/Qwen3-32B-GGUF:Q4_K_M", "context_tokens": "8192"},
        ),
        (
            "./llama-server -m m/gpt-oss-20b-mxfp4.gguf -ctk q8_0",
            {"model": "gpt-oss-20b-mxfp4", "cache-type-k": "q8_0"},
        ),
        ("vllm serve a/b -q awq --quantization fp8", {"dtype": "fp8"}),
        # Without a type, -hf takes the repository's default; --hf-file names the file.
        ("llama-server -hf x/Qwen3-32B-GGUF", {"model": "x/Qwen3-32B-GGUF"}),
        ("llama-server -hf x/Qwen3-32B-GGUF -hff Qwen3-32B-Q5_K_M.gguf", {"model": "x/Qwen3-32B-GGUF:Q5_K_M"}),
        ("llama-server -m Qwen3-30B-A3B-Q4_K_M.gguf -ot '.ffn_.*_exps.=CPU'", {"cpu-moe": "true"}),
        ("mlx_lm.server --model x/y --port 80", {"engine": "mlx", "model": "x/y"}),
    ],
)
def test_commands_are_read(text: str, said: dict[str, Any]) -> None:
    found = read(text)
    assert {key: found[key] for key in said} == said


@pytest.mark.parametrize(
    ("algorithm", "alone", "with_model"),
    [
        ("NEXTN", ("mtp", 3, None), ("eagle1", 3, "x/d")), ("EAGLE", ("mtp", 3, None), ("eagle1", 3, "x/d")),
        ("EAGLE3", ("eagle", 3, None), ("eagle", 3, "x/d")), ("eagle3", ("eagle", 3, None), ("eagle", 3, "x/d")),
        ("STANDALONE", ("draft", 3, None), ("draft", 3, "x/d")), ("DFLASH", ("dflash", 3, None), ("dflash", 3, "x/d")),
        ("NGRAM", ("ngram", 3, None), ("ngram", 3, None)), ("LOOKAHEAD", None, None),
    ],
)  # fmt: skip
def test_sglangs_algorithms_draft_with_the_models_own_layers_or_a_draft_model(
    algorithm: str, alone: tuple[Any, ...] | None, with_model: tuple[Any, ...] | None
) -> None:
    command = f"sglang serve --model-path a/b --speculative-algorithm {algorithm}"
    assert read(command)["drafting"] == alone
    assert read(f"{command} --speculative-draft-model-path x/d")["drafting"] == with_model
    # The last of the checked tokens is the model's own. A step of one token drafts nothing.
    for more, number in (("--speculative-num-steps 5", 5), ("--speculative-num-draft-tokens 5", 4)):
        assert read(f"{command} {more}")["drafting"] == (alone and (alone[0], number, None))
    assert read(f"{command} --speculative-num-draft-tokens 1")["drafting"] is None


@pytest.mark.parametrize(
    ("config", "mode", "is_counted"),
    [
        ("3", None, True),
        ("0", None, False),
        ('{"level": 3}', None, True),
        ('{"cudagraph_mode": "NONE"}', "none", True),
        ('{"cudagraph_mode": "PIECEWISE", "level": 2}', "piecewise", False),
        ('{"cudagraph_mode": 2}', None, False),
        ("{}", None, True),
    ],
)
def test_a_compilation_config_is_a_number_or_an_object(config: str, mode: str | None, is_counted: bool) -> None:
    (server,) = servers_in(f"vllm serve {LLAMA} --compilation-config '{config}'")
    found = server.read()
    assert (found.settings.get("cudagraph-mode"), not found.unknown) == (mode, is_counted)


@pytest.mark.parametrize(
    ("file", "kv_dtype", "dtype"),
    [
        ("dtype: float16", None, "fp16"),
        ("kv_cache_config: {dtype: fp8}", "fp8", None),
        ("kv_cache_config: {free_gpu_memory_fraction: 0.8}", "auto", None),
        ("{kv_cache_config: {dtype: fp8}, dtype: bfloat16}", "fp8", "bf16"),
        ("kv_cache_config:", None, None),
    ],
)
def test_a_file_of_tensorrt_llm_has_a_type_for_the_cache_and_one_for_the_model(
    file: str, kv_dtype: str | None, dtype: str | None
) -> None:
    (server,) = servers_in(f"cat > c.yaml <<EOF\n{file}\nEOF\ntrtllm-serve a/b --config c.yaml")
    found = server.read()
    assert (found.fields.get("kv_dtype"), found.fields.get("dtype")) == (kv_dtype, dtype)
    assert not found.unknown


def test_every_option_that_is_read_exists() -> None:
    """The names in the tables are those of the engine, or short names and names of earlier releases."""
    for name, file in _LISTS.items():
        text = (ROOT / "tests" / "engine_options" / f"{file}.txt").read_text()
        listed = {word.lstrip("-").replace("_", "-") for word in text.split() if word.startswith("-")}
        reader = next(one for one in readers() if one.engine == name)
        assert any(field in listed for field in reader.fields or reader.model_options), name
        for field in dict.fromkeys(reader.fields.values()):
            names = [option for option, found in reader.fields.items() if found == field]
            # Servers of TensorRT-LLM 1.2 are started with it, and the list is that of an early 1.3.
            assert set(names) & {*listed, "kv-cache-dtype"}, (name, names)
        for option in (*reader.harmless, *reader.default_on, *reader.special):
            assert f"--{option}" in reader.arguments.spelled, (name, option)


def test_own_options_stand_anywhere(kvcalc: Any) -> None:
    words = ["vllm", "serve", LLAMA]
    for arguments in (
        ["--gpu", "h100", "--get", "starts", *words],
        [*words, "--gpu", "h100", "--get", "starts"],
        ["--gpu=h100", "--get=starts", "--", *words],
        [" ".join(words), "--get", "starts", "--gpu", "h100"],
    ):
        assert kvcalc("check", *arguments).out == "true\n", arguments


def test_it_says_why_and_what_helps(kvcalc: Any) -> None:
    found = kvcalc("check", "vllm", "serve", LLAMA, "--max-model-len", "1M", "--gpu", "l40s", "--json")
    document = json.loads(found.out)
    assert found.status == 4
    assert not document["starts"]
    assert "are beyond the model's 131,072" in document["reason"]
    for change in document["server"]["try"]:
        words = ["vllm", "serve", LLAMA, "--max-model-len", "1M", change["option"], change["value"]]
        again = kvcalc("check", *words, "--gpu", "l40s", "--get", "starts")
        assert again.out.strip() == "true", change
    assert document["server"]["try"][0]["option"] == "--max-model-len"


def tried(document: Any) -> Any:
    return document["server"]["try"]


def test_more_devices_help_if_one_option_gives_them() -> None:
    command = "vllm serve meta-llama/Llama-3.1-70B-Instruct"
    (change,) = tried(check(command, "h100x8"))
    assert change == {"option": "--tensor-parallel-size", "value": "4"}
    assert check(f"{command} -tp 4", "h100x8")["starts"]
    assert tried(check(f"{command} -tp 4", "h100x8")) == []


def test_the_type_of_a_quantized_checkpoint_is_that_of_its_other_parts() -> None:
    plain, typed = (check(f"vllm serve openai/gpt-oss-20b{more}", "h100") for more in ("", " --dtype bfloat16"))
    assert plain["weights"] == typed["weights"]
    assert plain["weights"]["dtype"] == "mxfp4"


def test_mpirun_says_how_many_devices_there_are() -> None:
    for number in ("-n 8", "--map-by 4 -n 8", "-np 8 --map-by 4"):
        (server,) = servers_in(f"mpirun {number} trtllm-llmapi-launch trtllm-serve a/b")
        assert server.num_devices == 8
    (server,) = servers_in("mpirun --map-by 4 trtllm-llmapi-launch trtllm-serve a/b")
    assert server.num_devices is None


def test_a_manifest_may_have_any_metadata() -> None:
    container = "spec: {containers: [{image: 'vllm/vllm-openai:v0.33.0', args: ['--model', 'a/b']}]}"
    for metadata, name in (("[a]", None), ("{name: a}", "a"), ("{}", None)):
        (server,) = servers_in(f"apiVersion: v1\nkind: Pod\nmetadata: {metadata}\n{container}\n")
        assert server.name == name


def test_a_container_without_a_program_has_that_of_its_image() -> None:
    images = {"vllm/vllm-openai": "vllm", "ghcr.io/ggml-org/llama.cpp": "llama.cpp"}
    for image, engine in images.items():
        (server,) = servers_in(f"services: {{a: {{image: '{image}:latest', command: '--model a/b'}}}}")
        assert server.reader.engine == engine


def test_containers_are_found_in_lists_of_resources() -> None:
    pod = "{kind: Pod, spec: {containers: [{name: NAME, image: vllm/vllm-openai, args: [--model, a/b]}]}}"
    both = ", ".join(pod.replace("NAME", name) for name in ("a", "b"))
    assert [server.name for server in servers_in(f"kind: List\nitems: [{both}]\n")] == ["a", "b"]


@pytest.mark.parametrize(("asked", "given", "used"), [(8, "h100", 8), (2, "h100x4", 2), (8, "h100x4", 8)])
def test_a_container_has_the_devices_that_it_reserves(asked: int, given: str, used: int) -> None:
    reserved = f"deploy: {{resources: {{reservations: {{devices: [{{count: {asked}}}]}}}}}}"
    text = f"services: {{a: {{image: vllm/vllm-openai, command: '--model {LLAMA}', {reserved}}}}}"
    assert check(text, given)["hardware"]["num_devices"] == used


# Files of TensorRT-LLM's examples/configs, and one of the PyTorch backend before 0.20.
CURATED = """
max_batch_size: 720
max_num_tokens: 16384
tensor_parallel_size: 2
moe_expert_parallel_size: 2
trust_remote_code: true
enable_attention_dp: true
cuda_graph_config: {enable_padding: true, max_batch_size: 720}
moe_config: {backend: TRTLLM}
kv_cache_config: {dtype: fp8, enable_block_reuse: false, free_gpu_memory_fraction: 0.75}
stream_interval: 20
num_postprocess_workers: 4
attention_dp_config: {enable_balance: true, batching_wait_iters: 50, timeout_iters: 1}
"""
OLDER = """
pytorch_backend_config: {enable_overlap_scheduler: true, use_cuda_graph: true, kv_cache_dtype: fp8}
enable_attention_dp: true
max_beam_width: 1
"""


@pytest.mark.parametrize("config", [CURATED, OLDER])
def test_the_file_of_tensorrt_llm_is_counted_or_harmless(config: str) -> None:
    found = check(
        f"cat > c.yaml <<EOF{config}EOF\ntrtllm-serve openai/gpt-oss-120b --tp_size 2 --config c.yaml", "h200x2"
    )
    assert found["command"]["not_counted"] == []
    assert (found["kv_cache"]["dtype"], found["engine"]["data_parallel_size"]) == ("fp8", 2)


def test_keys_of_tensorrt_llms_file_that_change_the_memory_are_named() -> None:
    config = (
        "\nmoe_config: {backend: CUTLASS, max_num_tokens: 4096}\nlora_config: {max_lora_rank: 8}\nmax_beam_width: 4\n"
    )
    found = check(f"cat > c.yaml <<EOF{config}EOF\ntrtllm-serve openai/gpt-oss-20b --config c.yaml", "h200")
    assert found["command"]["not_counted"] == [
        "moe_config.max_num_tokens", "lora_config",
        "max_beam_width (answers that are searched in parallel, each with a cache)",
    ]  # fmt: skip


def test_graphs_of_tensorrt_llm_must_agree(kvcalc: Any, tmp_path: Path) -> None:
    """BaseCudaGraphConfig (llmapi/llm_args.py)."""
    path = tmp_path / "c.yaml"
    for most, status in ((8, 4), (2, 0)):
        path.write_text(f"cuda_graph_config:\n  batch_sizes: [1, 2]\n  max_batch_size: {most}\n")
        done = kvcalc("check", "--gpu", "h100", "trtllm-serve", "llama-3.1-8b", "--config", str(path))
        assert done.status == status
        assert ("max_batch_size: 2" in done.err) is (status == 4)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Qwen2.5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("/models/Qwen/Qwen3-8B/", "Qwen/Qwen3-8B"),
        ("/data/Qwen2___5-7B-Instruct", "Qwen2.5-7B-Instruct"),
        ("/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/0a1b", "Qwen/Qwen3-8B"),
        ("/model", None),
        ("/models/qwen", None),  # a name of ollama's, and of many folders
    ],
)
def test_a_path_of_the_server_is_taken_by_the_name_in_it(kvcalc: Any, path: str, name: str | None) -> None:
    done = kvcalc("check", "--gpu", "h200", "vllm", "serve", path, "--max-model-len", "4k")
    assert done.status == (2 if name is None else 0)
    said = "write the model's name instead" if name is None else f"is not here, and is taken as {name}"
    assert said in done.err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("vllm serve llama-3.1-8b -tp 3", "--tensor-parallel-size 3 does not divide"),
        (
            "vllm serve llama-3.1-8b --attention-backend FLEX_ATTENTION --kv-cache-dtype fp8",
            "--kv-cache-dtype bfloat16",
        ),
        (
            "python -m sglang.launch_server --model-path Qwen/Qwen3-30B-A3B-FP8 --tp 4",
            "use --tensor-parallel-size 2 or --expert-parallel-size 4",
        ),
        # llama.cpp has no such option.
        ("llama-server -m llama-3.1-8b --split-mode tensor", "--tp 3 does not divide"),
    ],
)
def test_a_refusal_names_the_engines_options(kvcalc: Any, command: str, said: str) -> None:
    gpu = "h100x3" if "llama-server" in command else "h100x4"
    done = kvcalc("check", "--gpu", gpu, *command.split())
    assert done.status == 4
    assert said in " ".join(done.err.split())


def test_a_config_that_is_not_here_is_not_counted() -> None:
    (server,) = servers_in(f"vllm serve {LLAMA} --config nowhere.yaml")
    assert server.read().unknown == ["--config"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_config_may_be_a_pipe(tmp_path: Path) -> None:
    """Such a file can be read once: a second time, there is nothing in it, and nobody writes any more."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = Thread(target=path.write_text, args=("tensor-parallel-size: 2\n",), daemon=True)
    reader = Thread(
        target=lambda: found.append(servers_in(f"vllm serve {LLAMA} --config {path}")[0].read()), daemon=True
    )
    found: list[Any] = []
    writer.start()
    reader.start()
    reader.join(timeout=10)
    assert [one.fields for one in found] == [{"tensor_parallel_size": "2"}]


def test_all_layers_may_be_on_several_devices(kvcalc: Any) -> None:
    words = ("check", "--gpu", "h100x2", "llama-server", "-hf", "x/Qwen3-32B-GGUF:Q4_K_M", "--json")
    plain, given = kvcalc(*words).json, kvcalc(*words, "-ngl", "99").json
    assert given["fit"] == plain["fit"]
    refused = kvcalc(*words, "-ngl", "20")
    assert "one device only" in refused.err


@pytest.mark.parametrize(
    "name",
    [
        "ggml-org/gemma-3-4b-it-GGUF",
        "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        "bartowski/Qwen_Qwen3-32B-GGUF:Q4_K_M",
        "unsloth/gpt-oss-20b-GGUF",
        "unsloth/Qwen3-0.6B-GGUF:Q8_0",
        "lmstudio-community/Qwen3-8B-GGUF",
        "TheBloke/Mistral-7B-Instruct-v0.2-GGUF:Q4_K_M",
        "Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
        "mradermacher/Qwen3-8B-i1-GGUF:i1-Q4_K_M",
        "Qwen/Qwen3-8B:Q8_0",
        "unsloth/Qwen3.6-27B-MTP-GGUF:Q4_K_M",
    ],
)
def test_a_repository_of_gguf_files_is_the_same_model_in_estimate_and_in_check(kvcalc: Any, name: str) -> None:
    checked = kvcalc("check", "--gpu", "h100", "llama-server", "-hf", name, "-c", "2048", "--json").json
    estimated = kvcalc("estimate", name, "--engine", "llama.cpp", "--gpu", "h100", "--context", "2048", "--json").json
    assert checked["model"]["name"] == estimated["model"]["name"]
    assert checked["weights"]["bytes"] == estimated["weights"]["bytes"] > 0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("-hf unsloth/Qwen3-32B-GGUF:Q8_0", "qwen3-32b"),
        ("-hf bartowski/Qwen_Qwen3-32B-GGUF:Q4_K_M", "qwen3-32b"),
        ("-hf unsloth/Qwen3-8B-GGUF -hff Qwen3-8B-Q4_K_M.gguf", "qwen3-8b"),
        ("-m /models/Qwen3-8B-Q8_0.gguf", "qwen3-8b"),
        ("-hf Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M", "Qwen/Qwen2.5-7B-Instruct"),
        # Another model than the one that it was made from.
        ("-hf mradermacher/Qwen3-8B-abliterated-GGUF:Q4_K_M", "mradermacher/Qwen3-8B-abliterated-GGUF:Q4_K_M"),
    ],
)
def test_a_gguf_file_has_the_name_of_its_model(words: str, name: str) -> None:
    assert check(f"llama-server {words} -c 2048", "h100")["model"]["name"] == name


@pytest.mark.parametrize(("quant", "dtype"), [("", "q4_k_m"), (":Q8_0", "q8_0")])
def test_the_file_of_a_repository_has_its_type(kvcalc: Any, quant: str, dtype: str) -> None:
    done = kvcalc("check", "--gpu", "h100", "llama-server", "-hf", f"x/Qwen3-32B-GGUF{quant}", "--get", "weights.dtype")
    assert done.out.strip() == dtype


def test_a_file_whose_layers_have_types_that_are_not_known_says_so(kvcalc: Any) -> None:
    done = kvcalc("check", "--gpu", "h100", "llama-server", "-hf", "unsloth/Qwen3-32B-GGUF:UD-TQ1_0")
    assert done.status == 3
    assert "UD-TQ1_0: which types its layers have is not known" in done.err
    assert "such as Q4_K_M" in done.err


def test_kernels_and_passes_change_no_memory(kvcalc: Any) -> None:
    config = '{"pass_config": {"fuse_allreduce_rms": true}, "custom_ops": ["+rms_norm"], "mode": 3}'
    words = ["vllm", "serve", LLAMA, "--gpu", "h100", "--attention-config.flash_attn_version", "3"]
    found = kvcalc("check", *words, "--compilation-config", config, "--json").json
    assert found["command"]["not_counted"] == []
    counted = [*words, "-cc.max_cudagraph_capture_size=64", "--attention-config.indexer_kv_dtype", "fp4", "-cc.mode=0"]
    found = kvcalc("check", *counted, "--json").json
    told = ["attention-config indexer_kv_dtype", "compilation-config max_cudagraph_capture_size"]
    named = [text.partition(" (")[0] for text in found["command"]["not_counted"]]
    assert sorted(named) == [*told, "compilation-config mode"]


def test_unknown_options_are_named_once(kvcalc: Any) -> None:
    words = ["vllm", "serve", LLAMA, "--frobnicate", "3", "--port", "80", "--gpu", "h100", "--json"]
    document = json.loads(kvcalc("check", "--release", "0.32.0", *words).out)
    assert document["command"]["not_counted"] == ["--frobnicate"]
    assert document["command"]["ignored"] == ["--port"]
    assert [one["text"] for one in document["warnings"] if one["part"] == "command"] == ["not counted: --frobnicate"]
    refused = kvcalc("check", *words)
    assert (refused.status, refused.json["reason"]) == (4, "unrecognized arguments: --frobnicate")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["vllm", "serve", "no/such", "--gpu", "h100"], 3, "is not known"),
        (["vllm", "serve", "--gpu", "h100"], 2, "names no model"),
        (["vllm", "serve", "$MODEL", "--gpu", "h100"], 2, "$MODEL stands for a model"),
        (["vllm", "serve", "...", "--gpu", "h100"], 2, "... stands for a model"),
        (["vllm", "serve", LLAMA], 2, "needs a device"),
        (["echo", "hi", "--gpu", "h100"], 2, "not a server command"),
        (["vllm", "serve", LLAMA, "--max-model-len", "--gpu", "h100"], 4, "max-model-len: expected one argument"),
        (["vllm", "serve", LLAMA, "--speculative-config", "{", "--gpu", "h100"], 2, "not a JSON object"),
        (["vllm", "serve", LLAMA, "-tp", "3", "--gpu", "h100"], 4, "does not start"),
        (["vllm", "serve", LLAMA, "--gpu", "h100", "--max-ttft", "1s"], 2, "needs the lengths"),
        (["-f", "/no/such", "--gpu", "h100"], 2, "no such file"),
        (["vllm serve 'a", "--gpu", "h100"], 2, "quote"),
    ],
)
def test_errors_are_one_line(kvcalc: Any, arguments: list[str], status: int, message: str) -> None:
    found = kvcalc("check", *arguments)
    assert found.status == status
    assert message in found.err.splitlines()[0]


def test_several_services_have_an_answer_each(kvcalc: Any, tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(
        "services:\n"
        f"  a: {{image: 'vllm/vllm-openai:v0.33.0', command: '--model {LLAMA}'}}\n"
        "  b: {image: redis}\n"
        f"  c: {{image: 'lmsysorg/sglang:latest', command: 'sglang serve --model-path {LLAMA}'}}\n"
    )
    found = kvcalc("check", "-f", str(file), "--gpu", "h100", "--get", "command.service")
    assert found.out.split() == ["a", "c"]
    answer = check(file.read_text(), "h100", service="c")
    assert answer["command"]["engine"] == "sglang"
    assert answer["starts"]


def test_the_largest_rate_keeps_the_target() -> None:
    answer = check(
        f"vllm serve {LLAMA}", "h100", input_tokens=2000, output_tokens=250, max_ttft_seconds=0.4, ttft_percentile=90
    )
    capacity = answer["capacity"]
    assert capacity is not None
    assert 0 < (capacity["ttft_p90_seconds"] or 0) <= 0.4
    fewer = check(
        f"vllm serve {LLAMA} --max-num-seqs 4", "h100", input_tokens=2000, output_tokens=250, max_ttft_seconds=0.4,
        ttft_percentile=90,
    )["capacity"]  # fmt: skip
    assert fewer is not None
    assert fewer["requests_per_second"] < capacity["requests_per_second"]


def test_every_reader_reads_its_own_engine() -> None:
    assert [reader.engine for reader in readers()] == ["vllm", "sglang", "tensorrt-llm", "llama.cpp", "mlx"]


def test_a_context_beyond_the_models_is_refused_as_the_engine_does(kvcalc: Any) -> None:
    # _get_and_verify_max_len (config/model.py, vLLM 0.33.0); _derive_context_length (configs/model_config.py, SGLang).
    words = ["--gpu", "h200", "--json"]
    vllm = ["check", "vllm", "serve", LLAMA, "--max-model-len", "140000", *words]
    sglang = ["check", "python", "-m", "sglang.launch_server", "--model", LLAMA, "--context-length", "140000", *words]
    for asked, variable in (
        (vllm, "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
        (sglang, "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"),
    ):
        found = kvcalc(*asked)
        document = json.loads(found.out)
        assert (found.status, document["starts"]) == (4, False)
        assert variable in document["reason"]
        assert [change["value"] for change in document["server"]["try"]] == ["131072"]
        lifted = kvcalc(asked[0], f"{variable}=1", *asked[1:])
        assert json.loads(lifted.out)["starts"]


def test_a_command_on_several_machines_has_the_devices_of_all(kvcalc: Any) -> None:
    words = ["--gpu", "h200x8", "--get", "hardware.num_devices"]
    for more in (["-tp", "16", "--nnodes", "2", "--node-rank", "0"], ["-dp", "16", "--data-parallel-size-local", "8"]):
        found = kvcalc("check", "vllm", "serve", "deepseek-ai/DeepSeek-R1", *more, "-ep", *words)
        assert found.out.strip() == "16", found.err
    alone = kvcalc("check", "vllm", "serve", "deepseek-ai/DeepSeek-R1", "-tp", "16", *words)
    assert alone.status == 4
    assert "one replica needs 16" in alone.err


@pytest.mark.parametrize(("gpu", "nodes", "devices"), [
    ("h200", 1, 4), ("h200", 2, 4), ("h200x2", 2, 4), ("h200x4", 1, 4), ("h200x4", 2, 8),
])  # fmt: skip
def test_each_machine_has_the_devices_that_are_given_and_one_device_is_as_many_as_needed(
    gpu: str, nodes: int, devices: int
) -> None:
    text = f"vllm serve {LLAMA} -tp {devices} --nnodes {nodes} --node-rank 0 --max-model-len 8k"
    answer: Any = check(text, gpu)
    assert (answer["hardware"]["num_devices"], answer["starts"]) == (devices, True)


def test_the_beginning_of_a_name_is_read_as_argparse_reads_it(kvcalc: Any) -> None:
    found = kvcalc("check", "vllm", "serve", LLAMA, "--tensor-parallel", "2", "--gpu", "h100x2", "--json")
    document = json.loads(found.out)
    assert document["hardware"]["replicas"] == 1
    assert document["command"]["not_counted"] == []


def test_a_line_of_batch_asks_about_a_server(kvcalc: Any, tmp_path: Any) -> None:
    lines = [
        {"command": "check", "server": f"vllm serve {LLAMA} -tp 2", "gpu": "h100x2"},
        {"command": "check", "server": "sglang serve --model-path Qwen/Qwen3-235B-A22B-FP8 --tp 8", "gpu": "h200x8"},
        {"command": "check", "gpu": "h100"},
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = kvcalc("batch", str(file))
    good, bad, wrong = map(json.loads, found.out.splitlines())
    alone = kvcalc("check", *str(lines[0]["server"]).split(), "--gpu", "h100x2", "--json").json
    assert good == alone
    assert (bad["error"]["exit_code"], wrong["error"]["exit_code"]) == (4, 2)
    assert "does not start" in bad["error"]["message"]


@pytest.mark.parametrize("method", ["fp8", "fp8_per_tensor", "ptpc_fp8"])
def test_methods_that_convert_to_fp8_count(kvcalc: Any, method: str) -> None:
    found = kvcalc("check", "vllm", "serve", LLAMA, "--quantization", method, "--gpu", "h100", "--get", "weights.dtype")
    assert found.out.strip() == "fp8"


def test_drafts_that_the_model_does_not_have_are_not_counted(kvcalc: Any) -> None:
    config = '{"method": "mtp", "num_speculative_tokens": 1}'
    found = kvcalc("check", "vllm", "serve", LLAMA, "--speculative-config", config, "--gpu", "h100", "--json")
    assert found.json["starts"]
    assert any("drafting is not counted" in warning["text"] for warning in found.json["warnings"])


def test_a_cache_of_an_unknown_type_is_counted_in_16_bits(kvcalc: Any) -> None:
    """An NVFP4 copy may ask for an fp8 cache. What starts with the larger cache starts with the smaller one."""
    found = kvcalc("check", "vllm", "serve", "Inferact/Qwen3.8-27B-NVFP4", "--gpu", "rtx-5090", "--json").json
    assert found["kv_cache"]["dtype"] == "bf16"
    assert any("counted in bf16" in warning["text"] for warning in found["warnings"])
    older = kvcalc(
        "check", "vllm", "serve", "nvidia/DeepSeek-V3-0324-FP4", "-tp", "8", "--gpu", "b200x8", "--json"
    ).json
    assert older["weights"]["bytes"] == kvcalc("estimate", "nvidia/DeepSeek-R1-FP4", "--json").json["weights"]["bytes"]
    said = kvcalc("estimate", "Inferact/Qwen3.8-27B-NVFP4", "--engine", "vllm")
    assert (said.status, "set --kv-dtype" in said.err) == (3, True)


@pytest.mark.parametrize(
    ("gpu", "model", "starts"),
    [("mi300x", "deepseek-v3.2", True), ("mi300x", "deepseek-r1", True), ("h200", "deepseek-r1", False)],
)
def test_amds_kernels_read_blocks_of_one_token(kvcalc: Any, gpu: str, model: str, starts: bool) -> None:
    """The recipe of vllm-project/recipes for DeepSeek-V3.2-Exp on AMD's GPUs has --block-size 1."""
    done = kvcalc("check", "--gpu", f"{gpu}x8", "vllm", "serve", model, "-tp", "8", "--block-size", "1")
    assert (done.status == 0) is starts
    assert ("need multiples of 16" in done.err) is not starts


def test_a_cache_beyond_the_device_does_not_start(kvcalc: Any) -> None:
    done = kvcalc("check", "--gpu", "h200", "vllm", "serve", "deepseek-v4-flash", "--kv-cache-memory-bytes", "10G")
    assert done.status == 4
    assert "does not start: --kv-memory" in done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("LLAMA_ARG_MODEL=/m/Qwen3-32B-Q4_K_M.gguf LLAMA_ARG_CTX_SIZE=8192 llama-server", {"context_tokens": "8192"}),
        ("LLAMA_ARG_N_PARALLEL=8 llama-server -m a.gguf --parallel 2", {"parallel": "2"}),
        # The command comes after the variables, and its last name of an option counts.
        ("LLAMA_ARG_CTX_SIZE=8192 llama-server -m a.gguf -c 4096", {"context_tokens": "4096"}),
        ("llama-server -m a.gguf -c 4096 --ctx-size 2048", {"context_tokens": "2048"}),
        ("llama-server -m a.gguf --ctx-size 2048 -c 4096", {"context_tokens": "4096"}),
        ("LLAMA_ARG_BATCH=64 llama-server -m a.gguf -b 256", {"ubatch-size": "256"}),
        ("LLAMA_ARG_KV_UNIFIED=1 LLAMA_ARG_SWA_FULL=0 llama-server -m a.gguf", {"kv-unified": "true"}),
        ("llama-server -m a.gguf -b 256", {"ubatch-size": "256"}),
        ("llama-server -m a.gguf -b 4096 -ub 1024", {"ubatch-size": "1024"}),
        (
            "llama-server -m a.gguf --draft-max 8 -hfd org/small-GGUF:Q8_0",
            {"drafting": ("draft", 8, "org/small-GGUF:Q8_0")},
        ),
    ],
)
def test_llama_cpps_variables_and_batches_are_read(text: str, said: dict[str, Any]) -> None:
    """common/arg.cpp (set_env), and n_ubatch of src/llama-context.cpp."""
    found = read(text)
    assert {key: found[key] for key in said} == said
    assert "swa-full" not in found


def test_a_flag_that_is_on_can_be_turned_off(kvcalc: Any) -> None:
    """It then counts, so it is named. Short names have negative forms too."""
    assert "kv-unified" not in read("llama-server -m a.gguf -no-kvu")
    for flag, unknown in (("--cont-batching", []), ("--no-cont-batching", ["--no-cont-batching"])):
        (server,) = servers_in(f"llama-server -m a.gguf {flag}")
        assert server.read().unknown == unknown


def test_llama_cpp_without_fit_takes_the_models_context(kvcalc: Any) -> None:
    words = (
        "check",
        "--gpu",
        "rtx-4090",
        "--get",
        "workload.context_tokens",
        "llama-server",
        "-m",
        "llama-3.1-8b-Q8_0.gguf",
    )
    assert int(kvcalc(*words).out) < 131_072
    assert int(kvcalc(*words, "--fit", "off").out) == 131_072


@pytest.mark.parametrize(
    ("options", "context", "cells", "requests"),
    [
        # Four slots share the cells. A request of 2,548 tokens fits once in 4,096, and 16 times in 40,960.
        ("-c 4096", 4096, 4096, 1), ("-c 8192", 8192, 8192, 3), ("-c 16384 -np -1", 16384, 16384, 4),
        ("", 40960, 40960, 4), ("-c 8192 -np 8 -kvu", 8192, 8192, 3), ("-c 16384 -np 4", 4096, 16384, 4),
        ("-c 8192 -np 1", 8192, 8192, 1),
        # Slots with cells of their own divide the model's length (n_ctx_train, llama_context), unless --fit chooses it.
        ("-np 4 --fit off", 10240, 40960, 4), ("-np 4 -kvu --fit off", 40960, 40960, 4), ("-np 2", 40960, 81920, 2),
    ],
)  # fmt: skip
def test_slots_of_llama_cpp_hold_as_many_requests_as_their_cells(
    kvcalc: Any, options: str, context: int, cells: int, requests: int
) -> None:
    lengths = ("--input-tokens", "2048", "--output-tokens", "500", "--json")
    command = ("llama-server", "-m", "Qwen3-8B-Q4_K_M.gguf", *options.split())
    found = json.loads(kvcalc("check", "--gpu", "rtx-4090", *lengths, *command).out)
    assert (found["workload"]["context_tokens"], found["engine"]["n_ctx"]) == (context, cells)
    assert (found["requests"]["max_requests"], found["requests"]["refused"]) == (requests, None)
    assert found["capacity"]["max_running_requests"] <= requests


def test_slots_of_deepseek_v4_have_cells_of_their_own(kvcalc: Any) -> None:
    words = ("check", "--gpu", "h200x4", "--input-tokens", "2048", "--output-tokens", "500", "--get", "requests")
    found = json.loads(kvcalc(*words, "llama-server", "-m", "deepseek-v4-flash-Q4_0.gguf", "-c", "4096").out)
    assert found["max_requests"] == 4


def test_fit_of_older_llama_cpp_divides_the_models_length(kvcalc: Any) -> None:
    command = ("--get", "workload.context_tokens", "llama-server", "-m", "Qwen3-8B-Q4_K_M.gguf", "-np", "4")
    assert kvcalc("check", "--gpu", "h100-sxm", "--release", "b9927", *command).out == "10240\n"
    assert kvcalc("check", "--gpu", "h100-sxm", *command).out == "40960\n"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_gguf_file_has_a_rate_or_a_reason(kvcalc: Any, tmp_path: Path, wrong: bool) -> None:
    pytest.importorskip("gguf", reason="the extra `gguf`")
    from tests.model.gguf_writing import base, config_of, tensors_of, write

    pairs = base(config_of("llama-3.2-1b"))
    if wrong:
        pairs["feed_forward_length"] *= 2
    path = str(tmp_path / "Llama-3.2-1B-Instruct-Q8_0.gguf")
    write(Path(path), "llama", pairs, tensors_of(load_model("llama-3.2-1b"), "llama", "Q8_0"), file_type=7)
    words = ("check", "--gpu", "rtx-4090", "--input-tokens", "500", "--output-tokens", "100", "--json", "llama-server")
    server = ("-c", "8192", "-np", "4")
    found = json.loads(kvcalc(*words, "-m", path, *server).out)
    if wrong:
        reason = "throughput: the GGUF file has 1.2 B parameters, but its metadata give 2.0 B"
        assert found["capacity"] is None
        assert [sentence(warning).partition(":")[0] for warning in found["warnings"]].count("throughput") == 1
        assert reason in " ".join(map(sentence, found["warnings"]))
        return
    by_name = json.loads(kvcalc(*words, "-m", "Llama-3.2-1B-Instruct-Q8_0.gguf", *server).out)
    for figure in ("requests_per_second", "ttft_mean_seconds", "tpot_mean_seconds"):
        assert found["capacity"][figure] == pytest.approx(by_name["capacity"][figure], rel=0.02), figure


@pytest.mark.parametrize(("more", "experts"), [([], "1"), (["--enable-expert-parallel"], "8")])
def test_dp_ranks_have_whole_experts_only_if_they_are_told(kvcalc: Any, more: list[str], experts: str) -> None:
    """ParallelConfig of vLLM (config/parallel.py), in which enable_expert_parallel is off by default."""
    words = (
        "check",
        "--gpu",
        "h200x8",
        "--get",
        "engine.expert_parallel_size",
        "vllm",
        "serve",
        "deepseek-v3",
        "-dp",
        "8",
    )
    assert kvcalc(*words, *more).out == f"{experts}\n"
    assert kvcalc("check", "--gpu", "h100x2", "vllm", "serve", LLAMA, "-dp", "2").status == 0


def test_a_server_that_refuses_the_requests_says_so_first(kvcalc: Any) -> None:
    command = ("check", "vllm", "serve", "Qwen/Qwen3-8B", "--max-model-len", "1000", "--gpu", "h100")
    found = kvcalc(*command, "--input-tokens", "900", "--output-tokens", "200", "--format", "human")
    assert found.status == 4
    assert found.out.splitlines()[0].endswith("starts, and refuses requests of 900 + 200 tokens: they need a")
    assert "sustains" not in found.out
    assert kvcalc(*command, "--input-tokens", "300", "--output-tokens", "100", "--get", "starts").status == 0


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (f"vllm serve {LLAMA} -tp 3", "--tensor-parallel-size 3 does not divide"),
        (f"CUDA_VISIBLE_DEVICES=0 vllm serve {LLAMA} -tp 2", "one replica needs 2"),
        ("python -m sglang.launch_server --model-path a/b --tp 3 --dp 2 --enable-dp-attention", "not a multiple of 2"),
    ],
)
def test_a_refusal_of_the_engine_is_a_document(kvcalc: Any, command: str, reason: str) -> None:
    words = ("check", command, "--gpu", "h100")
    found = kvcalc(*words, "--json")
    assert (found.status, found.json["starts"]) == (4, False)
    assert reason in found.json["reason"]
    assert not found.json["reason"].startswith("does not start: does")
    for path, value in (("starts", "false"), ("capacity", "null"), ("fit.fits", "null"), ("command.copies", "1")):
        got = kvcalc(*words, "--get", path)
        assert (got.status, got.out) == (4, f"{value}\n"), path
        assert reason in " ".join(got.err.split())
    assert kvcalc(*words, "--get", "fit.fitz").status == 2
    human = kvcalc(*words)
    assert (human.status, human.out) == (4, "")


def test_a_refusal_among_several_servers_is_an_answer(kvcalc: Any, tmp_path: Path) -> None:
    file = tmp_path / "two.sh"
    for second, status in (("-tp 2", 0), ("-tp 3", 4), ("--max-model-len x", 4), ("--nnodes 0", 1)):
        file.write_text(f"vllm serve {LLAMA}\nvllm serve {LLAMA} {second}\n")
        found = kvcalc("check", "-f", str(file), "--gpu", "h100", "--get", "starts")
        assert (found.status, found.out) == (status, {0: "true\ntrue\n", 4: "true\nfalse\n", 1: "true\n"}[status])


def test_a_target_that_no_rate_meets_is_a_load_that_does_not_fit(kvcalc: Any) -> None:
    load = ("--input-tokens", "2000", "--output-tokens", "250")
    words = ("check", "vllm", "serve", LLAMA, "--gpu", "h100", *load)
    for target, status in (("1ms@p99", 4), ("2s@p99", 0)):
        found = kvcalc(*words, "--max-ttft", target, "--json")
        assert (found.status, found.json["starts"]) == (status, True)
        assert bool(found.json["capacity"]["requests_per_second"]) is (status == 0)
    shown = kvcalc(*words, "--max-ttft", "1ms@p99", "--format", "human")
    assert shown.status == 4
    assert "sustains no rate within TTFT p99 <= 1 ms: TTFT p99 of\nrequests alone is" in shown.out
    assert "0 requests per second" not in shown.out


@pytest.mark.parametrize("words", [["env", "CUDA_VISIBLE_DEVICES=0"], ["A=b c", "CUDA_VISIBLE_DEVICES=0"]])
def test_words_are_read_like_the_text_of_a_script(kvcalc: Any, words: list[str]) -> None:
    result = kvcalc("check", "--gpu", "h100x8", "--", *words, "vllm", "serve", "Qwen/Qwen3-8B", "-tp", "4")
    assert result.status == 4
    assert "1 device with --tensor-parallel-size 4" in result.err
