"""The options of a command are read as the engine's own parser reads them, and none of them vanishes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from random import Random
from typing import Any

import pytest

from kvcalc import check
from kvcalc.engines.arguments import FLAGS, Argument
from kvcalc.engines.declarations import OPTIONS
from kvcalc.engines.reading import Read, Reader, readers
from kvcalc.errors import DoesNotFitError, LayoutError, UsageError
from kvcalc.planning.check.servers import choose_server
from tests.conftest import ROOT
from tests.rows import every_row

READERS = {reader.engine: reader for reader in readers()}
# The options that each engine's parser has, in the release whose options are all known.
LISTS = {
    "vllm": "vllm-0.33.0", "sglang": "sglang-0.5.23", "llama.cpp": "llama-server-2026", "mlx": "mlx-lm-0.32.2",
}  # fmt: skip
COMMANDS = {
    "vllm": "vllm serve a/b", "sglang": "python -m sglang.launch_server --model-path a/b",
    "llama.cpp": "llama-server -m Llama-3.1-8B-Q8_0.gguf", "mlx": "mlx_lm.server --model a/b",
    "tensorrt-llm": "trtllm-serve a/b",
}  # fmt: skip
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
# Values for options whose text is not just any.
VALUES = {
    "speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}', "split-mode": "none", "device": "CUDA0",
    "max-cpu-loras": "3", "draft": "3", "fit-target": "512",
    "speculative-algorithm": "NGRAM", "spec-type": "ngram-mod", "config": "/nowhere/c.yaml", "dtype": "float32",
    "kv-cache-dtype": "fp8_e4m3", "quantization": "fp8", "compilation-config": '{"cudagraph_mode": "NONE"}',
    "attention-config": '{"backend": "FLASHINFER"}', "hf-overrides": '{"max_position_embeddings": 9}', "fit": "off",
    "json-model-override-args": '{"max_position_embeddings": 9}', "rope-scaling": '{"factor": 2}', "parallel": "3",
    "limit-mm-per-prompt": '{"image": 0}', "hf-file": "Qwen3-8B-Q5_K_M.gguf", "override-tensor": "exps=CPU",
}  # fmt: skip
# Options that need another one.
WITH = {
    "max-loras": ("--enable-lora",), "max-lora-rank": ("--enable-lora",), "max-loras-per-batch": ("--enable-lora",),
    "max-cpu-loras": ("--enable-lora", "--max-loras", "3"), "cp-strategy": ("--enable-prefill-cp",),
    "lora-target-modules": ("--enable-lora", "--max-lora-rank", "16"),
    "speculative-num-steps": ("--speculative-algorithm", "NGRAM"),
    "speculative-num-draft-tokens": ("--speculative-algorithm", "NGRAM"),
    "speculative-draft-model-path": ("--speculative-algorithm", "EAGLE"),
    "spec-ngram-mod-n-max": ("--spec-type", "ngram-mod"), "spec-draft-n-max": ("--spec-type", "draft-mtp"),
    "draft": ("--spec-type", "draft-mtp"), "data-parallel-size-local": ("-dp", "4"),
    "attn-dp-size": ("--tp-size", "4"), "attn-cp-size": ("--tp-size", "4"),
    "enable-dp-attention": ("--tp-size", "4", "--dp-size", "4"),
    "speculative-eagle-topk": ("--speculative-algorithm", "EAGLE", "--speculative-num-draft-tokens", "4"),
    "spec-draft-model": ("--spec-draft-n-max", "3"), "spec-draft-hf": ("--spec-draft-n-max", "3"),
}  # fmt: skip


def read(engine: str, *words: str, environment: dict[str, str] | None = None, release: str | None = None) -> Read:
    server = choose_server(COMMANDS[engine], None)
    return server.reader.read([*server.words, *words], environment or {}, {}, release)


def said(found: Read) -> dict[str, Any]:
    """All that a command says, in one mapping."""
    return {name: value for name, value in vars(found).items() if name not in ("engine", "left")}


def value_for(argument: Argument, engine: str) -> str:
    if argument.choices:
        return next(value for value, (_, end) in argument.choices.items() if not end)
    numbers = {"integer": "2", "integers": "2", "size": "4096", "length": "4096", "number": "0.5", "object": "{}"}
    return numbers.get(argument.kind, "some-text")


def words_for(engine: str, argument: Argument) -> list[str]:
    option = next(spelled for spelled, known in READERS[engine].arguments.spelled.items() if known == (argument, True))
    if argument.kind in FLAGS:
        return [option]
    return [option, VALUES.get(argument.name, value_for(argument, engine))]


@pytest.mark.parametrize("engine", READERS)
def test_no_option_vanishes(engine: str) -> None:
    """Each changes what is asked, or stands among those that are not counted with its effect, or has none."""
    reader, vanished, unsaid = READERS[engine], [], []
    known = {argument.name: argument for argument, _ in reader.arguments.spelled.values()}
    for name, argument in known.items():
        if name in reader.model_options:
            continue
        before = WITH.get(name, ())
        plain, found = read(engine, *before), read(engine, *before, *words_for(engine, argument))
        # A switch may be on anyway.
        off = found if argument.kind != "switch" else read(engine, *before, f"--no-{name}")
        if said(plain) == said(found) == said(off) and plain.left == found.left:
            vanished.append(name)
        new = [option for option in found.unknown if option not in plain.unknown]
        unsaid += [option for option in reader.described(new) if "(" not in option and "config " not in option]
    assert (vanished, unsaid) == ([], [])


@pytest.mark.parametrize("engine", READERS)
def test_an_option_for_the_engines_own_reader_is_read(engine: str) -> None:
    """What stands in `special` changes more than the place where it waits for the reader."""
    reader = READERS[engine]
    known = {argument.name: argument for argument, _ in reader.arguments.spelled.values()}
    unread = []
    for name in reader.special:
        before = [word for word in WITH.get(name, ()) if word != "--enable-prefill-cp"]
        if said(read(engine, *before)) == said(read(engine, *before, *words_for(engine, known[name]))):
            unread.append(name)
    # One device has no experts to distribute, and -fit off keeps what -ngl says.
    assert not set(unread) - {"enable-expert-parallel", "fit"}, unread


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_variable_vanishes(engine: str) -> None:
    text = (ROOT / "tests" / "engine_options" / f"{LISTS[engine]}-variables.txt").read_text()
    names = [name for name in text.split("\n") if name and not name.startswith("#")]
    assert len(names) > 200
    plain = said(read(engine))
    found = {name: read(engine, environment={name: "1"}) for name in names}
    assert [name for name, one in found.items() if said(one) == plain] == []
    unknown = [option for one in found.values() for option in READERS[engine].described(one.unknown)]
    assert [option for option in unknown if "(" not in option] == []


def test_no_variable_of_llama_server_vanishes() -> None:
    reader, plain = READERS["llama.cpp"], said(read("llama.cpp"))
    known = {argument.name: argument for argument, _ in reader.arguments.spelled.values()}
    assert len(reader.arguments.variables) > 140
    vanished = []
    for variable, name in reader.arguments.variables.items():
        if name in reader.model_options:
            continue
        text = "1" if known[name].kind in FLAGS else VALUES.get(name, value_for(known[name], "llama.cpp"))
        before = WITH.get(name, ())
        with_it = read("llama.cpp", *before, environment={variable: text})
        if said(with_it) == (said(read("llama.cpp", *before)) if before else plain) and not with_it.left:
            vanished.append(variable)
    # On is the default of this one.
    assert vanished == ["LLAMA_ARG_KV_OFFLOAD"]


@pytest.mark.parametrize("engine", LISTS)
def test_the_options_are_those_of_the_engine(engine: str) -> None:
    text = (ROOT / "tests" / "engine_options" / f"{LISTS[engine]}.txt").read_text()
    listed = {word for word in text.split() if word.startswith("--")} - {"--help", "--usage"}
    arguments = READERS[engine].arguments
    spelled = {
        name for name, (argument, is_on) in arguments.spelled.items() if is_on and name.startswith("--")
        and not argument.releases[1]
    }  # fmt: skip
    missing = {name for name in listed if name not in arguments.spelled}
    own = {f"--{option}" for option in READERS[engine].own}
    own |= {alias for option in OPTIONS[engine] for alias in option.aliases}
    assert (
        missing,
        {name for name in spelled - listed - own if "-" in name[2:]} - {"--device-memory-utilization"},
    ) == (set(), set())


class Refused(Exception):
    pass


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Refused(message)


def argparse_of(reader: Reader) -> Parser:
    """Python's own parser with the options of an engine, as far as the newest release has them."""
    types: dict[str, Callable[[str], Any]] = {"integer": int, "integers": int, "size": int, "number": float}
    parser = Parser(add_help=False)
    seen: dict[str, list[str]] = {}
    for spelling, (argument, is_on) in reader.arguments.spelled.items():
        if is_on:
            seen.setdefault(argument.name, []).append(spelling)
    known = {argument.name: argument for argument, _ in reader.arguments.spelled.values()}
    for name, names in seen.items():
        argument = known[name]
        given: dict[str, Any] = {"dest": name}
        if argument.kind == "switch":
            given["action"] = argparse.BooleanOptionalAction
        elif argument.kind == "flag":
            given["action"] = "store_true"
        else:
            given["type"] = types.get(argument.kind, str)
            given["nargs"] = {"list": "+", "integers": "+", "optional": "?"}.get(argument.kind)
            if argument.choices:
                given["choices"] = list(argument.choices)
        parser.add_argument(*names, **given)
    return parser


