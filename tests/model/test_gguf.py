"""GGUF files as MODEL: what kvcalc reads, what it knows about the weights, and how it reports damaged files."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvcalc
from kvcalc.errors import KvcalcError, ModelError, RunError, UsageError
from kvcalc.model.caches import Cache, SlidingWindowAttention
from kvcalc.model.gguf.file import read_header
from kvcalc.model.gguf.files import read_files
from kvcalc.model.hf_config import read_config
from kvcalc.model.spec import cache_runs
from tests.conftest import ROOT

pytest.importorskip("gguf", reason="the extra `gguf`")

from tests.documents import estimate, texts
from tests.model.gguf_writing import base, config_of, mla, ssm, write

SMALL = {
    "block_count": 2, "context_length": 512, "embedding_length": 256, "feed_forward_length": 512,
    "attention.head_count": 4, "attention.head_count_kv": 2,
}  # fmt: skip
LLAMA_CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 512,
    "torch_dtype": "float16",
}  # fmt: skip


def llama_tensors(kind: str = "F16", layers: int = 2, tied: bool = False) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the tensors of LLAMA_CONFIG, with the position table that the converter writes."""
    tensors = {"token_embd.weight": ((256, 1000), kind), "output_norm.weight": ((256,), "F32")}
    if not tied:
        tensors["output.weight"] = ((256, 1000), kind)
    tensors["rope_freqs.weight"] = ((32,), "F32")
    for n in range(layers):
        for name, shape in (
            ("attn_q", (256, 256)), ("attn_k", (256, 128)), ("attn_v", (256, 128)), ("attn_output", (256, 256)),
            ("ffn_gate", (256, 512)), ("ffn_up", (256, 512)), ("ffn_down", (512, 256)),
        ):  # fmt: skip
            tensors[f"blk.{n}.{name}.weight"] = (shape, kind)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{n}.{name}.weight"] = ((256,), "F32")
    return tensors


def load(path: Path, **more: Any) -> Any:
    return kvcalc.load_model(str(path), **more)


# Reading


