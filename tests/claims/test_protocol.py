"""The protocol of the full recipes: what tables share, and which numbers reach the record."""

import json
from pathlib import Path
from typing import Any

import pytest

from lucid_lab.claims import compute_matched, finetuning_length, needle_grid, needle_lm
from lucid_lab.claims.engine.full_scale import read_steps
from lucid_lab.claims.engine.steps import Step, check_steps


def asked(steps: list[Step]) -> dict[str, tuple[str, ...]]:
    """The words of every evaluation by its model."""
    return {step.words[1]: step.words for step in steps if step.words[0] == "eval"}


def test_tables_6_and_7_and_both_figures_share_models_and_needles() -> None:
    tables = asked(needle_lm.paper())
    for other in (compute_matched.paper(), needle_grid.paper(), finetuning_length.paper()):
        check_steps(other)
        for model in ("softmax", "lucid"):
            name = f"runs/paper/finetune_64k-{model}/model"
            assert asked(other)[name] == tables[name]
    softmax, more = (
        asked(compute_matched.paper())[f"runs/paper/{name}-softmax/model"]
        for name in ("finetune_64k", "finetune_64k_more")
    )
    assert [word for word in softmax if word.startswith("--")] == [word for word in more if word.startswith("--")]
    assert "--haystack=essays" in softmax
    assert "--mean-lengths=2048-8192,2048-32768" in softmax


def test_steps_that_share_a_folder_are_the_same_step() -> None:
    steps: dict[str, Step] = {}
    for module in (needle_lm, compute_matched, needle_grid, finetuning_length):
        for step in module.paper():
            assert steps.setdefault(step.writes(), step) == step


def score(**labels: Any) -> dict[str, Any]:
    return {"family": "mniah", "labels": labels, "metric": "score", "mean": 0.25, "standard_error": 0.01, "out_of": 1.0}


def test_metrics_means_analyses_and_times_reach_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rouge = {"rouge1": {"mean": 9.0, "standard_error": 0.1}, "rougeL": {"mean": 7.0, "standard_error": None}}
    qmsum = score(task="qmsum") | {
        "family": "scrolls",
        "metric": "rouge1",
        "mean": 9.0,
        "out_of": 100,
        "metrics": rouge,
    }
    records: dict[str, Any] = {
        "eval/results.json": {
            "cells": [score(task="multikey_1", needles=2), qmsum],
            "means": [score(needles=2) | {"over": {"task": ["multikey_1"]}}],
        },
        "analyze/analysis.json": {
            "input": {"about": "2 samples"},
            "results": {
                "conditioning": [{"length": 64, "kappa": kappa} for kappa in (2.0, 4.0, 3.0)],
                "mean_hit_rate": {"softmax": 0.2, "magnitude": 0.3},
            },
        },
        "bench/on_device.json": {
            "records": [
                {
                    "sizes": {"model": "x", "tokens": 32_768},
                    "seconds": {"LUCID": [0.077, 0.07, 0.08, 5]},
                    "ratios": {"LUCID / SDPA": [1.0132, 1.0, 1.1, 5]},
                }
            ]
        },
    }
    for name, content in records.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(content))
    steps = [Step((word, "x", "--out", str(tmp_path / word))) for word in ("eval", "analyze", "bench")]
    scores, measured = (table["rows"] for table in read_steps(steps)[1])
    assert scores == [
        ["eval", "mniah", "needles 2, task multikey_1", 25.0, 1.0],
        ["eval", "scrolls", "task qmsum", 9.0, 0.1],
        ["eval", "scrolls rougeL", "task qmsum", 7.0, None],
        ["eval", "mniah", "needles 2", 25.0, 1.0],
    ]
    assert measured == [
        ["analyze", "κ(P), median", "length 64", 3.0, None],
        ["analyze", "κ(P), largest", "length 64", 4.0, None],
        ["analyze", "hit rate, softmax", "", 0.2, None],
        ["analyze", "hit rate, magnitude", "", 0.3, None],
        ["bench", "LUCID, ms", "x 32768", 77.0, None],
        ["bench", "LUCID, ratio", "x 32768", 1.0132, None],
    ]