@every_row("engine, seed", [(engine, seed) for engine in ("sglang", "mlx") for seed in range(150)])
def test_words_are_read_as_pythons_argparse_reads_them(engine: str, seed: int) -> None:
    """Whole names, beginnings, values after a space, an equals sign or a letter, and what the parser refuses."""
    random, reader = Random(f"{engine}{seed}"), READERS[engine]
    spelled = [name for name, (known, is_on) in reader.arguments.spelled.items() if is_on]
    words = list[str]()
    for _ in range(random.randint(1, 4)):
        name = random.choice(spelled)
        argument = reader.arguments.spelled[name][0]
        cut = name[: random.randint(4, len(name))] if random.random() < 0.3 else name
        text = random.choice([value_for(argument, engine), "8", "x", "1.5", "-1", "90%"])
        shape = random.random()
        if argument.kind in FLAGS:
            words.append(f"{cut}={text}" if shape < 0.1 else cut)
        else:
            words += [f"{cut}={text}"] if shape < 0.3 else [cut] if shape < 0.35 else [cut, text]
    place = reader.arguments.place(engine)
    try:
        with redirect_stderr(StringIO()):
            theirs: dict[str, Any] | None = vars(argparse_of(reader).parse_args(words))
    except Refused as error:
        if "ambiguous" in str(error):
            return  # newer Pythons accept several spellings of one option
        theirs = None
    try:
        given = list(reader.arguments.read(words, place))
        ours = {one.argument.name: one for one in given if one.argument is not None}
        is_stray = any(one.argument is None for one in given)
    except LayoutError:
        ours, is_stray = {}, True
    assert is_stray == (theirs is None), words
    if theirs is not None:
        for name, one in ours.items():
            value = theirs[name]
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            assert one.text in (shown, "true") or float(one.text) == value, words


