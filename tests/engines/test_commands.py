"""Every flag in a printed command exists in the engine."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from kvcalc.engines import ENGINES, SERVERS, engine_class, start_command
from kvcalc.engines.command import DECODE, PREFILL, ROLES, ROUTER, Checkpoint, Drafting, Pools, ServerArguments
from kvcalc.engines.llama_cpp.command import _ggml_type
from kvcalc.memory.dtypes import DTYPES
from kvcalc.model.layout import Layout
from kvcalc.writing.shell import AND, INTO, join
from tests.conftest import ROOT
from tests.rows import every_row

OPTIONS = ROOT / "tests" / "engine_options"
LISTS = {
    "vllm": "vllm-0.33.0.txt", "sglang": "sglang-0.5.23.txt", "tensorrt-llm": "tensorrt-llm-1.3.txt",
    "llama.cpp": "llama-server-2026.txt",
}  # fmt: skip

DRAFTINGS = [
    Drafting("mtp", 3, None), Drafting("eagle", 3, "a/head"), Drafting("draft", 4, "b/small"),
    Drafting("ngram", 4, None),
]  # fmt: skip

LAYOUTS = [
    (
        Checkpoint("meta-llama/Meta-Llama-3-70B", revision, dtype),
        ServerArguments(Layout(tp, pp, dp, tp * dp), 8192, 64, kv_dtype, settings, beyond, drafting),
    )
    for tp, pp, dp, revision, beyond in ((1, 1, 1, None, True), (8, 2, 1, "main", False), (2, 1, 8, None, False))
    for dtype in (None, "bf16", "fp16", "fp32")
    for kv_dtype in ("bf16", "fp8")
    for drafting in (None, *DRAFTINGS)
    for settings in (
        {},
        {"gpu-memory-utilization": "0.85", "mem-fraction-static": "0.8", "max-num-batched-tokens": "4096"},
        {"enable-prefix-caching": "true", "block-size": "32", "page-size": "64"},
        {
            "disable-hybrid-kv-cache-manager": "",
            "mamba-cache-mode": "align",
            "mamba-block-size": "64",
            "mamba-cache-dtype": "auto",
            "mamba-ssm-cache-dtype": "float32",
            "kv-cache-dtype-skip-layers": "0,1",
            "pp-layer-partition": "40,40",
        },
        {"max-loras": "4", "max-loras-per-batch": "4", "speculative-num-draft-tokens": "4", "draft-max": "3"},
    )
]


def words_of(engine: str, checkpoint: Checkpoint, arguments: ServerArguments) -> list[str]:
    """The words of an engine's command, which has this arguments."""
    words = start_command(engine).words(checkpoint, arguments)
    assert words is not None
    return words


def options_of(file: str) -> set[str]:
    lines = (OPTIONS / file).read_text().splitlines()
    assert lines[0].startswith("# ")
    return set(lines[1:])


@every_row("checkpoint, arguments", LAYOUTS)
def test_every_flag_is_the_engines(checkpoint: Checkpoint, arguments: ServerArguments) -> None:
    for engine in SERVERS:
        words, file = start_command(engine).words(checkpoint, arguments), LISTS[engine]
        if words is None:
            assert arguments.kv_dtype == "fp8" or arguments.layout.data_parallel_size > 1
            continue
        flags = {word for word in words if word.startswith("--")}
        assert flags
        assert flags <= options_of(file), flags - options_of(file)


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ("sglang", "--attn-dp-size 8"), ("sglang@0.5.22", "--attn-dp-size 8"), ("vllm@0.11", "--attn-dp-size 8"),
        ("sglang@0.5.21", "--enable-dp-attention --dp-size 8"), ("sglang@2026-10-01", "--enable-dp-attention"),
    ],
)  # fmt: skip
def test_dp_ranks_are_asked_for_as_the_release_wants(engine: str, flags: str) -> None:
    arguments = ServerArguments(Layout(2, 1, 8, 16), 8192, 64, "bf16", {}, engine=engine)
    command = join(words_of("sglang", Checkpoint("a/b"), arguments))
    assert flags in command
    assert ("--enable-dp-attention" in command) == ("--enable" in flags)


@pytest.mark.parametrize("engine", SERVERS)
def test_no_flag_is_given_twice(engine: str) -> None:
    for checkpoint, arguments in LAYOUTS:
        words = start_command(engine).words(checkpoint, arguments) or []
        flags = [word for word in words if word.startswith("--")]
        assert len(flags) == len(set(flags)), shlex.join(flags)


