"""Losses by position and by context, compared with losses from all logits at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GraniteConfig

from lucid_attention.models.decoder.modeling import LucidForCausalLM
from lucid_attention.models.decoder.presets import tiny
from lucid_lab.data.datasets import PackedTokens
from lucid_lab.data.tokenize import tokenize
from lucid_lab.evals.benchmarks.perplexity import (
    ROWS,
    TARGETS,
    buckets,
    by_context,
    by_position,
    check_head,
    loss_by_context,
    loss_by_position,
    token_losses,
    windows,
)
from lucid_lab.evals.cells import EvalError, Options

from .checkpoints import write_tokenizer

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def with_larger_weights(model: Any) -> Any:
    """With weights that are large enough for losses to differ."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6 if weight.ndim == 2 else 1)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return with_larger_weights(LucidForCausalLM(tiny(vocab_size=50, max_position_embeddings=4096)))


def direct(model: Any, ids: Tensor) -> Tensor:
    """Losses of tokens 1 to T − 1 from all logits."""
    with torch.no_grad():
        logits = model(ids).logits.double()
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


@pytest.mark.parametrize("rows", [1, 7, 1024])
def test_losses_are_those_of_the_logits(rows: int, model: Any) -> None:
    ids = torch.randint(50, (2, 40))
    expected = direct(model, ids)
    assert expected.std() > 0.1
    for last in (1, 13, 39):
        torch.testing.assert_close(token_losses(model, ids, last, rows=rows).double(), expected[:, -last:], rtol=1e-4,
                                   atol=1e-4)  # fmt: skip


def test_a_cap_on_logits_is_kept() -> None:
    capped = with_larger_weights(AutoModelForCausalLM.from_config(Gemma2Config(**SHAPE, final_logit_softcapping=2.0)))
    ids = torch.randint(50, (1, 20))
    check_head(capped, ids)
    losses = token_losses(capped, ids, 19).double()
    torch.testing.assert_close(losses, direct(capped, ids), rtol=1e-4, atol=1e-4)


def test_a_model_that_changes_its_logits_is_refused(model: Any) -> None:
    ids = torch.randint(50, (1, 20))
    check_head(model, ids)
    scaled = with_larger_weights(AutoModelForCausalLM.from_config(GraniteConfig(**SHAPE, logits_scaling=8.0)))
    with pytest.raises(EvalError, match="GraniteForCausalLM changes its logits after the head"):
        check_head(scaled, ids)


def test_buckets_are_powers_of_two_and_leave_nothing_out() -> None:
    assert buckets(256) == [(1, 64), (64, 128), (128, 256)]
    assert buckets(300) == [(1, 64), (64, 128), (128, 256), (256, 300)]
    assert buckets(10) == [(1, 10)]
    assert buckets(64) == [(1, 64)]
    assert buckets(65) == [(1, 64), (64, 65)]


def test_losses_by_position_are_means_in_buckets(model: Any) -> None:
    ids = torch.randint(50, (2, 150))
    expected = direct(model, ids)
    losses = loss_by_position(model, ids)
    assert list(losses) == [(1, 64), (64, 128), (128, 150)]
    for (first, stop), loss in losses.items():
        assert loss == pytest.approx(expected[:, first - 1 : stop - 1].mean().item(), rel=1e-4)


def test_losses_by_context_are_of_the_same_tokens(model: Any) -> None:
    ids = torch.randint(50, (2, 120))
    losses = loss_by_context(model, ids, (1, 32, 100), targets=20)
    for context, loss in losses.items():
        expected = direct(model, ids[:, 100 - context :])[:, -20:]
        assert expected.shape == (2, 20)
        assert loss == pytest.approx(expected.mean().item(), rel=1e-4)
    assert len({round(loss, 4) for loss in losses.values()}) == 3
    with pytest.raises(ValueError, match="contexts must be 1 to 100"):
        loss_by_context(model, ids, (101,), targets=20)


@contextmanager
def counted_rows(model: Any) -> Iterator[list[int]]:
    """The numbers of tokens in the calls of the head."""
    rows: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, inputs, logits: rows.append(logits.numel() // logits.shape[-1])
    )
    try:
        yield rows
    finally:
        hook.remove()


