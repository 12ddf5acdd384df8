"""An experiment: plan, do what is not done, plan again, conclude."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lucid_attention.files import parse_json, read_json
from lucid_lab import claims as experiments
from lucid_lab.claims.engine import study
from lucid_lab.claims.engine.jobs import Job, Store
from lucid_lab.claims.engine.pool import do
from lucid_lab.claims.engine.scale import SMALL, SMOKE
from lucid_lab.claims.engine.study import (
    EXPERIMENTS,
    NOT_JUDGED,
    ExperimentError,
    lacks,
    load,
    run_experiment,
    run_together,
)
from lucid_lab.locks import FolderInUse, locked
from lucid_lab.report.records import read_result

from .probing import Probes, probing


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probes]:
    """The experiment `probe`, whose jobs run in this process."""
    with probing(tmp_path / "probes") as made:

        def serial(jobs: Sequence[Job], store: Store, progress: Any, processes: int | None) -> None:
            for job in jobs:
                assert do(job, store.folder) is None

        monkeypatch.setattr(study, "run_jobs", serial)
        yield made


def run(out: Path, **options: Any) -> dict[str, Any]:
    return run_experiment("probe", SMOKE, out, quiet=True, **options)


def test_a_tiny_scale_has_no_verdict(probes: Probes, tmp_path: Path) -> None:
    smoke = run(tmp_path)
    assert (smoke["verdict"], smoke["because"]) == ("too small to judge", NOT_JUDGED)
    small = run_experiment("probe", SMALL, tmp_path, quiet=True)
    assert (small["verdict"], small["because"]) == ("holds", "They ran.")
    assert (smoke["scale"], small["scale"]) == ("smoke", "small")


def test_later_rounds_are_planned_from_the_records_of_earlier_ones(probes: Probes, tmp_path: Path) -> None:
    result = run(tmp_path)
    assert probes.runs() == ["a", "b", "c", "d"]
    assert result["ours"] == "14"  # a + b = 3, c = 13, d = 14


def test_a_finished_experiment_is_concluded_again_without_any_work(probes: Probes, tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / "probe-smoke" / "result.json"
    written = path.read_bytes()
    for job in Store(tmp_path / "jobs"):
        record = tmp_path / "jobs" / job.key / "record.json"
        os.utime(record, (time.time() - 3 * 86400,) * 2)
    run(tmp_path)
    assert probes.runs() == ["a", "b", "c", "d"]
    again = read_json(path)
    three_days_ago = datetime.fromtimestamp(time.time() - 3 * 86400, UTC).date().isoformat()
    assert again == parse_json(written, "") | {"finished": three_days_ago}


def test_the_result_is_what_the_report_reads(probes: Probes, tmp_path: Path) -> None:
    result = run(tmp_path)
    file = tmp_path / "probe-smoke" / "result.json"
    assert read_json(file) == result
    file.write_text(file.read_text().replace('"seconds": ', '"seconds": 1'))
    with pytest.raises(ValueError, match=r"result\.json: was altered"):
        read_result(file)
    assert set(result) == {
        *("format", "name", "scale", "title", "section", "claim", "paper", "ours", "verdict", "because", "rule"),
        *("command", "machine", "finished", "seconds", "seeds", "figures", "tables"),
    }
    claim = probes.module.CLAIM
    assert [result[key] for key in ("title", "section", "claim", "paper")] == [
        *(claim.title, claim.section, claim.says, claim.paper),
    ]
    assert (result["format"], result["name"], result["scale"]) == (1, "probe", "smoke")
    assert result["command"] == "lucid experiment probe --scale smoke"
    assert "torch 2." in result["machine"]
    assert result["finished"] == datetime.now(UTC).date().isoformat()


def test_several_experiments_run_together_and_share_what_they_share(probes: Probes, tmp_path: Path) -> None:
    results = run_together(["probe", "probe"], SMOKE, tmp_path, "lucid demo", quiet=True)
    assert [result["command"] for result in results] == ["lucid demo"] * len(results)
    assert probes.runs() == ["a", "b", "c", "d"]


def test_the_time_is_that_of_all_its_jobs_also_of_those_done_before(probes: Probes, tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs")
    run(tmp_path)
    for seconds, job in enumerate(list(store), 1):
        store.write(job, store[job], 10.0 * seconds)
    assert run(tmp_path)["seconds"] == 100.0


def test_restart_does_everything_again_with_later_rounds(probes: Probes, tmp_path: Path) -> None:
    run(tmp_path)
    made = [tmp_path / "jobs" / job.key / "made.txt" for job in Store(tmp_path / "jobs")]
    assert all(path.exists() for path in made)
    for path in made:
        path.write_text("old")
        path.with_name("left over.txt").touch()
    other = probes.module.probe("of another experiment")
    assert do(other, tmp_path / "jobs") is None
    assert run(tmp_path, restart=True)["ours"] == "14"
    assert sorted(probes.runs()) == sorted(["a", "b", "c", "d", "of another experiment", "a", "b", "c", "d"])
    assert "old" not in [path.read_text() for path in made]
    assert not list(tmp_path.rglob("left over.txt"))
    assert other in Store(tmp_path / "jobs")


def test_restart_after_a_stop_in_the_middle_forgets_what_is_there(probes: Probes, tmp_path: Path) -> None:
    run(tmp_path)
    store = Store(tmp_path / "jobs")
    jobs = probes.module.plan(SMOKE, store)
    store.forget(jobs[3])
    run(tmp_path, restart=True)
    assert probes.runs() == ["a", "b", "c", "d"] * 2


def test_a_damaged_record_is_done_again_and_named(
    probes: Probes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(tmp_path)
    job = probes.module.plan(SMOKE, {})[0]
    path = tmp_path / "jobs" / job.key / "record.json"
    entry = json.loads(path.read_text())
    path.write_text(json.dumps(entry | {"record": entry["record"] | {"value": 99.0}}))
    assert run(tmp_path)["ours"] == result["ours"]
    assert probes.runs() == ["a", "b", "c", "d", "a"]
    assert f"{path} cannot be used: its content does not match its hash. The job runs again" in capsys.readouterr().err


def test_the_next_run_removes_what_a_killed_one_was_writing(probes: Probes, tmp_path: Path) -> None:
    left = tmp_path / "jobs" / "some-job" / ".tmpAbC123"
    left.parent.mkdir(parents=True)
    left.touch()
    run(tmp_path)
    assert not left.exists()


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(probes: Probes, tmp_path: Path) -> None:
    run(tmp_path)
    for options in ({}, {"restart": True}):
        with locked(tmp_path, "lucid demo"), pytest.raises(FolderInUse, match="another `lucid demo`"):
            run(tmp_path, **options)
    assert probes.runs() == ["a", "b", "c", "d"]
    assert len(Store(tmp_path / "jobs")) == 4
    run(tmp_path)


def test_what_follows_a_run_is_done_before_another_may_begin(probes: Probes, tmp_path: Path) -> None:
    def then(results: list[dict[str, Any]]) -> None:
        assert [result["name"] for result in results] == ["probe"]
        with pytest.raises(FolderInUse, match="another `lucid demo`"), locked(tmp_path, "lucid report"):
            pass
        calls.append(results)

    calls: list[Any] = []
    run_together(["probe"], SMOKE, tmp_path, "lucid demo", quiet=True, then=then)
    assert len(calls) == 1


def test_two_experiments_share_their_jobs(probes: Probes, tmp_path: Path) -> None:
    for job in probes.module.plan(SMOKE, {}):
        assert do(job, tmp_path / "jobs") is None
    run(tmp_path)
    assert probes.runs() == ["a", "b", "c", "d"]


def test_records_of_another_folder_are_not_found(probes: Probes, tmp_path: Path) -> None:
    run(tmp_path / "one")
    run(tmp_path / "two")
    assert probes.runs() == ["a", "b", "c", "d"] * 2


def test_a_nan_in_a_conclusion_leaves_no_result(
    probes: Probes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = probes.module.conclude(SMOKE, {**_finished(probes, tmp_path)})
    wrong = type(right)(right.ours, right.verdict, right.because, 1, tables=[{"rows": [[float("nan")]]}])
    monkeypatch.setattr(probes.module, "conclude", lambda scale, done: wrong)
    with pytest.raises(ValueError, match="JSON"):
        run(tmp_path)
    assert not (tmp_path / "probe-smoke" / "result.json").exists()


def _finished(probes: Probes, out: Path) -> dict[Job, Any]:
    run(out)
    (out / "probe-smoke" / "result.json").unlink()
    store = Store(out / "jobs")
    return {job: store[job] for job in store}


def test_an_unknown_experiment_has_a_hint() -> None:
    with pytest.raises(ExperimentError, match=r"no experiment 'memory_updates' \(did you mean 'memory_update'\?\)"):
        load("memory_updates")
    with pytest.raises(ExperimentError, match=r"no experiment 'zzz': memory_update, .*pretrained, all or list"):
        load("zzz")


def test_every_file_with_a_claim_is_listed() -> None:
    folder = Path(experiments.__path__[0])
    modules = [*folder.glob("*.py"), *folder.glob("*/claim.py")]
    names = {
        path.parent.name if path.stem == "claim" else path.stem for path in modules if "\nCLAIM = " in path.read_text()
    }
    assert names == set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_what_one_needs(name: str) -> None:
    experiment = load(name)
    claim = experiment.CLAIM
    assert all((claim.title, claim.section, claim.says, claim.paper))
    assert not claim.section.startswith("§")
    assert (experiment.__doc__ or "").strip()
    for scale in (SMOKE, SMALL):
        jobs = experiment.plan(scale, {})
        # One that has to be given a model plans nothing without it, and says so.
        assert bool(jobs) == (lacks(name, scale) is None)
        assert jobs == experiment.plan(scale, {})  # the same again
        assert all(job.label for job in jobs)
        for job in jobs:
            job.resolve()
            json.dumps(dict(job.arguments), allow_nan=False)
