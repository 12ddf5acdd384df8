"""Losses of windows of a text: those of the model's own logits, whatever the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lucid_attention import enable_lucid
from lucid_lab.evals.evaluate import EvaluatedModel
from lucid_lab.evals.tokens import exponential_of_mean, load_tokenizer

from .stub_models import ask, leaves


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(3):
        words = " ".join(f"The river number {word} of document {number} is blue." for word in range(100))
        (folder / f"{number}.txt").write_text(words)
    return str(folder)


def direct(model: Any, ids: list[int], targets: int) -> float:
    """The mean loss of the last tokens."""
    tokens = torch.tensor([ids])
    with torch.no_grad():
        losses = -model(tokens[:, :-1]).logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[0, :, 0]
    return float(losses[-targets:].mean())


@pytest.mark.parametrize("kind", ["lucid", "llama"])
def test_losses_are_those_of_the_models_logits_in_every_batch(
    kind: str, text: str, lucid_folder: Path, llama_folder: Path, tokenizer_folder: Path
) -> None:
    enable_lucid()
    model = AutoModelForCausalLM.from_pretrained(lucid_folder if kind == "lucid" else llama_folder)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    for task in leaves("perplexity", tokenizer_folder, text=text, lengths=(16, 64), samples=5):
        alone, batched = (ask(task, EvaluatedModel(model, tokenizer, size)) for size in (1, 3))
        assert [sample["loss"] for sample in alone] == pytest.approx([sample["loss"] for sample in batched], rel=1e-4)
        for sample in alone:
            doc = sample["doc"]
            ids = tokenizer(tokenizer.bos_token + doc["target"])["input_ids"]
            assert sample["loss"] == pytest.approx(direct(model, ids, doc["tokens"]), rel=1e-4)
            # All tokens of a window are of one document.
            assert len({part[:1] for part in doc["target"].split("document ")[1:]}) <= 1


def test_the_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    assert exponential_of_mean([1.0, 3.0]) == pytest.approx(7.389056)
    assert exponential_of_mean([1e4]) == float("inf")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ""}, "--text is needed"),
        ({"text": "nowhere.txt"}, "'nowhere.txt' does not exist"),
        ({"lengths": (10**5,)}, "must have a document of 100000 tokens, and has none"),
        ({"lengths": (1,)}, "--lengths must be at least 2, got 1"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], message: str, text: str, tokenizer_folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        leaves("perplexity", tokenizer_folder, **{"text": text, "samples": 2, **changes})
