"""Results are read from the files of other commands; a damaged file takes nothing else with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from lucid_lab import cli
from lucid_lab.report.figures import shown, tick, with_spread
from lucid_lab.report.records import read_results

from .samples import memory_update, result, write_analysis, write_evaluation, write_json, write_state, write_training

RECORDS = Path(__file__).parents[2] / "records" / "claims"


def titles(results: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(made["kind"], made.get("title", made.get("error", ""))) for made in results]


def test_every_kind_of_file_is_found_and_runs_of_a_kind_are_compared(tmp_path: Path) -> None:
    write_json(tmp_path / "b" / "result.json", result("b", verdict="does not hold"))
    write_json(tmp_path / "c" / "result.json", result("c"))
    write_training(tmp_path / "runs" / "lucid", "lucid")
    write_training(tmp_path / "runs" / "softmax", "softmax")
    write_evaluation(tmp_path / "eval" / "results_2026-11-18.json", "/models/lucid", 0.75)
    write_evaluation(tmp_path / "other" / "results.json", "softmax", 0.5)
    write_analysis(tmp_path / "analysis.json")
    # What an experiment keeps is part of its result.
    write_training(tmp_path / "kept" / "1", "softmax")
    assert titles(read_results([tmp_path, tmp_path / "c"])) == [
        ("experiment", "C"),
        ("experiment", "B"),
        ("comparison", "Training runs compared"),
        ("comparison", "Evaluations compared"),
        ("training", "lucid"),
        ("training", "softmax"),
        ("evaluation", "softmax"),
        ("evaluation", "lucid"),
        ("analysis", "model"),
    ]


def test_a_training_run_is_read_also_if_it_was_killed(tmp_path: Path) -> None:
    write_training(tmp_path / "run", "lucid")
    (run,) = read_results([tmp_path])
    assert run["ours"] == "step 300 of 300, validation loss 4.25"
    training, validation = run["figures"][0]["series"]
    # NaN and 1e308 are left out.
    assert training["x"] == [0, 300]
    assert (validation["x"], validation["y"], validation["role"]) == ([300], [4.25], "lucid")


def test_a_run_of_transformers_trainer_shows_its_newest_state(tmp_path: Path) -> None:
    for step, loss in ((9, 3.0), (20, 2.0)):
        write_state(tmp_path / "run" / f"checkpoint-{step}" / "trainer_state.json", step, loss)
    (run,) = read_results([tmp_path])
    assert (run["title"], run["ours"]) == ("run", "step 20 of 40, validation loss 2")
    write_state(tmp_path / "run" / "trainer_state.json", 40, 1.5)
    (run,) = read_results([tmp_path])
    assert run["ours"] == "step 40 of 40, validation loss 1.5"
    write_training(tmp_path / "run", "lucid")
    (run,) = read_results([tmp_path])
    assert run["ours"].startswith("step 300")


def test_scores_of_lm_eval_have_errors_samples_and_lengths(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "a" / "results.json", "org/model", 0.75)
    write_evaluation(tmp_path / "b" / "results.json", "org/model", 0.5)
    compared, first, second = read_results([tmp_path])
    rows = [["arc_easy", "acc", 0.75, 0.01, 8], ["niah_single_1", "4096", 0.5, None, None]]
    assert first["tables"][0]["rows"][:2] == rows
    assert (first["title"], second["title"]) == ("model (1)", "model (2)")
    ruler, ours, bars = compared["figures"]
    assert [panel["values"] for panel in ruler["panels"]] == [[[0.5]], [[0.5]]]
    assert ruler["panels"][0]["columns"] == [4096]
    panel = ours["panels"][0]
    assert (panel["rows"], panel["columns"], panel["values"]) == (["mniah-needles_4"], [64, 128], [[0.25, 0.25]])
    (group,) = bars["groups"]
    assert [(bar["name"], bar["value"], bar["spread"]) for bar in group["bars"]] == [
        ("model (1)", 0.75, 0.01),
        ("model (2)", 0.5, 0.01),
    ]


DAMAGED = {
    "cut off": ("result.json", json.dumps(result("a"))[:60], "not JSON"),
    "altered": ("result.json", json.dumps(result("a") | {"content_sha256": "0"}), "was altered"),
    "of another format": ("result.json", json.dumps(result("a") | {"format": 2}), "format must be 1, got 2"),
    "without a verdict": ("result.json", json.dumps(result("a") | {"verdict": "good"}), "verdict must be one of"),
    "a table with a gap": (
        "result.json",
        json.dumps(result("a", tables=[{"title": "", "columns": ["a", "b"], "rows": [["1"]]}])),
        "every row must have 2 cells",
    ),
    "metrics with a broken line": ("metrics.jsonl", '{"step": 1}\n{"st\n', "line 2: not JSON"),
    "a state without a history": ("trainer_state.json", "{}", "log_history must be of type list"),
    "results of another tool": ("results.json", '{"results": [1]}', "results must be of type dict"),
    "results without a score": ("results.json", '{"results": {"a": {}}, "configs": {}}', "at least one score"),
    "results of a wrong form": (
        "results.json",
        '{"results": {"a": {"b,none": 1}}, "configs": {}, "n-samples": 7}',
        "not in the expected form",
    ),
    "an analysis without figures": ("analysis.json", '{"checkpoint": {"name": "a"}, "input": {}}', "figures must be"),
}


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_one_line_and_the_rest_is_shown(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "good" / "result.json", memory_update())
    file = tmp_path / "bad" / name
    file.parent.mkdir()
    file.write_text(content)
    page = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path), "--out", str(page)]) == 0
    shown_page = page.read_text()
    assert shown_page.count('class="damaged"') == 1
    assert message in shown_page
    assert "Memory update" in shown_page
    assert message in capsys.readouterr().err
    # With nothing else to show it is an error.
    assert cli.main(["report", str(file), "--out", str(page)]) == 1
    assert message in capsys.readouterr().err


def test_wrong_words_are_errors_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(tmp_path / "result.json", result("a"))
    (tmp_path / "empty").mkdir()
    same = str(tmp_path / "page.html")
    for words, message in (
        ([str(tmp_path / "nowhere")], "nowhere"),
        ([str(tmp_path / "empty")], "expected one of result.json, metrics.jsonl"),
        ([str(tmp_path), "--out", str(tmp_path / "page.json")], "ends with .html"),
        ([str(tmp_path), "--out", same, "--markdown", same], "--markdown must be another file"),
    ):
        assert cli.main(["report", *words]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_the_published_records_are_read(tmp_path: Path) -> None:
    results = read_results([RECORDS])
    assert len(results) == len(list(RECORDS.rglob("result.json")))
    assert {made["kind"] for made in results} == {"experiment"}


def test_numbers_are_written_as_people_read_them() -> None:
    values = [None, "text", 7, -0.0123456, 12345.6, 1e-9, 1.2e308, -2.5]
    assert [*map(shown, values)] == ["–", "text", "7", "−0.01235", "12346", "1.00·10⁻⁹", "1.20·10³⁰⁸", "−2.5"]
    assert with_spread(99.94, 0.06) == "99.940 ± 0.060"
    assert with_spread(-99.94, 0.06, 1) == "−99.9 ± 0.1"
    assert [tick(value) for value in (64, 2048, 3 << 20, 0.01, 1e6, 0)] == ["64", "2K", "3M", "0.01", "10⁶", "0"]
