"""`lucid eval` on a model that was trained for seconds, and what its tasks and the recipes have in common."""

import argparse
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lucid_lab.training.arguments import train_arguments
from lucid_lab.training.command import recipe_from
from lucid_lab.training.inputs import load_inputs

from lucid_lab.data.synthetic import MemoryUpdate, Needles
from lucid_lab.evals.benchmarks import recall
from lucid_lab.evals.benchmarks.recall import TRAINED_BY
from lucid_lab.evals.cells import Options
from lucid_lab.training.recipes import tiny_needle
from lucid_lab.training.run import train

from .checkpoints import lucid

CHANCE = 1 / 64


def _train(out: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(out.parent)
    recipe = replace(
        tiny_needle(),
        steps=400,
        sequence_length=10,
        data_options={"n": [3]},
        batch_size=32,
        micro_batch_size=32,
        learning_rate=6e-3,
        schedule="constant",
        beta2=0.95,
        evaluate_every=0,
        save_every=0,
        evaluation_sequences=8,
    )
    train(recipe, out)


@pytest.mark.parametrize("kind", TRAINED_BY, ids=lambda kind: kind.__name__)
def test_a_task_asks_what_its_recipe_trains_unless_options_say_otherwise(kind: Any) -> None:
    words = TRAINED_BY[kind].split()
    parser = argparse.ArgumentParser()
    train_arguments(parser)
    recipe = recipe_from(parser.parse_args(words[2:]))
    assert recipe.data == {Needles: "needles", MemoryUpdate: "memory_update"}[kind]
    cells = {Needles: recall.needles, MemoryUpdate: recall.memory_update}[kind](Options())
    lengths = {cell.length for cell in cells}
    assert lengths == {recipe.sequence_length}
    vocabulary = load_inputs(replace(recipe, evaluation_sequences=1)).vocab_size
    assert {kind(cell.labels["needles"], cell.length).vocab_size for cell in cells} == {vocabulary}


@pytest.mark.slow
def test_a_checkpoint_of_tiny_needle_recalls_far_above_chance(tmp_path: Path) -> None:
    # In a process of its own: a trainer changes global state that other tests would see.
    process = multiprocessing.get_context("fork").Process(target=_train, args=(tmp_path / "run",))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    words = ("--tasks", "recall", "--needles", "2,3", "--lengths", "10,13", "--samples", 50, "--batch-size", 50)
    assert lucid("eval", tmp_path / "run" / "model", *words, "--out", tmp_path / "out") == 0
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    scores = {tuple(cell["labels"].values()): cell["mean"] for cell in cells}
    assert len(scores) == 4
    # A guess among the three values in the context would score 1/3.
    assert scores[3, 10] > 0.6 > 30 * CHANCE
    assert min(scores.values()) > 5 * CHANCE
    assert (tmp_path / "out" / "recall.png").exists()
