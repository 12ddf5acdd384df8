"""`lucid make-data needles` and `lucid analyze --samples`: hit rates over many prompts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lucid_attention.models import limits
from lucid_lab import cli
from lucid_lab.analysis import command
from lucid_lab.analysis.hit_rate import Query, average, hit_rates


def lucid(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture
def samples(checkpoints: Any, tmp_path: Path) -> Path:
    file = tmp_path / "needles.jsonl"
    asked = ("--needles", "1,2", "--lengths", 512, "--samples", 2, "--haystack", "noise")
    assert lucid("make-data", "needles", file, "--tokenizer", checkpoints["lucid"], *asked) == 0
    return file


def test_the_spans_hold_the_answers(samples: Path, checkpoints: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["lucid"])
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == 4
    assert len({line["prompt"] for line in lines}) == 4
    for line in lines:
        ids = tokenizer(line["prompt"])["input_ids"]
        ((first, stop),) = line["answer_spans"]
        assert line["answer"].strip(" .") in tokenizer.decode(ids[first:stop])
        assert stop <= len(ids) < 512


def test_hit_rates_are_means_over_the_samples(samples: Path, checkpoints: Any, tmp_path: Path, capsys: Any) -> None:
    folder, out = checkpoints["lucid"], tmp_path / "out"
    assert lucid("analyze", folder, "--samples", samples, "--limit", 3, "--out", out) == 0
    written = json.loads((out / "analysis.json").read_text())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    records = []
    for line in samples.read_text().splitlines()[:3]:
        sample = json.loads(line)
        ids = torch.tensor([tokenizer(sample["prompt"])["input_ids"]])
        spans = tuple((first, stop) for first, stop in sample["answer_spans"])
        records += hit_rates(model, ids, [Query(ids.shape[1] - 1, spans)])
    assert written["results"]["hit_rate"] == average(records)
    assert written["results"]["mean_hit_rate"] == average(records, ())[0]
    assert "3 samples of needles.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        ('{"prompt": "a b"}', (), "line 1: expected a prompt and its answer_spans"),
        ("", (), "must hold at least one sample"),
        ('{"prompt": "a b", "answer_spans": [[0, 900]]}', (), "made for another tokenizer"),
        ('{"prompt": "a b", "answer_spans": [[0, 1]]}', ("--what", "maps"), "--samples is for --what hit_rate"),
        ('{"prompt": "a b", "answer_spans": [[0, 1]]}', ("--limit", 0), "--limit must be at least 1, got 0"),
    ],
)
def test_samples_that_cannot_be_used_are_refused(
    line: str, words: tuple[Any, ...], message: str, checkpoints: Any, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(line)
    assert lucid("analyze", checkpoints["lucid"], "--samples", file, *words, "--out", tmp_path / "out") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_prompts_that_do_not_fit_are_refused_before_the_model_is_loaded(
    samples: Path, checkpoints: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "machine_memory", lambda: 1000)
    monkeypatch.setattr(command, "load_model", lambda *_: pytest.fail("the model was loaded"))
    assert lucid("analyze", checkpoints["lucid"], "--samples", samples, "--out", tmp_path / "out") == 1
    assert "must fit in the 0.0 GB of memory of this machine" in capsys.readouterr().err


def test_prompts_for_training_are_not_those_of_evaluations(samples: Path, checkpoints: Any) -> None:
    from lucid_lab.evals.needles import make_needles

    tokenizer = AutoTokenizer.from_pretrained(checkpoints["lucid"])
    asked = {make_needles(tokenizer, 512, n, haystack="noise", index=i).question for n in (1, 2) for i in range(2)}
    assert not any(json.loads(line)["prompt"].startswith(tuple(asked)) for line in samples.read_text().splitlines())