@pytest.mark.parametrize(
    ("engine", "options", "reason"),
    [
        ("vllm", "--gpu-memory-utilization 90%", "argument --gpu-memory-utilization: invalid float value: '90%'"),
        ("vllm", "-tp8", "unrecognized arguments: -tp8"),
        ("vllm", "--kv-cache-dtype FP8", "argument --kv-cache-dtype: invalid choice: 'FP8'"),
        ("vllm", "--enforce-eager=false", "argument --enforce-eager: ignored explicit argument 'false'"),
        ("vllm", "--max-num-seqs 1.5", "argument --max-num-seqs: invalid int value: '1.5'"),
        ("vllm", "--enable-pro", "ambiguous option: --enable-pro could match"),
        ("vllm", "--enforce-eager false", "unrecognized arguments: false"),
        ("vllm", "--max-model-len -tp 2", "argument --max-model-len: expected one argument"),
        ("vllm", "--max-model-len 1.5K", "argument --max-model-len: invalid int value: '1.5K'"),
        ("vllm", "\u2013tp 2", "unrecognized arguments: \u2013tp 2"),
        ("sglang", "--mem_fraction_static 0.5", "unrecognized arguments: --mem_fraction_static"),
        ("sglang", "--kv-cache-dtype fp8", "argument --kv-cache-dtype: invalid choice: 'fp8'"),
        ("sglang", "--pp 2", "ambiguous option: --pp could match"),
        ("sglang", "--context-length 1.5Ki", "argument --context-length: invalid human_readable_int value: '1.5Ki'"),
        ("llama.cpp", "--ctx-size=8192", "invalid argument: --ctx-size=8192"),
        ("llama.cpp", "--ctx-siz 8192", "invalid argument: --ctx-siz"),
        ("llama.cpp", "-c four", "argument -c: invalid int value: 'four'"),
        ("llama.cpp", "-fa -ngl 99", "argument -fa: invalid choice: '-ngl'"),
        ("llama.cpp", "-ctk fp8", "argument -ctk: invalid choice: 'fp8'"),
        ("mlx", "--top-k 0.5", "argument --top-k: invalid int value: '0.5'"),
    ],
)  # fmt: skip
def test_what_the_engines_parser_refuses(engine: str, options: str, reason: str) -> None:
    with pytest.raises(LayoutError) as refused:
        read(engine, *options.split())
    assert reason in refused.value.message
    with pytest.raises(DoesNotFitError, match="does not start"):
        check(f"{COMMANDS[engine].replace('a/b', LLAMA)} {options}", "h100")


