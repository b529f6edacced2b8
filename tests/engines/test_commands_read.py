"""A command that kvcalc writes is read back to the layout, the options and the drafts that it was written for."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvcalc.engines import SERVERS, start_command
from kvcalc.engines.command import Checkpoint, ServerArguments
from kvcalc.engines.reading import Read, readers
from kvcalc.errors import LayoutError, UsageError
from kvcalc.model.layout import Layout
from kvcalc.model.resolve import load_model
from kvcalc.planning.check.servers import choose_server, servers_in
from kvcalc.writing.shell import join
from tests.engines.test_commands import DRAFTINGS
from tests.engines.test_options_are_read import CASES, GONE, NO_FLAGS
from tests.rows import every_row

# Options that a layout has in fields of its own, and those that depend on others.
FIELDS = {
    "max-num-seqs", "max-running-requests", "max-batch-size", "parallel", "context-length", "attn-cp-size",
    "split-mode", "no-enable-prefix-caching", "speculative-num-draft-tokens", "speculative-eagle-topk", "draft-max",
    "cpu-moe", "n-cpu-moe", "n-gpu-layers",
}  # fmt: skip
RUNNING = {
    "vllm": "max-num-seqs", "sglang": "max-running-requests", "tensorrt-llm": "max-batch-size", "llama.cpp": "parallel",
}  # fmt: skip


def text_of(value: object) -> str:
    return {True: "true", "128,32k": "128,32768"}.get(value, str(value))


def read_back(engine: str, checkpoint: Checkpoint, arguments: ServerArguments) -> Read:
    words = start_command(engine).words(checkpoint, arguments)
    assert words is not None
    return choose_server(join(words), None).read()


@every_row("engine, seed", [(engine, seed) for engine in SERVERS for seed in range(6)])
def test_a_command_is_read_back(engine: str, seed: int) -> None:
    random, is_llama = Random(seed), engine == "llama.cpp"
    names = [name for name in CASES[engine] if name not in NO_FLAGS | GONE | FIELDS]
    options = {name: CASES[engine][name].value for name in random.sample(names, random.randint(0, 5))}
    tp, pp, dp = (1, 1, 1) if is_llama else (random.choice((1, 4)), random.choice((1, 2)), random.choice((1, 2, 8)))
    tp = 1 if engine == "tensorrt-llm" and dp > 1 else tp  # its DP ranks are on one device each
    drafting = None if is_llama else random.choice((None, *DRAFTINGS))
    checkpoint = Checkpoint("org/model", random.choice((None, "main")), random.choice((None, "fp16")))
    arguments = ServerArguments(
        Layout(tp, pp, dp, tp * dp), 1000 * random.randint(1, 99), 8 * random.randint(1, 50),
        "bf16" if is_llama else "fp8", {name: "" if value is True else str(value) for name, value in options.items()},
        drafting=drafting,
    )  # fmt: skip
    found = read_back(engine, checkpoint, arguments)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "expert_parallel_size")
    if not is_llama:
        assert [found.size(name) for name in sizes] == [tp, pp, dp, tp * dp]
        assert (found.model, found.fields["kv_dtype"]) == ("org/model", "fp8")
        assert found.fields.get("dtype") == checkpoint.dtype
    context = found.fields.get("max_model_len") or found.fields["context_tokens"]
    assert int(context) == arguments.context_tokens
    assert found.drafting == (None if drafting is None else tuple(drafting))
    # vLLM and TensorRT-LLM count the requests of one DP rank.
    each = 1 if engine == "sglang" else dp
    assert int(found.settings[RUNNING[engine]]) == -(-(arguments.max_running or 0) // each)
    read = {name: text_of({"True": True}.get(text, text)) for name, text in found.settings.items()}
    assert {name: read.get(name) for name in options} == {name: text_of(value) for name, value in options.items()}
    assert not found.unknown


def trtllm(options: str = "", **file: Any) -> Read:
    text = f"echo '{json.dumps(file)}' > more.yaml && trtllm-serve a/b {options} --config more.yaml"
    return choose_server(text, None).read()


def test_the_file_of_tensorrt_llm_counts_unless_an_option_says_otherwise() -> None:
    """Names are those of LlmArgs and KvCacheConfig (llmapi/llm_args.py)."""
    found = trtllm(
        "--max_batch_size 16", max_batch_size=32, max_num_tokens=4096, tensor_parallel_size=4, build_config=None,
        kv_cache_config={"dtype": "fp8", "tokens_per_block": 64, "max_attention_window": [128, 4096], "host_cache": 1},
        moe_config={"backend": "CUTLASS", "max_num_tokens": 1}, enable_chunked_prefill=False, max_beam_width=1,
    )  # fmt: skip
    assert found.fields == {"tensor_parallel_size": "4", "kv_dtype": "fp8"}
    assert found.settings == {
        "max-batch-size": "16", "max-num-tokens": "4096", "tokens-per-block": "64", "max-attention-window": "128,4096",
    }  # fmt: skip
    assert sorted(found.unknown) == ["host_cache", "moe_config.max_num_tokens"]
    assert trtllm(max_beam_width=4).unknown == ["max_beam_width"]
    assert trtllm(kv_cache_dtype="nvfp4").fields["kv_dtype"] == "nvfp4"
    assert trtllm(dtype="bfloat16").fields["dtype"] == "bf16"
    assert "dtype" not in trtllm(kv_cache_config={"dtype": "fp8"}).fields
    ranks = trtllm("--tp_size 8", enable_attention_dp=True)
    assert (ranks.size("data_parallel_size"), ranks.size("tensor_parallel_size")) == (8, 1)
    for drafts in ({"decoding_type": "MTP"}, {"max_draft_len": 3}, {"decoding_type": "no", "max_draft_len": 3}):
        with pytest.raises(UsageError, match="needs decoding_type and max_draft_len"):
            trtllm(speculative_config=drafts)
    eagle = {"decoding_type": "Eagle", "max_draft_len": 4, "speculative_model_dir": "a/head"}
    assert trtllm(speculative_config=eagle).drafting == ("eagle1", 4, "a/head")
    eagle.update(decoding_type="EAGLE3", speculative_model="b/head")
    assert trtllm(speculative_config=eagle).drafting == ("eagle", 4, "b/head")


@pytest.mark.parametrize(
    ("file", "fields", "settings", "unknown"),
    [
        # Sizes and lengths have other names in the file than on the command line.
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "moe_expert_parallel_size": 4, "max_seq_len": 4096},
         {"tensor_parallel_size": "8", "pipeline_parallel_size": "2", "expert_parallel_size": "4",
          "context_tokens": "4096"}, {}, []),
        # Until 0.20, the PyTorch backend's were in a mapping of their own.
        ({"pytorch_backend_config": {"max_num_tokens": 4096, "kv_cache_dtype": "fp8"}}, {"kv_dtype": "fp8"},
         {"max-num-tokens": "4096"}, []),
        ({"kv_cache_config": {"max_tokens": 100, "free_gpu_memory_fraction": 0.5}}, {"kv_dtype": "auto"},
         {"max-tokens": "100", "free-gpu-memory-fraction": "0.5"}, []),
        # Flags that are not set, and defaults.
        ({"disable_overlap_scheduler": False, "enable_attention_dp": False, "max_beam_width": 1,
          "max_gpu_total_bytes": 0, "scheduler_config": {}, "max_num_tokens": None}, {}, {}, []),
        ({"disable_overlap_scheduler": True}, {}, {"disable-overlap-scheduler": "True"}, []),
        ({"attention_dp_config": {"enable_balance": True, "batching_wait_iters": 0, "timeout_iters": 60}}, {},
         {"enable-balance": "True", "batching-wait-iters": "0", "timeout-iters": "60"}, []),
        ({"max_gpu_total_bytes": 5, "scheduler_config": {"policy": 1}, "odd": 3}, {}, {},
         ["max_gpu_total_bytes", "scheduler_config", "odd"]),
        ({"moe_config": {"backend": "X", "disable_finalize_fusion": True, "use_low_precision_moe_combine": True,
                         "odd": 1}}, {}, {}, ["moe_config.odd"]),
        ({"moe_config": 3}, {}, {}, ["moe_config"]),
    ],
)  # fmt: skip
def test_the_keys_of_tensorrt_llms_file(
    file: dict[str, Any], fields: dict[str, str], settings: dict[str, str], unknown: list[str]
) -> None:
    """LlmArgs, KvCacheConfig and MoeConfig (llmapi/llm_args.py, TensorRT-LLM 1.3)."""
    found = trtllm(**file)
    assert (found.fields, found.settings, found.unknown) == (fields, settings, unknown)


@pytest.mark.parametrize(
    ("graphs", "starts"),
    [
        ({"batch_sizes": [1, 8], "max_batch_size": 4}, False), ({"batch_sizes": [1, 8], "max_batch_size": 8}, True),
        ({"batch_sizes": [1, 8]}, True), ({"batch_sizes": [1, 8], "max_batch_size": 0}, True),
        ({"batch_sizes": [], "max_batch_size": 4}, True), ({"max_batch_size": 4}, True), (True, True),
        ({"batch_sizes": ["1"], "max_batch_size": 4}, True),
    ],
)  # fmt: skip
def test_the_graphs_of_tensorrt_llm_agree_with_their_list(graphs: Any, starts: bool) -> None:
    """BaseCudaGraphConfig (llmapi/llm_args.py)."""
    if starts:
        assert not trtllm(cuda_graph_config=graphs).unknown
        return
    with pytest.raises(LayoutError, match="graphs of 8 requests and a max_batch_size of 4") as refused:
        trtllm(cuda_graph_config=graphs)
    assert refused.value.hint == "max_batch_size: 8"


def test_the_drafts_of_older_files_of_tensorrt_llm() -> None:
    """num_nextn_predict_layers was MTP's number of drafted tokens. MTP has no model of its own."""
    drafts = {"decoding_type": "MTP", "num_nextn_predict_layers": 2, "speculative_model": "a/b"}
    assert trtllm(speculative_config=drafts).drafting == ("mtp", 2, None)
    assert trtllm(speculative_config={"decoding_type": "NGram", "max_draft_len": 5}).drafting == ("ngram", 5, None)