def test_an_option_without_effect_is_left_out() -> None:
    settings = {"mamba-cache-mode": "align", "mamba-block-size": "64"}
    newest, first, older = (
        join(
            words_of(
                "vllm", Checkpoint("a/b"), ServerArguments(Layout(1, 1), 8192, 64, "bf16", settings, engine=engine)
            )
        )
        for engine in ("vllm", "vllm@0.33", "vllm@0.32")
    )
    assert "--mamba-cache-mode" not in newest
    assert "--mamba-cache-mode" not in first
    assert "--mamba-block-size 64" in newest
    assert "--mamba-cache-mode align" in older


@pytest.mark.parametrize(
    ("engine", "settings", "flags"),
    [
        ("vllm", {"max-loras": "4"}, "--max-loras 4 --enable-lora"),
        ("vllm", {"max-lora-rank": "32"}, "--max-lora-rank 32 --enable-lora"),
        (
            "sglang", {"max-loras-per-batch": "4"},
            "--max-loras-per-batch 4 --enable-lora --lora-target-modules all --max-lora-rank 16",
        ),
        ("sglang", {"max-lora-rank": "32"}, "--max-lora-rank 32 --enable-lora --lora-target-modules all"),
        # Options for drafts have no effect without the method, which the arguments does not have.
        ("sglang", {"speculative-num-draft-tokens": "4", "speculative-eagle-topk": "2"}, ""),
        ("llama.cpp", {"draft-max": "4"}, ""), ("vllm", {"num-speculative-tokens": "4"}, ""),
    ],
)  # fmt: skip
def test_an_option_has_the_options_that_it_needs(engine: str, settings: dict[str, str], flags: str) -> None:
    """Without --enable-lora, vLLM ignores --max-loras, and SGLang --max-loras-per-batch."""
    checkpoint, arguments = Checkpoint("a/b"), ServerArguments(Layout(1, 1), 8192, 64, "fp16", {})
    plain = words_of(engine, checkpoint, arguments)
    assert join(words_of(engine, checkpoint, arguments._replace(settings=settings))[len(plain) :]) == flags


def test_a_tree_of_drafts_keeps_its_branches() -> None:
    arguments = ServerArguments(Layout(1, 1), 8192, 64, "bf16", {"speculative-eagle-topk": "4"}, drafting=DRAFTINGS[1])
    command = join(words_of("sglang", Checkpoint("a/b"), arguments))
    assert "--speculative-eagle-topk 4 --speculative-num-draft-tokens 4" in command


def test_lists_variables_and_vllms_own_types() -> None:
    settings = {"kv-cache-dtype-skip-layers": "0,sliding_window", "pp-layer-partition": "30,50"}
    arguments = ServerArguments(Layout(1, 2), 8192, 64, "nvfp4", settings)
    assert join(words_of("vllm", Checkpoint("a/b", None, None), arguments)) == (
        "VLLM_PP_LAYER_PARTITION=30,50 vllm serve a/b --pipeline-parallel-size 2 "
        "--max-model-len 8192 --max-num-seqs 64 --kv-cache-dtype nvfp4 --kv-cache-dtype-skip-layers 0 sliding_window"
    )


def test_the_lists_are_whole_and_hold_no_nonsense() -> None:
    for file, some in (("vllm-0.33.0.txt", "--max-model-len"), ("sglang-0.5.23.txt", "--context-length")):
        options = options_of(file)
        assert some in options
        assert len(options) > 200
        assert "--no-such-option" not in options


def test_the_figures_are_plain_integers_and_the_types_are_said_where_asked() -> None:
    checkpoint = Checkpoint("meta-llama/Meta-Llama-3-70B", dtype="fp16")
    arguments = ServerArguments(Layout(8, 2), 131_072, 64, "fp8", {"gpu-memory-utilization": "0.85"})
    assert join(words_of("vllm", checkpoint, arguments)) == (
        "vllm serve meta-llama/Meta-Llama-3-70B --tensor-parallel-size 8 --pipeline-parallel-size 2 "
        "--max-model-len 131072 --max-num-seqs 64 --dtype float16 --kv-cache-dtype fp8 --gpu-memory-utilization 0.85"
    )
    assert join(words_of("sglang", checkpoint, arguments)) == (
        "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-70B --tp-size 8 --pp-size 2 "
        "--context-length 131072 --max-running-requests 64 --dtype float16 --kv-cache-dtype fp8_e4m3"
    )