@pytest.mark.parametrize(
    ("engine", "options", "fields"),
    [
        ("sglang", "--mem-frac 0.5", {"mem-fraction-static": "0.5"}),
        ("sglang", "--tp 2", {"tensor_parallel_size": "2"}),
        ("sglang", "--context-length 32Ki", {"context-length": "32768"}),
        ("sglang", "--context-length 25.6k", {"context-length": "25600"}),
        ("vllm", "--enforce-eager --no-enforce-eager", {"enforce-eager": None}),
        ("vllm", "--no-enforce-eager --enforce-eager", {"enforce-eager": "true"}),
        ("vllm", "--enable-prefix-caching --no-enable-prefix-caching",
         {"enable-prefix-caching": None, "no-enable-prefix-caching": "true"}),
        ("vllm", "--disable-prefix-caching", {"no-enable-prefix-caching": "true"}),
        ("vllm", "-ep --no-enable-expert-parallel -tp 2", {"expert_parallel_size": None}),
        ("vllm", "-tp 4 --tensor-parallel-size 2", {"tensor_parallel_size": "2"}),
        ("vllm", "-qfp8", {"dtype": "fp8"}), ("vllm", "--max_num_seqs=1_000", {"max-num-seqs": "1000"}),
        ("vllm", "--quantization None", {"dtype": None}),
        ("llama.cpp", "-c 16k", {"context_tokens": "16"}),  # std::stoi
        ("llama.cpp", "-fa true", {"flash-attn": "on"}), ("llama.cpp", "-fa 0", {"flash-attn": "off"}),
        ("sglang", "--mamba-scheduler-strategy auto", {"mamba-radix-cache-strategy": "auto"}),
        ("llama.cpp", "-nkvo -kvo", {"no-kv-offload": None}),
        ("llama.cpp", "--no_kv_offload", {"no-kv-offload": "true"}),
        ("tensorrt-llm", "--kv_cache_dtype fp8", {"kv_dtype": "fp8"}),
    ],
)  # fmt: skip
def test_what_the_engines_parser_reads(engine: str, options: str, fields: dict[str, str | None]) -> None:
    found = read(engine, *options.split())
    both = {**found.fields, **found.settings}
    assert {name: both.get(name) for name in fields} == fields