def test_the_document_names_the_file(kvcalc: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny-Q4_K_M.gguf", "llama", SMALL, name="Tiny")
    model = kvcalc("estimate", path, "--json").json
    assert (model["model"]["name"], model["model"]["source"]) == ("tiny-Q4_K_M", str(path))
    assert model["model"]["max_position_embeddings"] == 512
    # llama.cpp's default, whatever the type of the weights: 2 x 2 layers x 2 heads x 64 x 2 bytes per token.
    assert (model["kv_cache"]["dtype"], model["kv_cache"]["bytes_per_token"]) == ("fp16", 1024)


def test_a_file_is_known_by_its_content(kvcalc: Any, tmp_path: Path) -> None:
    """Ollama's blobs have no suffix."""
    path = write(tmp_path / "sha256-0123", "llama", SMALL)
    assert kvcalc("estimate", path, "--get", "model.name").out == "sha256-0123\n"


def test_other_commands_take_it_too(kvcalc: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", "llama", SMALL)
    done = kvcalc("estimate", path, "--engine", "all", "--json")
    assert done.status == 0
    assert done.json["model"]["source"] == str(path)


def test_a_folder_holds_one_model(kvcalc: Any, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", "llama", SMALL)
    write(tmp_path / "mmproj-tiny.gguf", "clip", {}, type="mmproj")
    assert kvcalc("estimate", tmp_path, "--get", "model.name").out == "tiny\n"
    write(tmp_path / "tiny-q8.gguf", "llama", SMALL)
    done = kvcalc("estimate", tmp_path)
    assert done.status == 2
    assert "tiny-q8.gguf" in done.err
    # A config.json in the same folder takes precedence.
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1}')
    assert "hidden_size" in kvcalc("estimate", tmp_path).err


def test_layers_for_further_tokens_are_not_counted(tmp_path: Path) -> None:
    """They are not counted, whether or not the lists per layer include them."""
    heads = [2, 2, 2, 2]
    pairs = {**SMALL, "block_count": 5, "nextn_predict_layers": 1, "attention.head_count_kv": heads}
    for listed in (heads, [*heads, 4]):
        spec = load(write(tmp_path / "x.gguf", "llama", {**pairs, "attention.head_count_kv": listed}))
        assert spec.num_layers == 4


def test_rwkv6_keeps_a_state(tmp_path: Path) -> None:
    pairs = {
        "block_count": 32, "context_length": 2**20, "embedding_length": 4096, "feed_forward_length": 14336,
        "attention.head_count": 0, "wkv.head_size": 64, "rescale_every_n_layers": 6, "time_mix_extra_dim": 32,
        "time_decay_extra_dim": 64,
    }  # fmt: skip
    config = {"model_type": "rwkv6", "num_hidden_layers": 32, "hidden_size": 4096, "head_size": 64}
    spec = load(write(tmp_path / "x.gguf", "rwkv6", pairs))
    assert spec.layers == read_config(config, "config", "config").layers
    with pytest.raises(ModelError, match="token_shift_count"):
        load(write(tmp_path / "y.gguf", "rwkv6", {**pairs, "token_shift_count": 1}))


def test_step_has_query_heads_by_layer(tmp_path: Path) -> None:
    flags = [False, True, True, True]
    pairs = {
        **SMALL, "block_count": 4, "attention.head_count": [4, 6, 6, 6], "attention.head_count_kv": [2] * 4,
        "attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 100,
        "attention.sliding_window_pattern": flags,
    }  # fmt: skip
    spec = load(write(tmp_path / "x.gguf", "step35", pairs))
    assert [caches[0].window for _, _, caches in cache_runs(spec)] == [None, 100]
    assert spec.attention.num_heads == 4


def test_mimo_counts_the_current_token_into_its_window(tmp_path: Path) -> None:
    """The config's 128 tokens do not include the current token, but llama.cpp's do, so a file keeps one token less."""
    config = config_of("mimo-v2-flash")
    flags = [bool(flag) for flag in config["hybrid_layer_pattern"]]
    pairs = {
        **base(config), "attention.sliding_window": 128, "attention.sliding_window_pattern": flags,
        "attention.head_count_kv": [8 if flag else 4 for flag in flags], "attention.value_length": 128,
        "attention.value_scale": 0.7,
    }  # fmt: skip
    spec = load(write(tmp_path / "x.gguf", "mimo2", pairs))
    published = kvcalc.load_model("mimo-v2-flash")

    def one_less(cache: Cache) -> Cache:
        return cache._replace(window=cache.window - 1) if isinstance(cache, SlidingWindowAttention) else cache

    assert [(first, last, [one_less(c) for c in caches]) for first, last, caches in cache_runs(published)] == [
        (first, last, [*caches]) for first, last, caches in cache_runs(spec)
    ]


def test_old_files_of_mla_models(tmp_path: Path) -> None:
    """The model keeps a latent, but for old files llama.cpp keeps K and V of every head."""
    config = config_of("deepseek-v2-lite")
    old, new = (
        load(write(tmp_path / f"{name}.gguf", "deepseek2", mla(config, old=name == "old"))) for name in ("old", "new")
    )
    assert old.layers == new.layers
    question: dict[str, Any] = {"context_tokens": 4096, "kv_dtype": "fp16"}
    for spec, elements in ((old, 16 * (192 + 128)), (new, 512 + 64)):
        held = estimate(spec, engine="llama.cpp", **question)["kv_cache"]["total_bytes"]
        assert held == 27 * 4096 * elements * 2
        assert estimate(spec, **question)["kv_cache"]["total_bytes"] == 27 * 4096 * 576 * 2
    assert "key_length_mla" in texts(estimate(old, **question))[0]


def test_a_window_the_converter_leaves_out_is_named(tmp_path: Path) -> None:
    spec = load(write(tmp_path / "x.gguf", "starcoder2", base(config_of("starcoder2-7b"))))
    assert "4,096" in spec.remarks[0]
    whole, windowed = (
        estimate(model, context_tokens=16384, engine="llama.cpp")["kv_cache"]["total_bytes"]
        for model in (spec, kvcalc.load_model("starcoder2-7b"))
    )
    assert whole == windowed
    config = base(config_of("phi-3-mini-4k"))
    assert "Phi-3" in load(write(tmp_path / "y.gguf", "phi3", config)).remarks[0]
    # Phi-4 has no window, and its file says so.
    assert load(write(tmp_path / "z.gguf", "phi3", {**config, "attention.sliding_window": 0})).remarks == ()


@pytest.mark.parametrize(
    ("arch", "more", "windows"),
    [
        ("gemma2", {}, "sfsf"),
        ("gemma3", {}, "ffff"),
        ("gemma3", {"attention.sliding_window": 9}, "ssss"),
        ("gemma3", {"attention.sliding_window": 9, "attention.sliding_window_pattern": 2}, "sfsf"),
        ("gpt-oss", {"attention.sliding_window": 9}, "sfsf"),
        ("cohere2", {"attention.sliding_window": 9}, "sssf"),
        ("laguna", {"attention.sliding_window": 9}, "fsss"),
        ("cohere2", {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False] * 2}, "sfsf"),
        ("phi3", {"attention.sliding_window": 9}, "ssss"),
        ("granite_swa", {"attention.sliding_window": 9, "attention.sliding_window_pattern": [False, True] * 2}, "fsfs"),
        ("llama4", {}, "cccf"),
        ("llama4", {"attention.sliding_window": 0}, "ffff"),
        ("exaone4", {}, "ffff"),
        ("dots1", {}, "ffff"),
    ],
)
def test_what_a_file_leaves_out(arch: str, more: dict[str, Any], windows: str, tmp_path: Path) -> None:
    """llama.cpp fills in these patterns."""
    spec = load(write(tmp_path / "x.gguf", arch, {**SMALL, "block_count": 4, **more}))
    letters = {"FullAttention": "f", "SlidingWindowAttention": "s", "ChunkedAttention": "c"}
    assert "".join(letters[type(g.caches[0]).__name__] * g.num_layers for g in spec.layers) == windows


def test_every_architecture_has_a_reader() -> None:
    from kvcalc.model.gguf.architectures import known_architectures
    from kvcalc.model.hf_config import known_types

    known = known_architectures()
    assert set(known.values()) <= {*known_types()}


def test_architectures_are_spelt_as_the_package_spells_them() -> None:
    """Except those that are newer than the oldest supported release of the package."""
    from gguf import MODEL_ARCH_NAMES

    from kvcalc.model.gguf.architectures import known_architectures

    assert len(set(known_architectures()) & set(MODEL_ARCH_NAMES.values())) >= 90


# Weights


@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_are_the_files(tied: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "llama", SMALL, llama_tensors(tied=tied), file_type=1)
    found = estimate(load(path))["weights"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**LLAMA_CONFIG, "tie_word_embeddings": tied}))
    counted = estimate(kvcalc.load_model(str(config)))["weights"]
    for key in ("parameters", "active_parameters_per_token", "input_embedding_parameters", "dtype"):
        assert found[key] == counted[key], key
    assert found["bytes_source"] == "gguf"
    # Norms and the position table are in fp32.
    norms = 5 * 256
    assert found["bytes"] == counted["bytes"] + 2 * norms + 4 * 32
    assert found["active_bytes_per_token"] == counted["active_bytes_per_token"] + 2 * norms