def test_a_file_that_is_not_here_is_named_and_one_that_is_here_is_not() -> None:
    missing = choose_server("trtllm-serve a/b --config /nowhere/more.yaml", None).read()
    assert missing.notes == ["/nowhere/more.yaml is not here, so its settings do not count"]
    assert trtllm(max_num_tokens=4096).notes == choose_server("trtllm-serve a/b", None).read().notes == []


@pytest.mark.parametrize(
    ("config", "drafting"),
    [
        ({"model": "a/small", "num_speculative_tokens": 3}, ("draft", 3, "a/small")),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 2}, ("mtp", 2, None)),
        ({"method": "eagle3", "model": "a/head", "num_speculative_tokens": 4}, ("eagle", 4, "a/head")),
        ({"method": "ngram"}, ("ngram", 1, None)),
        ({"model": "z-lab/Qwen3-8B-DFlash-b16"}, ("dflash", 1, "z-lab/Qwen3-8B-DFlash-b16")),
        ({"model": "AngelSlim/Qwen3-8B_eagle3"}, ("eagle", 1, "AngelSlim/Qwen3-8B_eagle3")),
        ({"model": "yuhuili/EAGLE-LLaMA3-Instruct-8B"}, ("eagle1", 1, "yuhuili/EAGLE-LLaMA3-Instruct-8B")),
        ({"num_speculative_tokens": 3}, None),
        ({"method": "unheard_of", "num_speculative_tokens": 3}, None),
    ],
)
def test_vllms_drafts_are_named_by_their_method_or_by_a_model(
    config: dict[str, Any], drafting: tuple[str, int, str | None] | None
) -> None:
    """SpeculativeConfig (vllm/config/speculative.py)."""
    found = choose_server(f"vllm serve a/b --speculative-config '{json.dumps(config)}'", None).read()
    assert found.drafting == drafting
    assert bool(found.notes) == (drafting is None)