def test_the_last_one_wins_over_a_file() -> None:
    file = "enforce-eager: true\nenable-expert-parallel: true\nenable-chunked-prefill: false"
    text = f"echo '{file}' > c.yaml && vllm serve a/b --config c.yaml"
    assert choose_server(text, None).read().settings == {"enforce-eager": "true", "no-enable-chunked-prefill": "true"}
    found = choose_server(f"{text} --no-enforce-eager --no-enable-expert-parallel", None).read()
    assert (found.settings, found.fields) == ({"no-enable-chunked-prefill": "true"}, {})


def test_choices_and_options_are_those_of_the_release() -> None:
    """CacheDType (config/cache.py) has nvfp4_ds_mla since 0.30.0; --swap-space went before 0.28.0."""
    for release, starts in (("0.29.0", False), ("0.30.0", True), (None, True)):
        if starts:
            assert read("vllm", "--kv-cache-dtype", "nvfp4_ds_mla", release=release).fields
        else:
            with pytest.raises(LayoutError, match="invalid choice"):
                read("vllm", "--kv-cache-dtype", "nvfp4_ds_mla", release=release)
    with pytest.raises(LayoutError, match="unrecognized arguments: --swap-space"):
        read("vllm", "--swap-space", "4", release="0.33.0")
    # Who names no release may run an older one, and one whose options were not read may have options of its own.
    assert read("vllm", "--swap-space", "4").ignored == ["--swap-space"]
    assert read("vllm", "--heard-of", "4", release="0.14.0").unknown == ["--heard-of"]
    with pytest.raises(LayoutError, match="unrecognized arguments: --heard-of"):
        read("vllm", "--heard-of", "4")


def test_variables_are_read_before_the_options() -> None:
    assert read("llama.cpp", environment={"LLAMA_ARG_KV_OFFLOAD": "0"}).settings == {"no-kv-offload": "true"}
    assert read("llama.cpp", environment={"LLAMA_ARG_NO_KV_OFFLOAD": "x"}).settings == {"no-kv-offload": "true"}
    assert not read("llama.cpp", "-kvo", environment={"LLAMA_ARG_KV_OFFLOAD": "0"}).settings
    assert (
        read("llama.cpp", "-c", "16384", environment={"LLAMA_ARG_CTX_SIZE": "8192"}).fields["context_tokens"] == "16384"
    )
    assert read("llama.cpp", environment={"LLAMA_ARG_SWA_FULL": "on"}).settings == {"swa-full": "true"}
    with pytest.raises(LayoutError, match="LLAMA_ARG_KV_OFFLOAD=maybe"):
        read("llama.cpp", environment={"LLAMA_ARG_KV_OFFLOAD": "maybe"})
    answer = check("VLLM_MLA_DISABLE=1 vllm serve deepseek-ai/DeepSeek-V2-Lite --max-model-len 8192", "h100")
    assert answer["command"]["not_counted"] == ["VLLM_MLA_DISABLE (full heads in the cache, in place of MLA's latent)"]


@pytest.mark.parametrize(
    ("command", "starts"),
    [
        ("-q awq", False), ("--quantization gptq_marlin", False), ("--quantization moe_wna16", False),
        ("--quantization w8a8_int8", "int8"), ("--quantization w8a8_fp8", "fp8"), ("--quantization fp8", "fp8"),
    ],
)  # fmt: skip
def test_sglangs_quantization_of_a_checkpoint_in_16_bits(command: str, starts: bool | str) -> None:
    """get_quant_config (srt/model_loader/weight_utils.py) and W8A8Int8Config, SGLang 0.5.23."""
    text = f"python -m sglang.launch_server --model-path {LLAMA} {command}"
    if starts is False:
        with pytest.raises(DoesNotFitError):
            check(text, "h100")
    else:
        assert check(text, "h100")["weights"]["dtype"] == starts


