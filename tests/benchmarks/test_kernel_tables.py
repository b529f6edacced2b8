"""Kernel tables: fits find the constants that made the times, summaries know the units, and the file is complete."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT

np = pytest.importorskip("numpy")
RESULT = ROOT / "benchmarks" / "results" / "kernel_tables.json"


@pytest.fixture
def load() -> Any:
    """A function that imports a script of the folder, which needs NumPy and SciPy."""
    return lambda name: importlib.import_module(f"benchmarks.fit.kernels.{name}")


@pytest.fixture
def fits(load: Any) -> ModuleType:
    return load("fits")  # type: ignore[no-any-return]


def scatter(seconds: Any, seed: int, outliers: int = 0) -> Any:
    """The times with 5% of noise, and some of them 5 times as long."""
    noisy = seconds * np.exp(np.random.default_rng(seed).normal(0, 0.05, len(seconds)))
    noisy[:outliers] *= 5
    return noisy


def ideal(seed: int, rows: int = 1500) -> Any:
    """Ideal seconds from 0.1 us to 1 ms."""
    return 10 ** np.random.default_rng(seed).uniform(-7, -3, rows)


@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
def test_a_roofline_is_found_in_spite_of_noise_and_outliers(fits: ModuleType, power: float) -> None:
    read, compute = ideal(1), ideal(2)
    seconds = 5e-6 + ((1.3 * read) ** power + (1.6 * compute) ** power) ** (1 / power)
    fit = fits.fit_roofline(scatter(seconds, 3, outliers=60), read, compute)
    assert fit.fixed_seconds == pytest.approx(5e-6, rel=0.03)
    assert fit.factors == pytest.approx((1.3, 1.6), rel=0.03)
    assert fit.power == pytest.approx(power, rel=0.15)
    assert fit.spread == pytest.approx(0.034, abs=0.01)
    assert fit.rows == 1500


def test_a_sum_is_found_and_a_term_that_never_counts_is_not_determined(fits: ModuleType) -> None:
    read, heads = ideal(4), ideal(5) * 1e-6
    fit = fits.fit_sum(scatter(9e-6 + 1.1 * read + 3 * heads, 6), [read, heads])
    assert fit.fixed_seconds == pytest.approx(9e-6, rel=0.03)
    assert fit.factors[0] == pytest.approx(1.1, rel=0.03)
    assert fit.factors[1] is None
    assert fit.power is None


def test_reads_faster_than_the_memory_leave_the_factor_at_its_bound(fits: ModuleType) -> None:
    read = ideal(7)
    assert fits.fit_sum(3e-6 + 0.5 * read, [read]).factors[0] == pytest.approx(1.0, rel=1e-6)


def test_too_few_or_unusable_rows_have_no_fit(fits: ModuleType) -> None:
    few = ideal(8, fits.MINIMUM_ROWS - 1)
    assert fits.fit_roofline(few, few, few) is None
    assert fits.fit_sum(np.zeros(100), [ideal(9, 100)]) is None
    assert fits.middle(np.array([1.0, 2.0])) is None


def device(load: Any) -> Any:
    peaks = {"bf16": 1e15, "fp8": 2e15}
    return load("columns").Device("test", bandwidth=4e12, peaks=peaks, l2_bytes=5e7, link=4e11)


def table(load: Any, engine: str = "vllm", release: str = "1.0", **columns: Any) -> Any:
    named = {name: np.asarray(column) for name, column in columns.items()}
    return load("columns").Table(device(load), engine, release, named)


def gemm_columns(fixed: float = 5e-6) -> dict[str, Any]:
    """Products in bf16 on `device`: 5 us, 1.25 times the read, 80% of the peak, and the sum of both."""
    sizes = [1, 8, 16, 64, 256, 1024, 4096, 8192]
    widths = [512, 1024, 4096, 8192, 16384, 32768]
    m, n, k = (
        column.ravel() for column in np.meshgrid(np.array(sizes), np.array(widths), np.array(widths), indexing="ij")
    )
    read = (2.0 * n * k + 2 * m * k + 2 * m * n) / 4e12
    seconds = fixed + 1.25 * read + 2.0 * m * n * k / 1e15 / 0.8
    return {"gemm_dtype": ["bfloat16"] * len(m), "m": m, "n": n, "k": k, "latency": seconds * 1e3}


def values(columns: list[str], row: list[Any]) -> dict[str, Any]:
    """A row's values by column, without its device, engine and release."""
    assert len(row) == len(columns) + 3
    return dict(zip(columns, row[3:]))