def test_vllms_dp_ranks_share_the_requests_and_the_experts() -> None:
    """Each DP rank has a scheduler of its own. --enable-expert-parallel distributes whole experts over all devices."""
    arguments = ServerArguments(Layout(2, 1, 8, 16), 8192, 65, "bf16", {})
    command = join(words_of("vllm", Checkpoint("a/b"), arguments))
    assert command == (
        "vllm serve a/b --tensor-parallel-size 2 --max-model-len 8192 --max-num-seqs 9 --data-parallel-size 8 "
        "--enable-expert-parallel"
    )
    for other in (Layout(2, 1, 8, 1), Layout(2, 1, 1, 16)):
        words = words_of("vllm", Checkpoint("a/b"), arguments._replace(layout=other))
        assert ("--enable-expert-parallel" in words) == (other.expert_parallel_size > 1)
        assert ("--data-parallel-size" in words) == (other.data_parallel_size > 1)


def test_vllms_replicas_over_several_machines() -> None:
    """config/parallel.py and entrypoints/cli/serve.py of vLLM 0.33.0: whole DP ranks, or ranks of one since 0.12."""
    vllm, checkpoint = start_command("vllm"), Checkpoint("a/b")
    arguments = ServerArguments(Layout(2, 1, 8), 8192, 64, "bf16", {})
    words = words_of("vllm", checkpoint, arguments)
    first = vllm.across(words, arguments, 4)
    assert first is not None
    of_head = [*words, "--data-parallel-size-local", "2", "--data-parallel-address", "node-0"]
    assert vllm.node_words(first) == [
        of_head,
        *([*of_head, "--data-parallel-start-rank", rank, "--headless"] for rank in ("2", "4", "6")),
    ]
    # Each machine has as many ranks as the others, and at least one.
    assert [vllm.across(words, arguments, nodes) is None for nodes in (1, 2, 3, 8, 16)] == [
        False,
        False,
        True,
        False,
        True,
    ]
    alone = ServerArguments(Layout(8, 2), 8192, 64, "bf16", {}, engine="vllm@0.12")
    words = words_of("vllm", checkpoint, alone)
    assert vllm.node_words(words) == [words]
    first = vllm.across(words, alone, 3)
    assert first == [*words, "--nnodes", "3", "--node-rank", "0", "--master-addr", "node-0"]
    assert [own[-5:] for own in vllm.node_words(first)] == [
        ["3", "--node-rank", "0", "--master-addr", "node-0"],
        ["--node-rank", "1", "--master-addr", "node-0", "--headless"],
        ["--node-rank", "2", "--master-addr", "node-0", "--headless"],
    ]  # fmt: skip
    assert vllm.across(words, alone._replace(engine="vllm@0.11"), 3) is None


@pytest.mark.parametrize(
    ("kv_dtype", "named"),
    [
        ("bf16", None), ("fp16", None), ("fp8", "fp8"), ("fp8_e4m3", "fp8"), ("fp8_ds_mla", "fp8_ds_mla"),
        ("nvfp4_ds_mla", "nvfp4_ds_mla"), ("int8_per_token_head", "int8_per_token_head"),
        ("turboquant_3bit_nc", "turboquant_3bit_nc"),
    ],
)  # fmt: skip
def test_vllms_names_for_the_types_of_a_cache(kv_dtype: str, named: str | None) -> None:
    """CacheDType (config/cache.py). The type of the model is the default."""
    words = words_of("vllm", Checkpoint("a/b"), ServerArguments(Layout(1, 1), 8192, 64, kv_dtype, {}))
    assert words[7:] == ([] if named is None else ["--kv-cache-dtype", named])


