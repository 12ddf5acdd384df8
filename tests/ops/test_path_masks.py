"""A masked token is ignored, its factor too; packed documents are computed as if alone."""

import math

import pytest
import torch

from lucid_attention.ops.path.api import path_attention

from .cases import assert_exact, error
from .path_cases import NEW, OLD, OPERATORS, PathCase, call, evaluate, five_masks, truth

IMPLEMENTATIONS = ["blockwise", "reference"]
CASES = [
    PathCase(T=37, B=5, G=2, D=1),
    PathCase(T=150, B=5, H=1, G=2, D=4, beta="edges"),
    PathCase(T=330, B=5, H=1, D=3, E=4, keys="repeated", beta="small"),
    PathCase(T=20, S=100, B=5, D=4, G=2),
    PathCase(T=150, S=20, B=5, H=1, D=4, beta="small"),
]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_masked_tokens_are_dropped_forward_and_backward(case, operator):
    tensors, weight = case.tensors(operator, sharpness=True), case.weight(operator)
    key_mask = five_masks(case.S + case.T)
    expected = evaluate(truth, operator, tensors, weight, key_mask=key_mask)
    strided = torch.stack([key_mask, ~key_mask], -1)[..., 0]
    for impl in IMPLEMENTATIONS:
        ours = evaluate(call, operator, tensors, weight, key_mask=strided, impl=impl)
        assert_exact(ours, expected)
        new, old = ~key_mask[:, None, case.S :], ~key_mask[:, None, : case.S]
        for name, x in ours.items():
            if name != "dsharpness":
                hidden = old if name[1:] in OLD else new
                assert (x[hidden.expand(x.shape[:3])] == 0).all(), name


@pytest.mark.parametrize("filling", [math.nan, math.inf])
@pytest.mark.parametrize("S", [0, 11])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_whatever_stands_at_a_masked_place_changes_nothing(impl, operator, S, filling):
    """In every tensor at once, forward and in all gradients."""
    case = PathCase(T=37, S=S, B=5, G=2, D=4)
    tensors, key_mask, weight = case.tensors(operator, sharpness=True), five_masks(S + 37), case.weight(operator)
    clean = evaluate(call, operator, tensors, weight, key_mask=key_mask, impl=impl)
    new, old = ~key_mask[:, None, S:], ~key_mask[:, None, :S]
    for name in tensors:
        if name in NEW + OLD:
            tensors[name][(new if name in NEW else old).expand(tensors[name].shape[:3])] = filling
    assert_exact(evaluate(call, operator, tensors, weight, key_mask=key_mask, impl=impl), clean)


# Up to 256 tokens documents are batched with others of similar length, beyond they run alone.
PACKINGS = {
    "one": [0, 300],
    "single tokens": [0, 1, 2, 3],
    "empty ones between": [0, 0, 5, 5, 5, 9, 9],
    "short": [0, 3, 10, 11, 75, 140, 141],
    "mixed": [0, 300, 303, 303, 560, 561, 640],
}


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("borders", PACKINGS.values(), ids=PACKINGS.keys())
def test_documents_are_computed_as_if_alone_with_all_gradients(borders, operator, masked):
    case = PathCase(T=borders[-1], H=1, G=2, D=4, E=6, beta="edges")
    tensors, weight = case.tensors(operator, sharpness=True), case.weight(operator)
    options = {"cu_seqlens": torch.tensor(borders, dtype=torch.int32)}
    options["key_mask"] = torch.rand(1, case.T) > 0.2 if masked else None
    expected = evaluate(truth, operator, tensors, weight, **options)
    for impl in IMPLEMENTATIONS[: 1 + masked]:
        assert_exact(evaluate(call, operator, tensors, weight, impl=impl, **options), expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_infinite_value_stays_in_its_document(operator):
    """Documents of similar length are computed in one batch."""
    borders = [0, 5, 12, 20]
    tensors = PathCase(T=20, G=2, D=4).tensors(operator)
    tensors["v"][:, :, 5] = math.inf
    out = call(operator, tensors, cu_seqlens=torch.tensor(borders))
    assert out[:, :, :5].isfinite().all()
    assert out[:, :, 12:].isfinite().all()
    assert not out[:, :, 5:12].isfinite().all()


def steep(length: int) -> list[torch.Tensor]:
    """Scores beyond the exponential of float32: the last token reflects the keys before it from +100 to −100."""
    q, k, w = (torch.zeros(1, 1, length, 2) for _ in range(3))
    w[..., 0] = 1
    k[..., 0], q[..., 1] = 1, 1
    q[:, :, -1, 0], k[:, :, -1, 0] = 100, 0
    beta = torch.zeros(1, 1, length)
    beta[..., -1] = 2
    return [q, k, torch.randn(1, 1, length, 2), w, beta]


@pytest.mark.parametrize("kind", ["packed", "masked"])
def test_steep_scores_at_the_end_of_a_shorter_sequence_have_finite_gradients(kind):
    """Behind its end stand rows whose scores may be anything, and exp may overflow there: infinity times zero."""
    short, long = steep(5), steep(7)
    for x in long:
        x[:, :, -1:] = x[:, :, :1]
    if kind == "packed":
        inputs = [torch.cat(pair, 2).requires_grad_() for pair in zip(short, long, strict=True)]
        options = {"cu_seqlens": torch.tensor([0, 5, 12])}
    else:
        wide = [torch.cat([x, torch.zeros_like(x[:, :, :2])], 2) for x in short]
        inputs = [torch.cat(pair).requires_grad_() for pair in zip(wide, long, strict=True)]
        options = {"key_mask": torch.tensor([[1] * 5 + [0] * 2, [1] * 7]).bool()}
    results = []
    for impl in IMPLEMENTATIONS:
        o = path_attention(*inputs, scale=1.0, impl=impl, **options)
        results.append(torch.autograd.grad(o.square().sum(), inputs))
    for name, ours, expected in zip(NEW, *results, strict=True):
        assert error(ours, expected) < 1e-5, name
