"""Files of `lucid train` and `lucid eval` become sections of the page; damaged ones are refused by name."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lucid_lab import cli
from lucid_lab.report.command import find_results
from lucid_lab.report.page import page_html
from lucid_lab.report.records import ReportError, checked_all
from lucid_lab.report.runs import read_evaluation, role_of

from .samples import result


def write_run(folder: Path, attention: Any = "lucid", finished: bool = True, **changes: Any) -> Path:
    """A training run of four steps."""
    folder.mkdir(parents=True)
    recipe = {"about": "a small model", "data": "/data/texts", "sequence_length": 64, "steps": 4, "batch_size": 8}
    recipe |= {"attention": attention, "learning_rate": 1e-3, "seed": 0} | changes
    (folder / "recipe.json").write_text(json.dumps(recipe))
    entries: list[dict[str, Any]] = [{"step": step, "loss": 5.0 - step} for step in (1, 2)]
    entries += [{"step": 3, "loss": "nan"}, {"step": 4, "loss": 1.5}, {"step": 4, "eval_loss": 1.25}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    if finished:
        summary = {"steps": 4, "tokens": 2048, "parameters": 123456, "vocab_size": 300, "validation_loss": 1.25}
        (folder / "summary.json").write_text(json.dumps(summary | {"median_tokens_per_second": 3033.3}))
    return folder


def cell(family: str, labels: dict[str, Any], mean: float, **changes: Any) -> dict[str, Any]:
    made = {"name": f"{family}-{labels}", "family": family, "labels": labels, "metric": "score", "out_of": 1}
    return made | {"samples": 20, "mean": mean, "standard_error": 0.05, "versions": {"torch": "2.13.0"}} | changes


CELLS = [
    *(cell("mniah", {"needles": n, "length": t}, n / 10) for n in (4, 2) for t in (1024, 2048)),
    *(cell("context_loss", {"context": t}, 3.0 - t / 1e4, metric="loss", out_of=None) for t in (64, 512, 4096)),
    *(cell("longbench", {"task": name}, 25.0, metric="f1", out_of=100) for name in ("2wikimqa", "qasper")),
]


def write_evaluation(folder: Path, name: str = "tiny", attention: Any = "lucid", cells: Any = CELLS) -> Path:
    folder.mkdir(parents=True)
    checkpoint = {"name": name, "path": "/model", "sha256": "0123456789abcdef", "model_type": "lucid_attention"}
    content = {"checkpoint": checkpoint | {"attention": attention}, "cells": cells}
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def test_a_run_has_its_curves_its_facts_and_its_loss(tmp_path: Path) -> None:
    (run,) = find_results([write_run(tmp_path / "tiny-lucid")])
    assert (run["kind"], run["title"], run["role"]) == ("training", "tiny-lucid", "lucid")
    assert run["ours"] == "validation loss 1.2500 after 4 steps"
    (figure,) = run["figures"]
    assert [(line["name"], line["x"], line["y"]) for line in figure["series"]] == [
        ("training", [1, 2, 4], [4.0, 3.0, 1.5]),
        ("validation", [4], [1.25]),
    ]
    facts = dict(run["facts"])
    assert facts["attention"] == "lucid"
    assert facts["data"] == "texts"
    assert (facts["parameters"], facts["tokens per second"]) == ("123,456", "3,033")
    assert "/data" not in page_html(checked_all([run]))


def test_a_run_that_is_not_finished_says_how_far_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False, steps=100)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    (run,) = find_results([folder])
    assert run["ours"] == "not finished: step 4 of 100"
    (folder / "metrics.jsonl").unlink()
    (run,) = find_results([folder])
    assert run["ours"] == "not finished: step 0 of 100"
    assert run["figures"] == []


def test_an_evaluation_has_a_figure_for_each_family_and_all_cells_with_standard_errors(tmp_path: Path) -> None:
    (evaluation,) = find_results([write_evaluation(tmp_path / "scores")])
    grid, curve, bars = evaluation["figures"]
    (panel,) = grid["panels"]
    assert (panel["rows"], panel["columns"]) == ([2, 4], [1024, 2048])
    assert panel["values"] == [[20.0, 20.0], [40.0, 40.0]]
    assert grid["range"] == [0, 100]
    (line,) = curve["series"]
    assert (line["x"], line["spread"]) == ([64, 512, 4096], [0.05] * 3)
    assert curve["x"]["log"]
    assert [(bar["name"], bar["value"]) for bar in bars["groups"][0]["bars"]] == [("2wikimqa", 25.0), ("qasper", 25.0)]
    mniah, loss, longbench = evaluation["tables"]
    assert mniah["columns"] == ["needles", "length", "metric", "score", "samples"]
    assert mniah["rows"][0] == [4, 1024, "score, %", "40.0 ± 5.0", 20]
    assert loss["rows"][0] == [64, "loss", "2.9936 ± 0.0500", 20]
    assert longbench["rows"][1] == ["qasper", "f1, %", "25.0 ± 0.1", 20]
    assert evaluation["ours"] == "mniah 30 % (score); context_loss 2.844 (loss); longbench 25 % (f1)"
    page = page_html(checked_all([evaluation]))
    assert "band: ± standard error over samples" in page
    assert "Spreads are standard errors over samples (evaluations)." in page


def test_runs_on_the_same_data_and_evaluations_of_the_same_family_are_compared(tmp_path: Path) -> None:
    for name in ("lucid", "softmax"):
        write_run(tmp_path / "runs" / name, name)
        write_evaluation(tmp_path / "scores" / name, name, "sdpa" if name == "softmax" else name)
    write_run(tmp_path / "runs" / "other", data="/data/other")
    write_evaluation(tmp_path / "scores" / "short", "short", cells=CELLS[:4])
    results = find_results([tmp_path])
    runs, evaluations = (each for each in results if each["kind"] == "comparison")
    assert [figure["title"] for figure in runs["figures"]] == ["Training loss", "Validation loss"]
    assert [(line["name"], line["role"], line["x"]) for line in runs["figures"][1]["series"]] == [
        ("lucid", "lucid", [4]),
        ("softmax", "softmax", [4]),
    ]
    grid, curves, bars = evaluations["figures"]
    assert [panel["name"] for panel in grid["panels"]] == ["lucid", "short", "softmax"]
    assert [(line["name"], line["role"]) for line in curves["series"]] == [("lucid", "lucid"), ("softmax", "softmax")]
    assert [group["name"] for group in bars["groups"]] == ["2wikimqa", "qasper"]
    assert [bar["name"] for bar in bars["groups"][0]["bars"]] == ["lucid", "softmax"]
    assert [each["kind"] for each in results[2:]] == ["training"] * 3 + ["evaluation"] * 3


def test_runs_with_batches_of_other_sizes_are_compared_by_tokens(tmp_path: Path) -> None:
    write_run(tmp_path / "a", batch_size=8)
    write_run(tmp_path / "b", batch_size=2)
    figure = find_results([tmp_path])[0]["figures"][1]
    assert figure["x"]["label"] == "tokens"
    assert [line["x"] for line in figure["series"]] == [[4 * 8 * 64], [4 * 2 * 64]]


def test_checkpoints_of_one_name_are_numbered(tmp_path: Path) -> None:
    for step in ("a", "b"):
        write_evaluation(tmp_path / step, "model")
    results = find_results([tmp_path])
    assert [each["title"] for each in results] == ["Evaluations compared", "model (1)", "model (2)"]
    assert [panel["name"] for panel in results[0]["figures"][0]["panels"]] == ["model (1)", "model (2)"]


def test_experiments_runs_and_evaluations_mix_in_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "result.json").write_text(json.dumps(result("claim")))
    write_run(tmp_path / "run")
    write_evaluation(tmp_path / "scores")
    # The runs of an experiment's jobs are no results of their own, and a benchmark's results.json is no evaluation.
    write_run(tmp_path / "jobs" / "abc" / "run")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "results.json").write_text(json.dumps({"about": {}, "records": {}}))
    page, table = tmp_path / "page.html", tmp_path / "page.md"
    assert cli.main(["report", str(tmp_path), "--out", str(page), "--markdown", str(table)]) == 0
    assert f"{page}: 1 experiment, 1 training run, 1 evaluation; numbers in" in capsys.readouterr().out
    text = page.read_text()
    assert "<title>LUCID attention: what holds, measured</title>" in text
    assert text.count('<section class="run"') == 2
    assert text.count('<section class="experiment') == 1
    assert "over seeds (experiments) and standard errors over samples (evaluations)." in text
    assert "| training | run | a small model | validation loss 1.2500 after 4 steps |" in table.read_text()
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(page)]) == 0
    assert "<title>LUCID attention: training runs and evaluations</title>" in page.read_text()


def test_a_file_of_a_run_stands_for_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    names = ("recipe.json", "metrics.jsonl", "summary.json")
    assert [each["title"] for each in find_results([folder / name for name in names])] == ["run"]
    file = write_evaluation(tmp_path / "scores") / "results.json"
    assert [each["kind"] for each in find_results([file])] == ["evaluation"]


Damage = Callable[[Path], object]


def change(name: str, **changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def change_cell(**changes: Any) -> Damage:
    return change("results.json", cells=[CELLS[0], CELLS[1] | changes])


DAMAGED: dict[str, tuple[Damage, str]] = {
    "half a recipe": (lambda run: (run / "recipe.json").write_text('{"about'), "recipe.json: not JSON"),
    "a recipe that is a list": (
        lambda run: (run / "recipe.json").write_text("[]"),
        "recipe.json: expected an object, got a list",
    ),
    "steps as text": (change("recipe.json", steps="4"), "recipe.json: steps must be of type int, got '4'"),
    "no attention": (change("recipe.json", attention=None), "attention must be of type str or list, got None"),
    "a torn line of metrics": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step"\n{"step": 3, "loss": 1}\n'),
        "metrics.jsonl, line 2: not JSON",
    ),
    "metrics without steps": (
        lambda run: (run / "metrics.jsonl").write_text('{"loss": 2}\n'),
        "metrics.jsonl, line 1: step must be of type int, got None",
    ),
    "half a summary": (lambda run: (run / "summary.json").write_text("{"), "summary.json: not JSON"),
    "no validation loss": (
        change("summary.json", validation_loss=None),
        "summary.json: validation_loss must be of type int or float, got None",
    ),
    "half an evaluation": (lambda run: (run / "results.json").write_text("{"), "results.json: not JSON"),
    "no checkpoint": (change("results.json", checkpoint=3), "results.json: checkpoint must be of type dict, got 3"),
    "no cells": (change("results.json", cells=[]), "cells must hold at least one cell, got none"),
    "a cell without a family": (change_cell(family=None), "cells[1]: family must be of type str, got None"),
    "a mean that is text": (change_cell(mean="1"), "cells[1]: mean must be of type int or float, got '1'"),
    "labels that are a list": (change_cell(labels=[1]), "cells[1]: labels must be of type dict, got [1]"),
    "a label that is a list": (change_cell(labels={"a": [1]}), "the label 'a' must be a text or a number, got [1]"),
    "no sample": (change_cell(samples=0), "cells[1]: samples must be at least 1, got 0"),
    "a mean above the best": (change_cell(mean=1.5), "cells[1]: mean must be 0 to out_of, 1, got 1.5"),
    "versions that are a list": (change_cell(versions=[1]), "cells[1]: versions must be of type dict, got [1]"),
    "a summary that is a list": (
        lambda run: (run / "summary.json").write_text("[]"),
        "summary.json: expected an object, got a list",
    ),
    "a speed that is text": (change("summary.json", median_tokens_per_second="x"), "must be of type int or float"),
    "attentions that are no names": (change("recipe.json", attention=[{}]), "attention must be a name or a list of"),
    "a deep summary": (lambda run: (run / "summary.json").write_text("[" * 200_000), "nested too deeply"),
    "metrics in UTF-16": (
        lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-16"),
        "metrics.jsonl, line 1: expected text in UTF-8",
    ),
    "an error that is text": (change_cell(standard_error="x"), "standard_error must be of type int or float, got 'x'"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named_with_what_was_expected(damage: Damage, message: str, tmp_path: Path) -> None:
    write_evaluation(tmp_path / "mixed")
    write_run(tmp_path / "run")
    for file in (tmp_path / "run").iterdir():
        file.rename(tmp_path / "mixed" / file.name)
    damage(tmp_path / "mixed")
    with pytest.raises(ReportError) as raised:
        find_results([tmp_path / "mixed"])
    assert str(raised.value).startswith(str(tmp_path / "mixed"))
    assert message in str(raised.value)


def test_samples_that_are_not_those_of_the_mean_are_named(tmp_path: Path) -> None:
    kept = b'{"id": 0, "score": 1.0}\n'
    hashed = cell("mniah", {"needles": 2}, 1.0, name="a", samples=1, sha256=hashlib.sha256(kept).hexdigest())
    folder = write_evaluation(tmp_path / "scores", cells=[hashed])
    # Results may be moved without their samples.
    assert len(find_results([folder])) == 1
    (folder / "samples").mkdir()
    (folder / "samples" / "a.jsonl").write_bytes(kept)
    assert len(find_results([folder])) == 1
    (folder / "samples" / "a.jsonl").write_bytes(kept[:-4])
    with pytest.raises(ReportError, match=r"a\.jsonl: not the file that results\.json describes, which has 1 samples"):
        find_results([folder])


def test_a_score_that_is_not_finite_is_missing(tmp_path: Path) -> None:
    cells = [cell("perplexity", {"length": t, "position": "0–7"}, float("nan"), out_of=None) for t in (8, 16)]
    (evaluation,) = find_results([write_evaluation(tmp_path / "scores", cells=cells)])
    assert evaluation["figures"][0]["panels"][0]["values"] == [[None], [None]]
    assert evaluation["ours"] == "perplexity – (score)"
    assert "–" in page_html(checked_all([evaluation]))


@pytest.mark.parametrize(
    ("attention", "role"),
    [
        ("lucid", "lucid"),
        ("sdpa", "softmax"),
        (["lucid", "lucid"], "lucid"),
        (["lucid", "sliding"], "hybrid"),
        ("new", "new"),
    ],
    ids=str,
)
def test_the_role_of_a_model_is_its_attention(attention: Any, role: str) -> None:
    assert role_of(attention) == role


def test_means_over_tasks_are_drawn_for_cells_with_three_labels(tmp_path: Path) -> None:
    places = [(n, length) for n in (2, 4) for length in (1024, 2048)]
    cells = [
        cell("mniah", {"task": task, "needles": n, "length": length}, 0.5, name=f"{task}{n}{length}")
        for task in ("multikey_1", "multivalue")
        for n, length in places
    ]
    means = [
        cell("mniah", {"needles": n, "length": length}, n / 10) | {"over": {"task": ["a", "b"]}, "cells": []}
        for n, length in places
    ]
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"checkpoint": {"name": "x", "attention": "lucid"}, "cells": cells, "means": means}))
    result = read_evaluation(file)
    (figure,) = result["figures"]
    assert figure["kind"] == "heatmaps"
    assert figure["panels"][0]["values"] == [[20.0, 20.0], [40.0, 40.0]]
    assert [table["title"] for table in result["tables"]] == ["mniah", "mniah, means"]
    assert result["ours"] == "mniah 30 % (score)"
    means[0]["over"] = None
    file.write_text(json.dumps({"checkpoint": {"name": "x"}, "cells": cells, "means": means}))
    with pytest.raises(ReportError, match=r"means\[0\]: over must"):
        read_evaluation(file)
