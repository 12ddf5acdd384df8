"""The cost of LUCID: the operator by length, and whole models from the benchmarks, next to the paper's figures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lucid_lab.bench import decode, harness, models, solve
from lucid_lab.bench.gate import WrongAnswer
from lucid_lab.bench.records import Settings
from lucid_lab.claims import decode_latency, training_overhead
from lucid_lab.claims.engine import timing
from lucid_lab.claims.engine.jobs import Job, Store, Work
from lucid_lab.claims.engine.pool import do
from lucid_lab.claims.engine.scale import SMALL, SMOKE
from lucid_lab.claims.engine.study import load
from lucid_lab.claims.engine.timing import cost_figure, cost_job, operator_cost

ROUND = {"median": 1.0, "low": 0.9, "high": 1.2, "rounds": 5}


@pytest.fixture(autouse=True)
def as_its_user_has_it(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Filling memory with NaN would be timed too. A few rounds are enough."""
    monkeypatch.setattr(Settings, "budget", 0.01)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(before)


def small_cost(folder: Path, **changes: Any) -> dict[str, Any]:
    sizes = {"lengths": (48, 96, 160), "heads": 4, "kv_heads": 2, "head_dim": 16, "backward": True}
    job = cost_job(**{**sizes, **changes}, quick=True)
    assert job.alone
    return operator_cost(Work(Store(folder), job), **job.arguments)