def test_quantized_weights(kvcalc: Any, tmp_path: Path) -> None:
    tensors = llama_tensors("Q4_K") | {"output.weight": ((256, 1000), "Q6_K")}
    path = write(tmp_path / "x.gguf", "llama", SMALL, tensors, file_type=15)
    weights = kvcalc("estimate", path, "--json").json["weights"]
    assert weights["dtype"] == "q4_k_m"
    q4 = (256 * 1000 + 2 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512)) // 256 * 144
    assert weights["bytes"] == q4 + 1000 * 210 + 5 * 256 * 4 + 32 * 4
    # With another --dtype, the bytes follow from the parameters, or they are not known.
    other = kvcalc("estimate", path, "--dtype", "fp32", "--json").json["weights"]
    assert (other["bytes"], other["dtype"]) == (weights["parameters"] * 4, "fp32")
    unknown = kvcalc("estimate", path, "--dtype", "int4", "--json").json
    assert unknown["weights"]["bytes"] is None
    assert any("int4" in warning for warning in texts(unknown))
    # The same with another kind of attention.
    changed = kvcalc("estimate", path, "--attention", "mha", "--json").json
    assert changed["weights"]["parameters"] is None
    assert "not counted with this attention" in changed["weights"]["reason"]


@pytest.mark.parametrize(
    ("tensors", "total", "active"),
    [
        ({"blk.0.ffn_up_exps.weight": ((256, 512, 8), "F16")}, 256 * 512 * 8, 256 * 512 * 2),
        ({f"blk.0.ffn_up.{n}.weight": ((256, 512), "F16") for n in range(8)}, 256 * 512 * 8, 256 * 512 * 2),
        ({"blk.0.ffn_gate_inp.weight": ((256, 8), "F32")}, 256 * 8, 256 * 8),
        ({"blk.2.ffn_up.weight": ((256, 512), "F16"), "output_norm.weight": ((256,), "F32")}, 256, 256),
        ({"token_embd.weight": ((256, 10), "F16"), "output.weight": ((256, 10), "F16")}, 5120, 2560),
        ({"token_embd.weight": ((256, 10), "F16")}, 2560, 2560),
        ({"per_layer_token_embd.weight": ((256, 10), "F16")}, 2560, 0),
    ],
)
def test_what_a_step_reads(tensors: Any, total: int, active: int, tmp_path: Path) -> None:
    """A step reads only the chosen experts. Lookup tables and layers for multi-token prediction do not count."""
    pairs = {**SMALL, "block_count": 3, "nextn_predict_layers": 1, "expert_count": 8, "expert_used_count": 2}
    found = estimate(load(write(tmp_path / "x.gguf", "llama", pairs, tensors)))["weights"]
    assert (found["parameters"], found["active_parameters_per_token"]) == (total, active)