def vllm(options: str, environment: str = "") -> Read:
    return choose_server(f"{environment} vllm serve a/b {options}".strip(), None).read()


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ("-dp 16 -dpl 4", 4), ("-dp 16 --data-parallel-size-local 5", 4), ("-dp 16 -dpl 16", 1), ("-dp 16", 1),
        ("--nnodes 2", 2), ("-n 3", 3), ("", 1),
    ],
)  # fmt: skip
def test_the_machines_of_vllms_command(options: str, nodes: int) -> None:
    """DP ranks that are not on this machine are on others with as many (config/parallel.py, vLLM 0.33.0)."""
    assert vllm(options).nodes == nodes


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("-dp 16 -tp 2 --enable-expert-parallel", {"expert_parallel_size": "32"}),
        ("-tp 4 -ep", {"expert_parallel_size": "4"}), ("-tp 4", {"expert_parallel_size": None}),
        # Names of options may be shortened, have an underscore, and an equals sign.
        ("--max-model 4096", {"max_model_len": "4096"}), ("--max_model_len=4096", {"max_model_len": "4096"}),
        ("--max-model-len -1", {"max_model_len": "-1"}),
        ("--dtype half --kv_cache_dtype bfloat16", {"dtype": "fp16", "kv_dtype": "bf16"}),
        # Methods that convert while they load; the others name what the config says.
        ("-q fp8", {"dtype": "fp8"}), ("--quantization fp8_per_block", {"dtype": "fp8"}), ("-q awq", {"dtype": None}),
    ],
)  # fmt: skip
def test_the_fields_of_vllms_command(options: str, fields: dict[str, str | None]) -> None:
    found = vllm(options)
    assert {name: found.fields.get(name) for name in fields} == fields
    assert not found.unknown


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ("--enable-lora", {"max-loras": "1"}), ("--enable-lora --max-loras 4 --max-cpu-loras 4", {"max-loras": "4"}),
        ("--max-lora-rank 64 --max-loras 4", {}), ("--enable-lora --max-lora-rank 64", {"max-lora-rank": "64"}),
        ("--max-cpu-loras 4", {}), ("--kv-cache-dtype-skip-layers 1 2 3", {"kv-cache-dtype-skip-layers": "1,2,3"}),
        ("--no-enable-prefix-caching", {"no-enable-prefix-caching": "true"}),
        ("--no-disable-hybrid-kv-cache-manager", {}),
        # --compilation-config is an object, single keys of it, or the number of its mode, of which 3 is the default.
        ("-cc 3", {}), ("-cc.level=3", {}), ("--compilation-config.pass_config.fuse=true", {}),
        ("-cc.cudagraph_mode=NONE -cc.mode=3", {"cudagraph-mode": "none"}),
        ("--compilation-config '{\"cudagraph_mode\": \"FULL\"}'", {"cudagraph-mode": "full"}),
        # An option of its own counts more than the same in --attention-config.
        ("-ac.backend FLASHINFER", {"attention-backend": "FLASHINFER"}),
        ("--attention-config.backend A --attention-backend B", {"attention-backend": "B"}),
        ("-ac.use_trtllm_attention=true", {}),
    ],
)  # fmt: skip
def test_the_settings_of_vllms_command(options: str, settings: dict[str, str]) -> None:
    found = vllm(options)
    assert found.settings == settings
    assert not found.unknown


