"""A new attention is one file and one line: experiments compare it without a change of theirs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lucid_attention.files import read_json
from lucid_attention.nn.attention import ATTENTIONS
from lucid_attention.nn.causal import CausalAttention, Past
from lucid_lab.claims import memory_update, needle_grid
from lucid_lab.claims.engine import demo, study
from lucid_lab.claims.engine.jobs import Job, Store
from lucid_lab.claims.engine.pool import do
from lucid_lab.claims.engine.scale import DEMO, SMALL, SMOKE
from lucid_lab.claims.engine.study import load, run_experiment

from .faking import fake, small_run


class ToyAttention(CausalAttention):
    """Softmax attention over doubled values."""

    title = "Toy"

    def values(
        self, x: Tensor, k: Tensor, v: Tensor, past: Past | None, key_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        return 2 * v


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTIONS, "toy", ToyAttention)


def toys(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.arguments.get("attention") == "toy"]


def test_the_demonstration_trains_it_on_both_tasks() -> None:
    planned = {name: toys(load(name).plan(DEMO, {})) for name in demo.PARTS}
    # With and without positions; with needles.
    assert len(planned["memory_update"]) == 2 * 3
    assert len(planned["needle_grid"]) == 2
    assert {job.label for job in planned["needle_grid"]} == {"Toy, seed 0", "Toy, seed 1"}


@pytest.mark.parametrize("experiment", [memory_update, needle_grid])
def test_tables_and_figures_name_it_and_the_verdict_stays(experiment: Any) -> None:
    def rule(job: Job) -> dict[str, Any]:
        accuracies = {"lucid": 99.9, "toy": 77.7}
        return small_run(job, accuracies.get(str(job.arguments.get("attention")), 9.0))

    conclusion = experiment.conclude(SMALL, fake(experiment, SMALL, rule))
    assert conclusion.verdict == "holds"
    rows = [row for table in conclusion.tables for row in table["rows"] if row[0] == "Toy"]
    assert rows
    assert all("77.7 ± 0.0" in row for row in rows)
    assert '"name": "Toy"' in json.dumps(conclusion.figures)


def test_an_experiment_runs_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(jobs: Sequence[Job], store: Store, *_: Any) -> None:
        for job in jobs:
            log = do(job, store.folder)
            assert log is None, Path(log).read_text()

    # Worker processes would not know the toy.
    monkeypatch.setattr(study, "run_jobs", run_here)
    monkeypatch.setattr(memory_update, "FEW", ("softmax", "lucid", "toy"))
    store = Store(tmp_path / "jobs")
    for job in memory_update.timings(SMOKE).values():
        store.write(job, small_run(job, accuracy=0.0), seconds=1.0)
    result = run_experiment("memory_update", SMOKE, tmp_path, quiet=True)
    trained = toys(list(store))
    assert {job.arguments["rope"] for job in trained} == {True, False}
    assert "Toy" in [row[0] for row in result["tables"][0]["rows"]]
    assert read_json(tmp_path / "memory_update-smoke" / "result.json") == result
