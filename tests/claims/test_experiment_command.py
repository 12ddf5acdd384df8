"""`lucid experiment`, as its user sees it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lucid_lab import cli, commands
from lucid_lab.claims.engine import command, study
from lucid_lab.claims.engine.command import table_lines
from lucid_lab.claims.engine.full_recipe import steps_of
from lucid_lab.claims.engine.jobs import Job
from lucid_lab.claims.engine.pool import JobsFailed, do
from lucid_lab.claims.engine.scale import HAVE_HOURS, SCALES, SMOKE
from lucid_lab.claims.engine.steps import Step
from lucid_lab.claims.engine.study import EXPERIMENTS, load

from .probing import Probes, probing


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probes]:
    def serial(jobs: list[Job], store: Any, progress: Any, processes: int | None) -> None:
        for job in jobs:
            assert do(job, store.folder) is None

    monkeypatch.setattr(study, "run_jobs", serial)
    with probing(tmp_path / "probes") as made:
        yield made


def test_list_names_every_claim_with_its_section_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiment", "list"]) == 0
    shown = capsys.readouterr().out
    for name in EXPERIMENTS:
        claim = load(name).CLAIM
        assert f"\n{name} " in "\n" + shown
        assert claim.title in shown
        assert claim.paper in shown


def test_the_guide_has_a_command_for_every_claim() -> None:
    guide = (Path(cli.__file__).parents[1] / "docs" / "guides" / "reproduce.md").read_text()
    for name in EXPERIMENTS:
        assert f"| `lucid experiment {name}` |" in guide


def test_an_unknown_name_is_refused_with_a_hint_before_anything_runs(
    probes: Probes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["experiment", "probe", "probes", "--scale", "smoke"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("lucid experiment: error: there is no experiment 'probes' (did you mean 'probe'?)")
    assert captured.out == ""
    assert probes.runs() == []


@pytest.mark.parametrize("words", [["--processes", "0"], ["--processes", "two"], ["--scale", "large"], []])
def test_wrong_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["experiment", *(["memory_update", *words] if words else [])])
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


def test_an_experiment_without_a_form_at_hours_is_refused_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiment", "variants", "hybrid", "--scale", "hours"]) == 1
    expected = "--scale hours is for needle_lm, babilong, variants, got hybrid: use --scale small"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *((name, scale) for name in EXPERIMENTS for scale in ("smoke", "small", "rehearsal", "paper")),
        *((name, "hours") for name in HAVE_HOURS),
    ],
)
def test_a_dry_run_says_what_would_run_and_runs_nothing(
    name: str, scale: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "condition_number":
        # Estimates of all models take a minute: tests/claims/test_costs.py has them.
        monkeypatch.setattr(Step, "estimate", lambda step: None)
    assert cli.main(["experiment", name, "--scale", scale, "--dry-run", "--out", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    *lines, last = shown.splitlines()
    assert last.startswith(f"{name}: ")
    if scale in ("rehearsal", "paper"):
        steps = steps_of(name, SCALES[scale])
        assert last.startswith(f"{name}: {len(steps)} commands")
        assert all(step.line in shown for step in steps)
    else:
        jobs = load(name).plan(SCALES[scale], {})
        assert f"{len(set(jobs))} to do" in last
        assert len(lines) == len(set(jobs))
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_leaves_out_what_is_finished(
    probes: Probes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--scale", "smoke", "--out", str(tmp_path)]
    assert do(probes.module.plan(SMOKE, {})[0], tmp_path / "jobs") is None
    assert cli.main(["experiment", "probe", "--dry-run", *out]) == 0
    shown = capsys.readouterr().out
    assert "1 jobs finished, 1 to do" in shown
    assert "a   #" not in shown
    assert probes.runs() == ["a"]


def test_a_run_shows_the_verdict_and_says_where_the_result_is(
    probes: Probes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["experiment", "probe", "--scale", "smoke", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "probe (smoke): Probes run" in shown
    assert "paper: 1 run" in shown
    assert "here:  14" in shown
    assert f"TOO SMALL TO JUDGE: {study.NOT_JUDGED}" in shown
    path = tmp_path / "probe-smoke" / "result.json"
    assert str(path) in shown
    assert json.loads(path.read_text())["ours"] == "14"
    assert cli.main(["experiment", "probe", "--scale", "smoke", "--out", str(tmp_path), "--restart"]) == 0
    assert probes.runs() == ["a", "b", "c", "d"] * 2


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (JobsFailed("1 of 2 jobs failed"), 1, "lucid experiment: error: 1 of 2 jobs failed\n"),
        (study.ExperimentError("no checkout"), 1, "lucid experiment: error: no checkout\n"),
        (
            KeyboardInterrupt(),
            130,
            f"lucid experiment: stopped by Ctrl-C; {commands.COMMANDS['experiment'].kept}\n",
        ),
    ],
    ids=["failed", "cannot run", "Ctrl-C"],
)
def test_the_reason_for_a_stop_is_one_line(
    error: BaseException,
    code: int,
    message: str,
    probes: Probes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def stop(*_: Any) -> None:
        raise error

    monkeypatch.setattr(study, "run_jobs", stop)
    assert cli.main(["experiment", "probe", "--scale", "smoke", "--out", str(tmp_path)]) == code
    assert capsys.readouterr().err == message


def test_a_step_that_fails_ends_the_recipe_with_its_code(
    probes: Probes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(step: Step) -> int:
        ran.append(step.words[1])
        return 7 if step.words[1] == "hit_rate" else 0

    monkeypatch.setattr(Step, "run", run)
    steps = [Step(("experiment", name, "--scale", "smoke")) for name in ("memory_update", "hit_rate", "variants")]
    monkeypatch.setattr(probes.module, "paper", lambda: steps)
    assert cli.main(["experiment", "probe", "--scale", "paper", "--out", str(tmp_path)]) == 7
    assert ran == ["memory_update", "hit_rate"]
    captured = capsys.readouterr()
    assert "1/3: lucid experiment memory_update --scale smoke" in captured.out
    assert "step 2 of 3 ended with 7: lucid experiment hit_rate" in captured.err
    assert not (tmp_path / "probe-paper").exists()


def test_the_full_recipe_leaves_a_result(probes: Probes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Step, "run", lambda step: 0)
    steps = [Step(("experiment", "memory_update", "--scale", "smoke"))]
    monkeypatch.setattr(probes.module, "paper", lambda: steps)
    assert cli.main(["experiment", "probe", "--scale", "paper", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "probe-paper" / "result.json").read_text())
    assert (result["scale"], result["verdict"]) == ("paper", "incomplete")


def test_a_full_recipe_locks_its_folder(
    probes: Probes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment", "probe", "--scale", "paper", "--out", str(tmp_path)]

    def run(step: Step) -> int:
        assert cli.main(words) == 1
        return 0

    monkeypatch.setattr(Step, "run", run)
    monkeypatch.setattr(probes.module, "paper", lambda: [Step(("experiment", "memory_update", "--scale", "smoke"))])
    assert cli.main(words) == 0
    assert "is being written by another `lucid experiment probe --scale paper`" in capsys.readouterr().err


def test_restart_is_not_for_the_full_recipe(probes: Probes, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiment", "probe", "--scale", "paper", "--restart"]) == 1
    assert "--restart" in capsys.readouterr().err


def test_tables_on_screen_have_columns_of_one_width() -> None:
    assert table_lines({"columns": ["name", "x"], "rows": [["a", 1.23456], [None, "long cell"]]}) == [
        "name  x",
        "----  ---------",
        "a     1.235",
        "      long cell",
    ]


def test_several_experiments_run_in_the_order_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_one(name: str, *_: Any) -> int:
        ran.append(name)
        return 0

    monkeypatch.setattr(command, "_run_one", run_one)
    assert cli.main(["experiment", "variants", "memory_update"]) == 0
    assert ran == ["variants", "memory_update"]
    ran.clear()
    assert cli.main(["experiment", "all"]) == 0
    assert ran == list(EXPERIMENTS)
