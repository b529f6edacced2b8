"""measure with every kind of cache: exact bytes, backends, curves, capacity, traces, and refused options."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcalc as library
from kvcalc.attention.cache import held_bytes
from kvcalc.measure import choose, figures, runner
from kvcalc.measure.devices import timing
from kvcalc.measure.layers import storage
from kvcalc.measure.layers.build import build_part
from kvcalc.measure.layers.parts import parts_of
from kvcalc.measure.layers.stack import Request, Stack, make_caches
from kvcalc.measure.sizes import budget, capacity
from kvcalc.measure.sweep import parse_sweep
from kvcalc.memory.dtypes import DTYPES
from tests.documents import texts, validate
from tests.measure.quick import EFFORT, SMALL, narrow

FAST = (*SMALL, "--context", "40", "--steps", "3", "--device", "cpu", "--dtype", "fp32")
CPU = torch.device("cpu")


def check(document: dict[str, Any]) -> None:
    validate(document, "measure")


# 40 tokens, 2 layers, 2 KV heads of 16, K and V in fp32. Blocks of 16 round up to 48. int8 has a 4-byte scale per row.
STORED = [
    ((), 2 * 40 * 2 * 2 * 16 * 4),
    (("--cache", "grow"), 2 * 40 * 2 * 2 * 16 * 4),
    (("--cache", "none"), 0),
    (("--block-size", "16"), 2 * 48 * 2 * 2 * 16 * 4),
    (("--block-size", "64"), 2 * 64 * 2 * 2 * 16 * 4),
    (("--kv-dtype", "int8"), 2 * 40 * 2 * 2 * (16 + 4)),
    (("--kv-cache-dtype", "fp8"), 2 * 40 * 2 * 2 * (16 + 4)),
    (("--kv-dtype", "fp8", "--block-size", "16"), 2 * 48 * 2 * 2 * (16 + 4)),
    (("--kv-dtype", "int8", "--cache-scales", "row"), 2 * 40 * 2 * 2 * (16 + 4)),
    (("--kv-dtype", "int8", "--cache-scales", "head", "--batch", "3"), 3 * 2 * 40 * 2 * 2 * 16 + 2 * 2 * 2 * 4),
    (("--kv-dtype", "fp8", "--cache-scales", "tensor", "--block-size", "16"), 2 * 48 * 2 * 2 * 16 + 2 * 2 * 4),
    (("--attention", "mla", "--kv-dtype", "fp8", "--cache-scales", "tensor"), 2 * (40 * 72 + 4)),
    (("--sliding-window", "10", "--block-size", "4"), 2 * 12 * 2 * 2 * 16 * 4),
    (("--sliding-window", "10", "--cache", "grow", "--kv-dtype", "int8"), 2 * 10 * 2 * 2 * (16 + 4)),
    (("--attention", "mla", "--kv-dtype", "int8"), 2 * 40 * (72 + 4)),
    (("--attention", "mla", "--mla", "expanded"), 2 * 40 * 72 * 4),
    (("--attention", "mla", "--block-size", "16"), 2 * 48 * 72 * 4),
]


@pytest.mark.parametrize(("options", "stored"), STORED, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")
def test_every_way_to_keep_a_cache_holds_what_is_predicted(kvcalc: Any, options: tuple[str, ...], stored: int) -> None:
    result = kvcalc("measure", *FAST, *options, "--json")
    assert result.status == 0, result.err
    check(result.json)
    (found,) = result.json["runs"]
    assert found["predicted_bytes"] == found["held_bytes"] == stored
    assert found["verified"]["ok"]
    assert (found["attention_core_seconds"] is None) is ("none" in options)
    assert result.json["workload"]["kv_dtype"] == ("fp32" if not {"int8", "fp8"} & set(options) else options[
        max(options.index(o) for o in ("int8", "fp8") if o in options)])  # fmt: skip


MODELS = (
    "falcon-h1-tiny-90m gemma-3n-e4b granite-4.0-h-small jamba-v0.1 kimi-linear-48b lfm2-8b-a1b llama-4-scout "
    "mamba2-780m mamba-2.8b mimo-v2-flash qwen3-next-80b-a3b t5-small whisper-large-v3"
).split()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "kept", [storage.Storage(), storage.Storage(block_size=16, kv_dtype="int8")], ids=["plain", "int8"]
)
def test_hybrid_and_per_layer_models_hold_what_the_formula_says(name: str, kept: storage.Storage) -> None:
    """The first layers of each kind are not run: modules are on the meta device, caches of 20 tokens on the CPU."""
    from kvcalc.memory.workload import bind_workload, resolve_workload

    spec = library.load_model(name)
    spec = bind_workload(spec, workload := resolve_workload(spec, 20, 2, None))
    request = Request(20, 2, 3, workload.kv_dtype, CPU, 0, storage=kept)
    parts, width, meta = parts_of(spec), spec.attention.hidden_size or 0, torch.device("meta")
    stack = Stack(parts, [build_part(part, width, torch.bfloat16, meta) for part in parts], [])
    make_caches(stack, request)
    assert held_bytes(stack.caches) == budget.predicted_bytes(spec, request)


@pytest.mark.parametrize("name", ["falcon-h1-tiny-90m", "lfm2-8b-a1b", "mamba2-780m"])
def test_a_model_with_states_runs(name: str) -> None:
    spec = narrow(library.load_model(name))
    document: Any = runner.measure(spec, num_layers=3, context_tokens=24, steps=3, device="cpu")
    check(document)
    (found,) = document["runs"]
    assert found["held_bytes"] == found["predicted_bytes"] > 0
    assert found["verified"]["ok"]
    assert any("recurrent layers" in warning for warning in texts(document))
    assert found["scaled"]["num_layers"] == spec.num_layers


@pytest.mark.parametrize(
    ("name", "what"), [("deepseek-v3.2", "indexer keys"), ("deepseek-v4-flash", "compressed attention")]
)
def test_what_no_module_runs_is_named(kvcalc: Any, name: str, what: str) -> None:
    result = kvcalc("measure", name, "--layers", "4", "--context", "24", "--steps", "3", "--device", "cpu")
    assert (result.status, result.out) == (3, "")
    assert what in result.err


def test_every_backend_is_in_the_record_with_its_time_or_the_reason(kvcalc: Any) -> None:
    (found,) = kvcalc("measure", *FAST, "--json").json["runs"]
    rows = {row["name"]: row for row in found["backends"]}
    assert [*rows] == [*choose.BACKENDS]
    assert all((row["seconds"] is None) is (row["reason"] is not None) for row in rows.values())
    timed = {name: row["seconds"] for name, row in rows.items() if row["seconds"] is not None}
    assert {"grouped-sdpa", "grouped-matmul"} <= set(timed)
    assert found["backend"] == min(timed, key=lambda name: timed[name])
    assert [name for name, row in rows.items() if row["is_chosen"]] == [found["backend"]]
    assert rows["repeat-kv"]["reason"] == "a baseline, run only by name"
    assert rows["sdpa-flash"]["reason"] == "only runs on CUDA devices"


@pytest.mark.parametrize("name", ["grouped-matmul", "repeat-kv"])
def test_a_backend_asked_for_is_the_one_that_runs(kvcalc: Any, name: str) -> None:
    (found,) = kvcalc("measure", *FAST, "--backend", name, "--json").json["runs"]
    assert found["backend"] == name
    assert {row["name"] for row in found["backends"] if row["seconds"] is not None} == {name}


def test_a_wrong_backend_is_not_timed_and_never_chosen(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = choose.BACKENDS["grouped-sdpa"]
    monkeypatch.setattr(type(wrong), "__call__", lambda self, query, key, value, *a, **k: value[:, :1, :1] + query * 0)
    (found,) = kvcalc("measure", *FAST, "--json").json["runs"]
    row = next(row for row in found["backends"] if row["name"] == "grouped-sdpa")
    assert row["seconds"] is None
    assert "differs from fp32 by" in row["reason"]
    assert found["backend"] != "grouped-sdpa"
    result = kvcalc("measure", *FAST, "--backend", "grouped-sdpa")
    assert result.status == 1
    assert "differs from fp32" in result.err


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--backend", "fastest"), 2, "auto or one of grouped-sdpa"),
        (("--backend", "sdpa-flash"), 1, "only runs on CUDA devices"),
        (("--cache", "endless"), 2, "preallocated, grow, none"),
        (("--cache", "grow", "--block-size", "16"), 2, "cannot be combined with --block-size"),
        (("--cache", "none", "--kv-dtype", "int8"), 2, "cannot be combined with --kv-dtype"),
        (("--block-size", "0"), 2, "--block-size"),
        (("--kv-dtype", "int4"), 2, "fp8 and int8"),
        (("--kv-dtype", "bf16"), 2, "--dtype"),
        (("--mla", "half"), 2, "absorbed, expanded"),
        (("--mla", "expanded"), 2, "--attention mla"),
        (("--sweep", "tokens=1..4"), 2, "is not an axis"),
        (("--sweep", "context=64..32"), 2, "64 is more than 32"),
        (("--sweep", "context=2..64"), 2, "--steps 3 must be less"),
        (("--sweep", "batch=1..1_000_000,context=1..1M"), 2, "points"),
        (("--until-full", "layers"), 2, "context, batch"),
        (("--until-full", "batch", "--sweep", "batch=1..2"), 2, "cannot be combined with --sweep"),
        (("--memory", "1G"), 2, "--until-full"),
        (("--until-full", "batch", "--memory", "900T"), 4, "more than a run may use"),
        (("--trace", "/no/such/folder/trace.json"), 1, "/no/such/folder"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(kvcalc: Any, options: tuple[str, ...], status: int, message: str) -> None:
    result = kvcalc("measure", *FAST, *options)
    assert result.status == status
    assert message in result.err
    assert result.out == ""
    assert len(result.err.splitlines()) <= 3


def test_a_sweep_is_a_run_for_every_point_and_a_table(kvcalc: Any, printed: Any) -> None:
    options = ("--sweep", "context=16..40,batch=1:3")
    document = kvcalc("measure", *FAST, *options, "--json").json
    check(document)
    points = [(16, 1), (16, 3), (32, 1), (32, 3), (40, 1), (40, 3)]
    assert [(row["context_tokens"], row["batch_size"]) for row in document["runs"]] == points
    assert [(row["context_tokens"], row["batch_size"]) for row in document["curve"]] == points
    for found in document["runs"]:
        assert found["held_bytes"] == 2 * found["batch_size"] * found["context_tokens"] * 2 * 2 * 16 * 4
    rows = [*csv.DictReader(io.StringIO(printed(document, *options, "--format", "csv").out))]
    assert [(int(row["context_tokens"]), int(row["batch_size"])) for row in rows] == points
    human = printed(document, *options, "--format", "human").out
    assert human.count("#") >= 6
    assert "batch" in human


def test_a_point_that_does_not_fit_is_skipped_with_the_reason(kvcalc: Any) -> None:
    document = kvcalc("measure", *FAST, "--sweep", "context=16:10G", "--json").json
    assert [found["context_tokens"] for found in document["runs"]] == [16]
    assert document["skipped"][0]["reason"].startswith("10,737,418,240 tokens, batch 1: ")


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("context=1k..4k", [(1024, 7), (2048, 7), (4096, 7)]),
        ("context=3..10", [(3, 7), (6, 7), (10, 7)]),
        ("batch=1:8:2", [(5, 1), (5, 2), (5, 8)]),
        ("batch=1..2,context=8", [(8, 1), (8, 2)]),
    ],
)
def test_axes_double_or_are_listed(text: str, points: list[tuple[int, int]]) -> None:
    assert parse_sweep(text, 5, 7).points() == points


def test_a_model_too_large_runs_the_layers_that_fit_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = narrow(library.load_model("gpt2"))
    three = budget.need_of(spec.head(3), Request(64, 1, 4, DTYPES["fp32"], CPU, 0, effort=EFFORT)).further_bytes
    monkeypatch.setattr(runner, "free_bytes", lambda device: three * 100 // 85 + 100)
    document: Any = runner.measure(spec, context_tokens=64, steps=4, device="cpu", dtype="fp32")
    check(document)
    (found,) = document["runs"]
    assert found["num_layers"] == document["model"]["num_layers"] == 3
    assert any("3 of 12 layers fit and run" in warning for warning in texts(document))
    assert found["scaled"]["predicted_bytes"] == 4 * found["predicted_bytes"] == 12 * 64 * 2 * 768 * 4
    assert found["scaled"]["factor"] == pytest.approx(4)
    assert found["scaled"]["decode_step_seconds"] == pytest.approx(4 * found["decode_step_seconds"]["p50"])


@pytest.mark.parametrize("axis", ["context", "batch"])
def test_until_full_finds_what_fits(kvcalc: Any, axis: str) -> None:
    """By the process's own peak: the result is near the formula's, and never beyond the limit."""
    result = kvcalc("measure", *FAST, "--until-full", axis, "--memory", "60M", "--json")
    assert result.status == 0, result.err
    check(result.json)
    found = result.json["capacity"]
    assert found["limit_bytes"] == 60_000_000
    per_unit = 2 * 2 * 2 * 16 * 4 * (1 if axis == "context" else 40)
    assert found["measured"] <= found["predicted"] <= 60_000_000 // per_unit
    assert found["ratio"] > 0.5


def test_bisection_finds_the_edge_wherever_it_is() -> None:
    for edge in (1, 2, 99, 100, 101, 5000):
        tried: list[int] = []

        def fits(size: int, edge: int = edge, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= edge

        found = capacity._bisect(fits, 1, 100)
        assert found <= edge < found + max(2, found // 64)
        assert len(tried) < 50
    assert capacity._bisect(lambda size: False, 1, 100) == 0


def test_a_profile_is_a_trace_of_the_layers(kvcalc: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = kvcalc("measure", *FAST, "--trace", trace, "--json")
    assert result.status == 0, result.err
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert any(name.startswith("aten::") for name in names)
    assert result.json["runs"][0]["held_bytes"] == result.json["runs"][0]["predicted_bytes"]


@pytest.mark.parametrize(
    ("options", "kind", "sequences", "tokens"), [((), "sample", 1, 40), (("--prefill", "full"), "full", 3, 37)]
)
def test_prefill_is_timed_and_its_flop_are_those_of_the_work(
    kvcalc: Any, options: tuple[str, ...], kind: str, sequences: int, tokens: int
) -> None:
    document = kvcalc("measure", *FAST, "--batch", "3", *options, "--json").json
    (found,) = document["runs"]
    filled = found["prefill"]
    weights = 64 * 8 * 16 * 2 + 64 * 2 * 2 * 16
    pairs = tokens * (tokens + 1) // 2
    assert filled["flop"] == sequences * 2 * (2 * weights * tokens + 4 * 8 * 16 * pairs)
    assert (filled["kind"], filled["batch_size"], filled["tokens"]) == (kind, sequences, tokens)
    assert document["workload"]["prefill"] == kind
    assert filled["tokens_per_second"] == pytest.approx(sequences * tokens / filled["seconds"])
    assert found["fraction_of_matmul_roof"]["prefill"] > 0
    # The bytes are counted after either of them.
    assert found["held_bytes"] == found["predicted_bytes"] == 3 * 2 * 40 * 2 * 2 * 16 * 4


def test_times_that_spread_are_not_to_be_trusted() -> None:
    steady = timing.summarize([1.0, 1.1, 1.2])
    wild = timing.summarize([1.0, 1.1, 9.0])
    assert steady["spread"] == pytest.approx(0.2 / 1.1)
    row: Any = {
        "attention": "mha", "context_tokens": 1, "batch_size": 1, "held_bytes": 1,
        "fraction_of_roof": {"attention_core": 0.5}, "fraction_of_matmul_roof": {},
        "decode_step_seconds": steady, "attention_core_seconds": wild,
        "num_layers": 1, "allocator_bytes": 1, "expected_allocator_bytes": 1,
    }  # fmt: skip
    roof: Any = {"read_bytes_per_second": 1.0}
    (line,) = figures.remarks_on_runs([row], roof, 1)
    assert "not reliable" in line
    assert "attention core" in line


def test_a_call_finds_nothing_in_a_cache_and_its_flush_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing would leave modified lines, which the timed call would have to write back."""
    flush = timing.flusher(CPU, timing.Effort(cache_bytes=1 << 16))
    buffer: torch.Tensor = flush.__self__
    before = buffer.clone()
    flush()
    assert torch.equal(buffer, before)
    assert buffer.nbytes >= 2 << 16
    # A page that nobody has written is one page of zeros for all, which stays in the cache.
    assert bool(buffer.all())
    order: list[str] = []
    monkeypatch.setattr(timing, "synchronize", lambda device: order.append("wait"))
    taken = timing.time_calls(CPU, lambda: order.append("call"), 2, lambda: order.append("flush"))
    assert order[-10:] == ["flush", "wait", "wait", "call", "wait"] * 2
    assert taken.method == "wall clock"
    assert taken.cpu_seconds is not None
    assert len(taken.seconds) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "options", [(), ("--block-size", "256"), ("--kv-dtype", "fp8"), ("--attention", "mla")], ids=str
)
def test_on_a_gpu_steps_are_graphs_and_bytes_are_right(kvcalc: Any, options: tuple[str, ...]) -> None:
    result = kvcalc(
        "measure", "llama-3-8b", "--layers", "2", "--context", "4k", "--device", "cuda", *options, "--json"
    )  # fmt: skip
    assert result.status == 0, result.err
    (found,) = result.json["runs"]
    assert found["held_bytes"] == found["predicted_bytes"]
    assert found["decode_step_seconds"]["method"] in ("CUDA graph", "CUDA events")
    assert found["memory"]["peak_bytes"] >= found["held_bytes"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cache-scales", "tensor"), "needs a cache in 8 bits"),
        (("--cache-scales", "layer", "--kv-dtype", "fp8"), "one of row, head, tensor"),
        (("--cache-scales", "head", "--kv-dtype", "fp8", "--cache", "grow"), "cannot be combined with"),
    ],
)
def test_scales_that_there_cannot_be_are_refused(kvcalc: Any, options: tuple[str, ...], said: str) -> None:
    result = kvcalc("measure", *FAST, *options)
    assert (result.status, result.out) == (2, "")
    assert said in result.err


def test_the_record_says_what_has_a_scale(kvcalc: Any) -> None:
    asked = (("--kv-dtype", "int8", "--cache-scales", "TENSOR"), ("--kv-dtype", "int8"), ())
    assert [kvcalc("measure", *FAST, *o, "--json").json["workload"]["cache_scales"] for o in asked] == [
        "tensor", "row", None,
    ]  # fmt: skip
    assert "cache: int8 with a scale per tensor" in kvcalc("measure", *FAST, *asked[0]).out
