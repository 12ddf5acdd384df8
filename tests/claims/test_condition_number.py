"""`condition_number`: κ is that of P, models are those of other experiments, the verdict is what the records say."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lucid_lab.claims import condition_number, needle_grid
from lucid_lab.claims.condition_number import growth, keys_job, measured, of_random_keys, sources
from lucid_lab.claims.engine.jobs import Job, Record, Store, Work
from lucid_lab.claims.engine.scale import SMALL, SMOKE
from lucid_lab.claims.engine.steps import check_steps

from .faking import compute, fake, small_run


def test_it_runs_to_a_conclusion(tmp_path: Path) -> None:
    conclusion = condition_number.conclude(SMOKE, compute(condition_number, SMOKE, tmp_path))
    assert [figure["kind"] for figure in conclusion.figures] == ["lines", "lines", "heatmaps"]
    # The last column: κ never falls with the prefix, for any keys.
    assert {row[-1] for row in conclusion.tables[0]["rows"]} == {"yes"}
    json.dumps([*conclusion.figures, *conclusion.tables], allow_nan=False)


def test_needle_models_are_those_of_needle_grid() -> None:
    for scale in (SMOKE, SMALL):
        shared = set(needle_grid.plan(scale, {}))
        needles = [source for source in sources(scale) if source.trained and source.key.startswith("needles")]
        assert len(needles) == 2
        assert {source.contestant.job(seed) for source in needles for seed in measured(scale).seeds} <= shared


def test_models_are_measured_when_they_are_trained() -> None:
    first = condition_number.plan(SMOKE, {})
    untrained = [job for job in first if job.function == "condition_number:of_model"]
    assert {job.arguments["trained"] for job in untrained} == {False}
    done = {job: small_run(job, 50) for job in first if job.function == "small.training:train_small"}
    later = [job for job in condition_number.plan(SMOKE, done) if job.function == "condition_number:of_model"]
    assert len(later) == len(sources(SMOKE))


@pytest.mark.parametrize("rope", [False, True])
def test_kappa_of_random_keys_is_that_of_the_dense_matrix(tmp_path: Path, rope: bool) -> None:
    job = keys_job(4, rope, 3, (5, 12))
    record = of_random_keys(Work(Store(tmp_path), job), **job.arguments)
    k = torch.randn(12, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if rope:
        # Pairs (i, i + 2) of a key at t turn by t and by t / 100.
        for t in range(12):
            for i, angle in enumerate((t, t / 100)):
                a, b = k[t, i].item(), k[t, i + 2].item()
                k[t, i] = a * math.cos(angle) - b * math.sin(angle)
                k[t, i + 2] = b * math.cos(angle) + a * math.sin(angle)
    k = k / k.norm(dim=-1, keepdim=True)
    P = torch.exp(2 * (k @ k.mT - 1)).tril()
    expected = [torch.linalg.cond(P[:n, :n]).item() for n in (5, 12)]
    assert [head["kappa"] for head in record["heads"]] == pytest.approx(expected, rel=1e-5)


def faked(kappa: Callable[[Job, int, int], float]) -> dict[Job, Record]:
    """Records in which κ is a function of the job, the head and the length."""

    def rule(job: Job) -> Record:
        if job.function == "small.training:train_small":
            return small_run(job, 50)
        return {
            "heads": [
                {"layer": 0, "row": 0, "head": head, "length": n, "kappa": kappa(job, head, n), "inverse_norm": 1.9}
                for head in (0, 1)
                for n in job.arguments["lengths"]
            ]
        }

    return fake(condition_number, SMALL, rule)


def power(trained: float, untrained: float) -> Callable[[Job, int, int], float]:
    """κ as powers of the length, of models before and after training; independent keys do not grow."""

    def kappa(job: Job, head: int, n: int) -> float:
        if "run" not in job.arguments:
            return 1.0
        return n ** (trained if job.arguments["trained"] else untrained)

    return kappa


def no_rope_only(job: Job, head: int, n: int) -> float:
    grows = "run" in job.arguments and job.arguments["trained"] and not job.arguments["run"]["rope"]
    return n ** (0.9 if grows else 0.5)


def falls_at_the_end(job: Job, head: int, n: int) -> float:
    return 1.0 if n == 2048 else power(0.9, 0.5)(job, head, n)


@pytest.mark.parametrize(
    ("kappa", "verdict"),
    [
        (power(0.9, 0.5), "holds"),
        # All keys have a κ that grows: this is no claim about what is learned.
        (power(0.5, 0.5), "does not hold"),
        (power(0.5, 0.9), "does not hold"),
        (no_rope_only, "partly"),
        (falls_at_the_end, "does not hold"),
    ],
)
def test_the_verdict_is_what_the_records_say(kappa: Callable[[Job, int, int], float], verdict: str) -> None:
    conclusion = condition_number.conclude(SMALL, faked(kappa))
    assert conclusion.verdict == verdict
    assert conclusion.seeds == 3
    assert "1.900 (the bound is 2)" in conclusion.because


def test_growth_has_an_exponent() -> None:
    lengths = (16, 256)
    heads = [
        {"layer": layer, "head": 0, "length": n, "kappa": (layer + 1) * n**0.5, "inverse_norm": 1.0}
        for layer in (0, 1)
        for n in lengths
    ]
    found = growth([{"heads": heads}], (0,), lengths)
    assert found.exponent() == pytest.approx(0.5)
    assert found.mean(0).mean == pytest.approx(4 * math.sqrt(2))
    assert found.monotone


def test_the_full_recipe_can_be_checked_here() -> None:
    check_steps(condition_number.paper())