@pytest.mark.parametrize(
    ("options", "settings", "unknown"),
    [
        ("--max-lora-rank 64 --max-loras-per-batch 4", {}, []),
        ("--enable-lora --max-lora-rank 64 --lora-target-modules all", {"max-lora-rank": "64"}, []),
        ("--lora-paths a=b c=d --max-lora-rank 64", {"max-lora-rank": "64"}, []),
        ("--lora-paths a=b c=d", {}, ["--lora-paths"]),
        (
            "--enable-lora --max-lora-rank 64 --lora-target-modules q_proj k_proj", {"max-lora-rank": "64"},
            ["--lora-target-modules"],
        ),
    ],
)  # fmt: skip
def test_sglang_has_adapters_if_they_are_enabled(options: str, settings: dict[str, str], unknown: list[str]) -> None:
    command = f"python -m sglang.launch_server --model-path org/model {options}"
    found = choose_server(command, None).read()
    assert (found.settings, found.unknown) == (settings, unknown)


def test_the_environment_of_vllms_command() -> None:
    assert vllm("", "VLLM_PP_LAYER_PARTITION=16,32").settings == {"pp-layer-partition": "16,32"}
    for text, is_lifted in (("1", True), ("True", True), ("0", False), ("no", False)):
        assert vllm("", f"VLLM_ALLOW_LONG_MAX_MODEL_LEN={text}").lifts_limit is is_lifted
    # A file that is not here may change the model's limit, which then does not count.
    assert [vllm(options).lifts_limit for options in ("--config a.yaml", "--watermark 1", "")] == [True, False, False]


