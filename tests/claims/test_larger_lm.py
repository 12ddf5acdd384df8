"""`larger_lm`: a training in pieces is the same training, and prompts say what they ask."""

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from lucid_lab.claims import larger_lm
from lucid_lab.claims.larger_lm import STATE, TOY, Piece, judge, probe, train_piece
from lucid_lab.toys.training import cosine_rate, train_steps

TINY = TOY.but(length=32, layers=1, width=16, heads=2, head_dim=8, steps=6, batch=2)


def test_a_training_in_pieces_is_the_training_at_once(tmp_path: Path) -> None:
    """The oracle is the training loop of all toys."""
    for name, piece in (("a", Piece(TINY, 0, 2)), ("b", Piece(TINY, 2, 3, "a")), ("c", Piece(TINY, 3, 6, "b"))):
        (tmp_path / name).mkdir()
        train_piece(tmp_path / name, piece)
    model = TINY.make_model()
    for _ in train_steps(TINY, model):
        pass
    found = torch.load(tmp_path / "c" / STATE, weights_only=True)["model"]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-7)
    # A schedule that begins anew with every piece ends elsewhere.
    (tmp_path / "d").mkdir()
    train_piece(tmp_path / "d", Piece(replace(TINY, steps=4), 3, 6, "b"))
    other = torch.load(tmp_path / "d" / STATE, weights_only=True)["model"]
    assert not torch.allclose(other["out.weight"], found["out.weight"], atol=1e-6)
    assert cosine_rate(5, 6) > cosine_rate(5, 5) >= 0


@pytest.mark.parametrize(("writes", "size"), larger_lm.PROBES)
def test_a_prompt_asserts_a_variable_whose_latest_digit_counts(writes: int, size: int) -> None:
    prompt, digit, old = probe(Random(3), writes, size)
    text = prompt.decode(errors="replace")
    name = re.findall(r"assert (\w+) == $", text)[0]
    assigned = re.findall(rf"\n{name} = (\d)\n", text)
    assert [chr(one) for one in (*old, digit)] == assigned
    assert len(set(assigned)) == writes
    assert len(prompt) == pytest.approx(size, rel=0.15)


def test_the_model_has_ten_million_weights_and_the_verdict_follows_the_rule() -> None:
    with torch.device("meta"):
        assert sum(weight.numel() for weight in TOY.make_model().parameters()) > 10_000_000
    assert judge((1.52, 1.50), (60, 50)) == "holds"
    assert judge((1.53, 1.50), (60, 50)) == judge((1.50, 1.50), (59, 50)) == "partly"
    assert judge((1.53, 1.50), (59, 50)) == "does not hold"
