"""The guide's path with the real commands: tokenize, train, eval, report."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from lucid_lab import cli

SETTINGS = {
    "steps": 12,
    "sequence_length": 48,
    "batch_size": 4,
    "micro_batch_size": 4,
    "log_every": 2,
    "evaluate_every": 6,
    "evaluation_sequences": 4,
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2,
    "model.num_key_value_heads": 1,
}


def lucid(*words: object) -> int:
    return cli.main([str(word) for word in words])


def _train(attention: str, tokens: Path, out: Path) -> None:
    torch.set_num_threads(1)
    changes = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    raise SystemExit(lucid("train", "tiny_lm", "--attention", attention, "--data", tokens, "--out", out, *changes))


def train(attention: str, tokens: Path, out: Path) -> None:
    """In a process of its own: a trainer changes much that other tests would see."""
    process = multiprocessing.get_context("fork").Process(target=_train, args=(attention, tokens, out))
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_tokens_models_and_scores_end_in_one_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, tokens, runs = tmp_path / "texts", tmp_path / "tokens", tmp_path / "runs"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"Document {number}. " + "The latest value wins. " * (5 + 10 * number))
    assert lucid("tokenize", texts, tokens, "--tokenizer", "train:300", "--workers", 1, "--validation", 0.2) == 0
    for attention in ("softmax", "lucid"):
        train(attention, tokens, runs / attention)
        words = ("--tasks", "perplexity,context_loss", "--text", tokens, "--lengths", "8,16", "--samples", 3)
        assert lucid("eval", runs / attention / "model", *words, "--out", tmp_path / "scores" / attention) == 0
    capsys.readouterr()
    page = tmp_path / "page.html"
    assert lucid("report", runs, tmp_path / "scores", "--out", page, "--markdown", tmp_path / "page.md") == 0
    assert f"{page}: 2 training runs, 2 evaluations; numbers in" in capsys.readouterr().out
    results = json.loads(page.with_suffix(".json").read_text())["results"]
    names = [(result["kind"], result["title"]) for result in results]
    assert names == [
        ("comparison", "Training runs compared"),
        ("comparison", "Evaluations compared"),
        ("training", "lucid"),
        ("training", "softmax"),
        ("evaluation", "lucid"),
        ("evaluation", "softmax"),
    ]
    summary = json.loads((runs / "lucid" / "summary.json").read_text())
    training = results[2]
    assert f"validation loss {summary['validation_loss']:.4f} after 12 steps" == training["ours"]
    curves = {line["name"]: line for line in training["figures"][0]["series"]}
    assert curves["training"]["x"] == [1, 2, 4, 6, 8, 10, 12]
    assert curves["validation"]["x"] == [6, 12]
    assert curves["validation"]["y"][-1] == pytest.approx(summary["validation_loss"])
    assert [figure["kind"] for figure in results[4]["figures"]] == ["heatmaps", "lines"]
    text = page.read_text()
    for result in results:
        assert result["ours"] in text.replace("\u00a0", " ")
        assert result["ours"].split(";")[0].replace("_", "\\_") in (tmp_path / "page.md").read_text()
    assert text.count("<figure") == sum(len(result["figures"]) for result in results) == 10
