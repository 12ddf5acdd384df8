"""M-NIAH and S-NIAH as the paper reports them: means over RULER's tasks, and over ranges of lengths."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lucid_lab.evals.benchmarks import needles
from lucid_lab.evals.cells import Cell, EvalError, Options
from lucid_lab.evals.means import means
from lucid_lab.evals.results import by_metric, results_table, summarize

from .checkpoints import lucid


def cell(task: str, count: int, length: int, mean: float, family: str = "mniah") -> dict[str, Any]:
    return {
        "name": f"{family}-{task}-{count}-{length}", "family": family, "metric": "score", "out_of": 1.0,
        "labels": {"task": task, "needles": count, "length": length}, "samples": 10, "mean": mean,
        "standard_error": 0.1, "metrics": {"score": {"mean": mean, "standard_error": 0.1}},
    }  # fmt: skip


CELLS = [
    cell(task, count, length, mean / 10)
    for task, shift in (("multikey_1", 0), ("multivalue", 2))
    for count, more in ((2, 3), (4, 1))
    for length, mean in ((2048, 3 + shift + more), (8192, shift + more), (32_768, shift))
]


def test_a_mean_is_over_the_tasks_at_one_number_of_needles_and_one_length() -> None:
    found = {tuple(mean["labels"].items()): mean for mean in means(CELLS)}
    assert len(found) == 6 + 3
    mean = found[("needles", 2), ("length", 2048)]
    assert mean["mean"] == pytest.approx((0.6 + 0.8) / 2)
    assert mean["standard_error"] == pytest.approx(math.sqrt(2) * 0.1 / 2)
    assert mean["over"] == {"task": ["multikey_1", "multivalue"]}
    assert mean["cells"] == ["mniah-multikey_1-2-2048", "mniah-multivalue-2-2048"]


def test_the_averages_of_figure_5_are_over_tasks_needles_and_lengths() -> None:
    at_2048 = next(mean for mean in means(CELLS) if mean["labels"] == {"length": 2048})
    assert at_2048["over"] == {"task": ["multikey_1", "multivalue"], "needles": [2, 4]}
    assert at_2048["mean"] == pytest.approx((0.6 + 0.4 + 0.8 + 0.6) / 4)
    short, long = (mean for mean in means(CELLS, [(2048, 8192), (2048, 32_768)]) if "length" in mean["over"])
    assert short["labels"] == {"length": "2048-8192"}
    assert short["mean"] == pytest.approx(sum(c["mean"] for c in CELLS if c["labels"]["length"] <= 8192) / 8)
    assert long["mean"] == pytest.approx(sum(c["mean"] for c in CELLS) / 12)
    assert long["over"]["length"] == [2048, 8192, 32_768]
    assert long["over"]["needles"] == [2, 4]


def test_families_are_not_mixed_and_one_label_has_no_mean() -> None:
    alone = [{**cell("qasper", 1, 1, 0.5), "labels": {"task": task}, "family": "scrolls"} for task in ("a", "b")]
    assert means(alone) == []
    both = means([*CELLS, cell("single_1", 2, 2048, 1.0, "sniah")])
    assert {mean["family"] for mean in both} == {"mniah", "sniah"}
    assert [mean["mean"] for mean in both if mean["family"] == "sniah"] == [1.0]


def test_mniah_has_the_five_tasks_of_ruler_with_the_given_number_of_needles(tokenizer_folder: Path) -> None:
    options = Options(tokenizer=str(tokenizer_folder), needles=(3,), lengths=(2048,), samples=2)
    made = {cell.labels["task"]: cell.metadata["settings"] for cell in needles.multiple(options)}
    counts = {task: (own["needles"], own["values"], own["queries"]) for task, own in made.items()}
    assert counts == {
        "multikey_1": (3, 1, 1), "multikey_2": (3, 1, 1), "multikey_3": (3, 1, 1), "multivalue": (1, 3, 1),
        "multiquery": (3, 1, 3),
    }  # fmt: skip
    assert {task: own["haystack"] for task, own in made.items() if own["haystack"] != "prose"} == {
        "multikey_2": "needles",
        "multikey_3": "needles",
    }
    assert [cell.labels["task"] for cell in needles.single(options)] == ["single_1", "single_2", "single_3"]


def test_variants_are_names_of_ruler(tokenizer_folder: Path) -> None:
    options = Options(tokenizer=str(tokenizer_folder), variants=("multiquery", "single_2"))
    assert {cell.labels["task"] for cell in needles.multiple(options)} == {"multiquery"}
    with pytest.raises(EvalError, match=r"--variants must be some of single_1, .*, got 'multikey_4'"):
        needles.multiple(Options(tokenizer=str(tokenizer_folder), variants=("multikey_4",)))
    with pytest.raises(EvalError, match=r"--variants must hold some of single_1, .*, got multiquery"):
        needles.single(Options(tokenizer=str(tokenizer_folder), variants=("multiquery",)))


def test_a_summary_keeps_every_metric_of_a_task() -> None:
    rouge = [{"rouge1": 30.0 + i, "rouge2": 10.0, "rougeL": 20.0 + 2 * i} for i in range(3)]
    records = [{"score": scores["rouge1"], "metrics": scores} for scores in rouge]
    settings = {"family": "scrolls", "labels": {"task": "qmsum"}, "metric": "rouge1"}
    summary = summarize("x", settings, Cell({"task": "qmsum"}, "rouge1", out_of=100.0), records)
    assert {name: value["mean"] for name, value in summary["metrics"].items()} == {
        "rouge1": 31.0, "rouge2": 10.0, "rougeL": 22.0,
    }  # fmt: skip
    assert summary["metrics"]["rougeL"]["standard_error"] == pytest.approx(2 / math.sqrt(3))
    assert summary["mean"] == 31.0
    assert [(part["metric"], part["mean"]) for part in by_metric([summary])] == [
        ("rouge1", 31.0), ("rouge2", 10.0), ("rougeL", 22.0),
    ]  # fmt: skip
    table = results_table([summary])
    assert "rouge2, %" in table
    assert "22.0 ± 1.2" in table


def test_means_reach_the_record_and_the_table(
    lucid_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--tasks", "mniah", "--variants", "multikey_1,multivalue", "--needles", 2, "--haystack", "noise",
             "--lengths", "320,400", "--samples", 2, "--answer-tokens", 12)  # fmt: skip
    out = tmp_path / "out"
    assert lucid("eval", lucid_folder, *words, "--mean-lengths", "256-512", "--out", out) == 0
    assert "mniah, mean over task multikey_1, multivalue" in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    assert [mean["labels"] for mean in results["means"]] == [
        {"needles": 2, "length": 320}, {"needles": 2, "length": 400}, {"length": "256-512"},
    ]  # fmt: skip
    assert (out / "mniah.png").exists()
    before = (out / "results.json").read_bytes()
    assert lucid("eval", lucid_folder, *words, "--mean-lengths", "256-512", "--out", out) == 0
    assert (out / "results.json").read_bytes() == before
    assert lucid("eval", lucid_folder, *words, "--mean-lengths", "512-4096", "--out", out) == 1
    assert "--mean-lengths 512-4096 must hold two lengths or more" in capsys.readouterr().err