@pytest.mark.parametrize("backward", [False, True])
def test_the_operator_is_timed_against_torch_and_the_dense_solve(
    backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The matrix of 160 tokens would be too large.
    monkeypatch.setattr(timing, "DENSE_BYTES", 4 * 2 * 150**2)
    record = small_cost(tmp_path, backward=backward)
    json.dumps(record, allow_nan=False)
    assert record["lengths"] == [48, 96, 160]
    assert record["flop_ratio"] == 1.5
    assert set(record["milliseconds"]) == {"sdpa", "lucid", "dense"}
    assert record["milliseconds"]["dense"][2] is None
    assert all(value > 0 for name in ("sdpa", "lucid") for value in record["milliseconds"][name])
    assert all(value > 0 for value in record["milliseconds"]["dense"][:2])
    for low, middle, high in zip(record["ratio_low"], record["ratio"], record["ratio_high"], strict=True):
        assert 0 < low <= middle <= high
    assert all(rounds >= 3 for rounds in record["rounds"])
    figure = cost_figure(record, "Cost")
    assert [(curve["role"], len(curve["x"])) for curve in figure["series"]] == [
        ("softmax", 3),
        ("lucid", 3),
        ("control", 2),
    ]
    assert figure["x"]["log"]
    assert figure["y"]["log"]


def test_the_times_are_those_of_the_contestants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances by 3 s in LUCID, 2 s in torch's attention, 10 s in the dense solve."""
    now = [0.0]

    class Clock:
        def perf_counter(self) -> float:
            return now[0]

    def slow(seconds: float) -> Any:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            now[0] += seconds
            return q

        return run

    monkeypatch.setattr(harness, "time", Clock())
    for name, seconds in ((solve.SDPA, 2.0), (solve.LUCID, 3.0), (solve.DENSE, 10.0)):
        monkeypatch.setitem(solve.CONTESTANTS, name, slow(seconds))
    monkeypatch.setattr(solve, "check_truth", lambda *case: None)
    record = small_cost(tmp_path, backward=False)
    assert record["milliseconds"] == {"sdpa": [2000.0] * 3, "lucid": [3000.0] * 3, "dense": [10000.0] * 3}
    assert record["ratio"] == [1.5] * 3


def test_nothing_is_timed_that_computes_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(solve.CONTESTANTS, solve.LUCID, solve.sdpa)
    with pytest.raises(WrongAnswer, match="Nothing was timed"):
        small_cost(tmp_path, head_dim=24)  # a shape that no other test has checked


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Both experiments at their smallest."""
    store = Store(tmp_path_factory.mktemp("costs") / "jobs")
    torch.use_deterministic_algorithms(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "budget", 0.01)
        for name in ("training_overhead", "decode_latency"):
            for job in load(name).plan(SMOKE, store):
                failed = do(job, store.folder)
                assert failed is None, Path(failed).read_text()
    return store


@pytest.mark.parametrize("name", ["training_overhead", "decode_latency"])
def test_the_smallest_scale_runs_and_judges_nothing(name: str, smoke: Store) -> None:
    experiment = load(name)
    assert all(job in smoke for job in experiment.plan(SMOKE, smoke))
    conclusion = experiment.conclude(SMOKE, smoke)
    assert conclusion.verdict == "too small to judge"
    assert conclusion.figures
    assert conclusion.tables
    json.dumps([conclusion.figures, conclusion.tables], allow_nan=False)
    assert all(len(row) == len(table["columns"]) for table in conclusion.tables for row in table["rows"])


def test_every_case_that_is_planned_is_one_of_the_benchmarks() -> None:
    cases = {
        (case.name, f"{case.name} {' '.join(map(str, point.sizes.values()))}")
        for case in (models.TRAINING, models.DECODING, decode.CASE)
        for point in case.points(Settings(threads=(1,), quick=False))
    }
    planned = [job for name in ("training_overhead", "decode_latency") for job in load(name).plan(SMALL, {})]
    planned_cases = {
        (job.arguments["benchmark"], job.arguments["case"]) for job in planned if job.function.endswith(":run_case")
    }
    assert len(planned_cases) == 18
    assert planned_cases <= cases
    assert all(job.alone for job in planned if job.function != "engine.timing:predicted_overheads")
    assert not any(job.arguments.get("quick") for job in planned)


def test_the_number_of_layers_is_that_of_the_benchmarks() -> None:
    shapes = {shape.name: shape for shape in models.DECODING_SHAPES}
    for name, model in decode_latency.MODELS.items():
        assert model.layers == shapes[name].kinds.count(models.FULL)
        assert model.heads.endswith(f" {shapes[name].heads}/{shapes[name].kv_heads}")
    assert {name: round(100 * shapes[name].paper, 6) for name in training_overhead.PAPER} == training_overhead.PAPER


def test_a_case_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    job = timing.case_job("decode", "decode 1 x", "x", 1.0, quick=True)
    with pytest.raises(ValueError, match="case must be one of decode 1 64 8/8"):
        job.resolve()(Work(Store(tmp_path), job), **job.arguments)


def test_counted_overheads_are_those_of_the_published_shapes(smoke: Store) -> None:
    """Qwen-2.5-1.5B at 2048 tokens: 28 layers, hidden 1536, 12/2 heads of 128, MLP 8960, vocabulary 151 936."""
    counted = smoke[timing.prediction_job(list(training_overhead.PREDICTED))]
    for length, percent in zip(training_overhead.PREDICTED, counted["Qwen-2.5-1.5B"], strict=True):
        weights = 28 * (1536 * 128 * (2 * 12 + 2 * 2) + 3 * 1536 * 8960) + 1536 * 151_936
        pairs = length * (length + 1) / 2
        solve = 28 * 2 * 14 * pairs * 128
        assert percent == pytest.approx(100 * solve / (6 * length * weights + 6 * solve), rel=1e-6)


def test_training_holds_up_to_three_points_above_the_paper() -> None:
    predicted = {name: [1.0, 2.0, 3.0, 11.3 if name.startswith("Qwen") else 4.0] for name in training_overhead.PAPER}
    names = list(training_overhead.PAPER)
    cases = {(2.9, 6.4, 8.4): "holds", (3.1, 6.4, 8.4): "partly", (2.9, 6.6, 8.6): "partly", (4, 9, 9): "does not hold"}
    for values, expected in cases.items():
        verdict, because = training_overhead.judged(dict(zip(names, values, strict=True)), predicted)
        assert verdict == expected
        assert "Qwen-2.5-1.5B pays +11 % at 65536 tokens" in because
        over = [name for name, value in zip(names, values, strict=True) if value > training_overhead.PAPER[name] + 3]
        assert all(name in because for name in over)


def written(store: Store, jobs: dict[Job, dict[str, Any]]) -> Store:
    for job, record in jobs.items():
        store.write(job, record, 1.0)
    return store


def test_training_figures_show_the_records(tmp_path: Path) -> None:
    ratios = {"Gemma-3-1B": 1.005, "Gemma-3-4B": 1.004, "Qwen-2.5-1.5B": 1.013}
    records: dict[Job, dict[str, Any]] = {}
    for name, job in training_overhead.training_jobs(SMALL).items():
        ratio = {"median": ratios[name], "low": ratios[name] - 0.002, "high": ratios[name] + 0.004, "rounds": 3}
        records[job] = {"entries": {"LUCID, whole model": {"ratio": ratio}}}
    counted = {name: [0.2, 0.9, 5.0, 9.0] for name in ratios}
    records[timing.prediction_job(list(training_overhead.PREDICTED))] = counted
    for (heads, kv_heads, _), job in training_overhead.cost_jobs(SMALL).items():
        milliseconds = {"sdpa": [1.0, 2, 3, 4], "lucid": [2.0, 4, 6, 8], "dense": [9.0, 9, 9, None]}
        flop_ratio = 1 + kv_heads / heads
        records[job] = {
            "lengths": [512, 1024, 2048, 4096],
            "milliseconds": milliseconds,
            "ratio": [2.0] * 4,
            "flop_ratio": flop_ratio,
        }
    conclusion = training_overhead.conclude(SMALL, written(Store(tmp_path), records))
    assert conclusion.verdict == "holds"
    assert conclusion.seeds == 3
    assert "Qwen-2.5-1.5B +1.3 % (+1.1 to +1.7)" in conclusion.ours
    groups = {group["name"]: group["bars"] for group in conclusion.figures[0]["groups"]}
    assert groups["Gemma-3-4B"][0]["value"] == pytest.approx(0.4)
    assert groups["Gemma-3-4B"][0]["spread"] == pytest.approx(0.3)
    assert groups["Gemma-3-4B"][1]["value"] == 0.2
    assert [line["value"] for line in conclusion.figures[0]["references"]] == [0.0, 3.5, 5.5]
    assert len(conclusion.figures) == 3
    assert conclusion.tables[0]["rows"][0][-1] == "~0 %"


def decoding(store: Store, *, step: float, static: float) -> Store:
    """A token of LUCID takes 100 ms, one of sdpa twice that; steps of the fastest attention 0.5 ms."""
    records: dict[Job, dict[str, Any]] = {}
    for name in decode_latency.MODELS:
        for cache, context in (
            *(("dynamic", context) for context in decode_latency.contexts(SMALL)),
            ("static", 32_768),
        ):
            ratio = 0.5 if cache == "dynamic" else static
            spread = {"median": ratio, "low": ratio, "high": ratio, "rounds": 5}
            entry = {"seconds": {"median": 0.1}, "ratio": spread}
            records[decode_latency.model_job(SMALL, name, cache, context)] = {"entries": {"LUCID, whole model": entry}}
        entries = {"SDPA": (0.004, 8.0), "bmm, softmax, bmm": (0.0005, 1.0), "lucid_decode": (step, step / 0.0005)}
        records[decode_latency.step_job(SMALL, name)] = {
            "facts": {"fastest": "bmm, softmax, bmm"},
            "entries": {
                step_name: {"seconds": {"median": seconds}, "ratio": {**ROUND, "median": ratio}}
                for step_name, (seconds, ratio) in entries.items()
            },
        }
    return written(store, records)


def test_decoding_is_judged_against_the_fastest_attention_and_against_transformers(tmp_path: Path) -> None:
    conclusion = decode_latency.conclude(SMALL, decoding(Store(tmp_path / "a"), step=0.00055, static=0.9))
    # 28 layers that each need 0.05 ms more make 1.4 ms of 100.
    assert "Qwen-2.5-1.5B +1.4 %" in conclusion.ours
    assert "Gemma-3-1B +0.2 %" in conclusion.ours
    assert conclusion.verdict == "holds"
    assert conclusion.figures[0]["references"] == [{"name": "paper", "value": 1.3}]
    line = conclusion.figures[1]
    assert [curve["y"][0] for curve in line["series"]] == pytest.approx([200.0, 100.0])
    # Slower steps: with 28 and 22 layers it is too much, with 4 it is not.
    slower = decode_latency.conclude(SMALL, decoding(Store(tmp_path / "b"), step=0.0008, static=0.9))
    assert slower.verdict == "partly"
    assert "above it: Qwen-2.5-1.5B, paper's 1B." in slower.because
    # A token that is slower in Transformers counts as well.
    other = decode_latency.conclude(SMALL, decoding(Store(tmp_path / "c"), step=0.00055, static=1.05))
    assert other.verdict == "does not hold"
