"""Packed documents: each equals its own run, and together they cost what they cost alone."""

import pytest
import torch

from lucid_attention import lucid_attention, precondition
from lucid_attention.ops import packing
from lucid_attention.ops.triangular import ExponentialTiles

from . import oracles
from .cases import Case, assert_exact, call, evaluate

CPU = torch.device("cpu")
NORMS = ["key", "qk", "row_max"]
ORACLES = {precondition: oracles.precondition, lucid_attention: oracles.lucid_attention}
# Up to 256 tokens documents are batched with others of similar length, beyond they run alone.
PACKINGS = {
    "one": [0, 300],
    "single tokens": [0, 1, 2, 3],
    "empty ones between": [0, 0, 5, 5, 5, 9, 9],
    "short": [0, 3, 10, 11, 75, 140, 141],
    "at the limit": [0, 256, 513, 768],
    "long": [0, 300, 600, 900],
    "mixed": [0, 300, 303, 303, 603, 604, 700, 960],
}


def packed(case: Case, dtype: torch.dtype = torch.float64) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Every option at once, and a mask with holes."""
    return case.tensors(dtype, beta=True, sharpness=True), torch.rand(1, case.T) > 0.2


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("fn", [precondition, lucid_attention])
@pytest.mark.parametrize("borders", PACKINGS.values(), ids=PACKINGS.keys())
def test_documents_are_computed_as_if_alone_with_all_gradients(borders, fn, masked):
    case = Case(T=borders[-1], G=2, D=4, E=6)
    tensors, key_mask = packed(case)
    options = {"cu_seqlens": torch.tensor(borders), "key_mask": key_mask if masked else None}
    weight = torch.randn(1, 2 if fn is precondition else 4, case.T, 6, dtype=torch.float64)
    truth = evaluate(ORACLES[fn], tensors, weight, **options)
    assert_exact(evaluate(fn, tensors, weight, **options), truth, tolerance=1e-10)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("impl", ["blockwise", "reference"])
@pytest.mark.parametrize("fn", [precondition, lucid_attention])
def test_every_norm_keeps_documents_apart(fn, impl, norm):
    borders = PACKINGS["mixed"]
    tensors, key_mask = packed(Case(T=borders[-1], G=2, D=4, E=3))
    options = {"cu_seqlens": torch.tensor(borders, dtype=torch.int32), "key_mask": key_mask, "norm": norm}
    weight = torch.randn(1, 2 if fn is precondition else 4, borders[-1], 3, dtype=torch.float64)
    truth = evaluate(ORACLES[fn], tensors, weight, **options)
    assert_exact(evaluate(fn, tensors, weight, impl=impl, **options), truth, tolerance=1e-10)


@pytest.mark.parametrize("norm", NORMS)
def test_broken_masked_tokens_do_not_reach_their_own_or_another_document(norm):
    borders = [0, 3, 40, 340, 341, 380]
    tensors, key_mask = packed(Case(T=380, G=2, D=4))
    key_mask[0, 2:5] = False  # the end of one and the beginning of the next
    key_mask[0, 340] = False  # a whole document
    key_mask[0, 379] = False  # the last token is what padding of a batch of documents repeats
    options = {"cu_seqlens": torch.tensor(borders), "key_mask": key_mask, "norm": norm}
    clean = call(lucid_attention, tensors, **options)
    assert (clean[:, :, 340] == 0).all()
    hidden = ~key_mask[:, None, :, None]
    for name in ("k", "v"):
        tensors[name].masked_fill_(hidden, float("nan"))
    torch.testing.assert_close(call(lucid_attention, tensors, **options), clean, rtol=0, atol=0)


WORKLOADS = {
    "long": [300] * 8,
    "short": [37] * 100,
    "single tokens": [1] * 3000,
    "mixed": [1, 2, 5, 100, 256, 257, 700] * 3,
    "one that is not like the others": [2] * 1000 + [256],
}


@pytest.mark.parametrize("lengths", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_the_work_is_that_of_the_documents_and_not_of_their_square(lengths, monkeypatch):
    """Counted in entries of P that are made, forward and backward."""
    made = []
    make = ExponentialTiles.make

    def counting(self, rows, cols):
        tile = make(self, rows, cols)
        made.append(tile.numel())
        return tile

    monkeypatch.setattr(ExponentialTiles, "make", counting)
    total, squares = sum(lengths), sum(n * n for n in lengths)
    borders = torch.tensor([0, *lengths]).cumsum(0)
    k = torch.randn(1, 1, total, 2, requires_grad=True)
    y = precondition(k, torch.randn(1, 1, total, 2), cu_seqlens=borders)
    forward = sum(made)
    y.sum().backward()
    # A document is padded to at most twice its length, which is at most four times its entries.
    assert squares / 2 <= forward <= 4 * squares
    assert sum(made) == 2 * forward
    assert forward < total * total / 2.2
    # The counter works: one document of this length costs about half the square.
    made.clear()
    precondition(k.detach()[:, :, :2000], torch.randn(1, 1, min(total, 2000), 2))
    assert sum(made) >= min(total, 2000) ** 2 / 2


def test_many_short_documents_are_few_calls():
    parts = list(packing.documents(torch.arange(0, 5001, 5), 5000, CPU))
    assert len(parts) == 1
    lengths = torch.randint(1, 257, (300,))
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    assert len(list(packing.documents(borders, int(borders[-1]), CPU))) <= 9


def test_every_token_is_in_exactly_one_part():
    borders = PACKINGS["mixed"]
    seen = torch.zeros(1, 1, borders[-1], 1)
    for part in packing.documents(torch.tensor(borders), borders[-1], CPU):
        before = part.take(seen).clone()
        assert (part.take_grad(before.new_zeros(1, 1, borders[-1], 1)) == 0).all()
        part.put_(seen, before + 1)
    assert (seen == 1).all()