def test_a_method_that_is_not_counted_is_named() -> None:
    answer = check(f"python -m sglang.launch_server --model-path {LLAMA} --quantization mxfp4", "h100")
    assert answer["command"]["not_counted"] == ["quantization mxfp4 (quantized weights)"]
    with pytest.raises(DoesNotFitError, match="a checkpoint in fp8"):
        check("python -m sglang.launch_server --model-path Qwen/Qwen3-8B-FP8 --quantization awq", "h100")


@pytest.mark.parametrize(
    ("command", "gpu", "devices"),
    [
        ("srun --gpus=2 vllm serve MODEL -tp 4", "h100x8", 0), ("srun --gpus=4 vllm serve MODEL -tp 4", "h100x8", 4),
        ("srun -N2 -G 16 vllm serve MODEL -tp 8", "h100x8", 8),
        ("srun --gres=gpu:h100:4 vllm serve MODEL -tp 8", "h100x8", 0),
        ("srun --gpus-per-node 1 vllm serve MODEL -tp 2", "h100x8", 0),
        ("srun -n1 vllm serve MODEL -tp 2", "h100x8", 8),
        ("CUDA_VISIBLE_DEVICES=0 mpirun -n 2 trtllm-serve MODEL --tp_size 2", "h100x8", 0),
        ("vllm serve MODEL -tp 2 --device-ids 0", "h100x4", 0),
        ("vllm serve MODEL -tp 2 --device-ids 0,3", "h100x4", 2),
        ("CUDA_VISIBLE_DEVICES=1 llama-server -m Llama-3.1-8B-Q8_0.gguf -c 2048", "h100x2", 1),
        ("llama-server -m Llama-3.1-8B-Q8_0.gguf -c 2048 --split-mode none", "h100x2", 1),
        ("llama-server -m Llama-3.1-8B-Q8_0.gguf -c 2048 -dev CUDA0", "h100x2", 1),
        # Attention DP is inside --tp-size (compute_world_size, srt/server_args.py), and copies of the server are not.
        ("python -m sglang.launch_server --model-path MODEL --tp 2 --dp 4", "h100x4", 0),
        ("python -m sglang.launch_server --model-path MODEL --tp 2 --dp 4", "h100x8", 8),
        ("python -m sglang.launch_server --model-path MODEL --tp 4 --dp 4 --enable-dp-attention", "h100x4", 4),
    ],
)  # fmt: skip
def test_a_server_has_the_devices_that_it_is_given(command: str, gpu: str, devices: int) -> None:
    text = command.replace("MODEL", LLAMA)
    if not devices:
        with pytest.raises(DoesNotFitError, match="device"):
            check(text, gpu)
    else:
        assert check(text, gpu)["hardware"]["num_devices"] == devices


def test_a_number_has_no_thousands_of_digits() -> None:
    for engine, option in (("llama.cpp", "--fit-target"), ("llama.cpp", "-c"), ("vllm", "--max-num-seqs")):
        with pytest.raises(UsageError):
            read(engine, option, "9" * 5000)


def test_the_release_of_llama_cpp_in_a_tag_is_its_build() -> None:
    tags = {"server-cuda-b6097": "b6097", "server-b5000": "b5000", "b6123": "b6123", "server-cuda": None}
    for tag, build in tags.items():
        text = f"docker run ghcr.io/ggml-org/llama.cpp:{tag} -m Llama-3.1-8B-Q8_0.gguf"
        assert choose_server(text, None).release == build
    assert choose_server("docker run vllm/vllm-openai:v0.30.0-b200 --model a/b", None).release == "0.30.0"


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ("-mu https://huggingface.co/unsloth/Qwen3-8B-GGUF/resolve/main/Qwen3-8B-Q8_0.gguf", "qwen3-8b"),
        ("-hf bartowski/Qwen_Qwen3-8B-GGUF:Q8_0", "qwen3-8b"),
        ("-hf x/Qwen3-8B-GGUF -hff Qwen3-8B-Q8_0.gguf", "qwen3-8b"),
    ],
)  # fmt: skip
def test_the_model_in_a_gguf_file_is_named(options: str, model: str) -> None:
    answer = check(f"llama-server {options} -c 2048", "h100")
    assert (answer["model"]["name"], answer["weights"]["dtype"]) == (model, "q8_0")
