"""measure end to end on the CPU: held bytes equal predicted bytes for every kind, and a wrong prediction is noticed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcalc as library
from kvcalc.attention.backends import BACKENDS
from kvcalc.attention.cache import TokenCache
from kvcalc.measure import run as one_run
from kvcalc.measure import runner, verify
from kvcalc.measure.layers.build import build_layer
from kvcalc.measure.layers.stack import Request
from kvcalc.measure.layers.storage import Storage
from kvcalc.measure.sizes import budget
from kvcalc.memory.dtypes import DTYPES
from tests.conftest import PLAIN_PRESETS, ROOT, without_progress
from tests.documents import texts, validate
from tests.measure.quick import FAST, narrow


def test_all_four_kinds_hold_what_the_formula_says(taken: dict[str, Any]) -> None:
    validate(taken, "measure")
    assert [run["attention"] for run in taken["runs"]] == ["mha", "mqa", "gqa", "mla"]
    elements = {"mha": 2 * 8 * 16, "mqa": 2 * 16, "gqa": 2 * 2 * 16, "mla": 4 * 16 + 8}
    for run in taken["runs"]:
        expected = 2 * 40 * elements[run["attention"]] * 4
        assert run["predicted_bytes"] == run["held_bytes"] == run["allocator_bytes"] == expected
        assert run["verified"]["ok"]
        for times in (run["decode_step_seconds"], run["attention_core_seconds"]):
            assert 0 < times["min"] <= times["p50"] <= times["p90"]
            assert times["n"] == 4


@pytest.mark.parametrize("name", PLAIN_PRESETS)
def test_every_preset_runs_or_is_refused_by_name(name: str) -> None:
    """Run one layer of each preset in its own dtype, and compare it with the estimate of that layer."""
    spec = narrow(library.load_model(name))
    document = runner.measure(spec, context_tokens=24, steps=2, num_layers=1, device="cpu")
    (run,) = document["runs"]
    expected = library.estimate(spec.head(1), context_tokens=24)["kv_cache"]["total_bytes"]
    assert run["predicted_bytes"] == run["held_bytes"] == expected
    assert run["attention"] == spec.attention.kind
    runner.check_bytes(document)


def test_a_window_is_a_ring_of_the_window(kvcalc: Any) -> None:
    document = kvcalc("measure", *FAST, "--sliding-window", "10", "--attention", "all", "--json").json
    for run in document["runs"]:
        assert run["predicted_bytes"] == run["held_bytes"]
        assert run["verified"]["ok"]
    assert document["runs"][2]["held_bytes"] == 2 * 10 * 2 * 2 * 16 * 4


def test_a_kind_the_model_cannot_have_is_skipped_with_the_reason() -> None:
    spec = narrow(library.load_model("falcon-7b"))
    document = runner.measure(spec, context_tokens=8, steps=2, num_layers=1, all_variants=True, device="cpu")
    assert [run["attention"] for run in document["runs"]] == ["mha", "mqa", "mla"]
    assert document["skipped"] == [{"attention": "gqa", "reason": "no number of groups from 2 to 8 divides 71 heads"}]


def test_a_tensor_one_row_too_long_is_found_out(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TokenCache._shape

    def longer(self: TokenCache, batch: int, heads: int, width: int) -> tuple[int, ...]:
        self.capacity += 1
        try:
            return real(self, batch, heads, width)
        finally:
            self.capacity -= 1

    monkeypatch.setattr(TokenCache, "_shape", longer)
    result = kvcalc("measure", *FAST, "--json")
    predicted, held = 2 * 40 * 2 * 2 * 16 * 4, 2 * 41 * 2 * 2 * 16 * 4
    assert result.status == 5
    assert f"{predicted:,}" in result.err
    assert f"{held:,}" in result.err
    # The document is still printed, with both numbers.
    run = result.json["runs"][0]
    assert (run["predicted_bytes"], run["held_bytes"]) == (predicted, held)


def test_predicted_bytes_come_from_the_formula_not_from_a_tensor(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcalc.memory.kv_cache.stored_bytes", lambda *args: 12345)
    result = kvcalc("measure", *FAST, "--json")
    assert result.json["runs"][0]["predicted_bytes"] == 12345
    assert result.status == 5


def test_a_decode_that_differs_from_the_full_pass_fails_the_run(kvcalc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that keeps one token too few does not change the counted bytes, but the self-check notices it."""
    real = verify.make_cache

    def forgetful(*args: Any) -> TokenCache:
        cache = real(*args)
        first = cache.tensors[0]
        append = cache.append

        def append_and_forget(rows: Any) -> None:
            append(rows)
            first[:, :, 0] = 0

        cache.append = append_and_forget  # type: ignore[method-assign]
        return cache

    monkeypatch.setattr(verify, "make_cache", forgetful)
    result = kvcalc("measure", *FAST, "--json")
    assert result.status == 1
    assert "differs from the full pass" in result.err
    assert not result.json["runs"][0]["verified"]["ok"]