def test_vllms_graphs_are_in_an_object_and_the_number_of_drafts_in_another() -> None:
    """--compilation-config and --speculative-config, with the names of vLLM's methods (config/speculative.py)."""
    settings = {"cudagraph-mode": "full_decode_only", "num-speculative-tokens": "3"}
    arguments = ServerArguments(Layout(1, 1), 8192, 64, "bf16", settings)
    words = words_of("vllm", Checkpoint("a/b"), arguments)
    assert (words[-2], json.loads(words[-1])) == ("--compilation-config", {"cudagraph_mode": "FULL_DECODE_ONLY"})
    assert len(words) == 9
    for method, name in (("eagle", "eagle3"), ("eagle1", "eagle"), ("dflash", "dflash")):
        words = words_of("vllm", Checkpoint("a/b"), arguments._replace(drafting=Drafting(method, 5, "a/head")))
        asked = {"method": name, "model": "a/head", "num_speculative_tokens": 5}
        assert (words[-2], json.loads(words[-1])) == ("--speculative-config", asked)


def test_vllms_separate_instances_send_and_get_through_nixl() -> None:
    """kv_role of KVTransferConfig. A decode instance asks for the cache at the prefill instance's address."""
    layouts = {role: ServerArguments(Layout(tp, 1), 8192, 64, "bf16", {}) for role, tp in ((PREFILL, 8), (DECODE, 4))}
    commands = start_command("vllm").pool_words(Pools(Checkpoint("a/b"), layouts, {PREFILL: 2, DECODE: 1}, 4096))
    assert commands[PREFILL][0] == "VLLM_NIXL_SIDE_CHANNEL_HOST=prefill-0"
    for role, tp, kv_role in ((PREFILL, "8", "kv_producer"), (DECODE, "4", "kv_consumer")):
        words = commands[role][commands[role].index("vllm") :]
        assert words[:5] == ["vllm", "serve", "a/b", "--tensor-parallel-size", tp]
        assert (words[-2], json.loads(words[-1])) == (
            "--kv-transfer-config", {"kv_connector": "NixlConnector", "kv_role": kv_role}
        )  # fmt: skip
    assert join(commands[ROUTER]).startswith("vllm-router --vllm-pd-disaggregation --kv-connector nixl ")


def test_a_length_beyond_the_limit_is_allowed_by_a_variable() -> None:
    arguments = ServerArguments(Layout(1, 1), 2548, 4, "bf16", {}, beyond_limit=True)
    assert join(words_of("vllm", Checkpoint("gpt2"), arguments)).startswith(
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve gpt2 "
    )
    assert join(words_of("sglang", Checkpoint("gpt2"), arguments)).startswith(
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m sglang.launch_server --model-path gpt2 "
    )


def test_a_placeholder_is_one_word_of_the_shell() -> None:
    arguments = ServerArguments(Layout(1, 1), 2548, 4, "bf16", {})
    command = join(words_of("vllm", Checkpoint("<your int4 checkpoint>"), arguments))
    assert shlex.split(command)[2] == "<your int4 checkpoint>"


def test_a_command_says_how_tokens_are_drafted() -> None:
    flags = {
        "mtp": (
            {"method": "mtp", "num_speculative_tokens": 3},
            "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4",
        ),
        "eagle": (
            {"method": "eagle3", "model": "a/head", "num_speculative_tokens": 3},
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/head --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        ),
        "draft": (
            {"method": "draft_model", "model": "b/small", "num_speculative_tokens": 4},
            "--speculative-algorithm STANDALONE --speculative-draft-model-path b/small --speculative-num-steps 4 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5",
        ),
        "ngram": (
            {"method": "ngram", "num_speculative_tokens": 4},
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5",
        ),
    }
    checkpoint = Checkpoint("meta-llama/Meta-Llama-3-70B")
    for drafting in DRAFTINGS:
        arguments = ServerArguments(Layout(8, 1), 8192, 64, "bf16", {}, drafting=drafting)
        config, words = flags[drafting.method]
        option, value = words_of("vllm", checkpoint, arguments)[-2:]
        assert (option, json.loads(value)) == ("--speculative-config", config)
        assert join(words_of("sglang", checkpoint, arguments)).endswith(f"--max-running-requests 64 {words}")