def test_logits_of_a_long_text_are_made_in_parts(model: Any) -> None:
    ids = torch.randint(50, (2, 2500))
    with counted_rows(model) as rows:
        loss_by_position(model, ids)
    assert sum(rows) == 2 * 2499
    assert max(rows) == ROWS


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("text")
    file = folder / "book.txt"
    file.write_text("".join(f"On day {day} the ship was {day % 7} miles from the shore.\n" for day in range(200)))
    return {"text": str(file), "tokenizer": str(write_tokenizer(folder / "tokenizer", [file.read_text()], 300))}


def test_cells_of_a_text_agree_with_all_logits_in_every_batch(text: dict[str, str]) -> None:
    model = with_larger_weights(LucidForCausalLM(tiny(vocab_size=300, max_position_embeddings=4096)))
    pieces = windows(text["text"], text["tokenizer"], 200, 3)
    assert pieces.shape == (3, 200)
    expected = direct(model, pieces)
    cells = by_position(Options(**text, lengths=(200,), samples=3))
    assert [cell.labels["position"] for cell in cells] == ["1–63", "64–127", "128–199"]
    for cell, (first, stop) in zip(cells, buckets(200), strict=True):
        assert cell.evaluate is not None
        assert cell.out_of is None
        for size in (1, 2):
            records = list(cell.evaluate(model, None, [2, 0], size))
            assert [record["id"] for record in records] == [2, 0]
            losses = expected[[2, 0], first - 1 : stop - 1].mean(1).tolist()
            assert [record["score"] for record in records] == pytest.approx(losses, rel=1e-4)


def test_every_context_has_the_same_targets(text: dict[str, str]) -> None:
    model = with_larger_weights(LucidForCausalLM(tiny(vocab_size=300, max_position_embeddings=4096)))
    cells = by_context(Options(**text, lengths=(16, 64), samples=2))
    whole = windows(text["text"], text["tokenizer"], 64 + TARGETS, 2)
    for cell, context in zip(cells, (16, 64), strict=True):
        assert cell.labels == {"context": context}
        assert cell.evaluate is not None
        expected = direct(model, whole[:, 64 - context :])[:, -TARGETS:].mean(1).tolist()
        assert [record["score"] for record in cell.evaluate(model, None, [0, 1], 2)] == pytest.approx(
            expected, rel=1e-4
        )


def test_a_window_is_of_one_document_of_the_validation_split(tmp_path: Path) -> None:
    for number in range(40):
        words = " ".join(f"{number}-{word}" for word in range(number % 5 * 10 + 1))
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(words)
    folder = str(tmp_path / "tokens")
    tokenize(str(tmp_path / "texts"), folder, tokenizer="train:300", validation=0.5, workers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    packed = PackedTokens(folder, 16, split="validation")
    pieces = windows(folder, "", 16, 100)
    assert 6 <= len(pieces) < len(packed)
    for window in pieces:
        # Every word begins with the number of its document.
        numbers = {word.split("-")[0] for word in tokenizer.decode(window).split("<|eos|>")[0].split()[1:-1]}
        assert len(numbers) == 1
        assert tokenizer.eos_token_id not in window[:-1]
    assert len(windows(folder, "", 16, 2)) == 2
    with pytest.raises(EvalError, match="must have a document of 300 tokens, and has none"):
        windows(folder, "", 300, 1)


def test_other_samples_are_another_cell(text: dict[str, str]) -> None:
    one, more = (by_context(Options(**text, lengths=(16,), samples=samples))[0].metadata for samples in (1, 2))
    assert one["tokens_sha256"] != more["tokens_sha256"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": ""}, "--text is needed"),
        ({"text": "nowhere.txt"}, "--text must be a text file or a folder .* got 'nowhere.txt'"),
        ({"lengths": (10**5,)}, "must have a document of 100000 tokens, and has none"),
        ({"lengths": (1,)}, "--lengths must be at least 2, got 1"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], message: str, text: dict[str, str]) -> None:
    with pytest.raises(EvalError, match=message):
        by_position(Options(**{**text, **changes}))


def test_tokens_of_another_tokenizer_are_refused(text: dict[str, str]) -> None:
    model = LucidForCausalLM(tiny(vocab_size=20))
    (cell,) = by_context(Options(**text, lengths=(16,), samples=1))
    assert cell.evaluate is not None
    with pytest.raises(EvalError, match="and the model knows 20: it was made with another tokenizer"):
        list(cell.evaluate(model, None, [0], 1))