def test_the_caches_end_full_with_every_row_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TokenCache] = []
    real = one_run.held_bytes

    def spy(caches: Any) -> int:
        seen.extend(caches)
        assert all(cache.length == 40 for cache in seen)
        assert all(bool((t.abs().sum(dim=-1) > 0).all()) for cache in seen for t in cache.tensors)
        return real(caches)

    monkeypatch.setattr(one_run, "held_bytes", spy)
    spec = library.read_config(
        {"model_type": "generic", "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}, "x", "x"
    )
    runner.measure(spec, context_tokens=40, steps=7, device="cpu", dtype="fp32")
    assert len(seen) == 3


def test_warm_up_leaves_no_token_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same run with and without warm-up ends with the same cache."""
    kept: list[list[torch.Tensor]] = []
    real = one_run.held_bytes

    def spy(caches: Any) -> int:
        kept.append([t.clone() for cache in caches for t in cache.in_order()])
        return real(caches)

    monkeypatch.setattr(one_run, "held_bytes", spy)
    spec = library.read_config(
        {
            "model_type": "generic",
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "hidden_size": 32,
            "sliding_window": 8,
        },
        "x",
        "x",
    )
    for warm_up in (3, 0):
        monkeypatch.setattr(one_run, "WARM_UP_STEPS", warm_up)
        # Constant inputs, so that warm-up does not advance the random stream of the steps.
        monkeypatch.setattr(one_run, "inputs", lambda spec, request: lambda n: torch.ones(request.batch_size, n, 32))
        runner.measure(spec, context_tokens=20, steps=5, device="cpu", dtype="fp32")
    for a, b in zip(*kept):
        torch.testing.assert_close(a, b)


def test_a_seed_gives_the_same_weights_and_inputs() -> None:
    spec = narrow(library.load_model("gpt2"))
    options: dict[str, Any] = {"num_layers": 1, "device": "cpu", "backend": "grouped-sdpa"}
    errors = [
        runner.measure(spec, context_tokens=8, steps=2, seed=seed, **options)["runs"][0]["verified"]["max_abs_error"]
        for seed in (1, 1, 2)
    ]
    assert errors[0] == errors[1] != errors[2]


def test_layers_are_the_first_ones_and_said_so(kvcalc: Any) -> None:
    document = kvcalc(
        "measure", "gpt2", "--layers", "2", "--context", "16", "--steps", "2", "--device", "cpu", "--json"
    ).json
    assert document["runs"][0]["num_layers"] == document["model"]["num_layers"] == 2
    assert any("2 of 12 layers" in warning for warning in texts(document))


def test_an_encoder_runs_with_a_warning() -> None:
    spec = narrow(library.load_model("bert-base"))
    document = runner.measure(spec, context_tokens=16, steps=2, num_layers=1, device="cpu")
    assert any("engines keep no cache" in warning for warning in texts(document))
    assert document["runs"][0]["held_bytes"] == 2 * 12 * 64 * 16 * 4  # its file is fp32


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--steps", "40"), 2, "--steps 40 must be less than the context of 40"),
        (("--steps", "41"), 2, "--steps 41"),
        (("--device", "tpu"), 2, "not a device"),
        (("--dtype", "fp8"), 2, "measure computes in"),
        (("--dtype", "int4"), 2, "measure computes in"),
        (("--attention", "some"), 2, "not a kind of attention"),
        (("--get", "runs.0.held"), 2, "no such path"),
        (("--seed", "-1"), 2, "--seed"),
        (("--context", "10G"), 4, "is free"),
        (("--batch", "1_000_000_000"), 4, "no context fits"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_allocated(
    kvcalc: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[str, str], status: int, message: str
) -> None:
    def unreachable(*args: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(runner, "read_roof", unreachable)
    monkeypatch.setattr(one_run, "build", unreachable)
    result = kvcalc("measure", *FAST, *options)
    assert result.status == status
    assert message in result.err
    assert result.out == ""
    assert len(result.err.splitlines()) <= 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_a_device_that_is_not_here_says_what_is(kvcalc: Any) -> None:
    result = kvcalc("measure", *FAST, "--device", "cuda")
    assert result.status == 2
    assert "available: " in result.err
    assert "cpu" in result.err


def test_more_layers_than_there_are(kvcalc: Any) -> None:
    result = kvcalc("measure", "gpt2", "--layers", "13", "--context", "16", "--steps", "2")
    assert (result.status, result.out) == (2, "")
    assert "gpt2 has 12" in result.err


def test_a_model_without_a_width_is_refused(kvcalc: Any) -> None:
    result = kvcalc("measure", "--layers", "1", "--heads", "4", "--head-dim", "8", "--context", "16", "--steps", "2")
    assert result.status == 3
    assert "--hidden-size" in result.err


def asked(dtype: str, context_tokens: int) -> Request:
    return Request(context_tokens, 1, 8, DTYPES[dtype], torch.device("cpu"), 0)


def test_what_would_fit_really_fits() -> None:
    """The context in the error message is the longest one whose need is within the usable memory."""
    spec, free = library.load_model("llama-7b").head(2), 4 << 30
    with pytest.raises(library.KvcalcError) as caught:
        budget.check_fits(spec, asked("fp16", 10**6), free)
    assert caught.value.exit_code == 4
    assert " (torch " in caught.value.message
    assert "4.00 GiB is free beyond torch's own" in caught.value.message
    hint = caught.value.hint or ""
    longest = int(hint.split(" tokens")[0].split()[-1].replace(",", ""))
    budget.check_fits(spec, asked("fp16", longest), free)
    with pytest.raises(library.KvcalcError):
        budget.check_fits(spec, asked("fp16", longest + 1), free)


def test_the_layers_a_refusal_offers_really_fit() -> None:
    spec, request, free = library.load_model("deepseek-v3"), asked("bf16", 4096), 8 << 30
    with pytest.raises(library.KvcalcError) as caught:
        budget.check_fits(spec, request, free)
    layers = int((caught.value.hint or "").split()[-1])
    budget.check_fits(spec.head(layers), request, free)
    with pytest.raises(library.KvcalcError):
        budget.check_fits(spec.head(layers + 1), request, free)


def test_the_weights_counted_are_the_weights_built() -> None:
    for name in ("gpt2", "llama-7b", "deepseek-v3"):
        spec = library.load_model(name).head(1)
        layer = build_layer(spec.attention, None, torch.bfloat16, torch.device("meta"))
        built = sum(p.numel() * 2 for p in layer.parameters() if p.dim() == 2)
        assert budget.need_of(spec, asked("bf16", 64)).weights_bytes == built


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3"])
def test_a_kernel_that_reads_8_bit_rows_needs_no_memory_for_copies(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others need it on a GPU, and are left out if they run out of memory. It is asked for if one is named."""
    monkeypatch.setattr(BACKENDS["triton"], "load", lambda: None)
    spec, stored = library.load_model(model).head(1), Storage(block_size=64, kv_dtype="fp8")
    request = Request(65_536, 32, 4, DTYPES["bf16"], torch.device("cuda", 0), 0, storage=stored)
    need = budget.need_of(spec, request)
    assert budget.need_of(spec, request._replace(batch_size=1)).workspace_bytes == need.workspace_bytes
    for storage in (stored._replace(backend="grouped-matmul"), stored._replace(without_backends=("triton", "gluon"))):
        assert budget.need_of(spec, request._replace(storage=storage)).workspace_bytes > 8 * need.kv_cache_bytes


def test_a_run_loads_neither_torchs_compiler_nor_sympy(tmp_path: Path) -> None:
    """Loading them takes seconds. torch loads them for some operations on the meta device.

    A process of its own, because the server of `tests.measure.processes` has loaded them.
    """
    code = """
import sys
import pytest
from kvcalc.measure import record
from kvcalc.__main__ import main
from tests.measure.quick import quicken
record.save = lambda *given: print(*({"sympy", "torch._dynamo"} & {*sys.modules}), file=sys.stderr)
quicken(pytest.MonkeyPatch())
sys.exit(main())
"""
    words = ["measure", *FAST, "--attention", "all", "--save", str(tmp_path / "record.json")]
    found = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False, cwd=ROOT)
    # Other programs on the machine may make times vary.
    lines = [line for line in without_progress(found.stderr).splitlines() if line.strip()]
    said = [line for line in lines if not line.endswith("something else was running")]
    assert (found.returncode, said) == (0, [])