def test_dense_layers_have_the_constants_that_made_them(load: Any) -> None:
    summaries = load("summaries")
    (row,) = summaries.gemm(table(load, **gemm_columns()))
    found = values(summaries.GEMM, row)
    assert found["fixed_us"] == pytest.approx(5, rel=0.02)
    assert found["read_factor"] == pytest.approx(1.25, rel=0.02)
    assert found["efficiency"] == pytest.approx(0.8, rel=0.02)
    assert found["power"] == pytest.approx(1, rel=0.02)
    # The fixed time and the products come on top of 1.25.
    assert 1.25 < found["overhead_m16"] < found["overhead_m64"] < found["overhead_m256"]


def test_a_step_of_attention_reads_the_cache_once(load: Any) -> None:
    summaries = load("summaries")
    batch, tokens = (
        column.ravel() for column in np.meshgrid([1, 1, 4, 16, 64, 256, 2048], [2, 16, 128, 1024, 8192, 131072])
    )
    heads, count = np.full(len(batch), 8), len(batch)
    read = batch * tokens * 8 * 128 * 2 * 2 / 4e12
    seconds = 9e-6 + 1.2 * read + batch * heads * 20e-9
    (row,) = summaries.decode_attention(
        table(
            load,
            kv_cache_dtype=["bfloat16"] * count,
            head_dim=[128] * count,
            batch_size=batch,
            num_key_value_heads=heads,
            step=tokens - 1,
            latency=seconds * 1e3,
        )
    )
    found = values(summaries.DECODE_ATTENTION, row)
    assert found["fixed_us"] == pytest.approx(9, rel=0.05)
    assert found["read_factor"] == pytest.approx(1.2, rel=0.02)
    assert found["nanoseconds_per_kv_head"] == pytest.approx(20, rel=0.1)
    assert found["us_8k"] == pytest.approx((9e-6 + 1.2 * 8192 * 4096 / 4e12 + 160e-9) * 1e6, rel=1e-6)


def test_only_the_experts_that_tokens_reach_are_read(load: Any) -> None:
    summaries = load("summaries")
    tokens, inter = (
        column.ravel() for column in np.meshgrid([1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192], range(128, 1024, 64))
    )
    count = len(tokens)
    touched = np.minimum(128, tokens * 8)
    one = 3 * 4096 * inter
    moved = tokens * 8 * (2 * 4096 + 3 * inter) * 2 + tokens * 4096 * 4
    seconds = 30e-6 + 1.1 * touched * one * 2 / 4e12 + 2 * moved / 4e12 + 2 * tokens * 8 * one / 1e15 / 0.6
    shape = {"hidden_size": 4096, "topk": 8, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1}
    even = {
        **{name: np.full(count, value) for name, value in shape.items()},
        "moe_dtype": np.array(["bfloat16"] * count),
        "kernel_source": np.array(["vllm_fused_moe"] * count),
        "num_tokens": tokens,
        "inter_size": inter,
    }
    both = {name: np.concatenate([column, column]) for name, column in even.items()}
    both["distribution"] = np.array(["balanced"] * count + ["power_law_1.2"] * count)
    both["latency"] = np.concatenate([seconds, 0.8 * seconds]) * 1e3
    (row,) = summaries.experts(table(load, **both))
    found = values(summaries.EXPERTS, row)
    assert found["kernel"] == "fused_moe"
    assert found["fixed_us"] == pytest.approx(30, rel=0.1)
    assert found["read_factor"] == pytest.approx(1.1, rel=0.02)
    assert found["activation_factor"] == pytest.approx(2, rel=0.15)
    assert found["efficiency"] == pytest.approx(0.6, rel=0.05)
    assert found["skew_n64"] == pytest.approx(0.8)


