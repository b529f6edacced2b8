"""The fit of the speed's constants: the same arithmetic as the answers, and constants that come back."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcalc.throughput.constants import Constants
from kvcalc.throughput.roofline import Part, SpeedModel
from kvcalc.throughput.serving import first_host_wait, host_wait

np = pytest.importorskip("numpy")
pytest.importorskip("scipy")

QUESTIONS = (
    {"model": "llama-3.1-8b", "dtype": "bf16", "tp": 1},
    {"model": "llama-3.1-70b", "dtype": "fp8", "tp": 4},
    {"model": "qwen3-235b-a22b", "dtype": "fp8", "tp": 8},
    {"model": "gpt-oss-120b", "tp": 1},
    {"model": "deepseek-v3", "dtype": "fp8", "tp": 8},
)


@pytest.fixture
def data() -> ModuleType:
    return importlib.import_module("benchmarks.fit.rows")


@pytest.fixture
def parameters() -> ModuleType:
    return importlib.import_module("benchmarks.fit.parameters")


@pytest.fixture
def arrays() -> ModuleType:
    return importlib.import_module("benchmarks.fit.arrays")


def points() -> list[dict[str, Any]]:
    """Serving points of two engines on h200, whose times are not known yet."""
    return [
        {
            "set": "silicon", "metric": "tpot", "seconds": 1.0, "family": f"family {number}", "engine": engine,
            "version": None, "date": None, "suspect": None, "ttft": None,
            "question": {
                **question, "gpu": "h200", "engine": engine, "input_tokens": 1024, "output_tokens": 512,
                "concurrency": concurrency,
            },
        }
        for number, question in enumerate(QUESTIONS)
        for engine in ("vllm", "sglang")
        for concurrency in (1, 8, 32, 128)
    ]  # fmt: skip


def rows_of(data: ModuleType) -> list[Any]:
    asks = data.Questions()
    rows = [data._row(asks, point) for point in points()]
    assert None not in rows
    return rows


def constants(parameters: ModuleType, row: Any, theta: Any) -> Constants:
    model = parameters.SERVERS
    found = model.first_token.likely() | model.values(theta, row.engine, model.labels_of(row))
    return Constants(**{name: found[name] for name in Constants._fields if name in found})


def seconds(row: Any, c: Constants, replaced: float) -> float:
    """TPOT of a row with the decoding and the replaced requests given, by the model that answers use."""
    model = SpeedModel(row.model.counts, row.model.gpu, c)
    step = model.decode(row.decoding, row.context_tokens).seconds
    work = model.beside([Part(0, row.input_tokens)], row.decoding).seconds
    if not row.rules.mixes:
        work = model.prefill(row.input_tokens, 2).seconds / 2
    return float(step + replaced / row.output_tokens * work)


def test_all_rows_at_once_take_the_seconds_of_each_row_alone(
    data: ModuleType, parameters: ModuleType, arrays: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, model = rows_of(data), parameters.SERVERS
    monkeypatch.setattr(arrays, "_prompts_of_step", lambda row: 1.0 if row.rules.mixes else 2.0)
    mean, spread = model.prior
    draw = np.random.default_rng(1)
    for theta in (mean, mean + 0.5 * spread * draw.standard_normal(len(mean))):
        together = arrays.seconds_of(rows)(model.arrays_of(rows)(theta))
        alone = [seconds(row, constants(parameters, row, theta), arrays._replaced(row)) for row in rows]
        assert together == pytest.approx(alone, rel=1e-9)


def test_the_fit_finds_the_constants_that_made_the_measurements(
    data: ModuleType, parameters: ModuleType, arrays: ModuleType
) -> None:
    rows, model = rows_of(data), parameters.SERVERS
    mean, _ = model.prior
    truth = mean.copy()
    names = [(p.name, label) for p, label in model.thetas]
    truth[names.index(("kernel_seconds", ""))] += 0.5
    truth[names.index(("kernel_seconds", "sglang"))] -= 0.4
    truth[names.index(("sequence_seconds", ""))] += 0.8
    ask = arrays.seconds_of(rows)
    measured = np.log(ask(model.arrays_of(rows)(truth)))
    fit = importlib.import_module("benchmarks.fit.fitted").most_probable
    found = fit(model, rows, ask, measured, np.ones(len(rows)))
    before = np.log(ask(model.arrays_of(rows)(mean))) - measured
    after = np.log(ask(model.arrays_of(rows)(found))) - measured
    assert np.abs(before).mean() > 0.1
    assert np.abs(after).mean() < 0.02
    for row in (rows[0], rows[4]):
        made, back = (constants(parameters, row, theta).kernel_seconds for theta in (truth, found))
        assert back == pytest.approx(made, rel=0.3), row.engine
        likely = constants(parameters, row, mean).kernel_seconds
        assert abs(back - made) < abs(likely - made) or row.engine == "sglang"


def test_a_release_before_a_step_and_a_kind_of_device_have_labels_of_their_own(
    data: ModuleType, parameters: ModuleType
) -> None:
    row = rows_of(data)[0]
    assert parameters.SERVERS.labels_of(row) == ["vllm", "hopper"]
    old = row._replace(version="0.12.0", source="ml-energy")
    assert parameters.SERVERS.labels_of(old) == ["vllm", "hopper", "vllm<0.14.0"]
    assert parameters.SERVERS.labels_of(old._replace(version=None, date="2025-12-08"))[-1] == "vllm<0.14.0"
    assert len(parameters.SERVERS.labels_of(old._replace(version="0.14.1"))) == 2


def test_the_flags_of_scripts_are_in_the_question_of_their_measurements(data: ModuleType) -> None:
    question = {"gpu": "b200", "concurrency": 16}
    point = {"engine": "sglang", "family": "deepseek-v3", "question": question}
    assert data._flags(point) == {"scheduler-recv-interval": 30}
    assert data._flags({**point, "question": {**question, "concurrency": 15}}) == {"scheduler-recv-interval": 10}
    for other in ({"engine": "vllm"}, {"family": "llama-3"}, {"question": {**question, "gpu": "h200"}}):
        assert data._flags({**point, **other}) == {}


def test_a_folder_without_the_measurements_is_refused(data: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        data.data_folder(str(tmp_path))
    assert stopped.value.code == 2


def test_the_range_of_a_region_is_nearer_to_its_own_rows_the_more_families_it_has(data: ModuleType) -> None:
    document = importlib.import_module("benchmarks.fit.document")
    row = rows_of(data)[0]

    def families(number: int, dtype: str, ratio: float) -> list[tuple[Any, float]]:
        """Six rows of each family."""
        return [(row._replace(family=f"family {i % number}", weight_dtype=dtype), ratio) for i in range(6 * number)]

    others = [*families(12, "int4", 0.5), *families(12, "int4", 2.0)]
    found = {n: document.ranges_of([*families(n, "bf16", 1.0), *others]) for n in (1, 2, 12)}
    # One family says nothing about the next one.
    assert not any(region.startswith("hopper bf16") for region in found[1])
    assert found[1][""] == found[2][""] == found[2]["hopper"] == [0.5, 2.0]
    # Two families are a seventh of the way from the device's range to their own, and twelve half of it.
    assert found[2]["hopper bf16"] == [round(0.5 ** (6 / 7), 3), round(2 ** (6 / 7), 3)]
    assert found[12]["hopper bf16"] == [round(0.5**0.5, 3), round(2**0.5, 3)]
    # So is the range of a size of batch between its own and that of the type of weights around it.
    assert found[12]["hopper bf16 1-8"] == [round(0.5**0.25, 3), round(2**0.25, 3)]


def test_a_cell_counts_once_in_a_range_however_many_rows_it_has(data: ModuleType) -> None:
    document = importlib.import_module("benchmarks.fit.document")
    row = rows_of(data)[0]
    few = [(row._replace(family=f"family {i % 8}"), 1.0) for i in range(80)]
    many = [(row._replace(family="one more"), 3.0)] * 1000
    # One cell of nine is more than the share that is left out at an end, whatever its rows.
    assert document.ranges_of([*few, *many])[""] == document.ranges_of([*few, *many[:10]])[""] == [0.91, 3.0]
    # A cell of one row counts a fifth.
    assert document.ranges_of([*few, *many[:1]])[""] == [0.91, 1.09]


def test_first_tokens_of_all_rows_at_once_are_those_of_each_row_alone(
    data: ModuleType, parameters: ModuleType, arrays: ModuleType
) -> None:
    rows, model = rows_of(data), parameters.SERVERS
    step = [constants(parameters, row, model.prior[0]) for row in rows]
    first = model.first_token
    theta = first.prior[0] + 0.5 * first.prior[1]
    together = arrays.ttft_seconds_of(rows, step)(first.arrays_of(rows)(theta))
    for row, c, seconds_together in zip(rows, step, together):
        own = c._replace(**first.values(theta, row.engine, first.labels_of(row)))
        used = SpeedModel(row.model.counts, row.model.gpu, own)
        # A client comes back after the host's time before this fit.
        step, starting, known, warm, cold, _, prefill, hidden = arrays._waits(
            SpeedModel(row.model.counts, row.model.gpu, c), row
        )
        alone = host_wait(own, step, row.input_tokens) + first_host_wait(own, row.input_tokens, starting, hidden)
        alone += known + used.launch_wait(prefill)
        alone += warm * own.first_seconds + cold * own.cold_seconds
        assert alone == pytest.approx(seconds_together, rel=1e-9)


def test_the_ranges_of_a_family_have_not_seen_it(data: ModuleType) -> None:
    """Four families are predicted exactly and one takes twice as long: only its cells are outside their ranges."""
    scored = importlib.import_module("benchmarks.score.ranges")
    found = [(row, 2.0 if row.family == "family 1" else 1.0) for row in rows_of(data) if row.engine == "vllm"]
    cells = list(scored.cells(found, 0.08))
    assert {row.family for row, _ in found} == {f"family {number}" for number in range(5)}
    assert sum(cell.points for cell in cells) == len(found)
    for cell in cells:
        outside = "family 1" in cell.name
        assert (cell.below, cell.inside, cell.above) == ((0, 0, 1) if outside else (0, 1, 0)), cell


def test_errors_that_are_alike_within_a_cell_have_no_range_that_suits_many_cells() -> None:
    scored, points = importlib.import_module("benchmarks.score.ranges"), np.linspace(-0.1, 0.1, 100)
    same, apart = [points] * 4, [points + place for place in range(4)]
    assert (scored.best_range(same), scored.best_range(apart)) == (4, 2)
    assert scored.variance_between(same) == 0
    assert 0.99 < scored.variance_between(apart) < 1


def test_a_row_has_the_simulated_times_at_the_constants_of_its_corrections(
    data: ModuleType, arrays: ModuleType
) -> None:
    """With other constants, the short form says by how much they change."""
    simulated = importlib.import_module("benchmarks.fit.simulated")
    script = importlib.import_module("benchmarks.fit.fitted")
    rows = [row._replace(ttft_seconds=1.0) for row in rows_of(data)[::5]]
    step = rows[0]._replace(output_tokens=0)  # a decode step is no load
    each = [row.model.constants for row in (*rows, step)]
    found = simulated.corrections([*rows, step], each)
    assert found.ratios[-1] == 1
    assert found.simulated[-1] is None
    served = found.of(range(len(rows)))
    stacked = arrays.stacked_constants(each[:-1])
    assert script.tpot_of(rows, served)(stacked) == pytest.approx([times[0] for times in served.simulated])
    first = script.first_of(rows, each[:-1], served)
    assert first(stacked) == pytest.approx([times[1] for times in served.simulated])
    # One client has nothing but the host beside its prompt.
    slower = first({**stacked, "ttft_seconds": stacked["ttft_seconds"] + 0.5})
    assert slower[0] - first(stacked)[0] == pytest.approx(0.5)
    assert rows[0].concurrency == 1


def test_a_run_at_random_and_a_median_are_simulated_as_they_were_measured(data: ModuleType) -> None:
    simulated = importlib.import_module("benchmarks.fit.simulated").simulated
    row = rows_of(data)[3]
    c = row.model.constants
    mean = simulated(row, c)
    # Few requests a second of which none meets another.
    alone = simulated(row._replace(rate=0.01), c)
    assert alone[0] < mean[0]
    assert alone[1] < mean[1]
    half, late = (simulated(row._replace(requests=which), c) for which in (data.STEADY, data.FIRST))
    assert half[1] < mean[1] < late[1]
    assert half[0] == late[0]
