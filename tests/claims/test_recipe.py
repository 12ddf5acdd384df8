"""`recipe`: the whole path on a tiny Llama, logs read by another reader, LUCID that starts as the original model."""

import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from lucid_attention.models.checkpoint import load_model
from lucid_lab import cli
from lucid_lab.claims import recipe, run_claim
from lucid_lab.claims.recipe import (
    LORA,
    MAPS,
    NAMES,
    SOFTMAX,
    THINGS,
    TITLES,
    WHITENED,
    Cell,
    Data,
    Lower,
    Outcome,
    Tuning,
    judge,
    upper,
)
from lucid_lab.data import IGNORED
from lucid_lab.toys.lab import SMALL, SMOKE, Lab, Record
from lucid_lab.toys.results import Spread
from tests.evals.checkpoints import write_checkpoint, write_tokenizer


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The smallest scale, with a tiny checkpoint and texts."""
    root = tmp_path_factory.mktemp("recipe")
    (root / "texts").mkdir()
    for number in range(20):
        words = Random(number).choices((*NAMES, *THINGS), k=400)
        (root / "texts" / f"text-{number}.txt").write_text(" ".join(words))
    model = write_checkpoint(root / "model", write_tokenizer(root / "tokenizer", [" ".join(THINGS)]), "llama")
    return Lab(SMOKE, root / "out", processes=1, quiet=True, model=str(model), texts=str(root / "texts"))


@pytest.fixture(scope="module")
def tuning(lab: Lab) -> Tuning:
    cells = ((Cell(3, 7), 1), (Cell(4, 4, 60), 1))
    sizes: dict[str, Any] = {"logs": 2, "trained": Cell(3, 6), "text": 20, "cells": cells, "calibration": 64}
    return Tuning(lab.model, "", lab.texts, "", first=1, layers=(1,), **sizes)


def test_it_runs_to_a_result_with_all_arms(lab: Lab) -> None:
    # Filling memory with NaN would be timed too.
    torch.use_deterministic_algorithms(False)
    result = run_claim("recipe", lab)
    assert result["verdict"] == "too small to judge"
    assert result["rule"].startswith("The verdict")
    answers, trials, gates = result["tables"]
    assert [row[0] for row in answers["rows"]] == ["before", *TITLES.values(), recipe.LATE]
    assert {row[0] for row in trials["rows"]} == set(TITLES.values())
    assert len(trials["rows"]) == 2 + 3 * len(recipe.STARTS)
    assert gates["rows"] == [[1.0]]
    for table in result["tables"]:
        assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_a_log_asks_every_name_once_for_its_latest_thing(tuning: Tuning) -> None:
    data = Data(tuning)
    decode = data.tokenizer.decode
    for cell in (Cell(3, 7), Cell(4, 4, 60), Cell(6, 40)):
        ids, labels = data.log(cell, Random(5), True)
        assert len(ids) == len(labels)
        held: dict[str, list[str]] = {}
        for name, thing in re.findall(r"(\w+) now has the (\w+)\.", decode(ids)):
            held.setdefault(name, []).append(thing)
        asked = re.findall(r"At the end (\w+) has the (\w+)\.", decode(ids))
        assert sorted(name for name, _ in asked) == sorted(held)
        assert len(held) == cell.names
        assert sum(map(len, held.values())) == cell.writes
        assert [thing for _, thing in asked] == [held[name][-1] for name, _ in asked]
        places = [t for t, label in enumerate(labels) if label != IGNORED]
        # The answer is the token after the place where it is asked for.
        assert (
            [ids[t + 1] for t in places]
            == [labels[t] for t in places]
            == [data.ids(f" {thing}")[0] for _, thing in asked]
        )
    assert data.log(Cell(3, 6), Random(5), True) == data.log(Cell(3, 6), Random(5), True)


@torch.no_grad()
@pytest.mark.parametrize("keys", TITLES)
def test_every_arm_starts_as_the_original_model_and_its_gates_change_it(tuning: Tuning, keys: str) -> None:
    """The oracle is the checkpoint, whole."""
    below = Lower(replace(tuning, marks=()))
    ids, labels = below.data.log(Cell(3, 7), Random(1), True)
    whole = load_model(tuning.model, torch.float32)(torch.tensor([ids])).logits[0]
    asked = torch.tensor(labels) != IGNORED
    model, groups = upper(replace(tuning, keys=keys), below.data)
    logits, answers = recipe.answer_logits(model, below.batch([ids], [labels]))
    torch.testing.assert_close(logits, whole[asked], rtol=1e-4, atol=1e-4)
    assert answers.tolist() == [label for label in labels if label != IGNORED]
    assert [len(group["params"]) for group in groups] == {SOFTMAX: [4], LORA: [8]}.get(keys, [4, 1, 1])
    # The last hidden states of a step's text are those of the original model: the divergence begins at zero.
    assert recipe.divergence(model, below.step(0, 0)[1]).abs() < 1e-6
    if keys in MAPS:
        for gate in groups[1]["params"]:
            gate.fill_(1.0)
        changed, _ = recipe.answer_logits(model, below.batch([ids], [labels]))
        assert (changed - logits).abs().max() > 1e-3
        assert recipe.divergence(model, below.step(0, 0)[1]) > 1e-6


def test_gradients_choose_layers_and_every_best_rate_lies_between_others(
    lab: Lab, tuning: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = recipe.gate_gradients(tmp_path, replace(tuning, keys=WHITENED))["gradients"]
    assert one == pytest.approx(1)

    def loss(run: Tuning) -> float:
        best = {LORA: 1e-2, WHITENED: 1e-4}.get(run.keys, 1e-3)
        return abs(math.log(run.rate / best)) - (run.start == "s = 1, c = 16")

    def map_groups(_: object, groups: dict[str, list[Tuning]], *, title: str) -> dict[str, list[Record]]:
        return {
            keys: [
                {"tests": {"9": {"loss": [loss(run)], "text": 2.0}}, "seconds": 3 - (keys == SOFTMAX)} for run in runs
            ]
            for keys, runs in groups.items()
        }

    monkeypatch.setattr(lab, "map_groups", map_groups)
    losses, ratio = recipe.search(lab, tuning, recipe.RATES)
    assert ratio == 1.5
    for keys, rates in {SOFTMAX: (3e-4, 1e-3, 3e-3), LORA: (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}.items():
        assert sorted(losses[keys]) == [("", rate) for rate in rates]
    chosen = sorted(rate for start, rate in losses[WHITENED] if start == "s = 1, c = 16")
    assert chosen == [3e-5, 1e-4, 3e-4, 1e-3, 3e-3]
    assert len(losses[WHITENED]) == 6


def test_training_moves_gates_and_the_same_tuning_gives_the_same_numbers(tuning: Tuning, tmp_path: Path) -> None:
    run = replace(tuning, keys=WHITENED, rate=1e-3, marks=(0, 3), test_texts=1)
    first, again = recipe.tune(tmp_path, run), recipe.tune(tmp_path, run)
    assert first["tests"] == again["tests"]
    start, end = (first["tests"][mark] for mark in ("0", "3"))
    assert (start["strength"], start["sharpness"]) == (0, 4)
    assert 0 < abs(end["strength"]) <= 0.1
    assert end["sharpness"] != 4
    assert end["text"] != start["text"]


def test_without_a_model_it_is_skipped_with_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["experiment", "recipe", "--out", str(tmp_path / "out")]) == 1
    assert "python tools/get_smollm2.py" in capsys.readouterr().err
    assert "is no checkpoint" in str(recipe.lacks(Lab(SMALL, tmp_path, model=str(tmp_path), texts=str(tmp_path))))


@pytest.mark.parametrize(
    ("score", "text", "late", "verdict"),
    [
        (60, 2.90, 50, "holds"),
        (60, 2.94, 50, "holds"),
        (60, 2.96, 50, "does not hold"),
        (60, 2.90, 60, "partly"),
        (41, 2.90, 40, "does not hold"),
        (19, 2.90, 19, "too small to judge"),
    ],
)
def test_the_verdict_follows_the_rule(score: float, text: float, late: float, verdict: str) -> None:
    lucid = Outcome(Spread(score, 1, 3), Spread(text, 0, 3))
    softmax, longer = (Outcome(Spread(mean, 1, 3), Spread(2.9, 0, 3)) for mean in (min(40, late), late))
    assert judge(lucid, softmax, longer) == verdict