def test_what_trtllm_serve_has_no_option_for_goes_into_its_file() -> None:
    arguments = ServerArguments(
        Layout(2, 1, 4, 8), 8192, 64, "fp8",
        {"tokens-per-block": "64", "max-attention-window": "128,8k", "avg-seq-len": "4k"}, False,
        Drafting("mtp", 3, None),
    )  # fmt: skip
    newer = arguments._replace(engine="tensorrt-llm@1.3.0rc16")
    words = words_of("tensorrt-llm", Checkpoint("deepseek-ai/DeepSeek-V3"), newer)
    printf, line, text, to, file, _, *command = words
    assert (printf, line, to, file) == ("printf", r"%s\n", INTO, "trtllm.yaml")
    assert json.loads(text) == {
        "kv_cache_config": {
            "dtype": "fp8",
            "tokens_per_block": 64,
            "max_attention_window": [128, 8192],
            "avg_seq_len": 4096,
        },
        "enable_attention_dp": True,
        "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3},
    }
    for engine in ("", "vllm", "tensorrt-llm", "tensorrt-llm@1.2"):
        older = words_of("tensorrt-llm", Checkpoint("deepseek-ai/DeepSeek-V3"), arguments._replace(engine=engine))
        assert '"num_nextn_predict_layers": 3' in older[2]
    # The devices of all replicas, and the requests of one.
    assert join(command) == (
        "trtllm-serve deepseek-ai/DeepSeek-V3 --tp_size 8 --ep_size 8 --max_seq_len 8192 --max_batch_size 16 "
        "--config trtllm.yaml"
    )


def test_the_options_of_trtllm_serve() -> None:
    """Its sizes count the devices of all DP ranks, and its requests are those of one (LlmArgs, TensorRT-LLM 1.3)."""
    settings = {
        "max-num-tokens": "4096", "enable-chunked-prefill": "", "free-gpu-memory-fraction": "0.8", "max-tokens": "9000",
        "disable-overlap-scheduler": "", "enable-balance": "", "timeout-iters": "60",
    }  # fmt: skip
    arguments = ServerArguments(
        Layout(4, 2, 2, 8), 8192, 65, "fp8_e4m3", settings, drafting=Drafting("draft", 4, "b/small")
    )
    words = words_of("tensorrt-llm", Checkpoint("a/b", "main", "bf16"), arguments)
    assert json.loads(words[2]) == {
        "dtype": "bfloat16", "kv_cache_config": {"dtype": "fp8", "max_tokens": 9000}, "disable_overlap_scheduler": True,
        "enable_attention_dp": True, "attention_dp_config": {"enable_balance": True, "timeout_iters": 60},
        "speculative_config": {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "b/small"},
    }  # fmt: skip
    start = words.index("trtllm-serve")
    assert join(words[start:]) == (
        "trtllm-serve a/b --revision main --tp_size 8 --pp_size 2 --ep_size 8 --max_seq_len 8192 --max_batch_size 33 "
        "--max_num_tokens 4096 --enable_chunked_prefill --free_gpu_memory_fraction 0.8 --config trtllm.yaml"
    )
    # MPI starts a process for each of 16 devices, after the file is written.
    assert start_command("tensorrt-llm").across(words, arguments, 2) == [
        *words[:start], "mpirun", "-n", "16", "-H", "node-0:8,node-1:8", "trtllm-llmapi-launch", *words[start:]
    ]  # fmt: skip
    # Without settings for a file there is none. Whole copies behind one server do not exist.
    plain = ServerArguments(Layout(1, 1), 8192, 64, "bf16", {})
    assert join(words_of("tensorrt-llm", Checkpoint("a/b"), plain)) == (
        "trtllm-serve a/b --max_seq_len 8192 --max_batch_size 64"
    )
    assert (
        start_command("tensorrt-llm").words(
            Checkpoint("a/b"), plain._replace(layout=Layout(1, 1, 2, divides_experts=False))
        )
        is None
    )


def test_trtllms_separate_instances_have_files_of_their_own() -> None:
    """disable_overlap_scheduler: context servers do not have it (examples/disaggregated/README.md)."""
    layouts = {role: ServerArguments(Layout(tp, 1), 8192, 64, "bf16", {}) for role, tp in ((PREFILL, 8), (DECODE, 4))}
    pools = Pools(Checkpoint("a/b"), layouts, {PREFILL: 2, DECODE: 1}, 4096)
    commands = start_command("tensorrt-llm").pool_words(pools)
    buffers = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 4096}}
    assert json.loads(commands[PREFILL][2]) == {"disable_overlap_scheduler": True, **buffers}
    assert json.loads(commands[DECODE][2]) == buffers
    assert json.loads(commands[ROUTER][2]) == {
        "hostname": "0.0.0.0", "port": 8000,
        "context_servers": {"num_instances": 2, "urls": ["prefill-0:8000", "prefill-1:8000"]},
        "generation_servers": {"num_instances": 1, "urls": ["decode-0:8000"]},
    }  # fmt: skip
    assert [commands[role][-1] for role in ROLES] == ["prefill.yaml", "decode.yaml", "router.yaml"]


