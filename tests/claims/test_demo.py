"""`lucid demo`, with made-up records."""

from pathlib import Path
from typing import Any

import pytest

from lucid_lab import cli
from lucid_lab.claims.engine import demo
from lucid_lab.claims.engine.jobs import Job, Record
from lucid_lab.claims.engine.pool import JobsFailed
from lucid_lab.claims.engine.scale import DEMO, Scale
from lucid_lab.claims.engine.study import load, save_result
from tests.claims.faking import fake, small_run


def rule(job: Job) -> Record:
    arguments = job.arguments
    if job.function == "engine.timing:operator_cost":
        n = len(arguments["lengths"])
        times = {"sdpa": [1.0] * n, "lucid": [2.0] * n, "dense": [9.0] * n}
        flop_ratio = 1 + arguments["kv_heads"] / arguments["heads"]
        quartiles = {"ratio_low": [flop_ratio] * n, "ratio_high": [flop_ratio] * n}
        return {
            "lengths": list(arguments["lengths"]),
            "milliseconds": times,
            "ratio": [flop_ratio] * n,
            "flop_ratio": flop_ratio,
            "rounds": [5] * n,
            **quartiles,
        }
    if job.function.startswith("condition_number:"):
        # κ grows in trained models only.
        kappas = {n: float(n) if arguments.get("trained") else 1.0 for n in arguments["lengths"]}
        heads = [
            {"layer": 0, "head": 0, "length": n, "kappa": kappa, "inverse_norm": 1.5} for n, kappa in kappas.items()
        ]
        return {"heads": heads}
    return small_run(job, 99.9 if arguments.get("attention") == "lucid" else 9.0)


def fake_run_together(names: Any, scale: Scale, out: Path, command: str, then: Any) -> list[dict[str, Any]]:
    results = []
    for name in names:
        module = load(name)
        conclusion = module.conclude(scale, fake(module, scale, rule))
        results.append(save_result(module.CLAIM, conclusion, name, scale, out, command, 7.0))
    then(results)
    return results


@pytest.mark.parametrize("words", [(), ("--full",)], ids=["demo", "full"])
def test_a_report_and_its_numbers_are_written_and_a_summary_shown(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run_together", fake_run_together)
    assert cli.main(["demo", "--out", str(tmp_path / "demo"), *words]) == 0
    page = (tmp_path / "demo" / "report.html").read_text()
    shown = capsys.readouterr().out
    for name in demo.PARTS:
        title = load(name).CLAIM.title
        assert title in page
        assert f"HOLDS          {title}" in shown
    assert ("Gated DeltaNet" in page) == bool(words)
    assert ("ARGS=--full" in shown) != bool(words)
    assert "99.9" in page
    assert " ".join(["lucid demo", *words]) in page
    assert str(tmp_path / "demo" / "report.html") in shown


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "the same command continues"),
        (JobsFailed("1 of 2 jobs failed"), 1, "1 of 2 jobs failed"),
    ],
)
def test_the_reason_for_a_stop_is_one_line(
    error: BaseException, code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(demo, "run_together", stop)
    assert cli.main(["demo", "--out", str(tmp_path)]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_the_demonstration_trains_every_model_once() -> None:
    modules = {name: load(name) for name in demo.PARTS}
    jobs = {name: set(fake(module, DEMO, rule)) for name, module in modules.items()}
    trained = {job for job in jobs["condition_number"] if job.function == "small.training:train_small"}
    assert trained
    assert trained <= jobs["needle_grid"]