@pytest.mark.parametrize(
    ("options", "overrides", "unknown"),
    [
        ('--hf-overrides \'{"rope_scaling": {"factor": 4.0}}\'', {"rope_scaling": {"factor": 4.0}}, []),
        ('--rope-scaling \'{"factor": 4.0}\' --rope-theta 1e6', {"rope_scaling": {"factor": 4.0}}, []),
        ("--hf-overrides.rope_parameters.factor 2", {"rope_parameters": {"factor": 2}}, []),
        ('--hf-overrides \'{"text_config": {"max_position_embeddings": 9}}\'', {"max_position_embeddings": 9}, []),
        ('--hf-overrides \'{"architectures": ["A"], "num_experts": 2}\'', {}, ["--hf-overrides num_experts"]),
    ],
)  # fmt: skip
def test_the_keys_of_the_config_that_a_command_changes(
    options: str, overrides: dict[str, object], unknown: list[str]
) -> None:
    found = vllm(options)
    assert (found.overrides, found.unknown) == (overrides, unknown)


@pytest.mark.parametrize(
    ("options", "unknown"),
    [
        ("-q torchao", ["quantization torchao"]),
        ("-cc 0", ["compilation-config mode"]),
        ("-cc.level=2", ["compilation-config level"]),
        ("-cc.new=3", ["compilation-config new"]),
        ("-cc.cudagraph_mode=2", ["compilation-config cudagraph_mode"]),
        ("-ac.odd=1", ["attention-config odd"]),
        ("--enable-dbo --enable-sleep-mode --no-enable-dbo", ["--enable-sleep-mode"]),
        ("--config /nowhere/c.yaml", ["--config"]),
    ],
)
def test_what_kvcalc_does_not_count_in_vllms_command(options: str, unknown: list[str]) -> None:
    assert vllm(options).unknown == unknown


@pytest.mark.parametrize(
    ("text", "is_on"), [("1", True), ("on", True), ("enabled", True), ("true", True), ("0", False), ("True", False)]
)
def test_a_variable_turns_a_flag_of_llama_server_on(text: str, is_on: bool) -> None:
    """is_truthy (common/arg.cpp). A variable with a value is the option itself."""
    command = f"LLAMA_ARG_SWA_FULL={text} LLAMA_ARG_UBATCH=256 llama-server -m x.gguf"
    found = choose_server(command, None).read().settings
    assert ("swa-full" in found, found["ubatch-size"]) == (is_on, "256")