def test_messages_are_counted_in_elements_of_two_bytes(load: Any) -> None:
    comparisons = load("comparisons")
    sizes = 2 ** np.arange(7, 29)
    # An all-reduce over four devices sends 1.5 times the buffer; half of the link's rate is reached.
    seconds = 5e-6 + 1.5 * sizes * 2 / (0.5 * 4e11)
    backends = ["vllm_graph"] * len(sizes) + ["vllm_eager"] * len(sizes)
    (row,) = comparisons.collectives(
        table(
            load,
            op_name=["all_reduce"] * len(backends),
            backend=backends,
            num_gpus=[4] * len(backends),
            message_size=[*sizes, *sizes],
            latency=[*(seconds * 1e3), *(seconds * 1e5)],
        )
    )
    found = values(comparisons.COLLECTIVES, row)
    assert found["variant"] == "vllm_graph"
    assert found["devices"] == 4
    assert found["link_share"] == pytest.approx(0.5, rel=0.01)
    assert found["us_1M"] == pytest.approx((5e-6 + 1.5 * 2**20 / 2e11) * 1e6, rel=1e-6)


def test_a_release_is_compared_with_another_only_where_it_differs(load: Any) -> None:
    comparisons = load("comparisons")
    columns = gemm_columns()
    older = table(load, release="0.9.0", **{**columns, "latency": columns["latency"] * 1.5})
    newer = table(load, release="0.10.0", **columns)
    (row,) = comparisons.release_ratio(older, newer, "gemm", "gemm_dtype")
    assert row[:6] == ["test", "vllm", "0.10.0", "gemm", "bfloat16", "0.9.0"]
    assert values(comparisons.RELEASES, row)["ratio"] == pytest.approx(1.5)
    assert comparisons.release_ratio(newer, newer, "gemm", "gemm_dtype") == []


@pytest.fixture
def script(load: Any) -> ModuleType:
    pytest.importorskip("pyarrow")
    return load("tables")  # type: ignore[no-any-return]


def test_releases_are_sorted_as_numbers(script: ModuleType) -> None:
    releases = ["0.5.9", "0.5.10", "0.5.6.post2", "0.5.6", "1.3.0rc20", "1.3.0rc5"]
    assert sorted(releases, key=script.release_key) == [
        *("0.5.6", "0.5.6.post2", "0.5.9", "0.5.10"),
        *("1.3.0rc5", "1.3.0rc20"),
    ]


def test_the_newest_release_of_a_checkout_is_summarised(script: ModuleType, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for release, slower in (("0.9.0", 1.5), ("0.10.0", 1.0)):
        folder = tmp_path / script.DATA / "h200_sxm" / "gemm" / "vllm" / release
        folder.mkdir(parents=True)
        columns = gemm_columns()
        parquet.write_table(
            arrow.table({**columns, "latency": columns["latency"] * slower}), folder / "gemm_perf.parquet"
        )
    document = json.loads(script.as_json(script.summarise(tmp_path)))
    assert list(document["gemm"]["rows"]) == ["h200-sxm vllm 0.10.0"]
    assert document["releases"]["rows"]["h200-sxm vllm 0.10.0"][0][:4] == ["gemm", "bfloat16", "0.9.0", 1.5]
    assert document["commit"] is None


def test_a_folder_without_tables_says_what_to_clone(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["kernel_tables.py", str(tmp_path)])
    assert script.main() == 2
    assert capsys.readouterr().err.splitlines()[1] == f"try: git clone {script.SOURCE}"


def test_the_shipped_summary_is_small_complete_and_names_its_source() -> None:
    text = RESULT.read_text()
    document = json.loads(text)
    assert len(text) < 60_000
    assert document["licence"] == "Apache-2.0"
    assert len(document["commit"]) == 40
    sections = {name: part for name, part in document.items() if isinstance(part, dict)}
    assert {"gemm", "decode_attention", "prefill_attention", "decode_mla", "experts", "collectives"} <= set(sections)
    for part in sections.values():
        assert part["rows"]
        for rows in part["rows"].values():
            assert all(len(row) == len(part["columns"]) for row in rows)