def test_llama_server_shares_the_context_among_its_slots() -> None:
    arguments = ServerArguments(
        Layout(2, 1), 8192, 4, "q8_0", {"n-cpu-moe": "3", "swa-full": "true"}, False, Drafting("draft", 4, "small")
    )
    assert join(words_of("llama.cpp", Checkpoint("/models/model-Q4_K_M.gguf"), arguments)) == (
        "llama-server --model /models/model-Q4_K_M.gguf --ctx-size 32768 --parallel 4 --n-gpu-layers all "
        "--split-mode tensor --cache-type-k q8_0 --cache-type-v q8_0 --n-cpu-moe 3 --swa-full "
        "--spec-type draft-simple --spec-draft-model '<your draft'\"'\"'s GGUF file>' --spec-draft-n-max 4"
    )
    words = words_of("llama.cpp", Checkpoint("m.gguf"), arguments._replace(drafting=Drafting("ngram", 6, None)))
    assert words[-4:] == ["--spec-type", "ngram-mod", "--spec-ngram-mod-n-max", "6"]
    assert start_command("llama.cpp").words(Checkpoint("m"), arguments._replace(kv_dtype="fp8")) is None


def test_every_flag_of_separate_instances_is_the_tools_own() -> None:
    layouts = {
        role: ServerArguments(Layout(tp, 1, dp), 8192, 64, "fp8", {})
        for role, tp, dp in ((PREFILL, 8, 1), (DECODE, 1, 8))
    }
    pools = Pools(Checkpoint("a/b"), layouts, {PREFILL: 2, DECODE: 3}, 4096)
    routers = {
        "vllm": "vllm-router-0.1.17.txt", "sglang": "sglang-router-0.3.2.txt",
        "tensorrt-llm": "tensorrt-llm-disaggregated-1.3.txt",
    }  # fmt: skip
    for engine in SERVERS:
        commands = start_command(engine).pool_words(pools)
        assert sorted(commands) == (sorted(ROLES) if engine_class(engine).disaggregation() else [])
        for role, words in commands.items():
            own = words[words.index(AND) + 1 :] if AND in words else words
            own = own[own.index("-m") + 2 :] if "-m" in own else own
            flags = {word for word in own if word.startswith("-")}
            known = options_of(routers[engine] if role == ROUTER else LISTS[engine])
            assert flags
            assert flags <= known, flags - known
        hosts = {f"prefill-{number}" for number in range(2)} | {f"decode-{number}" for number in range(3)}
        assert all(f"{host}:8000" in join(commands[ROUTER]) for host in hosts if commands)


def test_engines_without_a_start_command_have_no_separate_instances() -> None:
    assert not [name for name in ENGINES if name not in SERVERS and engine_class(name).disaggregation()]


@pytest.mark.parametrize(
    ("engine", "option"),
    [("sglang", "attn-cp-size"), ("tensorrt-llm", "tokens-per-block"), ("tensorrt-llm", "max-tokens")],
)
def test_a_setting_that_its_engine_cannot_read_is_refused_as_a_whole(kvcalc: Any, engine: str, option: str) -> None:
    """It is a slip of the hand, whatever the other engines would answer."""
    for engines in (engine, f"vllm,{engine}"):
        words = ("--input-tokens", "1k", "--output-tokens", "100", "--concurrency", "4", f"--{option}", "abc", "--json")
        result = kvcalc("plan", "llama-3.1-8b", "--gpu", "h100", "--engine", engines, *words)
        assert (result.status, result.out) == (2, ""), engines
        assert f"--{option} abc: not a whole number" in result.err


def test_llama_cpp_has_its_own_names_for_floats_and_kvcalcs_for_blocks() -> None:
    """--cache-type-k and -v: kv_cache_types, common/arg.cpp."""
    named = {name: own for name in [*DTYPES, "fp8_e4m3", "own_type"] if (own := _ggml_type(name)) is not None}
    blocks = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
    assert named == {"fp32": "f32", "fp16": "f16", "bf16": "bf16", **{name: name for name in blocks}}