def test_a_type_that_is_not_named_is_the_one_of_most_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "llama", SMALL, llama_tensors("Q8_0"))
    assert estimate(load(path))["weights"]["dtype"] == "q8_0"


def test_tensors_must_be_those_of_the_metadata(tmp_path: Path) -> None:
    wrong = llama_tensors() | {"blk.1.attn_k.weight": ((256, 64), "F16")}
    with pytest.raises(ModelError, match=r"blk\.1\.attn_k\.weight has the shape 256 x 64"):
        load(write(tmp_path / "x.gguf", "llama", SMALL, wrong))
    mixer = {**SMALL, "attention.head_count": 0, "attention.head_count_kv": 0, **ssm(512, 8, 16, 1)}
    with pytest.raises(ModelError, match="ssm_conv1d"):
        load(write(tmp_path / "y.gguf", "mamba2", mixer, {"blk.0.ssm_conv1d.weight": ((4, 512), "F32")}))


def test_biases_count_as_parameters_of_attention(tmp_path: Path) -> None:
    tensors = llama_tensors() | {"blk.0.attn_output.bias": ((256,), "F32")}
    assert load(write(tmp_path / "x.gguf", "llama", SMALL, tensors)).attention.output_bias


# Shards


def shards(folder: Path, **changed: Any) -> list[Path]:
    """Write shards like llama.cpp: the metadata in the first, and part of the tensors in each."""
    every, count = [*llama_tensors().items()], 3
    paths = []
    for n in range(count):
        own = dict(every[n::count])
        path = folder / f"m-{n + 1:05d}-of-{count:05d}.gguf"
        split = {"no": n, "count": count, "tensors.count": len(every), **changed}
        write_shard(path, SMALL if n == 0 else {}, own, split)
        paths.append(path)
    return paths