def test_options_without_an_effect_are_ignored() -> None:
    found = vllm("--no-enable-log-requests --port 9000 --swap-space 4 --enable-reasoning")
    assert found.ignored == ["--no-enable-log-requests", "--port", "--swap-space", "--enable-reasoning"]
    assert not found.unknown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--enable-lora --max-loras 4 --max-cpu-loras 3", "--max-cpu-loras 3: vLLM does not start"),
        ("-dp 4 -dpl 0", "--data-parallel-size-local '0'"), ("--nnodes two", "--nnodes: invalid int value: 'two'"),
        ("--tensor-parallel-size", "--tensor-parallel-size: expected one argument"),
        ("--speculative-config 3", "not a JSON object"),
        ("-cc '[1]'", "not a JSON object"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_vllms_command(options: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        vllm(options)


@pytest.mark.parametrize(("text", "words"), [("vllm serve", "names no model"), ("vllm serve $MODEL", "needs its name")])
def test_a_command_needs_the_name_of_a_model(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose_server(text, None).read()


def test_a_file_of_options_comes_before_those_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(
        "tensor-parallel-size: 2\nmax-model-len: 4096\nenable-expert-parallel: true\nenable-lora: false\nseed: null\n"
        "compilation-config: {cudagraph_mode: FULL}\n"
    )
    for option in (f"--config {file}", f"--config={file}"):
        found = vllm(f"{option} --max-model-len 8192")
        assert found.fields == {"tensor_parallel_size": "2", "max_model_len": "8192", "expert_parallel_size": "2"}
        assert found.settings == {"cudagraph-mode": "full"}
        assert not found.unknown


@pytest.mark.parametrize(
    ("quantized", "asked", "words"),
    [
        (None, "awq", "not quantized"), (None, "fp8", None), (None, "", None),
        ({"quant_method": "awq"}, "awq_marlin", None), ({"quant_method": "gptq"}, "gptq_marlin", None),
        ({"quant_method": "gptq"}, "awq", "a checkpoint in gptq"),
        ({"quant_method": "awq"}, "fp8", "a checkpoint in awq"),
        ({"quant_method": "fp8"}, "fp8", None), ({"quant_method": "fp8"}, "awq", "a checkpoint in fp8"),
        ({"quant_method": "compressed-tensors"}, "modelopt", "a checkpoint in compressed-tensors"),
        # hf_quant_config.json of ModelOpt has no method.
        ({"quant_algo": "FP8"}, "modelopt", None), ({"quant_algo": "FP8"}, "gptq", None),
        ({"quant_method": "modelopt"}, "compressed-tensors", None),
        # Other methods are not compared.
        ({"quant_method": "mxfp4"}, "awq", None), ({"quant_method": "awq"}, "bitsandbytes", None),
    ],
)  # fmt: skip
def test_vllm_reads_a_checkpoint_in_its_own_method(
    quantized: dict[str, str] | None, asked: str, words: str | None
) -> None:
    """_verify_quantization (config/model.py) and get_quant_config (model_loader/weight_utils.py), vLLM 0.33.0."""
    spec = load_model("llama-3.1-8b")._replace(quantization=quantized)
    (reader,) = (one for one in readers() if one.engine == "vllm")
    found = vllm(f"-q {asked}" if asked else "")
    if words is None:
        reader.check_model(found, spec)
        return
    with pytest.raises(LayoutError, match=words):
        reader.check_model(found, spec)


def test_modelopts_checkpoints_are_read_in_their_method_since_0_10_1() -> None:
    # vllm-project/vllm#22073. nvidia/Gemma-4-26B-A4B-NVFP4 ran with --quantization compressed-tensors under 0.20.2.
    spec = load_model("nvidia/Gemma-4-26B-A4B-NVFP4")
    (reader,) = (one for one in readers() if one.engine == "vllm")
    found = vllm("-q compressed-tensors")
    for release, starts in (("", True), ("@0.20.2", True), ("@0.10.1", True), ("@0.10.0", False)):
        found.engine = f"vllm{release}"
        with nullcontext() if starts else pytest.raises(LayoutError, match="a checkpoint in modelopt"):
            reader.check_model(found, spec)


@pytest.mark.parametrize(
    ("given", "is_known"),
    [("exps=CPU", True), (".ffn_.*_exps.=CPU", True), ("blk.1.ffn_up_exps=CPU", False), ("exps=CUDA0", False)],
)
def test_only_experts_of_all_layers_that_stay_in_host_memory_are_counted(given: str, is_known: bool) -> None:
    for option in ("-ot", "--override-tensor"):
        read = servers_in(f"llama-server -m y.gguf {option} '{given}'")[0].read()
        assert (read.settings.get("cpu-moe"), read.unknown) == (
            ("true", []) if is_known else (None, ["--override-tensor"])
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10G", 10 * 2**30), ("10g", 10**10), ("1T", 2**40), ("512M", 2**29), ("25.6k", 25_600), ("8K", 8192),
        ("16384", 16_384), ("10GiB", None), ("1.5G", None), ("10 GB", None),
    ],
)  # fmt: skip
def test_vllm_reads_some_integers_with_letters(text: str, expected: int | None) -> None:
    """human_readable_int (utils/argparse_utils.py) of vLLM 0.33.0, for the names in human_readable_int_args."""
    names = {"--kv-cache-memory-bytes": "kv_memory_bytes", "--max-num-batched-tokens": "max-num-batched-tokens"}
    for option, name in names.items():
        (server,) = servers_in(f"vllm serve a/b {option} '{text}'")
        if expected is None:
            with pytest.raises(UsageError, match=option):
                server.read()
        else:
            read = server.read()
            assert int({**read.fields, **read.settings}[name]) == expected


@pytest.mark.parametrize(
    ("words", "context", "batch"),
    [
        ("-c 8192", "8192", None), ("--ctx-size 8192 -np 4", "2048", "4"), ("-c 3 -np 4", "1", "4"),
        ("-c 8192 -np 4 --kv-unified", "8192", None), ("-c 0 -np 4", None, "4"), ("-np 4", None, "4"),
    ],
)  # fmt: skip
def test_slots_divide_the_context_of_llama_server_unless_they_share_it(
    words: str, context: str | None, batch: str | None
) -> None:
    fields = servers_in(f"llama-server -m y.gguf {words}")[0].read().fields
    assert (fields.get("context_tokens"), fields.get("batch_size")) == (context, batch)


@pytest.mark.parametrize(
    ("words", "drafting"),
    [
        ("--spec-type ngram-mod --spec-ngram-mod-n-max 5", ("ngram", 5, None)),
        ("--spec-type ngram-mod", ("ngram", 16, None)),
        ("--spec-type draft-mtp --spec-draft-n-max 3", ("mtp", 3, None)),
        ("--spec-type draft-mtp --spec-draft-model a/x.gguf", ("mtp", 16, None)),  # of the model itself
        ("--spec-draft-model a/x-Q8_0.gguf --spec-draft-n-max 4", ("draft", 4, "x-Q8_0")),
        ("--spec-type draft-eagle3 --spec-draft-model a/x-Q8_0.gguf", ("eagle", 16, "x-Q8_0")),
        ("", None),
    ],
)  # fmt: skip
def test_llama_server_drafts_by_its_type_or_with_a_model_that_is_named(words: str, drafting: Any) -> None:
    assert servers_in(f"llama-server -m y.gguf {words}")[0].read().drafting == drafting


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("-hf ggml-org/gpt-oss-20b-GGUF", "ggml-org/gpt-oss-20b-GGUF"),
        ("-hf ggml-org/Llama-3.1-8B-GGUF:Q8_0", "ggml-org/Llama-3.1-8B-GGUF:Q8_0"),
        ("-hf x/Llama-3.1-8B-GGUF:Q8_0 -hff Llama-3.1-8B-Q6_K.gguf", "x/Llama-3.1-8B-GGUF:Q6_K"),
        ("-m models/Llama-3.1-8B-Instruct-Q4_K_M.gguf", "Llama-3.1-8B-Instruct-Q4_K_M"),
        ("-m models/Qwen3-32B-UD-Q4_K_XL-00001-of-00002.gguf", "Qwen3-32B-UD-Q4_K_XL"),
        ("-m models/Llama-3.1-8B-Instruct.gguf", "models/Llama-3.1-8B-Instruct.gguf"),
    ],
)
def test_the_name_of_a_gguf_file_has_the_type_of_its_weights(file: str, model: str) -> None:
    """The name goes to the one place that knows names. A file without a type stays a path, whose type is not known."""
    read = servers_in(f"llama-server {file}")[0].read()
    assert (read.model, "dtype" in read.fields) == (model, False)