@pytest.mark.parametrize("missing", ["torch", "psutil"])
def test_without_torch_one_line_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from kvcalc.cli.app import run; sys.exit(run(['measure', 'gpt2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout == ""
    wanted = f"kvcalc: kvcalc measure needs {missing}, which is not installed: pip install 'kvcalc[measure]'"
    assert done.stderr.splitlines() == [wanted]


def test_human_output_names_bytes_times_and_shares(printed: Any, taken: dict[str, Any]) -> None:
    result = printed(taken, "--format", "human")
    assert result.status == 0
    lines = result.out.splitlines()
    for kind in ("MHA", "MQA", "GQA", "MLA"):
        assert sum(line.startswith(kind) for line in lines) == 2
    assert result.out.count("equal") == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_on_a_gpu_all_four_kinds_hold_what_the_formula_says(kvcalc: Any, dtype: str) -> None:
    result = kvcalc(
        "measure",
        "llama-7b",
        "--layers",
        "2",
        "--context",
        "2k",
        "--attention",
        "all",
        "--device",
        "cuda",
        "--dtype",
        dtype,
        "--json",
    )
    assert result.status == 0, result.err
    for run in result.json["runs"]:
        assert run["predicted_bytes"] == run["held_bytes"] == run["allocator_bytes"]
        assert run["verified"]["ok"]


@pytest.mark.parametrize(
    ("name", "left_out"), [("gpt-oss-20b", ["sink"]), ("gemma-2-9b", ["softcap"]), ("gemma-3-4b", [])]
)
def test_what_attention_leaves_out_is_said(name: str, left_out: list[str]) -> None:
    """Sinks and limits on scores change no bytes, and a little of the time."""
    from kvcalc.measure.layers.parts import remarks_on

    said = [remark for remark in remarks_on(library.load_model(name)) if "left out" in remark]
    assert len(said) == len(left_out)
    assert all(word in remark for word, remark in zip(left_out, said))