def write_shard(path: Path, pairs: dict[str, Any], tensors: Any, split: dict[str, int]) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in pairs.items():
        writer.add_uint32(f"llama.{key}", value)
    for key, value in split.items():
        writer.add_uint16(f"split.{key}", value)
    for name, (shape, kind) in tensors.items():
        writer.add_tensor(name, np.zeros([*reversed(shape)], dtype="f2" if kind == "F16" else "f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_any_shard_means_the_model(kvcalc: Any, tmp_path: Path) -> None:
    whole = kvcalc("estimate", write(tmp_path / "m.gguf", "llama", SMALL, llama_tensors()), "--json").json
    folder = tmp_path / "shards"
    folder.mkdir()
    for path in (*shards(folder), folder):
        found = kvcalc("estimate", path, "--json").json
        assert (found["model"]["name"], found["model"]["source"]) == ("m", str(folder / "m-00001-of-00003.gguf"))
        assert found["weights"] == whole["weights"]


def test_a_shard_that_is_missing(kvcalc: Any, tmp_path: Path) -> None:
    paths = shards(tmp_path)
    paths[1].unlink()
    found = kvcalc("estimate", paths[2], "--json").json
    assert found["weights"]["bytes"] is None
    assert "shards" in found["weights"]["reason"]
    paths[0].unlink()
    done = kvcalc("estimate", paths[2])
    assert done.status == 2
    assert "m-00001-of-00003.gguf: missing" in done.err


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"count": 4}, "shard 1 of 4"),
        ({"no": 2}, "shard 3 of 3"),
        ({"tensors.count": 99}, "split.tensors.count is 99"),
    ],
)
def test_shards_that_contradict_their_names(changed: dict[str, int], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        load(shards(tmp_path, **changed)[0])


def test_a_shard_under_another_name(tmp_path: Path) -> None:
    paths = shards(tmp_path)
    with pytest.raises(UsageError, match="NAME-00001"):
        load(paths[0].rename(tmp_path / "first.gguf"))
    # A shard of another model takes the place of the second.
    write(paths[1], "llama", {})
    shards(tmp_path)[1].unlink()
    write(paths[1], "llama", {})
    with pytest.raises(UsageError, match="shard 1 of 0"):
        load(paths[2])
    with pytest.raises(UsageError, match="shard 4 of 3"):
        read_files(str(tmp_path / "m-00004-of-00003.gguf"))


# What is not understood


@pytest.mark.parametrize(
    ("arch", "pairs", "says"),
    [
        ("lamma", SMALL, "architecture 'lamma' is not known"),
        ("rwkv7", {**SMALL, "wkv.head_size": 64}, "architecture 'rwkv7' is not known"),
        ("llama", {**SMALL, "attention.sliding_window": 4096}, "attention.sliding_window"),
        ("llama", {**SMALL, "attention.kv_lora_rank": 512}, "attention.kv_lora_rank"),
        ("llama", {**SMALL, "num_loops": 2}, "num_loops"),
        ("llama", {**SMALL, "attention.head_count_kv": [2, 1]}, "differs between layers"),
        ("llama", {**SMALL, "attention.head_count_kv": [2] * 3}, "list of 3"),
        ("llama", {**SMALL, "attention.head_count_kv": 3}, "does not divide"),
        ("llama", {**SMALL, "attention.value_length": 32}, "v_head_dim"),
        ("llama", {**SMALL, "block_count": 2001}, "block_count"),
        ("llama", {**SMALL, "block_count": 0}, "block_count"),
        ("llama", {**SMALL, "block_count": "two"}, "must be an integer"),
        ("llama", {**SMALL, "block_count": True}, "must be an integer"),
        ("llama", {**SMALL, "nextn_predict_layers": 2}, "nextn_predict_layers"),
        ("llama", {**SMALL, "attention.causal": False}, "attention.causal"),
        ("llama", {**SMALL, "rope.freq_base": float("nan")}, "rope.freq_base"),
        ("llama", {key: value for key, value in SMALL.items() if key != "embedding_length"}, "embedding_length is mis"),
        ("gpt2", {**SMALL, "attention.head_count_kv": 4, "attention.key_length": 16}, "head_dim"),
        ("gpt-oss", SMALL, "attention.sliding_window is missing"),
        ("granite_swa", {**SMALL, "attention.sliding_window": 9}, "sliding_window_pattern is missing"),
        ("exaone4", {**SMALL, "attention.sliding_window": 9}, "64-layer model"),
        ("gemma3n", {**SMALL, "attention.sliding_window": 9}, "first 20 layers"),
        ("llama4", {**SMALL, "attention.sliding_window": 9}, "8,192"),
        ("jamba", {**SMALL, "block_count": 4, "attention.head_count_kv": [2, 2, 0, 2], "ssm.inner_size": 512,
                   "ssm.state_size": 16, "ssm.conv_kernel": 4}, "uneven"),
        ("granitehybrid", {**SMALL, "attention.head_count_kv": [0, 2]}, "ssm.inner_size is missing"),
        ("deepseek2", {**SMALL, "attention.kv_lora_rank": 64, "rope.dimension_count": 32,
                       "attention.key_length": 64, "attention.value_length": 64, "attention.key_length_mla": 64},
         "do not match a latent"),
        ("lfm2", {**SMALL, "attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "attention.sliding_window": 5},
         "sliding_window"),
        ("clip", {}, "vision projector"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(
    arch: str, pairs: dict[str, Any], says: str, kvcalc: Any, tmp_path: Path
) -> None:
    done = kvcalc("estimate", write(tmp_path / "x.gguf", arch, pairs))
    assert done.status == 3
    assert says in done.err
    assert done.err.count("\n") <= 2


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="LoRA"):
        load(write(tmp_path / "x.gguf", "llama", SMALL, type="adapter"))


def test_an_upper_bound(kvcalc: Any, tmp_path: Path) -> None:
    """Every layer keeps K and V of the largest number of heads in any layer. Windows are ignored."""
    unknown = {**SMALL, "attention.head_count_kv": [4, 0], "attention.other_window": 7}
    done = kvcalc("estimate", write(tmp_path / "x.gguf", "newarch", unknown), "--assume-full-attention", "--json").json
    assert done["kv_cache"]["bytes_per_token"] == 2 * 2 * 4 * 64 * 2
    assert "newarch" in texts(done)[0]
    windowed = write(tmp_path / "y.gguf", "gpt-oss", {**SMALL, "attention.sliding_window": 9})
    done = kvcalc("estimate", windowed, "--assume-full-attention", "--json").json
    assert done["kv_cache"]["bytes_per_token"] == 2 * 2 * 2 * 64 * 2
    done = kvcalc("estimate", write(tmp_path / "z.gguf", "new", {"block_count": 2}), "--assume-full-attention")
    assert done.status == 3


def test_without_the_extra_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch, kvcalc: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", "llama", SMALL)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RunError, match="not installed"):
        read_header(str(path))
    done = kvcalc("estimate", path)
    assert done.status == 1
    assert "pip install 'kvcalc[gguf]'" in done.err
    assert done.err.count("\n") == 2


# Damage


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value


def raw(*pairs: bytes, tensors: int = 0, version: int = 3, count: int | None = None, order: str = "<") -> bytes:
    head = struct.pack(f"{order}IQQ", version, tensors, len(pairs) if count is None else count)
    return b"GGUF" + head + b"".join(pairs)


TEXT = struct.pack("<Q", 5) + b"llama"
BIG = 2**63


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"", 2, "not a GGUF file"),
        (b"GGU", 2, "not a GGUF file"),
        (b"GGUF", 2, "truncated"),
        (b"ggml" + bytes(100), 2, "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", 2, "Git LFS"),
        (raw(version=1), 3, "version 1"),
        (raw(version=4), 3, "version 4"),
        (raw(order=">"), 3, "big-endian"),
        (raw(count=BIG), 2, "damaged"),
        (raw(tensors=BIG), 2, "damaged"),
        (raw(count=1), 2, "truncated"),
        (raw(pair(b"", 4, bytes(4))), 2, "is empty"),
        (raw(struct.pack("<Q", BIG)), 2, "truncated"),
        (raw(pair(b"a\xff", 4, bytes(4))), 2, "not UTF-8"),
        (raw(pair(b"general.name", 8, struct.pack("<Q", 2) + b"\xff\xfe")), 2, "not UTF-8"),
        (raw(pair(b"general.name", 8, struct.pack("<Q", BIG))), 2, "truncated"),
        (raw(pair(b"general.architecture", 8, TEXT), pair(b"general.architecture", 8, TEXT)), 2, "appears twice"),
        (raw(pair(b"a", 13, bytes(8))), 2, "type 13"),
        (raw(pair(b"a", 9, struct.pack("<IQ", 9, 2))), 2, "array of type 9"),
        (raw(pair(b"a", 9, struct.pack("<IQ", 4, BIG))), 2, "truncated"),
        (raw(pair(b"a", 9, struct.pack("<IQ", 8, BIG))), 2, "strings"),
        (raw(pair(b"a", 9, struct.pack("<IQ", 8, 3) + bytes(8))), 2, "truncated"),
        (raw(pair(b"a", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", BIG))), 2, "truncated"),
        (raw(pair(b"general.alignment", 4, struct.pack("<I", 3))), 2, "general.alignment"),
        (raw(pair(b"general.name", 8, TEXT)), 3, "general.architecture is missing"),
        (raw(pair(b"general.architecture", 8, TEXT)), 3, "llama.block_count is missing"),
        (raw(tensors=1) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 5), 2, "5 dimensions"),
        (raw(tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 99, 0), 3, "type 99"),
        (raw(tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 31, 2, 0), 2, "do not divide a row"),
        (raw(tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 2, 32), 2, "do not follow"),
        (raw(tensors=1) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 32, 2, 0), 2, "describes 18 bytes"),
        (raw(tensors=1) + struct.pack("<Q1sIQQIQ", 1, b"t", 2, BIG, BIG, 0, 0), 2, "truncated"),
        (raw(tensors=2) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 0, 0, 0) * 2, 2, "appears twice"),
    ],
    ids=range(33),
)
def test_damaged_files(data: bytes, status: int, says: str, kvcalc: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    done = kvcalc("estimate", path)
    assert done.status == status, done.err
    assert says in done.err
    assert 1 <= done.err.count("\n") <= 2
    assert done.out == ""


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.gguf", "llama", SMALL, llama_tensors("Q8_0")).read_bytes()
    path = tmp_path / "cut.gguf"
    for end in [*range(0, 2000, 7), *range(2000, len(whole) - 33, len(whole) // 50), len(whole) - 33]:
        path.write_bytes(whole[:end])
        with pytest.raises(UsageError):
            load(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_give_an_answer_or_a_clean_refusal(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for place, value in changes:
        data[place % len(data)] = value
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with contextlib.suppress(KvcalcError):
        estimate(load(path))


def _whole() -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        pairs = {**SMALL, "attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]}
        tensors = {"blk.0.attn_k.weight": ((256, 128), "F16"), "output.weight": ((256, 3), "Q8_0")}
        return write(Path(folder) / "x.gguf", "gpt-oss", pairs, tensors).read_bytes()


WHOLE = _whole()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_what_is_no_file(kvcalc: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "folder.gguf").mkdir()
    for name, says in (
        ("pipe.gguf", "not a regular file"), ("folder.gguf", "no config.json"), ("none.gguf", "No such file"),
    ):  # fmt: skip
        done = kvcalc("estimate", tmp_path / name)
        assert done.status == 2
        assert says in done.err
    with pytest.raises(UsageError):
        load(Path("a\0b.gguf"))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    """Only the header costs time and memory, measured in a separate process.

    The file has a vocabulary of real size, followed by a hundred gigabytes of tensors, which are a sparse hole.
    """
    import gguf

    path = tmp_path / "huge.gguf"
    pairs = [pair(b"general.architecture", 8, TEXT)]
    pairs += [pair(f"llama.{key}".encode(), 4, struct.pack("<I", value)) for key, value in SMALL.items()]
    tokens = b"".join(struct.pack("<Q", 7) + b"%07d" % n for n in range(262_144))
    pairs.append(pair(b"tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 262_144) + tokens))
    merges = b"".join(struct.pack("<Q", 13) + b"%06d %06d" % (n, n) for n in range(450_000))
    pairs.append(pair(b"tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 450_000) + merges))
    pairs.append(pair(b"tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 262_144) + bytes(4 * 262_144)))
    tensor = struct.pack("<Q4sIQQIQ", 4, b"huge", 2, 2**20, 51_200, gguf.GGMLQuantizationType.F16, 0)
    data = raw(*pairs, tensors=1) + tensor
    with open(path, "wb") as file:
        file.write(data)
        file.truncate(len(data) + 64 + 2**21 * 51_200)
    script = (
        "import resource, sys, time, kvcalc, gguf\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "start = time.process_time()\n"
        "found = kvcalc.estimate(kvcalc.load_model(sys.argv[1]))\n"
        "taken = time.process_time() - start\n"
        "more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(found['weights']['bytes'], taken, more)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True, cwd=ROOT)
    held, seconds, kibibytes = done.stdout.split()
    assert int(held) == 2**21 * 51_200
    # It usually takes 0.2 seconds and 4 MiB, but machines can stall.
    assert float(seconds) < 2
    assert int(kibibytes) < 64 * 1024
